"""talea.mamba3 against autograd of the quadratic form in fp64; the edges of the contract."""

import math

import pytest
import talea
import torch
from mamba3_forms import (
    INITIAL,
    STATES,
    doubled,
    draw,
    gradients_of,
    leaves,
    quadratic,
    relative_l2,
    scan,
    upstreams,
)

TAU = 2 * math.pi
CASES = {
    "siso": {"axis": False, "rank": 1, "without": ("mimo_v", "mimo_z", "mimo_out")},
    "siso with a rank axis": {"rank": 1, "groups": 1},
    "mimo, 1 < G < H": {"heads": 6, "groups": 3, "pairs": 4},
    "G = 1": {"groups": 1},
    "G = H": {"groups": 4},
    "H / G prime": {"heads": 6, "groups": 2, "rank": 3},
    "shared angles": {"shared": True},
    "unreduced": {"without": ("mimo_out",)},
    "no gate": {"without": ("z", "mimo_z")},
    "bare": {"axis": False, "rank": 1, "without": (
        "z", "angles", "q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out", "norm_weight",
        *INITIAL)},
    "one token": {"tokens": 1},
    "rank 8": {"rank": 8, "tokens": 3},
}  # fmt: skip
HOST_LANES = [n for n in ("cpu", "unfused", "reference") if n in talea.mamba3_lanes()]


def both(t, norm=False, **options):
    """(out, finals, gradients) of the scan and of the quadratic form in fp64, upstreams shared."""
    made = scan(t, head_norm=norm, return_final=True, **options)
    final = [getattr(made.final, s) for s in STATES]
    ups = upstreams(made.out, final)
    ours = (made.out, final, gradients_of(t, made.out, final, ups))
    wide = doubled(t)
    pairs = options.get("rotary_pairs")
    out, wanted = quadratic(wide, head_norm=norm, rotary_pairs=pairs)
    wanted = [wanted[s] for s in STATES]
    grads = gradients_of(wide, out, wanted, [u.double() for u in ups])
    return ours, (out, wanted, grads)


def agree(t, bound, norm=False, **options):
    (out, final, grads), (truth, states, wanted) = both(t, norm, **options)
    assert relative_l2(out, truth) <= bound
    for name, ours, right in zip(STATES, final, states, strict=True):
        if name == "angle":
            gap = (ours.double() - right.double()).remainder(TAU)
            off = torch.minimum(gap, TAU - gap).detach()
            assert float(off.max() if off.numel() else 0) <= 10 * bound
            angle = ours.detach()
            assert not angle.numel() or (0 <= float(angle.min()) and float(angle.max()) < TAU)
        else:
            assert relative_l2(ours, right) <= bound, name
    assert grads.keys() == wanted.keys()
    for name, right in wanted.items():
        assert grads[name].dtype == t[name].dtype
        assert relative_l2(grads[name], right) <= 2 * bound, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "_"))
def test_fp64_is_the_quadratic_form(case):
    t = draw(**CASES[case])
    agree(t, 1e-13, norm="norm_weight" in t)


@pytest.mark.parametrize("lane", [n for n in HOST_LANES if n != "reference"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "_"))
def test_fp32_every_gradient(case, lane):
    t = draw(**CASES[case], dtype=torch.float32)
    agree(t, 2e-6, norm="norm_weight" in t, lane=lane)


@pytest.mark.parametrize("lane", [n for n in HOST_LANES if n != "reference"])
@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_chunks_and_schedules(schedule, lane):
    for chunk in (1, 3, 16):
        t = draw(batch=1, tokens=33, dtype=torch.float32, seed=chunk)
        agree(t, 2e-6, norm=True, chunk=chunk, schedule=schedule, lane=lane)


def test_saved_states_give_the_same_bits():
    t = draw(tokens=40, dtype=torch.float32)
    made = [scan(t, head_norm=True, return_final=True, save_states=s) for s in (False, True)]
    ups = upstreams(made[0].out, [getattr(made[0].final, s) for s in STATES])
    grads = [gradients_of(t, m.out, [getattr(m.final, s) for s in STATES], ups) for m in made]
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_operands(dtype):
    """Row a of the contract's table: at most 5e-3 for out, twice that for a gradient."""
    t = draw(tokens=65, cols=16, head_dim=8, dtype=dtype)
    (out, _, grads), (truth, _, wanted) = both(t, True)
    assert out.dtype == dtype and relative_l2(out, truth) <= 8e-3
    for name, right in wanted.items():
        assert grads[name].dtype == t[name].dtype
        assert relative_l2(grads[name], right) <= 2e-2, name


