"""talea.integrations.mamba_ssm against the released package's pure-Python reference functions.

The package itself needs Triton and a GPU to import. Its source archive is fetched by pip, and the two
reference functions of its step are cut out of it; no line of it is kept. Where there is no registry
the test says so and compares with its own restatement alone, which it always does.
"""

import ast
import importlib
import inspect
import math
import os
import subprocess
import sys
import tarfile
import types
import warnings
from typing import Optional

import pytest
import talea
import torch
from mamba3_forms import draw, quadratic, relative_l2
from talea.integrations import mamba_ssm as ours

RELEASE = "mamba_ssm==2.3.2.post1"
STEP = "mamba_ssm/ops/cute/mamba3/mamba3_step_fn.py"
ROTARY = "mamba_ssm/ops/triton/mamba3/mamba3_mimo_rotary_step.py"


def restated_step(state, a, b, c, xproj, x, zproj, z, dt, b_state, x_state, trap, d, outproj):
    """One token in the released order: (out, new state)."""
    alpha = (a * dt).exp()[..., None, None]
    v, v_in = (t[:, None] * xproj for t in (x, x_state))
    before = state + ((1 - trap) * dt)[..., None, None] * torch.einsum(
        "brhp,brhn->bhpn", v_in, b_state
    )
    new = alpha * before + (trap * dt)[..., None, None] * torch.einsum("brhp,brhn->bhpn", v, b)
    y = torch.einsum("bhpn,brhn->brhp", new, c) + d[:, None] * v
    if z is not None:
        y = y * torch.nn.functional.silu(z[:, None] * zproj)
    return (y if outproj is None else (y * outproj).sum(1)), new


def restated_rotary(q, k, angle_state, angle_proj, dt, bias_q, bias_k, rotate_pairwise):
    from mamba3_forms import rotate

    angle = angle_state + math.pi * angle_proj.tanh() * dt[..., None]
    turn = angle[:, None].expand(-1, q.shape[1], -1, -1)
    pairs = "interleaved" if rotate_pairwise else "halves"
    return rotate(q + bias_q, turn, pairs), rotate(k + bias_k, turn, pairs), angle


