"""Sparse attention beside PyTorch: gather, softmax and autograd; edges, indexer, storages."""

import numpy as np
import pytest
import talea
import talea.arrays
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DEVICES, close, gradients

LANES = {torch.float64: "reference", torch.float32: "auto"}


def problem(s=7, keys=19, h=4, d=32, slots=6, g=1, b=None, dtype=torch.float32, device="cpu"):
    lead = () if b is None else (b,)
    like = {"dtype": dtype, "device": device}
    q = torch.randn(*lead, s, h, d, **like).requires_grad_()
    kv = torch.randn(*lead, keys, g, d, **like).requires_grad_()
    indices = torch.randint(0, keys, (*lead, s, g, slots), device=device)
    indices[..., 1, :, :] = -1  # a row without keys
    indices[..., 2, :, 3:] = -1
    sink = torch.randn(h, device=device).requires_grad_()
    return q, kv, indices, sink


def eager(q, kv, indices, value_dim, *, sink=None, scale=None, keep=None):
    """[B, S, H, D] by gather and softmax; a slot counts as often as it stands in the list."""
    if q.dim() == 3:
        keep = None if keep is None else keep[None]
        o, lse = eager(
            q[None], kv[None], indices[None], value_dim, sink=sink, scale=scale, keep=keep
        )
        return o[0], lse[0]
    b, s, h, d = q.shape
    g, slots = indices.shape[2:]
    valid = (indices >= 0) & (indices < kv.shape[1])
    if keep is not None:
        valid = valid & keep
    safe = torch.where(valid, indices, 0).long()
    batch = torch.arange(b, device=q.device)[:, None, None, None]
    group = torch.arange(g, device=q.device)[None, None, :, None]
    rows = kv[batch, safe, group].repeat_interleave(h // g, 2)  # [B, S, H, K, D]
    valid = valid.repeat_interleave(h // g, 2)
    logits = (q[..., None, :] * rows).sum(-1) * (d**-0.5 if scale is None else scale)
    logits = logits.masked_fill(~valid, -torch.inf)
    empty = ~valid.any(-1)
    lse = torch.logsumexp(logits.masked_fill(empty[..., None], 0), -1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    p = torch.exp(logits - total[..., None]).masked_fill(empty[..., None], 0)
    o = (p[..., None] * rows[..., :value_dim]).sum(-2)
    return o, torch.where(empty, torch.inf, lse)


def tolerance(dtype):
    return 1e-6 if dtype == torch.float64 else 5e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("b,g", ((None, 1), (2, 1), (2, 2)))
@pytest.mark.parametrize("with_sink", (False, True))
def test_parity(device, dtype, b, g, with_sink):
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("fp64 is the reference lane's")
    q, kv, indices, sink = problem(b=b, g=g, dtype=dtype, device=device)
    sink = sink if with_sink else None
    out = talea.sparse_attention(
        q, kv, indices, value_dim=16, sink=sink, outputs=("lse", "row_max"), lane=LANES[dtype]
    )
    want_o, want_lse = eager(q, kv, indices, 16, sink=sink)
    assert close(out.o, want_o, tolerance(dtype))
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isposinf(out.lse), ~finite)
    assert close(out.lse[finite], want_lse[finite], 2e-6)
    weight_o = torch.randn_like(want_o)
    weight_lse = torch.randn_like(want_lse).masked_fill(~finite, 0).float()
    ours = (out.o * weight_o).sum() + (out.lse.masked_fill(~finite, 0) * weight_lse).sum()
    theirs = (want_o * weight_o).sum() + (want_lse.masked_fill(~finite, 0) * weight_lse).sum()
    leaves = (q, kv, sink)
    for mine, other in zip(gradients(ours, *leaves), gradients(theirs, *leaves), strict=True):
        assert close(mine, other, 2e-6 if dtype == torch.float64 else 2e-5)


def test_gradcheck():
    q, kv, indices, sink = problem(s=3, keys=5, h=2, d=6, slots=4, dtype=torch.float64)
    sink = sink.detach()

    def attend(q, kv):
        return talea.sparse_attention(
            q, kv, indices, value_dim=4, sink=sink, scale=-0.3, lane="reference"
        )

    assert torch.autograd.gradcheck(attend, (q, kv), eps=1e-5, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ("bshd", "sbhd"))
def test_layouts_are_views(layout):
    q, kv, indices, _ = problem(b=2)
    turn = (lambda t: t.transpose(0, 1)) if layout == "sbhd" else (lambda t: t)
    ours = talea.sparse_attention(turn(q), turn(kv), turn(indices), value_dim=16, layout=layout)
    theirs, _ = eager(q, kv, indices, 16)
    assert close(turn(ours), theirs, 5e-6)
    weight = torch.randn_like(theirs)
    mine = gradients((turn(ours) * weight).sum(), q, kv)
    other = gradients((theirs * weight).sum(), q, kv)
    assert all(close(a, b, 2e-5) for a, b in zip(mine, other, strict=True))


def test_thd_and_causal():
    q, kv, indices, _ = problem(s=8, keys=8)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    ours = talea.sparse_attention(
        q, kv, indices, value_dim=16, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True
    )
    of = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])
    at = torch.arange(8)
    safe = indices.clamp(0, 7)
    keep = (of[safe] == of[:, None, None]) & (safe <= at[:, None, None])
    theirs, _ = eager(q, kv, indices, 16, keep=keep)
    assert close(ours, theirs, 5e-6)