def test_gradcheck():
    t = draw(1, 3, 2, 1, 2, 4, 2, 1)
    names = list(leaves(t))

    def outputs(*tensors):
        made = scan(dict(zip(names, tensors, strict=True)), head_norm=True, return_final=True,
                    lane="reference")  # fmt: skip
        return made.out, made.final.ssm, made.final.k, made.final.v

    assert torch.autograd.gradcheck(outputs, tuple(t.values()), eps=1e-6, atol=1e-7)


def packed(sizes, before=0, after=0, **more):
    edges = torch.tensor([before, *(before + sum(sizes[: i + 1]) for i in range(len(sizes)))])
    tokens = before + sum(sizes) + after
    t = draw(1, tokens, n=len(sizes), **more)
    return {**t, "cu_seqlens": edges.to(torch.int32)}


@pytest.mark.parametrize("sizes", [[0, 1, 6, 0, 7, 1, 0], [0, 0], [5]], ids=str)
def test_packed_sequences(sizes):
    t = packed(sizes, before=2, after=3)
    agree(t, 1e-13, norm=True)
    made = scan(t, return_final=True)
    grads = gradients_of(t, made.out, [], [torch.ones_like(made.out)])
    assert not made.out[:, :2].any() and not made.out[:, 2 + sum(sizes) :].any()
    for name in ("q", "k", "v", "z", "angles"):
        assert not grads[name][:, :2].any() and not grads[name][:, 2 + sum(sizes) :].any(), name


@pytest.mark.parametrize("lane", HOST_LANES)
def test_packed_equals_dense_bit_for_bit(lane):
    sizes = [3, 17, 0, 40, 1]
    t = packed(sizes, dtype=torch.float32)
    whole = scan(t, lane=lane, return_final=True)
    for n, (lo, hi) in enumerate(
        zip(t["cu_seqlens"][:-1].tolist(), t["cu_seqlens"][1:].tolist(), strict=True)
    ):
        one = {}
        for name, x in t.items():
            if name in ("q", "k", "v", "z", "angles"):
                one[name] = x[:, lo:hi]
            elif name in ("adt", "dt", "trap"):
                one[name] = x[:, :, lo:hi]
            elif name in INITIAL:
                one[name] = x[n : n + 1]
            elif name != "cu_seqlens":
                one[name] = x
        made = scan(one, lane=lane, return_final=True)
        assert torch.equal(made.out, whole.out[:, lo:hi])
        for s in STATES:
            assert torch.equal(getattr(made.final, s)[0], getattr(whole.final, s)[n]), s


def test_nothing_to_do():
    t = draw(tokens=0)
    made = scan(t, return_final=True)
    assert made.out.shape == t["v"].shape
    for s in ("ssm", "k", "v"):
        assert torch.equal(getattr(made.final, s), t["initial_" + s])
    ups = upstreams(made.out, [getattr(made.final, s) for s in STATES])
    grads = gradients_of(t, made.out, [getattr(made.final, s) for s in STATES], ups)
    for s, up in zip(STATES, ups[1:], strict=True):
        assert torch.equal(grads["initial_" + s], up), s
    for name in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out"):
        assert not grads[name].any(), name
    for empty in ({"batch": 0}, {"heads": 0, "groups": 1}):
        made = scan(draw(**empty), return_final=True)
        assert not made.out.numel()


@pytest.mark.parametrize("at", range(8))
def test_cut_at_any_token(at):
    t = draw(tokens=7)
    whole = scan(t, return_final=True)

    def piece(lo, hi, state):
        one = dict(t)
        for name in ("q", "k", "v", "z", "angles"):
            one[name] = t[name][:, lo:hi]
        for name in ("adt", "dt", "trap"):
            one[name] = t[name][:, :, lo:hi]
        if state is not None:
            one.update({"initial_" + s: getattr(state, s) for s in STATES})
        return scan(one, return_final=True)

    first = piece(0, at, None)
    second = piece(at, 7, first.final)
    out = torch.cat([first.out, second.out], 1)
    final = [[getattr(m.final, s) for s in STATES] for m in (whole, second)]
    ups = upstreams(whole.out, final[0])
    ours, wanted = gradients_of(t, out, final[1], ups), gradients_of(t, whole.out, final[0], ups)
    assert relative_l2(out, whole.out) <= 1e-13
    for name in wanted:
        assert relative_l2(ours[name], wanted[name]) <= 1e-12, name


