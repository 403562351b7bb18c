"""What: workspace limits on the host through autograd, bytes of both calls and of what waits.
Why: a limit that forward keeps and backward breaks, or refuses only then, is no limit.
Never: needs a device; speed is bench's.
"""

from __future__ import annotations

import re

import pytest
import talea

torch = pytest.importorskip("torch")
KINDS = ("scalar", "none", "lse", "main_grad", "grad_scale")


def problem(dtype, need="xw", shape=(256, 64, 2000)):
    n, d, v = shape
    torch.manual_seed(3)
    x, w = torch.randn(n, d).to(dtype), (0.1 * torch.randn(v, d)).to(dtype)
    return x.requires_grad_("x" in need), w.requires_grad_("w" in need), torch.arange(n)


def step(x, w, y, kind, limit):
    more = {"reduction": "none"} if kind == "none" else {}
    if kind in ("main_grad", "grad_scale"):
        more["main_grad"] = torch.zeros(w.shape)
    if kind == "grad_scale":
        more["grad_scale"] = 0.25
    outputs = ("loss", "lse") if kind == "lse" else ("loss",)
    made = talea.linear_cross_entropy(x, w, y, outputs=outputs, workspace_limit=limit, **more)
    loss = made.loss.sum() if kind == "none" else 0.25 * made.loss
    return made, loss + made.lse.sum() if kind == "lse" else loss


def named(call, *arguments, **more) -> int:
    with pytest.raises(talea.UsageError, match="at least") as said:
        call(*arguments, **more)
    return int(re.search(r"at least (\d+)", str(said.value))[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need", ["xw", "x", "w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_least_that_is_named_serves_both_calls(dtype, need, kind):
    """The error is forward's, and its number is one with which backward runs as well."""
    x, w, y = problem(dtype, need)
    least = named(step, x, w, y, kind, 1)
    with pytest.raises(talea.UsageError, match="at least"):
        step(x, w, y, kind, least - 1)
    for limit in (least, least + least // 2, 4 * least):
        step(x, w, y, kind, limit)[1].backward()


def attend(limit, **more):
    torch.manual_seed(4)
    q, kv = torch.randn(16, 4, 32).requires_grad_(), torch.randn(40, 32).requires_grad_()
    indices = torch.randint(0, 40, (16, 8))
    return talea.sparse_attention(q, kv, indices, value_dim=16, workspace_limit=limit, **more)


def scan(limit, **more):
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 40, 2, n).requires_grad_() for n in (8, 8, 16))
    adt, dt, trap = (torch.rand(1, 2, 40) for _ in range(3))
    return talea.mamba3(q, k, v, -adt, dt, trap, workspace_limit=limit, **more)


@pytest.mark.parametrize("lane", ["cpu", "unfused", "reference"])
@pytest.mark.parametrize("call, more", [(attend, {}), (scan, {}), (scan, {"save_states": True})])
def test_attention_and_scan_name_what_serves_both_calls(call, more, lane):
    least = named(call, 1, lane=lane, **more)
    call(least, lane=lane, **more).sum().backward()
    if not more:
        assert named(call, least - 1, lane=lane) == least
    with torch.no_grad():  # where no backward comes, none has to fit
        alone = named(call, 1, lane=lane, **more)
        assert alone < least or (call is scan and lane == "unfused")
        call(alone, lane=lane, **more)


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.3, float("inf")])
def test_backward_keeps_the_limit(dtype, factor):
    """By the pages that a step took: a tensor of dW's size beside it would be seen."""
    n, d, v = shape = 128, 512, 16384
    x, w, y = problem(dtype, shape=shape)
    limit = (4 << 20) + (0 if dtype == torch.float32 else 2 * d * (n + v))
    for _ in range(2):
        x.grad = w.grad = None
        try:
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")
        except OSError:
            pytest.skip("this system does not reset a process's highest resident set")
        before = resident("VmRSS")
        (talea.linear_cross_entropy(x, w, y, workspace_limit=limit) * factor).backward()
        extra = resident("VmHWM") - before - x.grad.nbytes - w.grad.nbytes
    assert extra <= limit + (2 << 20)


@pytest.mark.parametrize("limit", ["auto", 8 << 20])
def test_what_waits_for_backward_counts(limit):
    """Sums in fp32 and the workspace share the limit: three products, not five."""
    n, d, v = shape = 1024, 256, 8192
    x, w, y = problem(torch.bfloat16, shape=shape)
    kept = 2 * d * (n + v)
    if limit != "auto":
        limit += kept
    made, loss = step(x, w, y, "scalar", limit)
    loss.backward()
    facts = made.receipt()
    assert facts["products"] == 3
    assert facts["workspace_bytes"] + kept <= (2 * n * v if limit == "auto" else limit)
