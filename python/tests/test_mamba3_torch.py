"""talea.mamba3 under what PyTorch offers: compile, opcheck, checkpointing, autocast; refusals."""

import copy

import numpy as np
import pytest
import talea
import talea.arrays
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
from talea._mamba3 import _compiled
from talea._mamba3._operator import DIFFERENTIABLE
from talea._mamba3._settings import make
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


def arguments(t, **options):
    return (*(t.get(n) for n in (*DIFFERENTIABLE, "cu_seqlens")), make(**options).text())


@pytest.mark.parametrize("options", [
    {"head_norm": True, "final": True, "save": True}, {"head_norm": True},
], ids=["final_saved", "plain"])  # fmt: skip
def test_opcheck_forward(options):
    t = draw(1, 5, dtype=torch.float32)
    torch.library.opcheck(torch.ops.talea.mamba3.default, arguments(t, **options))


def test_opcheck_without_the_optional_tensors():
    t = draw(1, 5, rank=1, axis=False, dtype=torch.float32, without=(
        "z", "angles", "q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out", "norm_weight", *INITIAL,
    ))  # fmt: skip
    torch.library.opcheck(torch.ops.talea.mamba3.default, arguments(t))


def test_opcheck_backward():
    t = draw(1, 5, dtype=torch.float32, grad=False)
    made = _compiled.forward(*arguments(t, head_norm=True, final=True, save=True))
    ups = [torch.randn_like(made[0]), *(torch.randn_like(m) for m in made[2:])]
    *tensors, text = arguments(t, head_norm=True, final=True, save=True)
    need = [True] * len(DIFFERENTIABLE)
    torch.library.opcheck(
        torch.ops.talea.mamba3_backward.default, (*tensors, *ups, made[1], text, need)
    )


