"""Edges of the scan: resets, growth, NaN, lengths, repeats, wide heads."""

import math

import pytest
import talea
import torch
from mamba3_forms import (
    STATES,
    doubled,
    draw,
    gradients_of,
    quadratic,
    relative_l2,
    scan,
    upstreams,
)

HOST_LANES = [n for n in ("cpu", "unfused", "reference") if n in talea.mamba3_lanes()]
EXACT = [n for n in HOST_LANES if n != "unfused"]


def finals(made):
    return [getattr(made.final, s) for s in STATES]


@pytest.mark.parametrize("lane", EXACT)
def test_resets_and_growth(lane):
    t = draw(1, 9, dtype=torch.float32, without=("norm_weight",))
    for value in (-math.inf, -1e4, -128.0):
        adt = t["adt"].detach().clone()
        adt[:, :, 4] = value
        one = {**t, "adt": adt.requires_grad_()}
        made = scan(one, lane=lane, return_final=True)
        ups = upstreams(made.out, finals(made))
        grads = gradients_of(one, made.out, finals(made), ups)
        assert made.out.isfinite().all() and all(g.isfinite().all() for g in grads.values())
        assert not grads["adt"][:, :, 4].any()
        # What lies behind the reset does not reach what lies before it.
        behind = torch.zeros_like(made.out)
        behind[:, 4:] = 1
        late = gradients_of(one, made.out, [], [behind])
        for name in ("v", "q", "z"):
            assert not late[name][:, :4].any(), name
        assert not late["initial_ssm"].any()
    grown = {**t, "adt": (t["adt"].detach().abs() * 3).requires_grad_()}
    made = scan(grown, lane=lane)
    truth, _ = quadratic(doubled(grown))
    assert relative_l2(made, truth) <= 5e-6


@pytest.mark.parametrize("lane", EXACT)
def test_saturated_logits(lane):
    t = draw(1, 7, dtype=torch.float32, without=("norm_weight",))
    for value in (math.inf, -math.inf, 1e4, -1e4):
        trap, angles = t["trap"].detach().clone(), t["angles"].detach().clone()
        trap[:, :, 3], angles[:, 3] = value, value
        one = {**t, "trap": trap.requires_grad_(), "angles": angles.requires_grad_()}
        out = scan(one, lane=lane)
        grads = gradients_of(one, out, [], [torch.ones_like(out)])
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads.values())
        assert not grads["trap"][:, :, 3].any() and not grads["angles"][:, 3].any()


@pytest.mark.parametrize("lane", EXACT)
@pytest.mark.parametrize("size", [4.0, 6.0, 9.0])
def test_rates_near_their_ends_keep_their_slope(lane, size):
    """1 - tanh^2 as a difference has no digit left there."""
    t = draw(1, 9, dtype=torch.float32, without=("norm_weight",))
    angles = t["angles"].detach()
    one = {**t, "angles": (angles.sign() * size + angles / 8).requires_grad_()}
    out = scan(one, lane=lane)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = gradients_of(one, out, [], [up])["angles"]
    wide = doubled(one)
    truth = gradients_of(wide, quadratic(wide)[0], [], [up.double()])["angles"]
    assert relative_l2(ours, truth) <= 2e-6


@pytest.mark.parametrize("lane", EXACT)
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_long_turns_do_not_walk_away(lane, tokens):
    """Steps of half a turn: an increment rounded to fp32 leaves 1e-5 of the angle, 3e-6 of the state."""
    t = draw(
        1, tokens, heads=2, groups=1, dtype=torch.float32, grad=False, without=("norm_weight",)
    )
    made = scan(t, lane=lane, return_final=True)
    truth = scan({n: x.double() for n, x in t.items()}, lane="reference", return_final=True)
    gap = (made.final.angle.double() - truth.final.angle).remainder(2 * math.pi)
    assert torch.minimum(gap, 2 * math.pi - gap).max() <= 5e-7
    for ours, right in ((made.final.ssm, truth.final.ssm), (made.final.k, truth.final.k)):
        assert relative_l2(ours, right) <= 5e-7


@pytest.mark.parametrize("lane", EXACT)
def test_steps_of_no_length(lane):
    t = draw(1, 7, dtype=torch.float32, without=("norm_weight",))
    dt = t["dt"].detach().clone()
    dt[:, :, 3:5] = 0
    one = {**t, "dt": dt.requires_grad_()}
    out = scan(one, lane=lane)
    grads = gradients_of(one, out, [], [torch.randn_like(out)])
    for at in (3, 4):
        assert not grads["trap"][:, :, at].any() and not grads["angles"][:, at].any()
    assert not grads["k"][:, 3].any() and grads["k"][:, 4].any()


