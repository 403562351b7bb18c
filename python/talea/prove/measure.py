"""One head, dense and fused: time, memory, and the distance of loss and gradients from fp64.

Truth is formed over blocks of vocabulary columns in fp64, so that it needs no [N, V] tensor.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..functional import linear_cross_entropy
from .model import Head

_COLUMNS = 4096  # vocabulary columns of a block of the fp64 truth


@dataclass
class Contender:
    """What one way of computing the loss gave and cost. Bytes are above the inputs."""

    name: str
    results: dict[str, torch.Tensor] = field(default_factory=dict)  # loss, dx, dw, db
    milliseconds: list[float] = field(default_factory=list)
    total_bytes: int = 0
    error: str = ""  # why it could not run
    receipt: dict | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.milliseconds) if self.milliseconds else math.nan

    @property
    def extra_bytes(self) -> int:
        """Above inputs and returned gradients."""
        kept = sum(t.numel() * t.element_size() for t in self.results.values())
        return max(0, self.total_bytes - kept)


def dense_loss(head: Head, hidden, weight, bias):
    """What transformers computes: logits in memory, cross-entropy in fp32."""
    logits = F.linear(hidden, weight)
    if head.options["logit_scale"] != 1.0:
        logits = logits * head.options["logit_scale"]
    if bias is not None:
        logits = logits + bias
    cap = head.options["softcap"]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits.float(), head.labels)


class _Peak:
    """Peak memory of the block above what stood at its beginning, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    @staticmethod
    def _status(field_name: str) -> int:
        with open("/proc/self/status") as f:
            line = next(line for line in f if line.startswith(field_name))
        return int(line.split()[1]) * 1024

    def __enter__(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the high water starts at what is resident
            self.before = self._status("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        else:
            self.bytes = max(0, self._status("VmHWM") - self.before)


def run(name: str, head: Head, loss_of, seconds: float) -> Contender:
    """One warm-up whose memory is measured, then repeats for `seconds` (three at least)."""
    found = Contender(name)
    device = head.hidden.device

    def step() -> dict[str, torch.Tensor]:
        leaves = [head.hidden, head.weight] + ([] if head.bias is None else [head.bias])
        leaves = [t.detach().requires_grad_() for t in leaves]
        loss = loss_of(*leaves, *([None] * (3 - len(leaves))))
        gradients = torch.autograd.grad(loss, leaves)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"loss": loss.detach(), **dict(zip(("dx", "dw", "db"), gradients, strict=False))}

    try:
        step()  # what libraries keep for good is not this call's
        with _Peak(device) as peak:
            found.results = step()
        found.total_bytes = peak.bytes
        begin = time.perf_counter()
        while len(found.milliseconds) < 3 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            step()
            found.milliseconds.append(1e3 * (time.perf_counter() - start))
    except (RuntimeError, MemoryError) as error:  # out of memory is an answer, too
        found.error = str(error).split("\n")[0]
    return found


def contenders(head: Head, seconds: float, limit, lane: str) -> tuple[Contender, Contender]:
    fused_options = dict(head.options, lane=lane)
    if limit is not None:
        fused_options["workspace_limit"] = limit

    def fused(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, head.labels, linear_bias=bias, **fused_options)

    dense = run("dense", head, lambda *leaves: dense_loss(head, *leaves), seconds)
    ours = run("fused", head, fused, seconds)
    if not ours.error:
        said = linear_cross_entropy(
            head.hidden, head.weight, head.labels, linear_bias=head.bias, outputs=("loss",),
            **fused_options,
        )  # fmt: skip
        ours.receipt = said.receipt()
    return dense, ours


class _Distance:
    """Distance of one tensor from truth, gathered block by block."""

    def __init__(self) -> None:
        self.squares = self.truth_squares = 0.0
        self.worst, self.largest, self.at = -1.0, 0.0, (0.0, 0.0)
        self.index: list[int] = []
        self.nan = False

    def add(self, ours: torch.Tensor, truth: torch.Tensor, first_row: int = 0) -> None:
        ours, truth = ours.detach(), truth.detach()
        gap = (ours.double() - truth).abs()
        self.nan = self.nan or not bool(torch.isfinite(gap).all())
        self.squares += float((gap * gap).sum())
        self.truth_squares += float((truth * truth).sum())
        self.largest = max(self.largest, float(truth.abs().max()))
        worst = float(gap.max())
        if worst > self.worst:
            flat = int(gap.flatten().argmax())
            self.worst = worst
            self.index = [int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape)]
            if self.index:
                self.index[0] += first_row
            self.at = (float(ours.flatten()[flat]), float(truth.flatten()[flat]))

    @property
    def relative(self) -> float:
        if self.nan:
            return math.nan
        return math.sqrt(self.squares / self.truth_squares) if self.truth_squares else self.worst


def distances(head: Head, found: list[Contender]) -> dict[str, dict[str, _Distance]]:
    """name of the contender -> tensor -> distance from the fp64 truth."""
    x, w, b, y = head.hidden.double(), head.weight, head.bias, head.labels
    scale, cap = head.options["logit_scale"], head.options["softcap"]
    rows, vocab = x.shape[0], w.shape[0]
    marks = {c.name: {t: _Distance() for t in c.results} for c in found if not c.error}

    def block(lo: int):
        hi = min(lo + _COLUMNS, vocab)
        z = scale * (x @ w[lo:hi].double().T)
        z = z if b is None else z + b[lo:hi].double()
        slope = None
        if cap is not None:
            t = torch.tanh(z / cap)
            z, slope = cap * t, 1 - t * t
        return hi, z, slope

    lse = torch.full((rows,), -math.inf, dtype=torch.float64, device=x.device)
    target = torch.empty_like(lse)
    for lo in range(0, vocab, _COLUMNS):
        hi, z, _ = block(lo)
        lse = torch.logaddexp(lse, z.logsumexp(1))
        inside = (y >= lo) & (y < hi)
        target[inside] = z[inside, y[inside] - lo]
    dx = torch.zeros_like(x)
    for lo in range(0, vocab, _COLUMNS):
        hi, z, slope = block(lo)
        dz = (z - lse[:, None]).exp()
        inside = torch.nonzero((y >= lo) & (y < hi)).flatten()
        dz[inside, y[inside] - lo] -= 1
        dz /= rows
        dz = dz if slope is None else dz * slope
        dx += scale * (dz @ w[lo:hi].double())
        for c in (c for c in found if not c.error):
            marks[c.name]["dw"].add(c.results["dw"][lo:hi], scale * (dz.T @ x), lo)
            if b is not None:
                marks[c.name]["db"].add(c.results["db"][lo:hi], dz.sum(0), lo)
    for c in (c for c in found if not c.error):
        marks[c.name]["dx"].add(c.results["dx"], dx)
        marks[c.name]["loss"].add(c.results["loss"][None], (lse - target).mean()[None])
    return marks
