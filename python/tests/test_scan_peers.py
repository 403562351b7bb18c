"""What: how bench/scan_peers.py calls mamba_ssm: arguments, states and packs, beside the same functions of ours and
fp64; which kernels of TileLang it has compiled ahead; what it says of a peer that is not there.
Why: it runs for minutes on a device; a wrong order of arguments must be seen before.
Never: needs a device, mamba_ssm, Triton or TileLang; times anything."""

import contextlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from talea.integrations import mamba_ssm as integration

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.exists():
    pytest.skip("the tree's bench/ is not here", allow_module_level=True)
sys.path.insert(0, str(BENCH))
try:
    import scan_compile
    import scan_contenders as who
    import scan_peers
    import scan_truth
    from mamba3_device import PROBLEMS, draw, step_of
finally:
    sys.path.remove(str(BENCH))

OPS = "mamba_ssm.ops"
SMALL = (2, 6, 4, 2, 2, 16, 8)
# What a checkout has, in as few words: upstream's wrappers ask for a kernel, then launch it.
KERNELS = """
from tilelang.jit import jit
fwd, bwd_fwd, bwd_bwd = (jit(n) for n in ("fwd", "bwd_fwd", "bwd_bwd"))

def mamba_mimo_forward{end}(q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap,
                            segsum, chunk_size, rotary_dim_divisor, dtype{ends}):
    fwd(*q.shape, v.shape[2], chunk_size=chunk_size)(q)
    raise AssertionError("launched")

def mamba_mimo_bwd_combined{end}(up, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev,
                                 dt, trap, D, segsum, chunk_size, rotary_dim_divisor, dtype{ends}):
    bwd_fwd(*q.shape, v.shape[2], chunk_size=chunk_size)(q)
    bwd_bwd(*q.shape, v.shape[2], chunk_size=chunk_size)(q)
    raise AssertionError("launched")
"""


class Kernel:
    """A kernel before it is compiled, as TileLang's decorator leaves it."""

    def __init__(self, name):
        self.name, self.compiled = name, []

    def __call__(self, *args, **more):
        self.compiled.append((args, more))


def taken_out():
    names = [n for n in sys.modules if n.partition(".")[0] in ("mamba_ssm", "tilelang")]
    return {n: sys.modules.pop(n) for n in names}


@pytest.fixture
def source(tmp_path):
    """A checkout with SISO and, where `tilelang` can be imported, MIMO; without CuTe."""
    before = taken_out()
    sys.modules["tilelang"] = None  # where it is installed, too
    root = tmp_path / "mamba"
    for path, text in {
        "triton/mamba3/mamba3_siso_combined": "def mamba3_siso_combined(): pass",
        "triton/mamba3/mamba3_siso_step": "def mamba3_siso_step(): pass",
        "triton/mamba3/mamba3_mimo_rotary_step": "def apply_rotary_qk_inference_fwd(): pass",
        "cute/mamba3/mamba3_step_fn": "import no_cutlass_here",
        "tilelang/mamba3/mamba3_mimo_fwd": KERNELS.format(end="", ends=""),
        "tilelang/mamba3/mamba3_mimo_bwd": KERNELS.format(end="", ends=""),
        "tilelang/mamba3/mamba3_mimo_fwd_varlen": KERNELS.format(
            end="_varlen", ends=", cu_seqlens"
        ),
        "tilelang/mamba3/mamba3_mimo_bwd_varlen": KERNELS.format(
            end="_varlen", ends=", cu_seqlens"
        ),
        "tilelang/mamba3/mamba3_mimo": "from . import mamba3_mimo_fwd, mamba3_mimo_bwd\n"
        "from . import mamba3_mimo_fwd_varlen, mamba3_mimo_bwd_varlen\ndef mamba3_mimo(): pass",
    }.items():
        file = root / "mamba_ssm" / "ops" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "REVISION").write_text("0123456789abcdef\n")
    yield root
    taken_out()
    sys.modules.update(before)