def _function(source: str, name: str):
    tree = ast.parse(source)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    module = ast.Module(body=found, type_ignores=[])
    space = {"torch": torch, "math": math, "Optional": Optional}
    exec(compile(module, name, "exec"), space)
    return space[name]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The released step and rotation, or None without a registry."""
    folder = tmp_path_factory.mktemp("released")
    archive = os.environ.get("TALEA_MAMBA_SSM_ARCHIVE")
    if not archive:
        words = ["download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "-q"]
        done = subprocess.run([sys.executable, "-m", "pip", *words, "-d", str(folder), RELEASE],
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        archives = list(folder.glob("mamba_ssm*.tar.gz"))
        if done.returncode or not archives:
            said = (done.stderr.strip().splitlines() or ["no archive"])[-1]
            warnings.warn(f"{RELEASE} cannot be had ({said}): the restatement alone", stacklevel=1)
            return None
        archive = archives[0]
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = member.name.split("/", 1)[-1]
            if inside in (STEP, ROTARY):
                texts[inside] = tar.extractfile(member).read().decode()
    return (
        _function(texts[STEP], "selective_state_update_fused_ref_v2"),
        _function(texts[ROTARY], "apply_rotary_qk_inference_reference"),
    )


def references(released, dtype):
    """(step, rotary) by whom; the released step computes in the dtype it is told."""
    yield restated_step, restated_rotary
    if released is not None:
        step, rotary = released

        def timed(*arguments):
            return step(*arguments, compute_dtype=dtype)

        def turned(q, k, state, proj, dt, bias_q, bias_k, pairwise):
            return rotary(q, k, state, proj, dt, bias_q, bias_k, rotate_pairwise=pairwise)

        yield timed, turned


def rows(batch=2, heads=4, rank=2, cols=8, p=3, pairs=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "state": normal(batch, heads, p, cols), "Bstate": normal(batch, rank, heads, cols),
        "Xstate": normal(batch, heads, p), "A": -normal(batch, heads).abs(),
        "B": normal(batch, rank, heads, cols), "C": normal(batch, rank, heads, cols),
        "D": normal(heads), "x": normal(batch, heads, p), "dt": normal(batch, heads).abs(),
        "trap": normal(batch, heads).sigmoid(), "xproj": normal(rank, heads, p),
        "outproj": normal(rank, heads, p), "z": normal(batch, heads, p),
        "zproj": normal(rank, heads, p),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["full", "no gate", "unreduced", "another state"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_step_fn_is_the_released_reference(released, form, dtype):
    t = rows(dtype=dtype)
    if form == "no gate":
        t.update(z=None, zproj=None)
    if form == "unreduced":
        t["outproj"] = None
    bound = 1e-13 if dtype == torch.float64 else 2e-6
    for step, _ in references(released, dtype):
        wanted, state = step(
            t["state"], t["A"], t["B"], t["C"], t["xproj"], t["x"], t["zproj"], t["z"], t["dt"],
            t["Bstate"], t["Xstate"], t["trap"], t["D"], t["outproj"],
        )  # fmt: skip
        mine = {n: None if x is None else x.clone() for n, x in t.items()}
        mine["out"] = torch.empty_like(wanted)
        if form == "another state":
            mine["state_out"] = torch.empty_like(mine["state"])
        assert ours.mamba3_step_fn(**mine, tile_D=64, num_warps=4) is None
        assert relative_l2(mine["out"], wanted) <= bound
        written = mine["state_out"] if form == "another state" else mine["state"]
        assert relative_l2(written, state) <= bound
        if form == "another state":
            assert torch.equal(mine["state"], t["state"])
        for name in ("Bstate", "Xstate", "B", "C"):
            assert torch.equal(mine[name], t[name]), name


def sequence(rank, dtype, **more):
    axis = rank > 1
    without = ("norm_weight", "initial_angle", "initial_ssm", "initial_k", "initial_v")
    if not axis:
        without = (*without, "mimo_v", "mimo_z", "mimo_out")
    return draw(2, 9, heads=4, groups=2, rank=rank, axis=axis, cols=8, head_dim=3, pairs=4,
                dtype=dtype, grad=False, without=without, **more)  # fmt: skip


def by_released_steps(t, step, rotary):
    """The scan token by token through the released step: out and the states behind it."""
    ranked = t["q"].dim() == 5
    q, k = (t[n] if ranked else t[n].unsqueeze(2) for n in "qk")
    rank, groups, heads = q.shape[2], q.shape[3], t["v"].shape[2]
    of = torch.arange(heads) // (heads // groups)
    bias = [(t[n] if ranked else t[n].unsqueeze(1)).transpose(0, 1) for n in ("q_bias", "k_bias")]
    batch, tokens, _, p = t["v"].shape
    kind = {"dtype": t["v"].dtype}
    angle = torch.zeros(batch, heads, t["angles"].shape[-1], **kind)
    ssm = torch.zeros(batch, heads, p, q.shape[-1], **kind)
    b_state = torch.zeros(batch, rank, heads, q.shape[-1], **kind)
    x_state, one = torch.zeros(batch, heads, p, **kind), torch.ones(rank, heads, p, **kind)
    proj = [t[n].transpose(0, 1) if n in t else one for n in ("mimo_v", "mimo_z", "mimo_out")]
    parts = []
    for i in range(tokens):
        dt = t["dt"][:, :, i]
        c, b, angle = rotary(q[:, i][:, :, of], k[:, i][:, :, of], angle, t["angles"][:, i], dt,
                             *bias, not ranked)  # fmt: skip
        out, ssm = step(ssm, t["adt"][:, :, i] / dt, b, c, proj[0], t["v"][:, i], proj[1],
                        t["z"][:, i], dt, b_state, x_state, t["trap"][:, :, i].sigmoid(), t["d"],
                        proj[2])  # fmt: skip
        parts.append(out)
        b_state, x_state = b, t["v"][:, i]
    return torch.stack(parts, 1), (angle % (2 * math.pi), ssm, b_state, x_state)


@pytest.mark.parametrize("rank", [1, 2], ids=["siso", "mimo"])
def test_combined_are_the_released_reference(released, rank):
    t = sequence(rank, torch.float64)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias")
    if rank == 1:
        made = ours.mamba3_siso_combined(
            *(t[n] for n in names), t["angles"], t["d"], t["z"], chunk_size=64,
            return_final_states=True,
        )  # fmt: skip
        out = ours.mamba3_siso_combined(*(t[n] for n in names), t["angles"], D=t["d"], Z=t["z"])
    else:
        more = [t[n] for n in ("mimo_v", "mimo_z", "mimo_out", "angles", "d", "z")]
        made = ours.mamba3_mimo(*(t[n] for n in names), *more, 16, 2, torch.bfloat16, True)
        out = ours.mamba3_mimo(*(t[n] for n in names), *more, 16, 2, torch.bfloat16)
    assert torch.equal(out, made[0])
    truth, final = quadratic(t)
    assert relative_l2(made[0], truth) <= 1.5e-14 * 10
    for step, rotary in references(released, torch.float64):
        wanted, states = by_released_steps(t, step, rotary)
        assert relative_l2(made[0], wanted) <= 1e-13
        for mine, theirs in zip(made[1:], states, strict=True):
            theirs = theirs.squeeze(1) if theirs.dim() > mine.dim() else theirs
            assert relative_l2(mine, theirs) <= 1e-12
    assert final.keys() == {"angle", "ssm", "k", "v"}


@pytest.mark.parametrize("flat", [False, True], ids=["per head", "flattened"])
def test_the_norm_of_main(flat):
    """Behind the release, mamba_ssm's module gives three more arguments in every call of MIMO."""
    t = sequence(2, torch.float64)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out",
             "angles", "d", "z")  # fmt: skip
    weight = torch.randn(4, 3, dtype=torch.float64)

    def call(fused, given, eps):
        return ours.mamba3_mimo(
            *(t[n] for n in names), chunk_size=16, rotary_dim_divisor=2, dtype=torch.bfloat16,
            return_state=False, cu_seqlens=None, fuse_pregate_headwise_rms_norm=fused,
            outproj_norm_weight=given, outproj_norm_eps=eps,
        )  # fmt: skip

    given = weight.reshape(-1) if flat else weight
    truth, _ = quadratic({**t, "norm_weight": weight}, head_norm=True, norm_eps=0.1)
    assert relative_l2(call(True, given, 0.1), truth) <= 1e-13
    without, _ = quadratic(t, head_norm=True, norm_eps=1e-5)
    assert relative_l2(call(True, None, 1e-5), without) <= 1e-13
    plain, _ = quadratic(t)
    assert relative_l2(call(False, None, 1e-5), plain) <= 1e-13
    with pytest.raises(talea.DataError, match="outproj_norm_weight"):
        call(True, weight[:2], 1e-5)


