"""What: who takes part in bench/peers.py: Talea's lanes and the libraries people use today.
Why: each is called as its own documentation says, from one place.
Never: measures; a library that is missing raises where its contender is made.
"""

import importlib.metadata
import itertools
import os
import statistics

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


def make_liger():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x, w, y: loss(w, x, y)


def make_liger_fp32():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return lambda x, w, y: loss(w, x, y)


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


def make_cce(filter_eps):
    def make():
        from cut_cross_entropy import linear_cross_entropy

        return lambda x, w, y: linear_cross_entropy(x, w, y, filter_eps=filter_eps)

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
    "Liger": (make_liger, "liger-kernel"),
    "Liger, fp32 dW": (make_liger_fp32, "liger-kernel"),
    "CCE": (make_cce("high"), "cut-cross-entropy"),  # its default
    # Not Apple's cce_exact, which sums with Kahan's correction, too, in its own repository's version.
    "CCE, filter_eps=None": (make_cce(None), "cut-cross-entropy"),
    "FLA": (make_fla, "flash-linear-attention"),
    # quack compiles and times its products when first called: last, so that others have their time
    "quack scaled-exp, chunk 8192": (make_quack(8192, True), "quack-kernels"),
    "quack scaled-exp, chunk 2048": (make_quack(2048, True), "quack-kernels"),
    "quack, chunk 8192, not tuned": (make_quack(8192, tuned=False), "quack-kernels"),
    "quack, chunk 8192": (make_quack(8192), "quack-kernels"),
    "quack, chunk 2048": (make_quack(2048), "quack-kernels"),
}


def version_of(package):
    return talea.__version__ if package == "talea" else importlib.metadata.version(package)


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
