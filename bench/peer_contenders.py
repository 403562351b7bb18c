"""What: who takes part in bench/peers.py: Talea's lanes and the libraries people use today.
Why: each is called as its own documentation says, from one place.
Never: measures; a library that is missing raises where its contender is made.
"""

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import sys
from pathlib import Path

import talea
import torch
import torch.nn.functional as F
from talea._linear_cross_entropy._settings import Config
from talea._linear_cross_entropy._tensors import NO_GRADIENT, call

MIB, TUNING_CALLS = 1 << 20, 7
# lane, workspace limit in MiB, fp32 main gradient
LANES = [
    ("sm90", 1050, True),
    ("sm90", 530, True),
    ("sm90", 265, True),
    ("sm90", 135, True),
    ("sm90", 2100, False),
    ("cuda", 1060, True),
    ("cuda", 530, True),
]


def eager(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def eager_upcast(x, w, y):
    return F.cross_entropy(F.linear(x, w).float(), y)


def make_compile():
    return torch.compile(eager_upcast)


def make_operator():
    """PyTorch's own chunked operator, from 2.13 on."""
    operator = F.linear_cross_entropy
    return lambda x, w, y: operator(x, w, y)


def make_liger(chunk_constant, accum_dtype=None):
    """Its logits take as many times the memory of the hidden states as the constant says."""

    def make():
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda x, w, y: liger_fused_linear_cross_entropy(
            x, w, y, accum_dtype=accum_dtype, chunk_mem_const=chunk_constant
        )

    return make


def make_liger_sm90():
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.liger_fused_linear_cross_entropy_sm90


def make_liger_scaled():
    """A loss a token, whose gradient is formed when it is known: the logits twice."""
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

    return lambda x, w, y: sm90.LigerFusedScaledCrossEntropySM90Function.apply(x, w, y).mean()


def file_of(package, *path):
    """A file by itself: what its package imports besides is not needed."""
    name = f"{package}_{Path(path[-1]).stem}"
    if name not in sys.modules:
        found = importlib.util.find_spec(package)
        if found is None:
            raise ModuleNotFoundError(f"No module named '{package}'")
        file = Path(found.submodule_search_locations[0]).joinpath(*path)
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def make_trl():
    """Log-probabilities of the tokens, with the width of a tile that its trainers use."""
    from trl.kernels import ChunkedLogProbFunction

    width = 32768

    def loss(x, w, y):
        logprobs, *_ = ChunkedLogProbFunction.apply(x, w, None, y, 1.0, width, None, 1.0, ())
        return -logprobs.mean()

    return loss


def make_unsloth(fp32_dw):
    def make():
        head = file_of("unsloth_zoo", "fused_losses", "fused_linear.py").fused_linear_cross_entropy
        return lambda x, w, y: head(x, w, None, y, divisor=y.numel(), fp32_head_grad=fp32_dw)

    return make


def median_of_calls(call, quantiles):
    """Milliseconds of a call of some milliseconds: what a tuner needs of it."""
    call()  # compiles, or tells quack to come back once another process has
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TUNING_CALLS + 1)]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    events[-1].synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return [statistics.median(times)] * len(quantiles)


def tune_quickly():
    """quack times the 44 variants of each product over 250 calls or more, minutes at this size.

    Here over a few, which its tuner provides for. They are compiled by as many processes as there
    are processors, which begin at once: they import for longer than they compile.
    """
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(os.cpu_count()))
    from quack.cache.async_compile import CompilePool, get_shared_executor
    from quack.gemm_interface import gemm_tuned

    gemm_tuned._do_bench = median_of_calls
    CompilePool(executor=get_shared_executor()).prewarm()


def make_quack(chunk, scaled_exp=False, tuned=True):
    def make():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        tune_quickly()
        return lambda x, w, y: chunked_linear_cross_entropy(
            x, w, y, chunk_size=chunk, use_scaled_exp=scaled_exp, tuned=tuned
        )

    return make


SOURCES = {"": None}  # packages that no registry has: name -> folder of their sources
SEEN = {name: {} for name in ("", "apple", "axolotl")}  # modules of each
current = ""


def switch_cce(name):
    """Three packages call themselves cut_cross_entropy; what inductor imports later is the last one's."""
    global current
    if name not in SOURCES:
        raise ModuleNotFoundError(f"no --source {name}=FOLDER")
    if name != current:
        own = {
            m: sys.modules.pop(m) for m in list(sys.modules) if m.startswith("cut_cross_entropy")
        }
        SEEN[current] = own
        if SOURCES[current]:
            sys.path.remove(SOURCES[current])
        if SOURCES[name]:
            sys.path.insert(0, SOURCES[name])
        sys.modules.update(SEEN[name])
        importlib.invalidate_caches()
        current = name
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy


def make_cce(name, **options):
    def make():
        switch_cce(name)
        return lambda x, w, y: switch_cce(name)(x, w, y, **options)

    return make