@pytest.mark.parametrize("lane", EXACT)
def test_nan_stays_where_it_is(lane):
    t = draw(1, 40, n=2, dtype=torch.float32, grad=False, without=("norm_weight",))
    t["cu_seqlens"] = torch.tensor([2, 20, 37], dtype=torch.int32)
    clean = scan(t, lane=lane)
    padded = dict(t)
    for name in ("q", "k", "v", "z", "angles"):
        padded[name] = t[name].clone()
        padded[name][:, :2], padded[name][:, 37:] = math.nan, math.nan
    for name in ("adt", "dt", "trap"):
        padded[name] = t[name].clone()
        padded[name][:, :, :2], padded[name][:, :, 37:] = math.nan, math.nan
    assert torch.equal(scan(padded, lane=lane), clean)
    for name in ("q", "z", "k", "v"):
        bad = {**t, name: t[name].clone()}
        bad[name][:, 20] = math.nan  # the second sequence's first token
        out = scan(bad, lane=lane)
        assert torch.equal(out[:, :20], clean[:, :20]), name
        assert out[:, 20].isnan().any()
    for name in ("initial_ssm", "initial_k", "initial_v", "initial_angle"):
        bad = {**t, name: t[name].clone()}
        bad[name][0] = math.nan
        assert torch.equal(scan(bad, lane=lane)[:, 20:], clean[:, 20:]), name


@pytest.mark.parametrize("lane", EXACT)
def test_causality(lane):
    t = draw(1, 21, dtype=torch.float32, grad=False, without=("norm_weight",))
    clean = scan(t, lane=lane)
    for name in ("q", "k", "v", "z", "angles"):
        other = {**t, name: t[name].clone()}
        other[name][:, 13] += 1
        assert torch.equal(scan(other, lane=lane)[:, :13], clean[:, :13]), name


@pytest.mark.parametrize("value", [5.0, 0.5, -1e4, -math.inf], ids=str)
@pytest.mark.parametrize("lane", EXACT)
def test_no_decay_changes_a_bit_before_it(lane, value):
    """A growth or a reset: the chunk's own earlier tokens know nothing of it."""
    t = draw(1, 70, heads=2, groups=1, rank=1, dtype=torch.float32, grad=False,
             without=("norm_weight",))  # fmt: skip
    clean = scan(t, lane=lane)
    for token in (1, 15, 16, 40, 63, 69):
        other = {**t, "adt": t["adt"].clone()}
        other["adt"][:, :, token] = value
        out = scan(other, lane=lane)
        assert torch.equal(out[:, :token], clean[:, :token]), token
        assert not torch.equal(out[:, token:], clean[:, token:])


def test_the_same_bits_every_time():
    t = draw(2, 70, heads=6, groups=2, dtype=torch.float32)
    seen = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        made = scan(t, head_norm=True, return_final=True)
        ups = upstreams(made.out, finals(made))
        seen.append(
            [made.out, *finals(made), *gradients_of(t, made.out, finals(made), ups).values()]
        )
    torch.set_num_threads(2)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_a_constant_turn_changes_nothing():
    t = draw(1, 12, grad=False, without=("norm_weight", "initial_ssm", "initial_k", "initial_v"))
    turned = {**t, "initial_angle": t["initial_angle"] + 0.7}
    assert relative_l2(scan(turned), scan(t)) <= 1e-13


def test_absent_tensors_are_their_neutral_ones():
    t = draw(1, 9, dtype=torch.float32, grad=False, without=("norm_weight",))
    neutral = {n: torch.zeros_like(t[n]) for n in ("angles", "q_bias", "k_bias", "d")}
    neutral.update({n: torch.ones_like(t[n]) for n in ("mimo_v", "mimo_z")})
    neutral.update({"initial_" + s: torch.zeros_like(t["initial_" + s]) for s in STATES})
    full = {**t, **neutral}
    wanted = scan(full)
    for name in neutral:
        less = {n: x for n, x in full.items() if n != name}
        assert torch.equal(scan(less), wanted), name
    assert torch.equal(scan({n: x for n, x in full.items() if n not in neutral}), wanted)


def test_zero_rows_under_the_norm():
    t = draw(1, 5, dtype=torch.float32, without=("d", "initial_ssm", "initial_k", "initial_v"))
    v = t["v"].detach().clone()
    v[:] = 0
    one = {**t, "v": v.requires_grad_()}
    out = scan(one, head_norm=True)
    grads = gradients_of(one, out, [], [torch.randn_like(out)])
    assert not out.any() and all(g.isfinite().all() for g in grads.values())


def test_wide_heads():
    t = draw(1, 17, heads=2, groups=1, rank=1, axis=False, cols=256, head_dim=256, pairs=64,
             dtype=torch.float32, without=("mimo_v", "mimo_z", "mimo_out"))  # fmt: skip
    out = scan(t, head_norm=True)
    up = torch.randn_like(out)
    grads = gradients_of(t, out, [], [up])
    wide = doubled(t)
    truth, _ = quadratic(wide, head_norm=True)
    wanted = gradients_of(wide, truth, [], [up.double()])
    assert relative_l2(out, truth) <= 2e-6
    for name in wanted:
        assert relative_l2(grads[name], wanted[name]) <= 4e-6, name


def test_elements_far_apart():
    """Rows more than 2^31 elements apart, in memory that is only promised."""
    import mmap

    gap = (1 << 31) + 8
    promised = mmap.mmap(
        -1, 4 * (2 * gap + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )
    room = torch.frombuffer(promised, dtype=torch.float32)
    t = draw(3, 2, heads=1, groups=1, rank=1, axis=False, cols=4, head_dim=4, pairs=2, grad=False,
             dtype=torch.float32, without=("mimo_v", "mimo_z", "mimo_out", "norm_weight"))  # fmt: skip
    far = room.as_strided((3, 2, 1, 4), (gap, 4, 4, 1))
    far.copy_(t["v"])
    assert torch.equal(scan({**t, "v": far}), scan(t))
