"""Sparse attention: what is asked for happens or is refused; nothing is left out in silence."""

import pytest
import talea
import torch
from conftest import close, gradients
from sparse_forms import eager, indexer, problem
from torch.autograd import forward_ad


def turned(t):
    return t.transpose(0, 1).contiguous()


@pytest.mark.parametrize("form", ((3, 3), (3, 3, 1)))
def test_sbhd_turns_scales_as_it_turns_rows(form):
    """As many tokens as batch entries: the other reading would fit as well."""
    data = torch.randn(3, 3, 32).to(torch.float8_e4m3fn)
    q = torch.randn(3, 3, 4, 32).to(torch.float8_e4m3fn)
    scale, q_scale = torch.rand(form) + 0.1, torch.rand(3, 3) + 0.1
    indices = torch.randint(0, 3, (3, 3, 5))
    want = talea.sparse_attention(
        talea.Fp8(q, q_scale), talea.Fp8(data, scale), indices, value_dim=16
    )
    have = talea.sparse_attention(
        talea.Fp8(turned(q), turned(q_scale)), talea.Fp8(turned(data), turned(scale)),
        turned(indices), value_dim=16, layout="sbhd",
    )  # fmt: skip
    assert torch.equal(turned(have), want)


@pytest.mark.parametrize("paged", (False, True))
def test_pages_lie_as_they_lie_in_any_layout(paged):
    q, cache = torch.randn(2, 6, 4, 32), torch.randn(4, 3, 32, requires_grad=True)
    indices = torch.randint(0, 9, (2, 6, 5))
    more = {"index_space": "slots"}
    if paged:
        table = torch.tensor([[3, 0, 1], [2, 2, 0]], dtype=torch.int32)
        more = {"index_space": "sequence", "block_table": table,
                "kv_lengths": torch.tensor([9, 7], dtype=torch.int32)}  # fmt: skip
    want = talea.sparse_attention(q, cache, indices, value_dim=16, **more)
    have = talea.sparse_attention(
        turned(q), cache, turned(indices), value_dim=16, layout="sbhd", **more
    )
    assert torch.equal(turned(have), want)
    weight = torch.randn_like(want)
    (mine,) = gradients(have, cache, upstream=turned(weight))
    assert torch.equal(mine, gradients(want, cache, upstream=weight)[0])
    main = torch.zeros_like(cache)
    talea.sparse_attention(
        turned(q), cache, turned(indices), value_dim=16, layout="sbhd", main_grad=main, **more
    ).backward(turned(weight))
    assert close(main, mine, 1e-6)


def test_sbhd_of_one_batch_entry_takes_lists_without_it():
    q, kv, indices, _ = problem(b=1, g=3, s=3, h=6)
    want = talea.sparse_attention(q, kv, indices, value_dim=16)
    have = talea.sparse_attention(turned(q), turned(kv), indices[0], value_dim=16, layout="sbhd")
    assert torch.equal(turned(have), want)


ASKED = {
    "report": ({"index_check": "report"}, "status"),
    "report_beside": ({"index_check": "report", "outputs": ("lse",)}, "status"),
    "gather": ({"gather_kv": True}, "sequence_group"),
    "group": ({"heads_group": "tp"}, "heads_group = 'tp'"),
    "flag": ({"causal": "no"}, "causal = 'no'"),
    "flag_tensor": ({"causal": torch.tensor(True)}, "causal"),
    "flag_array": ({"causal": torch.zeros(2).numpy()}, "causal"),
    "scale": ({"scale": True}, "scale = True"),
    "scale_complex": ({"scale": 1j}, "scale = 1j"),
    "workspace": ({"workspace_limit": 1e9}, "workspace_limit = 1"),
    "lane": ({"lane": "cpu\0sm90"}, "lane = "),
    "outputs": ({"outputs": "lse"}, "outputs = 'lse'"),
    "space": ({"index_space": ["rows"]}, "index_space"),
}


@pytest.mark.parametrize("name", ASKED)
def test_an_option_that_cannot_be_followed_is_refused(name):
    q, kv, indices, _ = problem()
    options, word = ASKED[name]
    with pytest.raises(talea.UsageError, match=word):
        talea.sparse_attention(q, kv, indices, **{"value_dim": 16, **options})


def test_outputs_may_be_any_collection():
    q, kv, indices, _ = problem()
    for names in (["lse"], {"lse"}, (n for n in ("lse",))):
        out = talea.sparse_attention(q, kv, indices, value_dim=16, outputs=names)
        assert out.lse is not None and out.row_max is None