def make_fla():
    from fla.modules import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss()
    return lambda x, w, y: loss(x, y, w)


def make_public(limit=None):
    options = {"workspace_limit": limit * MIB} if limit else {}
    return lambda: lambda x, w, y: talea.linear_cross_entropy(x, w, y, **options)


PEERS = {
    "Talea public, default arguments": (make_public(), "talea"),
    "Talea public, 2100 MiB": (make_public(2100), "talea"),
    "torch eager": (lambda: eager, "torch"),
    "torch eager, logits upcast": (lambda: eager_upcast, "torch"),
    "torch.compile, logits upcast": (make_compile, "torch"),
    "torch linear_cross_entropy": (make_operator, "torch"),
    "Liger": (make_liger(1), "liger-kernel"),
    **{f"Liger, chunk constant {n}": (make_liger(n), "liger-kernel") for n in (2, 4, 8, 16)},
    **{
        f"Liger, fp32 dW, chunk constant {n}": (make_liger(n, torch.float32), "liger-kernel")
        for n in (1, 8, 16)
    },
    "TRL, log-probabilities": (make_trl, "trl"),
    "Unsloth": (make_unsloth(False), "unsloth-zoo"),
    "Unsloth, fp32 dW": (make_unsloth(True), "unsloth-zoo"),
    "CCE": (make_cce("", filter_eps="high"), "cut-cross-entropy"),  # its default
    # Not Apple's cce_exact, which sums with Kahan's correction, too, in its own repository's version.
    "CCE, filter_eps=None": (make_cce("", filter_eps=None), "cut-cross-entropy"),
    "CCE, Apple's sources": (make_cce("apple", impl="cce"), "apple"),
    "CCE, Apple's sources, cce_exact": (make_cce("apple", impl="cce_exact"), "apple"),
    "CCE, axolotl's fork": (make_cce("axolotl", impl="cce"), "axolotl"),
    "CCE, axolotl's fork, cce_exact": (make_cce("axolotl", impl="cce_exact"), "axolotl"),
    "FLA": (make_fla, "flash-linear-attention"),
    # These compile when first called, quack times its products, too: last, so that others have their time
    "Liger SM90": (make_liger_sm90, "liger-kernel"),
    "Liger scaled SM90": (make_liger_scaled, "liger-kernel"),
    "quack scaled-exp, chunk 8192": (make_quack(8192, True), "quack-kernels"),
    "quack scaled-exp, chunk 2048": (make_quack(2048, True), "quack-kernels"),
    "quack, chunk 8192, not tuned": (make_quack(8192, tuned=False), "quack-kernels"),
    "quack, chunk 8192": (make_quack(8192), "quack-kernels"),
    "quack, chunk 2048": (make_quack(2048), "quack-kernels"),
}


def version_of(package):
    if package == "talea":
        return talea.__version__
    if package in SOURCES:
        return (Path(SOURCES[package]) / "REVISION").read_text().strip()
    return importlib.metadata.version(package)


class Peer:
    """A library with autograd: returns gradients in the inputs' dtype."""

    lane = None

    def __init__(self, name, x, w, y):
        make, package = PEERS[name]
        self.name, self.loss_of, self.y = name, make(), y
        self.version = f"{package} {version_of(package)}"
        self.x, self.w = x.detach().requires_grad_(), w.detach().requires_grad_()

    def use(self, x, y):
        self.x, self.y = x.detach().requires_grad_(), y

    def step(self):
        self.x.grad = self.w.grad = None
        loss = self.loss_of(self.x, self.w, self.y)
        loss.backward()
        return loss.detach(), self.x.grad, self.w.grad

    def prepared_bytes(self):
        return 0

    def returned_bytes(self):
        return self.x.numel() * self.x.element_size() + self.w.numel() * self.w.element_size()

    def release(self):
        self.x.grad = self.w.grad = None


class Talea:
    """dW added into an fp32 main gradient, or returned in the weight's dtype."""

    def __init__(self, lane, limit_mib, main_grad, x, w, y, buffers):
        self.name = f"Talea {lane}, {limit_mib} MiB" + ("" if main_grad else ", dW bf16")
        self.version, self.lane, self.main = f"talea {talea.__version__}", lane, main_grad
        self.config = Config(lane=lane, workspace_limit_bytes=limit_mib * MIB)
        self.x, self.w, self.y = x, w, y
        self.dw, self.dx = buffers[main_grad], buffers["dx"]
        self.loss = torch.empty((), device=x.device)

    def use(self, x, y):
        self.x, self.y = x, y

    def step(self):
        given = {"loss": self.loss, "dx": self.dx, "dw": self.dw}
        inputs = (self.x, self.w, None, self.y)
        call(self.config, inputs, NO_GRADIENT, given, accumulate_dw=self.main)
        return self.loss, self.dx, self.dw

    def prepared_bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.dx, self.dw))

    def returned_bytes(self):
        return 0  # allocated before the measurement

    def release(self):
        pass
