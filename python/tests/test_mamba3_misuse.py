"""talea.mamba3 where a call can go wrong unseen: states written between forward and backward, options
that would be left aside, arguments of another kind."""

import pytest
import talea
import talea.arrays
import torch
from mamba3_forms import INITIAL, STATES, draw, relative_l2, scan

SCANNED = ("q", "k", "v", "adt", "dt", "trap", "angles")


def one_token(t):
    flat = {n: t[n][:, 0] for n in ("q", "k", "v", "z", "angles")}
    flat.update({n: t[n][:, :, 0] for n in ("adt", "dt", "trap")})
    flat.update({n: t[n] for n in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out")})
    return [flat.pop(n) for n in SCANNED], flat


@pytest.fixture
def problem():
    return draw(2, 5, dtype=torch.float32, grad=False, without=("norm_weight",))


def test_backward_sees_that_a_step_wrote_its_state(problem):
    leaf = {**problem, "q": problem["q"].clone().requires_grad_()}
    out = scan(leaf)
    tensors, more = one_token(problem)
    talea.mamba3_step(talea.Mamba3State(*(problem[n] for n in INITIAL)), *tensors, **more)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_steps_of_inference_tensors(problem):
    tensors, more = one_token(problem)
    wanted = talea.Mamba3State(*(problem[n].clone() for n in INITIAL))
    out = talea.mamba3_step(wanted, *tensors, **more)
    with torch.inference_mode():
        state = talea.Mamba3State(*(problem[n].clone() for n in INITIAL))
        assert torch.equal(talea.mamba3_step(state, *tensors, **more), out)
    assert all(torch.equal(getattr(state, s), getattr(wanted, s)) for s in STATES)


def test_main_grads_are_seen_to_be_written(problem):
    total = torch.zeros(4)
    leaf = {**problem, "d": problem["d"].clone().requires_grad_()}
    out, before = scan(leaf, main_grads={"d": total}), total._version
    out.sum().backward()
    assert total.any() and total._version > before


@pytest.mark.parametrize("trained", ["d", "q", None])
def test_main_grads_are_filled_whatever_requires_grad(problem, trained):
    leaf = {**problem, "d": problem["d"].clone().requires_grad_()}
    wanted = torch.autograd.grad(scan(leaf).sum(), leaf["d"])[0]
    mixed = {n: x.clone().requires_grad_(n == trained) for n, x in problem.items()}
    total = torch.zeros(4)
    scan(mixed, main_grads={"d": total}).sum().backward()
    assert torch.equal(total, wanted) and mixed["d"].grad is None
    assert (mixed["q"].grad is not None) == (trained == "q")


def test_main_grads_of_fp64_are_fp64():
    t = draw(1, 5, without=("norm_weight",))
    wanted = torch.autograd.grad(scan(t).sum(), [t["d"], t["q_bias"]])
    total = torch.zeros(4, dtype=torch.float64)
    got = torch.autograd.grad(scan(t, main_grads={"d": total}).sum(), t["q_bias"])[0]
    assert relative_l2(total, wanted[0]) <= 1e-14 and relative_l2(got, wanted[1]) <= 1e-14
    with pytest.raises(talea.DataError, match="fp64"):
        scan(t, main_grads={"d": torch.zeros(4)})


def test_a_step_takes_the_keywords_of_the_scan(problem):
    tensors, more = one_token(problem)

    def step(**options):
        state = talea.Mamba3State(*(problem[n].clone() for n in INITIAL))
        return talea.mamba3_step(state, *tensors, **more, **options)

    plain = step()
    for options in ({"chunk": 16}, {"schedule": "parallel"}, {"workspace_limit": 1 << 20}):
        assert torch.equal(step(**options), plain)
    for options, words in (
        ({"workspace_limit": 1}, "workspace_limit = 1 "), ({"chunk": -1}, "chunk = -1"),
        ({"schedule": "lazy"}, "schedule"), ({"chunk": 4, "lane": "reference"}, "no chunks"),
    ):  # fmt: skip
        with pytest.raises(talea.Error, match=words):
            step(**options)


def test_arguments_of_another_kind_are_named(problem):
    plain = [problem[n] for n in SCANNED]
    tensors, more = one_token(problem)
    state = talea.Mamba3State.zeros(2, 4, 2, 8, 3, 3)
    for call, words in (
        (lambda: talea.mamba3(None, *plain[1:]), "q: NoneType"),
        (lambda: talea.mamba3(*plain, initial={"ssm": None}), "initial: dict"),
        (lambda: talea.mamba3(*plain, heads_group="world"), "heads_group = .world."),
        (lambda: talea.mamba3(*plain, workspace_limit="auto"), "workspace_limit = 'auto'"),
        (lambda: talea.mamba3_step({"ssm": None}, *tensors, **more), "state: dict"),
        (lambda: talea.mamba3_step(state, *tensors, **more, slots=[0, 1]), "slots: list"),
        (lambda: talea.mamba3_step(state, None, *tensors[1:], **more), "q: NoneType"),
    ):
        with pytest.raises(talea.Error, match=words):
            call()
    state.k = state.k.double()
    with pytest.raises(talea.DataError, match="state_k: dtype fp64"):
        talea.mamba3_step(state, *tensors, **more)


def test_options_are_never_left_aside(problem):
    plain = [problem[n] for n in SCANNED]
    assert torch.equal(talea.mamba3(*plain, total_groups=2), talea.mamba3(*plain))
    with pytest.raises(talea.UsageError, match="total_groups = 4"):
        talea.mamba3(*plain, total_groups=4)
    arrays = [x.numpy() for x in plain]
    for option in ("save", "final", "heads_group", "total_groups", "workspace_limit"):
        with pytest.raises(TypeError, match=option):
            talea.arrays.mamba3(*arrays, **{option: 1})


def test_numpy_states_are_arrays_that_can_be_written(problem):
    tensors, more = one_token(problem)
    flat = dict(zip(SCANNED, (x.numpy() for x in tensors), strict=True))
    flat.update({n: x.numpy() for n, x in more.items()})

    def states():
        return {s: problem["initial_" + s].clone().numpy() for s in STATES}

    frozen, before = states(), states()
    frozen["k"].flags.writeable = False
    for state, slots, words in (
        (frozen, None, "state_k: a read-only array"), ({**states(), "v": [1.0]}, None, "state_v: list"),
        ({**states(), "w": states()["v"]}, None, "state: 'w'"), (states(), [0.5, 1], "slots: dtype"),
    ):  # fmt: skip
        with pytest.raises(talea.Error, match=words):
            talea.arrays.mamba3_step(state, **flat, slots=slots)
    assert all((frozen[s] == before[s]).all() for s in STATES)
    arrays = {n: problem[n].numpy() for n in SCANNED}
    with pytest.raises(talea.UsageError, match="d_out: needs a d_"):
        talea.arrays.mamba3(**arrays, d_out=arrays["v"])