def test_siso_step_goes_on_from_the_scan(released):
    t = sequence(1, torch.float64)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")

    def at(lo, hi, one=False):
        made = []
        for n in names:
            x = t[n]
            if n in ("adt", "dt", "trap"):
                x = x[:, :, lo] if one else x[:, :, lo:hi]
            elif n in ("q", "k", "v", "angles", "z"):
                x = x[:, lo] if one else x[:, lo:hi]
            made.append(x)
        return made

    whole = ours.mamba3_siso_combined(*at(0, 9))
    _, *states = ours.mamba3_siso_combined(*at(0, 8), return_final_states=True)
    kept = [s.clone() for s in states]
    out, after = ours.mamba3_siso_step(*at(8, 9, True), tuple(states))
    assert relative_l2(out, whole[:, 8]) <= 1e-13
    assert all(torch.equal(a, b) for a, b in zip(kept, states, strict=True)) and len(after) == 4


def test_a_cast_model_is_told_by_name():
    t = sequence(1, torch.float32)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles")
    bad = {**t, "dt": t["dt"].bfloat16()}
    with pytest.raises(talea.DataError, match="dt_bias"):
        ours.mamba3_siso_combined(*(bad[n] for n in names))

    class Mamba3(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dt_bias = torch.nn.Parameter(torch.zeros(4))
            self.D = torch.nn.Parameter(torch.ones(4))
            self.in_proj = torch.nn.Linear(2, 2)

    model = torch.nn.Sequential(Mamba3()).bfloat16()
    assert ours.fp32_parameters(model) == ["0.dt_bias", "0.D"]
    assert model[0].in_proj.weight.dtype == torch.bfloat16


@pytest.fixture
def installed(monkeypatch):
    """A mamba_ssm of this test's own, whose SISO function is the restatement, right or wrong."""
    state = {"factor": 1.0, "calls": 0}

    def siso(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, **_):
        state["calls"] += 1
        t = {"q": Q, "k": K, "v": V, "adt": ADT, "dt": DT, "trap": Trap, "q_bias": Q_bias,
             "k_bias": K_bias, "angles": Angles, "d": D, "z": Z}  # fmt: skip
        return quadratic({n: x for n, x in t.items() if x is not None})[0] * state["factor"]

    class Mamba3(torch.nn.Module):
        def forward(self, u):
            return u

        step = forward

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton",
                 "mamba_ssm.ops.triton.mamba3", "mamba_ssm.modules"):  # fmt: skip
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    module = types.ModuleType(ours._SISO)
    module.mamba3_siso_combined = siso
    user = types.ModuleType(ours._MODULE)
    user.mamba3_siso_combined, user.mamba3_mimo_combined, user.Mamba3 = siso, None, Mamba3
    monkeypatch.setitem(sys.modules, ours._SISO, module)
    monkeypatch.setitem(sys.modules, ours._MODULE, user)
    return state, module, user


