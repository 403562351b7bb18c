"""Shared pieces of the Python tests: seeds, devices, the eager comparison."""

import os

import pytest
import talea  # noqa: F401  (fails early when the wheel is broken)
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Liger's kernels then run on the CPU


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def eager(x, w, y, *, bias=None, **options):
    """What PyTorch computes with the logits in memory."""
    return F.cross_entropy(F.linear(x, w, bias), y, **options)


def problem(n=33, d=24, v=101, dtype=torch.float32, device="cpu", bias=False):
    x = torch.randn(n, d, dtype=dtype, device=device, requires_grad=True)
    w = (torch.randn(v, d, device=device) / d**0.5 * 2).to(dtype).requires_grad_()
    y = torch.randint(0, v, (n,), device=device)
    b = torch.randn(v, dtype=dtype, device=device, requires_grad=True) if bias else None
    return x, w, y, b


def gradients(loss, *leaves, upstream=None):
    leaves = [t for t in leaves if t is not None]
    return torch.autograd.grad(loss, leaves, upstream, retain_graph=True)


def close(ours, theirs, tol=2e-6):
    """Relative to the largest magnitude; NaN must match NaN and fails anything else."""
    if not torch.equal(torch.isnan(ours), torch.isnan(theirs)):
        return False
    ours, theirs = ours.detach(), theirs.detach()
    a, b = torch.nan_to_num(ours.double()), torch.nan_to_num(theirs.double())
    scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-30)
    return bool((a - b).abs().max() <= tol * scale) if a.numel() else True
