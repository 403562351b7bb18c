"""Sparse attention beside PyTorch: gather, softmax and autograd; layouts, edges, compile."""

import pytest
import talea
import torch
from conftest import DEVICES, close, gradients
from sparse_forms import eager, indexer, problem, tolerance
from talea._sparse_attention import _attention

LANES = {torch.float64: "reference", torch.float32: "auto"}


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


@pytest.mark.parametrize("compiled", (False, True))
def test_gradients_of_fp64_are_fp64(compiled):
    q, kv, indices, sink = problem(dtype=torch.float64, slots=5)
    sink = sink.detach().double().requires_grad_()

    def attend(q, kv, sink):
        found = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink, outputs=("lse",))
        return found.o, found.lse

    ours = (torch.compile(attend, backend="aot_eager") if compiled else attend)(q, kv, sink)
    theirs = eager(q, kv, indices, 16, sink=sink)
    assert ours[1].dtype == torch.float32
    weight = torch.randn_like(theirs[0])
    leaves = (q, kv, sink)
    for mine, other in zip(
        gradients(ours[0], *leaves, upstream=weight),
        gradients(theirs[0], *leaves, upstream=weight),
        strict=True,
    ):
        assert close(mine, other, 1e-13)


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


@pytest.mark.parametrize("compiled", (False, True))
def test_gradient_of_lse_alone(compiled):
    q, kv, indices, _ = problem()
    want = eager(q, kv, indices, 16)[1]
    weight = torch.randn_like(want)

    def loss(q, kv):
        lse = talea.sparse_attention(q, kv, indices, value_dim=16, outputs=("lse",)).lse
        return (torch.where(torch.isfinite(lse), lse, 0.0) * weight).sum()

    call = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    ours = gradients(call(q, kv), q, kv)
    theirs = gradients((torch.where(torch.isfinite(want), want, 0.0) * weight).sum(), q, kv)
    assert theirs[0].any() and theirs[1].any()
    assert all(close(a, b, 2e-5) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("compiled", (False, True))
def test_backward_takes_what_o_lost(monkeypatch, compiled):
    """The residual of a 16-bit o: without it, Delta is that of the rounded numbers."""
    q, kv, indices, _ = problem(s=32, keys=64, h=4, d=64, slots=24)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, kv)]
    given, backward = [], _attention.backward

    def seen(text, q, kv, sink, rest, kept, *more, **named):
        given.append(kept[2])
        return backward(text, q, kv, sink, rest, kept, *more, **named)

    monkeypatch.setattr(_attention, "backward", seen)

    def attend(q, kv):
        return talea.sparse_attention(q, kv, indices, value_dim=32, operands="split")

    o = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(*low)
    o.float().sum().backward()
    assert given[0].shape == o.shape and given[0].any()


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


@pytest.mark.parametrize("device", DEVICES)
def test_a_sink_alone_is_trained(device):
    q, kv, indices, sink = problem(device=device)
    q, kv = q.detach(), kv.detach()
    ours = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink)
    theirs = eager(q, kv, indices, 16, sink=sink)[0]
    up = torch.randn_like(theirs)
    mine, other = ((gradients(o, sink, upstream=up)[0]) for o in (ours, theirs))
    assert close(mine, other, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_gradients_of_lse(device):
    q, kv, indices, sink = problem(device=device)

    def loss(q, kv):
        made = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink, outputs=("lse",))
        finite = torch.isfinite(made.lse)
        return made.o.square().sum() + torch.where(finite, made.lse, 0.0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for mine, other in zip(
        gradients(compiled(q, kv), q, kv), gradients(loss(q, kv), q, kv), strict=True
    ):
        assert close(mine, other, 1e-6)
