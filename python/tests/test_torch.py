"""What PyTorch does around an operator: compile, autocast, checkpoint, graphs, functional_call."""

import importlib.util
import mmap
import pathlib
import subprocess
import sys

import pytest
import talea
import torch
import torch.distributed as dist
from conftest import DEVICES, close, eager, gradients, problem
from talea import _fast
from talea._linear_cross_entropy import (  # noqa: F401  (registers torch.ops.talea)
    _compiled,
    _operator,
    _tensors,
    functional,
)
from talea._linear_cross_entropy._settings import Config
from torch.utils.checkpoint import checkpoint


@pytest.mark.filterwarnings("error:.*lru_cache")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_compile(device, reduction):
    x, w, y, _ = problem(device=device)

    @torch.compile(fullgraph=True)
    def loss(x, w, y):
        return talea.linear_cross_entropy(
            x * 2, w, y, reduction=reduction, label_smoothing=0.1
        ).sum()

    theirs = eager(x * 2, w, y, reduction=reduction, label_smoothing=0.1).sum()
    ours = loss(x, w, y)
    assert close(ours, theirs)
    for mine, other in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, w, y, _ = problem(n=6, d=8, v=11, device=device)
    nothing = (None,) * 5
    for reduction, early in (("mean", True), ("none", False)):
        config = Config(reduction=reduction, outputs=("loss", "lse")).text()
        if early:
            config = Config(reduction=reduction, outputs=("loss",)).text()
        torch.library.opcheck(
            torch.ops.talea.linear_cross_entropy,
            (x, w, None, y, *nothing, config, early, early, False),
        )


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    x, w, y, _ = problem(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = talea.linear_cross_entropy(x, w, y)
    dx, dw = gradients(loss, x, w)
    assert dx.dtype == dw.dtype == torch.float32
    want = gradients(eager(x, w, y), x, w)
    assert close(dx, want[0], 2e-2) and close(dw, want[1], 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_checkpoint(device):
    x, w, y, _ = problem(device=device)
    loss = checkpoint(lambda a: talea.linear_cross_entropy(a, w, y), x, use_reentrant=False)
    for mine, other in zip(gradients(loss, x, w), gradients(eager(x, w, y), x, w), strict=True):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_of_equal_steps(device, reentrant):
    """The second step knows the call when it runs forward again: what it saves must not differ."""
    x, w, y, _ = problem(n=12, device=device)
    x, y = x.detach().view(3, 4, -1).requires_grad_(), y.view(3, 4)
    want = gradients(eager(x.flatten(0, 1), w, y.flatten()), x, w)
    for _ in range(5):
        x.grad = w.grad = None
        loss = checkpoint(lambda a: talea.linear_cross_entropy(a, w, y), x, use_reentrant=reentrant)
        loss.backward()
        assert all(close(a, b, 5e-6) for a, b in zip((x.grad, w.grad), want, strict=True))


def test_functional_call():
    layer = talea.LinearCrossEntropy(24, 101, label_smoothing=0.1)
    x, w, y, _ = problem()
    loss = torch.func.functional_call(layer, {"weight": w}, (x, y))
    assert close(loss, eager(x, w, y, label_smoothing=0.1))


def test_early_gradient_is_one_pass():
    x = torch.zeros(2, 3)
    assert _operator.forms_gradient_early(Config(outputs=("loss",)), x)
    assert not _operator.forms_gradient_early(Config(outputs=("loss", "lse")), x)
    assert not _operator.forms_gradient_early(Config(reduction="none", outputs=("loss",)), x)
    assert not _operator.forms_gradient_early(Config(outputs=("loss",)), x.half())


def _truth(x, w, y, scale):
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    return torch.autograd.grad(eager(x, w, y) * scale, (x, w))


def _truth_and_loss(x, w, y):
    return eager(x.double(), w.double(), y), *_truth(x, w, y, 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", (False, True))
def test_late_scalar_rounds_16_bits_once(device, compiled):
    """A product of a rounded bf16 gradient and 1/3 would be 1.4 times as far from the truth."""
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=torch.bfloat16, device=device)

    def scaled(x, w, y, s):
        return talea.linear_cross_entropy(x, w, y) * s

    if compiled:
        scaled = torch.compile(scaled, fullgraph=True)
    errors = {}
    for s in (1.0, 1 / 3):
        for name, got, want in zip(
            ("dx", "dw"), gradients(scaled(x, w, y, s), x, w), _truth(x, w, y, s), strict=True
        ):
            assert got.dtype == torch.bfloat16
            errors[name, s] = float((got.double() - want).norm() / want.norm())
    for name in ("dx", "dw"):
        assert errors[name, 1 / 3] <= 1.1 * errors[name, 1.0], errors


@pytest.mark.parametrize("device", DEVICES)
def test_loss_scale_enters_before_fp16_underflows(device):
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=torch.float16, device=device)
    scale, tokens = 65536.0, 1e6  # 1e-6 of a gradient has three bits in fp16, or none
    loss = talea.linear_cross_entropy(x, w, y, denominator=tokens)
    for got, want in zip(
        gradients(loss * scale, x, w), _truth(x, w, y, scale * 64 / tokens), strict=True
    ):
        assert close(got.double(), want, 2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_call_meets_other_addresses(device):
    """Calls of one description with tensors elsewhere: aligned, not aligned, freed and made anew."""
    x, w, y, _ = problem(n=8, d=24, v=64, device=device)
    for offset in (0, 1, 0, 3):
        memory = torch.randn(w.numel() + offset, device=device)
        moved = memory[offset:].view(w.shape).requires_grad_()
        ours, theirs = talea.linear_cross_entropy(x, moved, y), eager(x, moved, y)
        assert close(ours, theirs)
        for a, b in zip(gradients(ours, x, moved), gradients(theirs, x, moved), strict=True):
            assert close(a, b, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_torch_without_inductors_allocator(device, monkeypatch):
    """Outputs and workspace are then ordinary tensors; what comes out is the same."""
    x, w, y, _ = problem(n=9, d=24, v=64, device=device)
    found = []
    for ways in (_tensors._EMPTY_STRIDED, {}):
        monkeypatch.setattr(_tensors, "_EMPTY_STRIDED", ways)
        monkeypatch.setattr(_tensors._kept, "calls", {})
        loss = talea.linear_cross_entropy(x, w, y)
        found.append((loss, *gradients(loss, x, w)))
        (kept,) = _tensors._kept.calls.values()
        assert (kept.fresh is None) == (not ways)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_torch_without_private_names(monkeypatch):
    """Each has a public way beside it, and what comes out is the same."""
    assert _fast.transforms_active is not None and _fast.empty_strided(), "all are there today"
    assert not _fast.saved_by_hooks(), "this, too"
    spec = importlib.util.spec_from_file_location("talea._fast_public", _fast.__file__)
    public = importlib.util.module_from_spec(spec)
    source = pathlib.Path(_fast.__file__).read_text().replace("found = torch._C\n", "return None\n")
    exec(compile(source, _fast.__file__, "exec"), public.__dict__)
    assert public.empty_strided() == {} and public.transforms_active is None
    assert public.saved_by_hooks()
    assert public.allocate is public._public_allocate
    assert public.current_device is torch.cuda.current_device
    assert public.stream_of(0).func is public._public_stream
    x, w, y, _ = problem(n=9, d=24, v=64)
    loss = talea.linear_cross_entropy(x, w, y)
    want = (loss, *gradients(loss, x, w))
    for name in ("transforms_active", "apply_of"):
        monkeypatch.setattr(_fast, name, getattr(public, name))
    monkeypatch.setattr(_fast, "forward_mode", lambda: True)  # not told
    monkeypatch.setattr(_operator, "_apply", public.apply_of(_operator.Operator))
    monkeypatch.setattr(_tensors, "_EMPTY_STRIDED", {})
    monkeypatch.setattr(_tensors._kept, "calls", {})
    loss = talea.linear_cross_entropy(x, w, y)
    assert all(torch.equal(a, b) for a, b in zip(want, (loss, *gradients(loss, x, w)), strict=True))
    with pytest.raises(RuntimeError, match="functorch|vmap|setup_context"):
        torch.func.grad(lambda x: talea.linear_cross_entropy(x, w.detach(), y))(x.detach())


def test_a_kept_call_meets_another_main_grad():
    """The place and the strides of main_grad belong to the description."""
    x, w, y, _ = problem(n=8, d=24, v=64)
    want = gradients(eager(x, w, y), w)[0]
    for main in (torch.zeros(64, 24), torch.zeros(64, 24), torch.zeros(64, 48)[:, :24]):
        talea.linear_cross_entropy(x, w, y, main_grad=main).backward()
        assert close(main, want, 5e-6) and w.grad is None


@pytest.mark.parametrize(
    "shard", ({"sequence_parallel": True}, {"vocab_begin": 3}), ids=lambda shard: next(iter(shard))
)
def test_a_shard_without_its_group_is_refused(shard):
    x, w, y, _ = problem(n=8, d=24, v=64)
    with pytest.raises(talea.UsageError, match=f"{next(iter(shard))} = .*needs tp_group"):
        talea.linear_cross_entropy(x, w, y, **shard)


def test_dx_sum_is_of_ranks_and_of_two_words():
    x, w, y, _ = problem(n=8, d=24, v=64)
    with pytest.raises(talea.UsageError, match="dx_sum = 'bf16': needs tp_group"):
        talea.linear_cross_entropy(x, w, y, dx_sum="bf16")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.group.WORLD
        with pytest.raises(talea.UsageError, match="dx_sum = 'fp16': one of fp32, bf16"):
            talea.linear_cross_entropy(x, w, y, tp_group=group, dx_sum="fp16")
        loss = talea.linear_cross_entropy(x, w, y, tp_group=group, dx_sum="bf16")
        assert torch.equal(loss, talea.linear_cross_entropy(x, w, y))  # a world of one sums nothing
    finally:
        dist.destroy_process_group()


def test_outputs_are_named_once(monkeypatch):
    """What `outputs` may name follows the list of results; top-k comes with top_k."""
    monkeypatch.setattr(_tensors, "RESULTS", (*_tensors.RESULTS, "margin"))
    again = importlib.util.spec_from_file_location(
        "talea._linear_cross_entropy.functional_again", functional.__file__
    )
    module = importlib.util.module_from_spec(again)
    monkeypatch.setitem(sys.modules, again.name, module)  # where a dataclass looks for its module
    again.loader.exec_module(module)
    assert module.OUTPUTS == (*functional.OUTPUTS, "margin")
    with pytest.raises(talea.UsageError, match="none of loss, .*accuracy$"):
        x, w, y, _ = problem()
        talea.linear_cross_entropy(x, w, y, outputs=("topk_ids",))


def test_a_large_gradient_lies_in_large_pages(monkeypatch):
    """From 4 MiB on, the pages of a gradient on the host are asked for as large ones."""
    asked = []
    monkeypatch.setattr(
        _tensors, "_madvise", lambda *range_and_advice: asked.append(range_and_advice)
    )
    x, w, y, _ = problem(n=5, d=520, v=2053)
    (dw,) = torch.autograd.grad(talea.linear_cross_entropy(x, w, y), w)
    assert dw.nbytes >= 4 << 20
    begin, end = dw.data_ptr(), dw.data_ptr() + dw.nbytes
    begin += -begin % mmap.PAGESIZE
    assert (begin, end - begin, mmap.MADV_HUGEPAGE) in asked


def test_threads_do_not_share_a_plan():
    from concurrent.futures import ThreadPoolExecutor

    def one(seed):
        torch.manual_seed(seed)
        x, w, y, _ = problem()
        ours, theirs = talea.linear_cross_entropy(x, w, y), eager(x, w, y)
        return close(ours, theirs) and all(
            close(a, b, 5e-6)
            for a, b in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, [7] * 64))


def test_a_receipt_may_live_until_the_interpreter_ends():
    code = """
import talea, torch
x, w = torch.randn(2, 4, requires_grad=True), torch.randn(5, 4)
out = talea.linear_cross_entropy(x, w, torch.tensor([1, 2]), outputs=("loss",))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_cuda_graph(reduction):
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=torch.bfloat16, device="cuda")
    up = torch.rand(64, device="cuda") if reduction == "none" else torch.ones((), device="cuda")

    def step():
        loss = talea.linear_cross_entropy(x, w, y, reduction=reduction)
        return loss, *torch.autograd.grad(loss, (x, w), up)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        y.copy_(torch.randint_like(y, 256))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(held, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device memory needs a CUDA device")
def test_a_call_that_fails_keeps_no_device_memory():
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=torch.bfloat16, device="cuda")
    y[5] = 256
    held = []
    for _ in range(2):  # the first describes the call
        with pytest.raises(talea.DataError, match=r"target\[5\] = 256"):
            talea.linear_cross_entropy(x, w, y, target_check="checked")
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices")
def test_a_call_on_a_device_that_is_not_current():
    """Memory and stream are those of the tensors' device."""
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    loss = talea.linear_cross_entropy(x, w, y)
    for ours, theirs in zip((loss, *gradients(loss, x, w)), _truth_and_loss(x, w, y), strict=True):
        assert ours.device == x.device and close(ours.double(), theirs, 2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device libraries need a CUDA device")
def test_device_libraries_are_those_that_torch_loaded():
    x, w, y, _ = problem(n=64, d=64, v=256, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, w.T)
    for lane in talea.lanes():
        if lane in ("cuda", "sm90"):
            talea.linear_cross_entropy(x, w, y, lane=lane).backward()
    torch.cuda.synchronize()
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    for name in ("libcublasLt.so", "libcudart.so", "libnccl.so"):
        assert len([f for f in files if name in f]) == 1, name
    assert not [f for f in files if "talea" in f and ("cublas" in f or "nccl" in f)]


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_takes_either_16_bit_type(device):
    x, w, y, _ = problem(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        ours = talea.linear_cross_entropy(x.detach().half(), w, y)
    same = talea.linear_cross_entropy(x.detach().half().bfloat16(), w.detach().bfloat16(), y)
    assert torch.equal(ours, same)
