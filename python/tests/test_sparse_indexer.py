"""The indexer and its loss, storages, refusals, NumPy, ranks of torch.distributed."""

import numpy as np
import pytest
import ranks
import talea
import talea.arrays
import torch
import torch.distributed as dist
from conftest import close, gradients
from sparse_forms import eager, indexer, problem, scores


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


def test_packed_rows_of_every_other_column():
    """They are laid out row by row first, in memory that lives as long as the call."""
    for columns in (torch.arange(4.0 * 1152).view(4, 1152)[:, ::2], torch.randn(576, 64).t()):
        assert torch.equal(talea.pack_rows(columns), talea.pack_rows(columns.contiguous()))


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
    ours = talea.sparse_attention(q.double(), talea.PackedKV(rows), indices, value_dim=512)
    theirs, _ = eager(q.double(), exact.double()[:, None], indices[:, None], 512)
    assert ours.dtype == torch.float64 and close(ours, theirs, 1e-12)


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


def test_scales_that_nobody_reads():
    """A cache holds pages that were never written; their scales are 0."""
    q, indices = torch.randn(1, 2, 3, 576).bfloat16(), torch.tensor([[[[2, 5]], [[5, -1]]]])
    rows = talea.pack_rows(torch.randn(1, 8, 1, 576))
    clean = talea.sparse_attention(q, talea.PackedKV(rows), indices, value_dim=512)
    bare = torch.zeros_like(rows)
    bare[:, [2, 5]] = rows[:, [2, 5]]
    ours = talea.sparse_attention(q, talea.PackedKV(bare), indices, value_dim=512)
    assert torch.equal(ours, clean)
    data, scale = torch.randn(1, 8, 1, 576).to(torch.float8_e4m3fn), torch.rand(1, 8, 5) + 0.5
    clean = talea.sparse_attention(q, talea.Fp8(data, scale), indices, value_dim=512)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        some = scale.clone()
        some[:, [0, 1, 3, 4, 6, 7]] = value
        assert torch.equal(
            talea.sparse_attention(q, talea.Fp8(data, some), indices, value_dim=512), clean
        )
        some[0, 5, 3] = value
        with pytest.raises(talea.DataError, match="kv_scale: .*row 5, tile"):
            talea.sparse_attention(q, talea.Fp8(data, some), indices, value_dim=512)
        q8, q_scale = q.to(torch.float8_e4m3fn), torch.ones(1, 2, 3)
        q_scale[0, 1, 2] = value
        with pytest.raises(talea.DataError, match="q_scale: .*row 1, head 2"):
            talea.sparse_attention(
                talea.Fp8(q8, q_scale), talea.Fp8(data, scale), indices, value_dim=512
            )


def test_scales_of_keys_out_of_bounds():
    iq, ik = (torch.randn(1, n, *h, 8).to(torch.float8_e4m3fn) for n, h in ((2, (3,)), (9, ())))
    weights, end = torch.randn(1, 2, 3), torch.tensor([[4, 6]], dtype=torch.int32)
    scale = torch.ones(1, 9)

    def select(scale):
        keys = talea.Fp8(ik, scale)
        return talea.sparse_select(
            talea.Fp8(iq, torch.ones(1, 2, 3)), keys, weights, top_k=3, end=end
        )

    clean = select(scale)
    scale[0, 6:] = 0
    assert all(torch.equal(a, b) for a, b in zip(select(scale), clean, strict=True))
    scale[0, 5] = 0
    with pytest.raises(talea.DataError, match="index_k_scale: 0 at row 5"):
        select(scale)


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


def _shares(rank, cut):
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


@pytest.mark.parametrize("cut", ("heads", "sequence"))
def test_ranks_of_torch_distributed(cut, tmp_path):
    ranks.spawn(_shares, 2, tmp_path, cut)