def test_patch_compares_the_first_batch(installed):
    state, module, user = installed
    done = ours.patch(tolerance=1e-5)
    assert f"{ours._SISO}.mamba3_siso_combined" in done
    assert f"{ours._MODULE}.mamba3_mimo_combined" in done
    t = sequence(1, torch.float32)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")
    for _ in range(3):
        user.mamba3_siso_combined(*(t[n] for n in names))
    assert state["calls"] == 1
    module.mamba3_siso_combined = user.mamba3_siso_combined
    model = user.Mamba3()
    model.dt_bias = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(talea.DataError, match="dt_bias"):
        model(torch.ones(1))


def test_patched_functions_are_held_by_a_graph(installed):
    state, _, user = installed
    ours.patch(tolerance=1e-5)
    t = sequence(1, torch.float32)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")

    def run(*tensors):
        return user.mamba3_siso_combined(*tensors)

    out = torch.compile(run, fullgraph=True, backend="eager")(*(t[n] for n in names))
    assert state["calls"] == 0
    assert torch.equal(out, run(*(t[n] for n in names))) and state["calls"] == 1


def test_patch_raises_on_a_difference(installed):
    state, _, user = installed
    state["factor"] = 1.01
    ours.patch(tolerance=1e-3)
    t = sequence(1, torch.float32)
    names = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")
    with pytest.raises(RuntimeError, match="apart from mamba_ssm's"):
        user.mamba3_siso_combined(*(t[n] for n in names))


@pytest.mark.parametrize("wrong", ["out", "state"])
def test_patch_compares_what_a_step_writes(installed, monkeypatch, wrong):
    """`out` and the state, by place or by name, where upstream's returns nothing."""
    module = types.ModuleType(ours._STEP_FN)

    def step_fn(*arguments, **keywords):
        bound = inspect.signature(ours.mamba3_step_fn).bind(*arguments, **keywords).arguments
        ours.mamba3_step_fn(*arguments, **keywords)
        bound[wrong].mul_(1.01)

    module.mamba3_step_fn = step_fn
    for name in ("mamba_ssm.ops.cute", "mamba_ssm.ops.cute.mamba3"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, ours._STEP_FN, module)
    ours.patch(tolerance=1e-3)
    t = rows(dtype=torch.float32)
    order = list(inspect.signature(ours.mamba3_step_fn).parameters)[:16]
    t.update(out=torch.empty_like(t["x"]), state_out=None)
    with pytest.raises(RuntimeError, match="apart from mamba_ssm's"):
        module.mamba3_step_fn(*(t[n] for n in order))


def test_patch_before_the_module_is_imported(installed, monkeypatch):
    _, _, user = installed
    imported = importlib.import_module

    def importing(name, *rest):
        if name == ours._MODULE:
            sys.modules[name] = user
        return imported(name, *rest)

    monkeypatch.delitem(sys.modules, ours._MODULE)
    monkeypatch.setattr(importlib, "import_module", importing)
    assert f"{ours._MODULE}.mamba3_mimo_combined" in ours.patch()


@pytest.mark.parametrize("rank", [1, 2], ids=["siso", "mimo"])
def test_a_model_in_fp64_and_lengths_of_cumsum(rank):
    """Upstream's module makes angles fp32 whatever its own type; torch.cumsum gives int64."""
    t = sequence(rank, torch.float64)
    names = ["q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias"]
    names += (
        ["mimo_v", "mimo_z", "mimo_out", "angles", "d", "z"] if rank > 1 else ["angles", "d", "z"]
    )
    mixed = {**t, "angles": t["angles"].float(), "adt": t["adt"].float()}
    one = {n: x[:1] if n not in ("q_bias", "k_bias", "d") and "mimo" not in n else x
           for n, x in mixed.items()}  # fmt: skip
    more = {"chunk_size": 16, "rotary_dim_divisor": 2, "dtype": torch.float64} if rank > 1 else {}
    call = ours.mamba3_mimo if rank > 1 else ours.mamba3_siso_combined
    made = call(*(one[n] for n in names), **more, cu_seqlens=torch.tensor([0, 4, 9]))
    wide = {n: x.double() for n, x in one.items()}
    wide["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert relative_l2(made, quadratic(wide)[0]) <= 1e-13


def test_patch_without_mamba_ssm():
    with pytest.raises(talea.UsageError, match="not installed"):
        ours.patch()