def test_lengths_and_positions():
    q, kv, indices, _ = problem()
    length = torch.tensor([6, 6, 0, -3, 99, 2, 1], dtype=torch.int32)
    positions = torch.tensor([18, 18, 18, 18, 9, 18, 3], dtype=torch.int32)
    ours = talea.sparse_attention(
        q, kv, indices, value_dim=16, topk_length=length, causal=True, q_positions=positions
    )
    slot = torch.arange(6)[None, None]
    keep = (slot < length[:, None, None]) & (indices <= positions[:, None, None])
    theirs, _ = eager(q, kv, indices, 16, keep=keep)
    assert close(ours, theirs, 5e-6)


def test_paged():
    q, kv, indices, _ = problem(s=4, keys=12, b=2)
    pages = (
        kv.detach().reshape(2, 3, 4, 1, 32).reshape(6, 4, 1, 32)[torch.tensor([5, 0, 3, 1, 2, 4])]
    )
    inverse = torch.argsort(torch.tensor([5, 0, 3, 1, 2, 4])).reshape(2, 3)
    ours = talea.sparse_attention(
        q, pages, indices, value_dim=16, index_space="sequence",
        block_table=inverse.to(torch.int32),
        kv_lengths=torch.tensor([12, 7], dtype=torch.int32),
    )  # fmt: skip
    bound = torch.tensor([12, 7])[:, None, None, None]
    theirs, _ = eager(q, kv, indices, 16, keep=indices < bound)
    assert close(ours, theirs, 5e-6)


def test_sixteen_bits_split_and_residual():
    q, kv, indices, _ = problem(s=32, keys=64, h=4, d=64, slots=24)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, kv)]
    truth_o, _ = eager(*(t.double() for t in low), indices, 32)
    weight = torch.randn_like(truth_o).bfloat16()
    truth = gradients((truth_o * weight.double()).sum(), *low)
    for operands in ("native", "split"):
        main = torch.zeros(kv.shape)
        o = talea.sparse_attention(*low, indices, value_dim=32, operands=operands, main_grad=main)
        assert o.dtype == torch.bfloat16 and close(o.float(), truth_o.float(), 1e-2)
        (dq,) = torch.autograd.grad((o * weight).float().sum(), low[:1])
        assert close(dq.float(), truth[0].float(), 2e-2)
        assert close(main, truth[1].float(), 2e-2)