@pytest.mark.parametrize("case", ["siso", "mimo, 1 < G < H", "unreduced"])
def test_a_token_at_a_time_is_the_scan(case):
    t = draw(
        **{**CASES[case], "without": (*CASES[case].get("without", ()), "norm_weight")}, grad=False
    )
    whole = scan(t, return_final=True)
    state = talea.Mamba3State(*(t[n].clone() for n in INITIAL))
    parameters = {
        n: t[n] for n in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out") if n in t
    }
    for i in range(t["v"].shape[1]):
        out = talea.mamba3_step(
            state, t["q"][:, i], t["k"][:, i], t["v"][:, i], *(t[n][:, :, i] for n in ("adt", "dt", "trap")),
            t["angles"][:, i], z=t["z"][:, i], **parameters,
        )  # fmt: skip
        assert relative_l2(out, whole.out[:, i]) <= 1e-13
    for s in STATES:
        assert relative_l2(getattr(state, s), getattr(whole.final, s)) <= 1e-12, s


def test_step_on_slots():
    t = draw(batch=3, tokens=1, grad=False, without=("norm_weight", *INITIAL), dtype=torch.float32)
    caches = talea.Mamba3State.zeros(6, 4, 2, 8, 3, 3)
    for c in (caches.angle, caches.ssm, caches.k, caches.v):
        c.normal_()
    before = talea.Mamba3State(*(getattr(caches, s).clone() for s in STATES))
    slots = torch.tensor([4, -1, 2], dtype=torch.int32)
    tensors = [t[n][:, 0] for n in ("q", "k", "v")] + [t[n][:, :, 0] for n in ("adt", "dt", "trap")]
    more = {n: t[n] for n in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out")}
    out = talea.mamba3_step(
        caches, *tensors, t["angles"][:, 0], z=t["z"][:, 0], slots=slots, **more
    )
    alone = talea.Mamba3State(*(getattr(before, s)[[4, 0, 2]] for s in STATES))
    wanted = talea.mamba3_step(alone, *tensors, t["angles"][:, 0], z=t["z"][:, 0], **more)
    assert torch.equal(out[[0, 2]], wanted[[0, 2]]) and not out[1].any()
    for s in STATES:
        ours, old, new = (getattr(x, s) for x in (caches, before, alone))
        assert torch.equal(ours[[0, 1, 3, 5]], old[[0, 1, 3, 5]]), s
        assert torch.equal(ours[[4, 2]], new[[0, 2]]), s
    for bad, words in ((torch.tensor([4, 6, 2]), "slots"), (torch.tensor([4, 4, 2]), "slots")):
        with pytest.raises(talea.Error, match=words):
            talea.mamba3_step(caches, *tensors, t["angles"][:, 0], slots=bad.to(torch.int32))


def test_receipt_names_what_ran():
    r = scan(draw(dtype=torch.float32), return_final=True).receipt()
    assert r["lane"] in talea.mamba3_lanes()
    assert r["rotary_pairs"] == "halves" and r["quadratic_bytes"] == 0


def test_a_step_norms_as_the_scan_does():
    t = draw(tokens=1, grad=False, dtype=torch.float32)
    whole = scan(t, head_norm=True, norm_eps=0.5)
    state = talea.Mamba3State(*(t[n].clone() for n in INITIAL))
    names = ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out", "norm_weight")
    out = talea.mamba3_step(
        state, *(t[n][:, 0] for n in ("q", "k", "v")), *(t[n][:, :, 0] for n in ("adt", "dt", "trap")),
        t["angles"][:, 0], z=t["z"][:, 0], head_norm=True, norm_eps=0.5, **{n: t[n] for n in names},
    )  # fmt: skip
    assert relative_l2(out, whole[:, 0]) <= 1e-5


def test_states_are_kept_where_asked_for():
    for save in (True, False):
        out = scan(draw(dtype=torch.float32), save_states=save)
        kept = out.grad_fn.saved_tensors[-1]
        assert (kept is not None and kept.numel() > 0) == save


@pytest.mark.parametrize("given", [3, 4], ids=["without a rank axis", "with one"])
@pytest.mark.parametrize("axis", [False, True], ids=["rows without", "rows with"])
def test_a_final_key_has_the_axes_of_the_initial_one(axis, given):
    t = draw(axis=axis, rank=1, without=("norm_weight",), dtype=torch.float32)
    key = t["initial_k"].detach().reshape(2, *([1] if given == 4 else []), 4, -1)
    t["initial_k"] = key.requires_grad_()
    made = scan(t, return_final=True)
    assert made.final.k.shape == key.shape
    made.final.k.sum().backward()
    assert t["k"].grad.abs().sum() > 0
    arrays = {n: x.detach().numpy() for n, x in t.items()}
    again = talea.arrays.mamba3(**arrays, outputs=("final_k",))
    assert again["final_k"].shape == tuple(key.shape)
    assert (again["final_k"] == made.final.k.detach().numpy()).all()