def test_report_is_counted_where_it_can_be():
    q, kv, indices, _ = problem()
    indices[0, 0, 2] = 400
    out = talea.sparse_attention(
        q, kv, indices, value_dim=16, index_check="report", outputs=("status",)
    )
    with pytest.raises(talea.DataError, match="400"):
        talea.require_clean(out.status)
    out.o.sum().backward()
    iq, ik, iw, q, kv = indexer()
    lists = torch.zeros(6, 3, dtype=torch.int32)
    with pytest.raises(talea.UsageError, match="status"):
        talea.sparse_index_loss(
            iq, ik, iw, q, kv, value_dim=16, indices=lists, index_check="report"
        )
    with pytest.raises(talea.UsageError, match="status"):
        talea.index_mask(torch.zeros(6, 17), lists, index_check="report")
    with pytest.raises(talea.UsageError, match="sequence_group"):
        talea.sparse_select(iq, ik, iw, top_k=3, gather_kv=True)
    with pytest.raises(talea.UsageError, match="sequence_group"):
        talea.sparse_index_loss(iq, ik, iw, q, kv, value_dim=16, gather_kv=True)


@pytest.mark.filterwarnings("error")
def test_positions_without_causal_are_told():
    q, kv, indices, _ = problem()
    iq, ik, iw, aq, akv = indexer()
    at = torch.arange(7, dtype=torch.int32)
    for more in ({"q_positions": at}, {"q_position_base": 3}):
        with pytest.warns(UserWarning, match=f"{next(iter(more))}: bounds nothing"):
            talea.sparse_attention(q, kv, indices, value_dim=16, **more)
        talea.sparse_attention(q, kv, indices, value_dim=16, causal=True, **more)
        with pytest.warns(UserWarning, match="bounds nothing"):
            talea.index_mask(torch.zeros(7, 19), indices[:, 0], **more)
    with pytest.warns(UserWarning, match="key_stride: bounds nothing"):
        talea.sparse_select(iq, ik, iw, top_k=3, key_stride=2)
    with pytest.warns(UserWarning, match="key_stride: bounds nothing"):
        talea.sparse_index_loss(iq, ik, iw, aq, akv, value_dim=16, key_stride=2)


def test_arrays_know_their_options():
    import talea.arrays as arrays

    q, kv, indices = (t.detach().numpy() for t in problem()[:3])
    mask, lists = torch.zeros(7, 19).numpy(), indices[:, 0]
    for unknown in ({"foo": "x"}, {"layout": "sbhd"}, {"top_k": 3}):
        with pytest.raises(talea.UsageError, match=next(iter(unknown))):
            arrays.index_mask(mask, lists, **unknown)
    with pytest.raises(talea.UsageError, match="status"):
        arrays.index_mask(mask, lists, index_check="report")
    frozen = mask.copy()
    frozen.flags.writeable = False
    for written in (frozen, mask.tolist()):
        with pytest.raises(talea.DataError, match="mask"):
            arrays.index_mask(written, lists)
    assert not frozen.any()
    with pytest.raises(talea.UsageError, match="d_o"):
        arrays.sparse_attention(q, kv, indices, value_dim=16, d_o=q[..., :16].copy())


@pytest.mark.parametrize("lane", ("cpu", "reference", "unfused"))
def test_what_backward_is_given_may_be_fp32(lane):
    import numpy as np
    import talea.arrays as arrays

    q, kv, indices = (t.detach().numpy() for t in problem()[:3])
    given = {"q": q.astype(np.float16), "kv": kv.astype(np.float16), "indices": indices}
    given |= {"value_dim": 16, "lane": lane}
    kept = arrays.sparse_attention(**given, outputs=("o", "lse", "o_residual"))
    names = ("o", "o_residual")
    given |= {"d_o": np.cos(kept["o"]), "lse": kept["lse"], "outputs": ("dq", "dkv")}
    narrow = arrays.sparse_attention(**given, **{n: kept[n] for n in names})
    given["d_o"] = given["d_o"].astype(np.float32)
    wide = arrays.sparse_attention(**given, **{n: kept[n].astype(np.float32) for n in names})
    assert kept["o_residual"].any()
    assert all(np.array_equal(narrow[n], wide[n]) for n in ("dq", "dkv"))


class Float8Tensor(torch.Tensor):
    """As Transformer Engine's: a logical dtype, and what it holds beside it."""

    @staticmethod
    def __new__(cls, data, scale):
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        self._data, self._scale_inv, self._fp8_dtype = data.view(torch.uint8), scale, "kFloat8E4M3"
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("dispatched behind the caller's back")


def test_no_name_among_the_outputs_asks_for_o_alone():
    q, kv, indices, _ = problem()
    o = talea.sparse_attention(q, kv, indices, value_dim=16)
    assert torch.equal(talea.sparse_attention(q, kv, indices, value_dim=16, outputs=()), o)