def with_tilelang():
    for name in ("tilelang", "tilelang.jit"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["tilelang.jit"].JITImpl = sys.modules["tilelang.jit"].jit = Kernel


class NoTuning(contextlib.nullcontext):
    most = None


def imported(source, *wanted):
    return who.import_peers(str(source), NoTuning(), wanted)


def test_a_peer_that_is_not_there_leaves_its_words(source):
    peers = imported(source, "mimo", "mimo_step")
    assert peers["version"] == "mamba_ssm at 01234567"
    assert {"siso", "step", "rotate"} <= set(peers) and not {"mimo", "mimo_step"} & set(peers)
    assert "tilelang" in peers["mimo_missing"] and "no_cutlass_here" in peers["mimo_step_missing"]
    with pytest.raises(ImportError, match="no_cutlass_here"):
        scan_peers.peers_step("D1", peers, None, None)
    assert list(scan_peers.contenders(peers, True, False, 4)) == ["Talea"]
    assert list(scan_peers.contenders(peers, True, False, 1))[1:] == [
        "mamba_ssm at 01234567, SISO in Triton"
    ]


def test_the_version_of_a_release_and_of_a_folder_without_one(tmp_path):
    folder = tmp_path / "mamba_ssm-9.9"
    folder.mkdir()
    assert who.version_of(f"{folder}/") == "mamba_ssm 9.9"
    (folder / "mamba_ssm").mkdir()
    (folder / "mamba_ssm" / "__init__.py").write_text('__version__ = "2.3.2.post1"\n')
    assert who.version_of(str(folder)) == "mamba_ssm 2.3.2.post1"


def test_each_kernel_of_a_row_is_asked_for_as_upstream_asks_and_none_is_launched(source):
    with_tilelang()
    peers = imported(source, "mimo")
    assert list(scan_peers.contenders(peers, True, False, 4))[1:] == [
        "mamba_ssm at 01234567, MIMO in TileLang"
    ]
    for row, as_pack, sizes, chunk in (
        ("M1", False, (2, 4096, 4, 8, 128, 112), 16), ("M4 R2", False, (2, 4096, 2, 8, 128, 64), 32),
        ("M4 R8", False, (2, 4096, 8, 8, 128, 64), 8), ("M4 N256", False, (2, 4096, 4, 1, 256, 64), 8),
        ("M4 P128", False, (2, 4096, 4, 1, 128, 64), 8), ("M2", True, (1, 16384, 4, 1, 128, 32), 16),
    ):  # fmt: skip
        asked = scan_compile.tilelang_kernels(PROBLEMS[row], as_pack)
        assert [k.name for k, *_ in asked] == ["fwd", "bwd_fwd", "bwd_bwd"]
        assert [args for _, args, _ in asked] == [sizes] * 3
        assert [more for *_, more in asked] == [{"chunk_size": chunk}] * 3
        assert not any(k.compiled for k, *_ in asked)


def test_the_processes_compile_each_kernel_once(source):
    with_tilelang()
    imported(source, "mimo")
    rows = scan_peers.problems_of(["M1", "V M2", "M4 R8", "S1", "D1"], ["S1"])
    assert scan_compile.wanted_of(rows) == {"mimo", "ssd"}
    many = [x[:2] for x in rows if x[0][4] > 1]
    done = [scan_compile.tilelang_kernels(*many[0])[0][0], *(k for k, *_ in scan_compile.tilelang_kernels(*many[1]))]  # fmt: skip
    for part in range(4):
        scan_compile.compile_tilelang(many, part, 4)
    assert [len(k.compiled) for k in done] == [2, 1, 1, 1]
    for jobs in (1, 7, 24, 33):
        shares = [scan_compile.share(range(jobs), part, 4) for part in range(4)]
        assert sorted(x for s in shares for x in s) == list(range(jobs))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_kernel_that_does_not_compile_leaves_the_others(source, capsys):
    with_tilelang()
    imported(source, "mimo")
    kernels = [k for k, *_ in scan_compile.tilelang_kernels(PROBLEMS["M1"], False)]
    kernels[2].compiled = None
    scan_compile.compile_tilelang([(PROBLEMS["M1"], False)], 0, 1)
    assert [len(k.compiled) for k in kernels[:2]] == [1, 1]
    assert "AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_calls_are_those_of_upstream_s_signatures(rank, packed):
    """Ours under upstream's names and order, through the bench's call, beside the call of ours and fp64."""
    sizes = (1, 12, 4, 2, rank, 16, 8) if packed else (2, 16, 4, 2, rank, 16, 8)
    t = draw(sizes, torch.float32, "cpu")
    if packed:
        t["cu_seqlens"] = who.packed_ends(4, 12, "cpu")
    peer = integration.mamba3_siso_combined if rank == 1 else integration.mamba3_mimo

    def call(t):
        return (who.siso if rank == 1 else who.mimo)(peer, t)

    assert torch.equal(call(t), who.ours(t))
    up = torch.randn_like(t["v"])
    errors = scan_truth.errors_of(call, t, up, scan_truth.truth(t, up), scan_truth.names_of(t))
    assert len(errors) == len(scan_truth.names_of(t)) + 1
    assert max(errors.values()) <= 2e-5, errors


def rotate(q, k, angle_state, angle_proj, dt, bias_q, bias_k, conjugate, inplace, rotate_pairwise):
    """What upstream's kernel of that name is said to do."""
    assert not (conjugate or inplace or rotate_pairwise)
    theta = angle_state + torch.pi * angle_proj.tanh() * dt[..., None]
    made = (scan_truth.turned(x, b, theta, False) for x, b in ((q, bias_q), (k, bias_k)))
    return *made, theta


def test_a_step_of_mimo_is_called_as_upstream_s_module_calls_it():
    one, state = step_of(draw((3, 1, 4, 1, 2, 16, 8), torch.float32, "cpu"))
    for tensor in (state.angle, state.ssm, state.k, state.v):
        tensor.normal_()
    before = [x.clone() for x in (state.angle, state.ssm, state.k, state.v)]
    step, behind = who.mimo_step(rotate, integration.mamba3_step_fn, one, state)
    right = scan_truth.step_truth(one, state)
    found = {"out": step()} | behind
    assert max(scan_truth.relative(x, right[n]) for n, x in found.items()) <= 1e-5
    after = (state.angle, state.ssm, state.k, state.v)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # Another token on: what the first left behind is what this one reads.
    theta = state.angle + torch.pi * one["angles"].tanh() * one["dt"][..., None]
    next_state = type(state)(theta, behind["ssm"].clone(), behind["k"].clone(), one["v"])
    right = scan_truth.step_truth(one, next_state)
    found = {"out": step()} | behind
    assert max(scan_truth.relative(x, right[n]) for n, x in found.items()) <= 1e-5


def test_a_process_that_compiles_for_too_long_is_ended(capsys):
    code = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"

    def started(*of):
        return [
            subprocess.Popen([sys.executable, "-c", code, str(s), str(status)]) for s, status in of
        ]

    assert scan_compile.waited([], 0) == 0
    assert scan_compile.waited(started((0, 0), (0, 3)), 60) == 3
    parts = started((0, 0), (60, 0))
    parts[0].wait()
    assert scan_compile.waited(parts, 0.1) != 0
    assert "1 of 2 processes" in capsys.readouterr().out