def test_main_grad_is_added_to():
    q, kv, indices, _ = problem()
    plain = gradients(talea.sparse_attention(q, kv, indices, value_dim=16).sum(), q, kv)
    main = torch.full(kv.shape, 3.0)
    o = talea.sparse_attention(q, kv, indices, value_dim=16, main_grad=main)
    o.sum().backward()
    assert kv.grad is None and torch.equal(q.grad, plain[0])
    assert close(main - 3, plain[1], 1e-5)


def test_second_backward_and_subsets_are_bitwise():
    q, kv, indices, sink = problem()
    o = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink)
    weight = torch.randn_like(o)
    first = gradients(o, q, kv, sink, upstream=weight)
    again = gradients(o, q, kv, sink, upstream=weight)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for i, leaf in enumerate((q, kv, sink)):
        assert torch.equal(gradients(o, leaf, upstream=weight)[0], first[i])


def test_double_backward_says_so():
    q, kv, indices, _ = problem()
    o = talea.sparse_attention(q, kv, indices, value_dim=16)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


def test_receipt_and_status():
    q, kv, indices, _ = problem()
    indices[0, 0, 2] = 400
    indices[3, 0, 1] = -9
    out = talea.sparse_attention(q, kv, indices, value_dim=16, outputs=("status",))
    assert out.status.tolist()[:3] == [2, 2, 400]
    with pytest.raises(talea.DataError, match="400"):
        talea.require_clean(out.status)
    facts = out.receipt()
    assert facts["operator"] == "sparse_attention" and facts["slots"]["foreign"] == 2
    with pytest.raises(talea.DataError, match="400"):
        talea.sparse_attention(q, kv, indices, value_dim=16, index_check="checked")


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    from talea._sparse_attention import _ops, _settings  # noqa: F401  (registers the ops)

    q, kv, indices, sink = problem(s=3, keys=5, h=2, slots=4, device=device)
    text = _settings.text_of(value_dim=16, outputs=("o", "lse"), kv_storage="plain")
    nothing = (None,) * 8
    torch.library.opcheck(
        torch.ops.talea.sparse_attention, (q, kv, sink, indices, *nothing, text),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    iq, ik, iw = (torch.randn(s, device=device) for s in ((3, 2, 8), (5, 8), (3, 2)))
    picked = _settings.text_of(top_k=3, outputs=("indices", "topk_length"))
    torch.library.opcheck(
        torch.ops.talea.sparse_select, (iq, None, ik, None, iw, *(None,) * 5, picked),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_compile(device):
    q, kv, indices, sink = problem(device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(q, kv, sink):
        o = talea.sparse_attention(q * 2, kv, indices, value_dim=16, sink=sink)
        return o.square().sum()

    ours, theirs = loss(q, kv, sink), eager(q * 2, kv, indices, 16, sink=sink)[0].square().sum()
    assert close(ours, theirs, 1e-5)
    leaves = (q, kv, sink)
    for mine, other in zip(gradients(ours, *leaves), gradients(theirs, *leaves), strict=True):
        assert close(mine, other, 2e-5)


def test_compile_of_the_indexer():
    iq, ik, iw, q, kv = indexer()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(iq, ik, iw, q, kv):
        indices, length = talea.sparse_select(iq, ik, iw, top_k=5)
        return talea.sparse_index_loss(
            iq, ik, iw, q, kv, value_dim=16, indices=indices, topk_length=length
        )

    plain = step._torchdynamo_orig_callable(iq, ik, iw, q, kv)
    ours = step(iq, ik, iw, q, kv)
    assert torch.equal(ours, plain)
    for a, b in zip(gradients(ours, iq, ik, iw), gradients(plain, iq, ik, iw), strict=True):
        assert torch.equal(a, b)


def test_checkpoint_and_autocast():
    from torch.utils.checkpoint import checkpoint

    q, kv, indices, sink = problem()

    def attend(q, kv):
        return talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink)

    plain = gradients(attend(q, kv).sum(), q, kv)
    kept = gradients(checkpoint(attend, q, kv, use_reentrant=False).sum(), q, kv)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attend(q, kv)
    assert o.dtype == torch.bfloat16
    dq, dkv = gradients(o.float().sum(), q, kv)
    assert dq.dtype == dkv.dtype == torch.float32 and close(dq, plain[0], 3e-2)


def indexer(s=6, keys=17, hi=3, di=8, h=4, d=32):
    iq = torch.randn(s, hi, di, requires_grad=True)
    ik = torch.randn(keys, di, requires_grad=True)
    iw = torch.randn(s, hi, requires_grad=True)
    return iq, ik, iw, torch.randn(s, h, d), torch.randn(keys, d)


def scores(iq, ik, iw, act="relu"):
    z = torch.einsum("shd,kd->shk", iq, ik)
    return ((z.relu() if act == "relu" else z) * iw[..., None]).sum(1)


@pytest.mark.parametrize("act", ("relu", "identity"))
def test_select(act):
    iq, ik, iw, _, _ = indexer()
    found, length, best = talea.sparse_select(iq, ik, iw, top_k=5, act=act, return_scores=True)
    # topk() leaves open which of equal scores it takes; ReLU makes many zeros.
    order = scores(iq, ik, iw, act).sort(dim=-1, descending=True, stable=True).indices
    want = order[:, :5].sort(-1).values
    assert torch.equal(found.long(), want) and length.tolist() == [5] * 6
    assert close(best, scores(iq, ik, iw, act).gather(1, want), 5e-6)


def test_select_bounds_ties_and_fill():
    iq, ik, iw = torch.ones(3, 1, 4), torch.ones(9, 4), torch.ones(3, 1)
    found, length = talea.sparse_select(
        iq, ik, iw, top_k=4, end=torch.tensor([0, 2, 99], dtype=torch.int32)
    )
    assert found.tolist() == [[-1] * 4, [0, 1, -1, -1], [0, 1, 2, 3]]
    assert length.tolist() == [0, 2, 4]
    causal, _ = talea.sparse_select(iq, ik, iw, top_k=2, causal=True)
    assert causal.tolist() == [[0, -1], [0, 1], [0, 1]]


@pytest.mark.parametrize("over", ("sparse", "dense"))
def test_index_loss(over):
    iq, ik, iw, q, kv = indexer()
    indices = torch.stack([torch.randperm(17)[:5].sort().values for _ in range(6)]).int()
    chosen = indices if over == "sparse" else torch.arange(17).expand(6, 17)
    logits = torch.einsum("shd,kd->shk", q, kv) * 32**-0.5
    picked = logits.gather(2, chosen.long()[:, None].expand(-1, 4, -1)).softmax(-1)
    teacher = picked.mean(1)
    ours_logp = scores(iq, ik, iw).gather(1, chosen.long()).log_softmax(-1)
    want = 0.5 * (teacher * (teacher.log() - ours_logp)).sum(-1).mean()
    have = talea.sparse_index_loss(
        iq, ik, iw, q, kv, value_dim=16, coeff=0.5, indices=indices if over == "sparse" else None
    )
    assert close(have, want, 5e-6)
    for a, b in zip(gradients(have * 3, iq, ik, iw), gradients(want * 3, iq, ik, iw), strict=True):
        assert close(a, b, 2e-5)


def test_index_mask():
    mask = torch.full((3, 6), -torch.inf)
    mask[0, 0] = 0
    indices = torch.tensor([[1, -1], [0, 5], [9, -4]])
    for _ in range(2):
        assert talea.index_mask(mask, indices) is mask
    want = torch.full((3, 6), -torch.inf)
    want[0, 0] = want[0, 1] = want[1, 0] = want[1, 5] = 0
    assert torch.equal(mask, want)


def test_packed_rows():
    kv = torch.randn(9, 576).bfloat16()
    rows = talea.pack_rows(kv)
    assert rows.shape == (9, 656) and rows.dtype == torch.uint8
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().reshape(9, 4, 128)
    scale = rows[:, 512:528].contiguous().view(torch.float32)
    exact = torch.cat(
        [(values * scale[..., None]).reshape(9, 512),
         rows[:, 528:].contiguous().view(torch.bfloat16).float()], 1,
    )  # fmt: skip
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    assert close(exact, kv.float(), 0.05)
    q = torch.randn(3, 2, 576)
    indices = torch.randint(0, 9, (3, 5))
    ours = talea.sparse_attention(
        q.bfloat16(), talea.PackedKV(rows), indices, value_dim=512, outputs=("lse",)
    )
    theirs, _ = eager(q.bfloat16().float(), exact[:, None], indices[:, None], 512)
    assert close(ours.o.float(), theirs, 2e-2) and ours.receipt()["kv"]["path"]


def test_fp8_scaled():
    q, kv, indices, _ = problem(d=32)
    scale = kv.detach().abs().amax() / 448
    data = (kv.detach() / scale).to(torch.float8_e4m3fn)
    exact = (data.float() * scale).requires_grad_()
    main = torch.zeros_like(exact)
    o = talea.sparse_attention(q, talea.Fp8(data, scale), indices, value_dim=16, main_grad=main)
    theirs, _ = eager(q, exact, indices, 16)
    assert close(o, theirs, 5e-6)
    weight = torch.randn_like(o)
    (dq,) = gradients(o, q, upstream=weight)
    want = gradients(theirs, q, exact, upstream=weight)
    assert close(dq, want[0], 2e-5) and close(main, want[1], 2e-5)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("dispatched behind the caller's back")


def wrapped(t):
    return torch.Tensor._make_wrapper_subclass(Wrapped, t.shape, dtype=t.dtype)


def fp8(t, kind=torch.float8_e4m3fn):
    return t.detach().to(kind)


BAD = {
    "value_dim": (lambda q, kv, i: ((q, kv, i), {"value_dim": 40}), "value_dim"),
    "value_dim_0": (lambda q, kv, i: ((q, kv, i), {"value_dim": 0}), "value_dim"),
    "layout": (lambda q, kv, i: ((q, kv, i), {"layout": "hbsd"}), "layout"),
    "wrapper": (lambda q, kv, i: ((q, wrapped(kv), i), {}), "Wrapped"),
    "e5m2": (lambda q, kv, i: ((q, fp8(kv, torch.float8_e5m2), i), {}), "e5m2"),
    "e4m3fnuz": (lambda q, kv, i: ((q, fp8(kv, torch.float8_e4m3fnuz), i), {}), "fnuz"),
    "no_scale": (lambda q, kv, i: ((q, fp8(kv), i), {}), "scale"),
    "scale_of_bf16": (
        lambda q, kv, i: ((q, talea.Fp8(kv.bfloat16(), torch.ones(())), i), {}),
        "bfloat16",
    ),
    "scale_shape": (lambda q, kv, i: ((q, talea.Fp8(fp8(kv), torch.ones(3)), i), {}), "kv_scale"),
    "scale_dtype": (
        lambda q, kv, i: ((q, talea.Fp8(fp8(kv), torch.ones((), dtype=torch.float64)), i), {}),
        "scale",
    ),
    "scale_zero": (lambda q, kv, i: ((q, talea.Fp8(fp8(kv), torch.zeros(())), i), {}), "kv_scale"),
    "scale_nan": (
        lambda q, kv, i: ((q, talea.Fp8(fp8(kv), torch.tensor(torch.nan)), i), {}),
        "kv_scale",
    ),
    "u8": (lambda q, kv, i: ((q, torch.zeros(19, 656, dtype=torch.uint8), i), {}), "PackedKV"),
    "rows_584": (
        lambda q, kv, i: ((q, talea.PackedKV(torch.zeros(19, 584, dtype=torch.uint8)), i), {}),
        "656",
    ),
    "dtypes": (lambda q, kv, i: ((q, kv.half(), i), {}), "kv"),
    "operands": (lambda q, kv, i: ((q, kv, i), {"operands": "triple"}), "operands"),
    "outputs": (lambda q, kv, i: ((q, kv, i), {"outputs": ("entropy",)}), "entropy"),
    "scale_inf": (lambda q, kv, i: ((q, kv, i), {"scale": float("inf")}), "scale"),
    "indices": (lambda q, kv, i: ((q, kv, i.float()), {}), "indices"),
    "main_grad": (lambda q, kv, i: ((q, kv, i), {"main_grad": kv.detach().half()}), "main_grad"),
    "lane": (lambda q, kv, i: ((q, kv, i), {"lane": "fastest"}), "fastest"),
    "thd": (lambda q, kv, i: ((q, kv, i), {"layout": "thd"}), "cu_seqlens"),
    "numpy": (lambda q, kv, i: ((q.detach().numpy(), kv, i), {}), "ndarray"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    q, kv, indices, _ = problem()
    make, word = BAD[name]
    arguments, options = make(q, kv, indices)
    with pytest.raises((talea.DataError, talea.UsageError, talea.UnavailableError), match=word):
        talea.sparse_attention(*arguments, **{"value_dim": 16, **options})


def test_a_scale_gets_no_gradient():
    q, kv, indices, _ = problem()
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(talea.UsageError, match="requires grad"):
        talea.sparse_attention(q, talea.Fp8(fp8(kv), scale), indices, value_dim=16)


def test_arrays():
    q, kv, indices, _ = problem()
    want, lse = eager(q, kv, indices, 16)
    d_o = np.random.default_rng(3).standard_normal(want.shape).astype(np.float32)
    have = talea.arrays.sparse_attention(
        q.detach().numpy(), kv.detach().numpy(), indices.numpy(), value_dim=16,
        outputs=("o", "lse", "dq", "dkv"), d_o=d_o,
    )  # fmt: skip
    dq, dkv = gradients(want, q, kv, upstream=torch.from_numpy(d_o))
    assert close(torch.from_numpy(have["o"]), want, 5e-6)
    assert np.array_equal(np.isposinf(have["lse"]), torch.isposinf(lse).numpy())
    assert close(torch.from_numpy(have["dq"]), dq, 2e-5)
    assert close(torch.from_numpy(have["dkv"]), dkv, 2e-5)
    iq, ik, iw, _, _ = (t.detach().numpy() for t in indexer())
    found = talea.arrays.sparse_select(iq, ik, iw, top_k=5)
    assert found["indices"].shape == (6, 5) and found["receipt"]["pass"] == "select"


def _shares(rank, world, file, cut):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        torch.manual_seed(11)
        q, kv, indices, sink = problem(s=6, keys=10, h=4)
        weight = torch.randn(6, 4, 16)
        whole = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink, causal=True)
        want = gradients(whole, q, kv, sink, upstream=weight)
        group = dist.group.WORLD
        part = slice(rank * 2, rank * 2 + 2) if cut == "heads" else slice(rank * 3, rank * 3 + 3)
        if cut == "heads":
            mine, their = (q[:, part], kv, indices, sink[part]), (want[0][:, part], want[2][part])
            upstream, more = weight[:, part], {"heads_group": group}
        else:
            mine, their = (q[part], kv, indices[part], sink), (want[0][part], want[2])
            upstream, more = weight[part], {"sequence_group": group, "q_position_base": rank * 3}
        leaves = [t.detach().requires_grad_() for t in (mine[0], mine[1], mine[3])]
        o = talea.sparse_attention(
            leaves[0], leaves[1], mine[2], value_dim=16, sink=leaves[2], causal=True, **more
        )
        dq, dkv, d_sink = gradients(o, *leaves, upstream=upstream)
        assert close(o, whole[:, part] if cut == "heads" else whole[part], 1e-6)
        assert close(dq, their[0], 1e-5) and close(dkv, want[1], 1e-5)
        assert close(d_sink, their[1], 1e-5)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cut", ("heads", "sequence"))
def test_ranks_of_torch_distributed(cut, tmp_path):
    mp.spawn(_shares, args=(2, tmp_path / "meet", cut), nprocs=2)