def test_autograd_sees_that_a_mask_was_written():
    scores, mask = torch.randn(3, 6, requires_grad=True), torch.full((3, 6), -1.0)
    product = scores * mask  # keeps the mask
    talea.index_mask(mask, torch.tensor([[1, -1], [0, 5], [2, 4]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_gradient_is_never_e4m3():
    q, kv, indices, _ = problem()
    low = kv.detach().to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(talea.UsageError, match="kv: float8_e4m3fn requires grad"):
        talea.sparse_attention(q, talea.Fp8(low, torch.ones(())), indices, value_dim=16)
    main = torch.zeros(kv.shape)
    talea.sparse_attention(
        q, talea.Fp8(low, torch.ones(())), indices, value_dim=16, main_grad=main
    ).sum().backward()
    assert low.grad is None and main.abs().sum() > 0
    wrapper = Float8Tensor(low.detach(), torch.ones(1))
    o = talea.sparse_attention(q, wrapper, indices, value_dim=16)
    wrapper._fp8_dtype = torch.float8_e4m3fn  # the same kind, as PyTorch names it
    assert torch.equal(talea.sparse_attention(q, wrapper, indices, value_dim=16), o)
    wrapper.requires_grad_()
    with pytest.raises(talea.UsageError, match="kv: float8_e4m3fn requires grad"):
        talea.sparse_attention(q, wrapper, indices, value_dim=16)
    talea.sparse_attention(q, wrapper, indices, value_dim=16, main_grad=main)
    with torch.no_grad():
        assert torch.equal(talea.sparse_attention(q, wrapper, indices, value_dim=16), o)
    iq, ik, iw, aq, akv = (t.detach() for t in indexer())
    scaled = talea.Fp8(iq.to(torch.float8_e4m3fn).requires_grad_(), torch.ones(6, 3))
    keys = talea.Fp8(ik.to(torch.float8_e4m3fn), torch.ones(17))
    talea.sparse_select(scaled, keys, iw, top_k=3)
    with pytest.raises(talea.UsageError, match="index_q: float8_e4m3fn requires grad"):
        talea.sparse_index_loss(scaled, keys, iw, aq, akv, value_dim=16)
    low_q = q.detach().to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(talea.UsageError, match="q: float8_e4m3fn requires grad"):
        talea.sparse_attention(
            talea.Fp8(low_q, torch.ones(())), talea.Fp8(low.detach(), torch.ones(())), indices,
            value_dim=16,
        )  # fmt: skip


def test_main_grad_alone_is_filled():
    """Nothing else of the call requires grad; another part of the graph does."""
    q, kv, indices, _ = problem()
    want = gradients(eager(q, kv, indices, 16)[0].sum(), kv)[0]
    main, factor = torch.zeros(kv.shape), torch.ones((), requires_grad=True)
    o = talea.sparse_attention(q.detach(), kv.detach(), indices, value_dim=16, main_grad=main)
    (o.sum() * factor).backward()
    assert close(main, want, 1e-5)


def test_derivatives_that_are_not_backwards():
    q, kv, indices, _ = problem()
    iq, ik, iw, aq, akv = (t.detach() for t in indexer())
    calls = (
        lambda q, iq: talea.sparse_attention(q, kv.detach(), indices, value_dim=16),
        lambda q, iq: talea.sparse_select(iq, ik, iw, top_k=3),
        lambda q, iq: talea.sparse_index_loss(iq, ik, iw, aq, akv, value_dim=16),
    )
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in (q.detach(), iq)]
        for call in calls:
            with pytest.raises(talea.UsageError, match="forward-mode"):
                call(*duals)
    loss = talea.sparse_index_loss(iq.requires_grad_(), ik, iw, aq, akv, value_dim=16)
    (d,) = torch.autograd.grad(loss, iq, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_index_loss: double backward"):
        (d.square().sum() + iq.sum()).backward()


def test_the_indexer_under_autocast():
    """A product gives 16 bits there and a norm fp32: both become the type of products."""
    iq, ik, iw, q, kv = indexer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = talea.sparse_select(iq.bfloat16(), ik, iw, top_k=5)
        loss = talea.sparse_index_loss(iq.bfloat16(), ik, iw, q, kv.bfloat16(), value_dim=16)
    low = [t.bfloat16() for t in (iq, ik)]
    assert torch.equal(found, talea.sparse_select(*low, iw, top_k=5)[0])
    want = talea.sparse_index_loss(*low, iw, q.bfloat16(), kv.bfloat16(), value_dim=16)
    assert torch.equal(loss, want)
    assert gradients(loss, ik)[0].dtype == torch.float32


@pytest.mark.parametrize("empty", ("b", "s", "h", "keys", "k"))
def test_nothing_has_gradients_of_nothing(empty):
    """An upstream of a sum has strides of 0, which an empty tensor keeps whatever is done to it."""
    n = {"b": 2, "s": 3, "h": 4, "keys": 9, "k": 5, empty: 0}
    q = torch.randn(n["b"], n["s"], n["h"], 32, requires_grad=True)
    kv = torch.randn(n["b"], n["keys"], 32, requires_grad=True)
    sink = torch.randn(n["h"], requires_grad=True)
    indices = torch.zeros(n["b"], n["s"], n["k"], dtype=torch.int32)
    out = talea.sparse_attention(q, kv, indices, value_dim=16, sink=sink, outputs=("lse",))
    assert not out.o.any() and torch.isposinf(out.lse).all()
    for grad in gradients(out.o.sum() + out.lse.sum() * 0, q, kv, sink):
        assert not grad.any()
