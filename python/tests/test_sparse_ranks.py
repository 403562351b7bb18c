"""Two ranks of sparse attention on device lanes: heads and rows cut, beside one rank, over gloo and NCCL.

Over gloo both ranks have one device, and its memory goes through the host; over NCCL a device each.
"""

import itertools

import pytest
import ranks
import talea
import torch
import torch.distributed as dist
from conftest import close
from sparse_forms import problem

SIZES = {"s": 70, "keys": 150, "d": 96, "slots": 90}
VALUE = 64


def _leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def _run(lane, q, kv, indices, sink, upstream, upstream_lse, **more):
    """o, lse, dq, dkv (fp32, added to what stood in main_grad) and d_sink."""
    q, kv, sink = _leaves(q, kv, sink)
    grad = torch.ones(kv.shape, device=kv.device)
    out = talea.sparse_attention(
        q, kv, indices, value_dim=VALUE, sink=sink, outputs=("lse",), lane=lane, main_grad=grad,
        causal=True, **more,
    )  # fmt: skip
    lse = torch.nan_to_num(out.lse, posinf=0)
    ((out.o * upstream).sum() + (lse * upstream_lse).sum()).backward()
    return out.o.detach(), out.lse.detach(), q.grad, grad, sink.grad


def _attention(rank, device, lane, cut, gathers, dtype):
    """Shares are uneven. Rows of o, lse and dq are those of one rank bit for bit."""
    torch.manual_seed(11)
    q, kv, indices, sink = problem(h=5, dtype=dtype, device=device, **SIZES)
    sequence = cut == "sequence"
    upstream = torch.randn(*q.shape[:2], VALUE, device=device).to(dtype)
    upstream_lse = torch.randn(q.shape[:2], device=device)
    want = _run(lane, q, kv, indices, sink, upstream, upstream_lse)
    total = q.shape[0 if sequence else 1]
    first, last = ((0, total // 3), (total // 3, total))[rank]
    part = slice(first, last)
    own = part if sequence else (slice(None), part)
    group = {f"{cut}_group": dist.group.WORLD}
    keys = slice(None)
    if sequence:
        group |= {"q_position_base": first, "gather_kv": gathers}
        if gathers:
            keys = ((slice(0, 97)), slice(97, None))[rank]
    found = _run(
        lane, q[own], kv[keys], indices[part] if sequence else indices,
        sink if sequence else sink[part], upstream[own], upstream_lse[own], **group,
    )  # fmt: skip
    where = f"{device} {lane} {cut} gathers={gathers} {dtype}: "
    for name, a, b in zip(("o", "lse", "dq"), found, want, strict=False):
        assert torch.equal(a, b[own]), where + name
    assert close(found[3], want[3][keys], 1e-5), where + "dkv"
    assert close(found[4], want[4] if sequence else want[4][part], 1e-5), where + "d_sink"


def _selection(rank, device, lane, gathers):
    torch.manual_seed(12)
    iq = torch.randn(70, 6, 64, device=device).bfloat16()
    ik = torch.randn(150, 64, device=device).bfloat16()
    iw = torch.rand(70, 6, device=device)
    how = {"top_k": 40, "causal": True, "return_scores": True, "lane": lane}
    want = talea.sparse_select(iq, ik, iw, **how)
    first, last = ((0, 23), (23, 70))[rank]
    keys = ((slice(0, 97)), slice(97, None))[rank] if gathers else slice(None)
    found = talea.sparse_select(
        iq[first:last], ik[keys], iw[first:last], q_position_base=first, gather_kv=gathers,
        sequence_group=dist.group.WORLD, **how,
    )  # fmt: skip
    for name, a, b in zip(("indices", "topk_length", "scores"), found, want, strict=True):
        assert torch.equal(a, b[first:last]), f"{device} {lane} gathers={gathers}: {name}"


def _index_loss(rank, device, cut, dense, gathers):
    torch.manual_seed(13)
    iq, ik, iw = torch.randn(70, 6, 64), torch.randn(150, 64), torch.rand(70, 6)
    iq, ik, iw = (t.to(device).requires_grad_() for t in (iq, ik, iw))
    q, kv = torch.randn(70, 5, 32, device=device), torch.randn(150, 32, device=device)
    indices = None if dense else torch.rand(70, 150, device=device).argsort(-1)[:, :40].int()
    how = {"value_dim": 16, "causal": True, "coeff": 0.7}
    loss = talea.sparse_index_loss(iq, ik, iw, q, kv, indices=indices, **how)
    want = torch.autograd.grad(loss, (iq, ik, iw))
    heads, rows = ((slice(0, 2), slice(0, 23)), (slice(2, 5), slice(23, 70)))[rank]
    keys = (slice(0, 97), slice(97, None))[rank] if gathers else slice(None)
    if cut == "heads":
        rows, how["heads_group"] = slice(None), dist.group.WORLD
    else:
        heads = slice(None)
        how.update(sequence_group=dist.group.WORLD, denominator_scope="global", gather_kv=gathers)
        how["q_position_base"] = rows.start
    own = [t.detach().requires_grad_() for t in (iq[rows], ik[keys], iw[rows])]
    found = talea.sparse_index_loss(
        *own, q[rows, heads], kv[keys], indices=None if dense else indices[rows], **how
    )
    where = f"{device} {cut} dense={dense} gathers={gathers}: "
    assert close(found, loss, 1e-5), where + "loss"
    grads = torch.autograd.grad(found, own)
    for name, a, b in zip("qkw", grads, (want[0][rows], want[1][keys], want[2][rows]), strict=True):
        assert close(a, b, 2e-5), where + "gradient of index_" + name


def lanes_of(device):
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return ("sm90", "cuda") if hopper else ("cuda",)


def _world(rank, device=None):
    device = torch.device(device or f"cuda:{rank}")
    torch.cuda.set_device(device)
    for lane, dtype in itertools.product(lanes_of(device), (torch.bfloat16, torch.float16)):
        for cut, gathers in (("heads", False), ("sequence", False), ("sequence", True)):
            _attention(rank, device, lane, cut, gathers, dtype)
    for lane, gathers in itertools.product(lanes_of(device), (False, True)):
        _selection(rank, device, lane, gathers)
    for dense in (False, True):
        for cut, gathers in (("heads", False), ("sequence", False), ("sequence", True)):
            _index_loss(rank, device, cut, dense, gathers)
    torch.cuda.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device lanes need a CUDA device")
def test_two_ranks_of_one_device(tmp_path):
    ranks.spawn(_world, 2, tmp_path, "cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device a rank")
def test_two_ranks_nccl(tmp_path):
    ranks.spawn(_world, 2, tmp_path, backend="nccl")