def step_problem(dtype=torch.float32):
    t = draw(2, 1, grad=False, without=("norm_weight",), dtype=dtype)
    state = [t[n].clone() for n in INITIAL]
    flat = {n: t[n][:, 0] for n in ("q", "k", "v", "z", "angles")}
    flat.update({n: t[n][:, :, 0] for n in ("adt", "dt", "trap")})
    flat.update({n: t[n] for n in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out")})
    return flat, state


def test_opcheck_step():
    flat, state = step_problem()
    tensors = [flat.get(n) for n in DIFFERENTIABLE[:15]]
    torch.library.opcheck(
        torch.ops.talea.mamba3_step.default, (*tensors, *state, None, make().text())
    )


@pytest.mark.parametrize("save", [False, True])
def test_compiled_is_eager(save):
    t = draw(1, 9, dtype=torch.float32)

    def run(**tensors):
        made = scan(tensors, head_norm=True, return_final=True, save_states=save)
        return made.out, made.final.angle, made.final.ssm, made.final.k, made.final.v

    eager, compiled = run(**t), torch.compile(run, fullgraph=True)(**t)
    ups = upstreams(eager[0], eager[1:])
    grads = [gradients_of(t, o[0], o[1:], ups) for o in (eager, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_compiled_for_any_length():
    run = torch.compile(lambda **t: scan(t), fullgraph=True, dynamic=True)
    for tokens in (5, 9, 14):
        t = draw(1, tokens, dtype=torch.float32, without=("norm_weight",))
        assert torch.equal(run(**t), scan(t))


def test_compiled_step():
    flat, state = step_problem()
    wanted = talea.Mamba3State(*(s.clone() for s in state))
    names = ("q", "k", "v", "adt", "dt", "trap", "angles")
    more = {n: x for n, x in flat.items() if n not in names}

    def run(angle, ssm, k, v):
        return talea.mamba3_step(
            talea.Mamba3State(angle, ssm, k, v), *(flat[n] for n in names), **more
        )

    out = talea.mamba3_step(wanted, *(flat[n] for n in names), **more)
    assert torch.equal(torch.compile(run, fullgraph=True)(*state), out)
    for ours, name in zip(state, STATES, strict=True):
        assert torch.equal(ours, getattr(wanted, name)), name


def test_checkpointing():
    t = draw(1, 9, dtype=torch.float32)
    plain = scan(t, head_norm=True)
    names = list(t)

    def run(*tensors):
        return scan(dict(zip(names, tensors, strict=True)), head_norm=True)

    again = checkpoint(run, *t.values(), use_reentrant=False)
    up = torch.randn_like(plain)
    a, b = (gradients_of(t, o, [], [up]) for o in (plain, again))
    assert torch.equal(plain, again) and all(torch.equal(a[n], b[n]) for n in a)


def test_autocast_keeps_steps_in_fp32():
    t = draw(1, 33, cols=16, head_dim=8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = scan(t, head_norm=True)
    truth, _ = quadratic(doubled(t), head_norm=True)
    assert out.dtype == torch.bfloat16 and relative_l2(out, truth) <= 1e-2
    grads = gradients_of(t, out, [], [torch.ones_like(out)])
    assert {n: g.dtype for n, g in grads.items()} == {n: x.dtype for n, x in leaves(t).items()}
    t["dt"] = t["dt"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(talea.DataError, match="dt"):
        scan(t)


def test_main_grads_are_added_to():
    t = draw(1, 9, dtype=torch.float32)
    plain = scan(t, head_norm=True)
    up = torch.randn_like(plain)
    wanted = gradients_of(t, plain, [], [up])
    sums = {n: torch.full_like(t[n], 3.0) for n in ("q_bias", "mimo_v", "d")}
    got = gradients_of(t, scan(t, head_norm=True, main_grads=sums), [], [up])
    for name, g in got.items():
        if name in sums:
            assert not g.any() and relative_l2(sums[name] - 3.0, wanted[name]) <= 1e-5, name
        else:
            assert relative_l2(g, wanted[name]) <= 1e-6, name
    for bad, words in (({"q": up}, "none of"), ({"d": up}, "fp32"), ({"q_bias": None}, None)):
        if words:
            with pytest.raises(talea.Error, match=words):
                scan(t, main_grads=bad)


def test_one_gradient_alone_and_twice():
    t = draw(1, 9, dtype=torch.float32)
    out = scan(t, head_norm=True)
    up = torch.randn_like(out)
    every = gradients_of(t, out, [], [up])
    for name, x in t.items():
        one = scan({n: y if n == name else y.detach() for n, y in t.items()}, head_norm=True)
        for _ in range(2):
            (g,) = torch.autograd.grad(one, x, up, retain_graph=True)
            assert torch.equal(g, every[name]), name


def test_expanded_and_strided_inputs():
    t = draw(2, 9, dtype=torch.float32, shared=True, without=("norm_weight",))
    wide = {**t, "angles": t["angles"].detach().expand(-1, -1, 4, -1).requires_grad_()}
    up = torch.randn_like(t["v"])
    shared, heads = scan(t), scan(wide)
    assert torch.equal(shared, heads)
    a = torch.autograd.grad(shared, t["angles"], up)[0]
    b = torch.autograd.grad(heads, wide["angles"], up)[0]
    assert relative_l2(a, b.sum(2, keepdim=True)) <= 1e-6
    order = {**t, "q": t["q"].detach().transpose(2, 3).contiguous().transpose(2, 3),
             "k": t["k"].detach().transpose(0, 1).contiguous().transpose(0, 1)}  # fmt: skip
    assert torch.equal(scan(order), shared)
    grads = torch.autograd.grad(scan(t), t["v"], torch.ones(()).expand_as(t["v"]))[0]
    assert torch.equal(grads, torch.autograd.grad(scan(t), t["v"], torch.ones_like(t["v"]))[0])


REFUSED = [
    ("adt", lambda t: t.update(adt=t["adt"].half()), "adt"),
    ("dt", lambda t: t.update(dt=t["dt"].bfloat16()), "dt"),
    ("groups", lambda t: t.update(q=t["q"][:, :, :, :1].expand(-1, -1, -1, 3, -1)), "q|groups"),
    ("angles", lambda t: t.update(angles=torch.zeros(2, 7, 4, 5)), "angles"),
    ("mimo_z", lambda t: t.pop("z"), "mimo_z"),
    ("v", lambda t: t.update(v=t["v"].double()), "v"),
    ("integers", lambda t: t.update(q=t["q"].int()), "q"),
    ("rows", lambda t: t.update(k=t["k"][:, :3]), "k"),
    ("cu", lambda t: t.update(cu_seqlens=torch.tensor([0, 7], dtype=torch.int32)), "cu_seqlens"),
]


@pytest.mark.parametrize("change,words", [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refusals_name_the_tensor(change, words):
    t = draw(dtype=torch.float32, grad=False)
    change(t)
    with pytest.raises(talea.Error, match=words):
        scan(t)


def test_a_norm_weight_needs_the_norm():
    t = draw(dtype=torch.float32, grad=False)
    tensors = [t[n] for n in ("q", "k", "v", "adt", "dt", "trap", "angles")]
    with pytest.raises(talea.UsageError, match="norm_weight"):
        talea.mamba3(*tensors, norm_weight=t["norm_weight"])


@pytest.mark.parametrize("entries", [[0, 5, 3, 7], [-1, 7], [0, 9]], ids=str)
def test_bad_cu_seqlens_are_named(entries):
    t = draw(1, 7, n=len(entries) - 1, dtype=torch.float32, grad=False, without=("norm_weight",))
    t["cu_seqlens"] = torch.tensor(entries, dtype=torch.int32)
    with pytest.raises(talea.DataError, match="cu_seqlens"):
        scan(t)


def test_options_are_named():
    t = draw(dtype=torch.float32, grad=False, without=("norm_weight",))
    for options, words in (
        ({"rotary_pairs": "thirds"}, "rotary_pairs"), ({"schedule": "lazy"}, "schedule"),
        ({"chunk": -1}, "chunk"), ({"chunk": 2.5}, "chunk"), ({"lane": "gpu"}, "gpu"),
        ({"norm_eps": float("nan")}, "norm_eps"), ({"workspace_limit": 2**64}, "workspace_limit"),
    ):  # fmt: skip
        with pytest.raises(talea.Error, match=words):
            scan(t, **options)


def test_what_has_no_gradient_says_so():
    t = draw(1, 5, dtype=torch.float32, without=("norm_weight",))
    out = scan(t)
    g = torch.autograd.grad(out.sum(), t["q"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(g.sum(), t["k"])
    with pytest.raises(talea.UsageError, match="torch.func"):
        torch.func.grad(lambda q: scan({**t, "q": q}).sum())(t["q"])
    with forward_ad.dual_level():
        for name in ("q", "v", "dt", "trap", "initial_ssm"):
            dual = forward_ad.make_dual(t[name].detach(), torch.ones_like(t[name]))
            with pytest.raises(talea.UsageError, match="forward-mode"):
                scan({**t, name: dual})
    flat, state = step_problem()
    flat["q"].requires_grad_()
    with pytest.raises(talea.UsageError, match="q requires grad"):
        talea.mamba3_step(talea.Mamba3State(*state), *(
            flat[n] for n in ("q", "k", "v", "adt", "dt", "trap", "angles")))  # fmt: skip


def test_numpy():
    t = draw(2, 9, dtype=torch.float32, grad=False)
    a = {n: x.numpy() for n, x in t.items()}
    up = np.random.default_rng(3).normal(size=a["v"].shape).astype(np.float32)
    names = ("out", "final_ssm", "final_k", "d_q", "d_dt", "d_mimo_v", "d_initial_ssm")
    made = talea.arrays.mamba3(**a, d_out=up, outputs=names, head_norm=True)
    leaf = {n: x.clone().requires_grad_() for n, x in t.items()}
    ours = scan(leaf, head_norm=True, return_final=True)
    grads = gradients_of(leaf, ours.out, [], [torch.from_numpy(up)])
    assert np.array_equal(made["out"], ours.out.detach().numpy())
    assert np.array_equal(made["final_ssm"], ours.final.ssm.detach().numpy())
    for name in names[3:]:
        assert np.array_equal(made[name], grads[name[2:]].numpy()), name
    assert made["receipt"]["lane"] == made["backward_receipt"]["lane"]
    with pytest.raises(talea.UsageError, match="d_q: needs d_out"):
        talea.arrays.mamba3(**a, outputs=("d_q",))


def test_numpy_step():
    flat, state = step_problem()
    want = talea.Mamba3State(*(s.clone() for s in state))
    names = ("q", "k", "v", "adt", "dt", "trap", "angles")
    more = {n: x for n, x in flat.items() if n not in names}
    out = talea.mamba3_step(want, *(flat[n] for n in names), **more)
    ours = {n: s.numpy().copy() for n, s in zip(STATES, state, strict=True)}
    made = talea.arrays.mamba3_step(ours, *(flat[n].numpy() for n in names),
                                    **{n: x.numpy() for n, x in more.items()})  # fmt: skip
    assert np.array_equal(made["out"], out.numpy())
    for n in STATES:
        assert np.array_equal(ours[n], getattr(want, n).numpy()), n


def test_a_state_is_copied_and_made():
    state = talea.Mamba3State.zeros(2, 4, 2, 8, 3, 3, dtype=torch.bfloat16)
    assert state.k.dtype == torch.bfloat16 and state.ssm.dtype == torch.float32
    assert [tuple(getattr(copy.deepcopy(state), s).shape) for s in STATES] == [
        (2, 4, 3), (2, 4, 3, 8), (2, 2, 4, 8), (2, 4, 3)]  # fmt: skip
