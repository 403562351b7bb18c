"""What: the public call of the scan beside PyTorch's eager chunk form, in turn, in one process: time and memory.
Why: what a user gets by the line they type, against what PyTorch computes by itself.
Never: one side tuned: both see the same tensors and threads; values are compared before times.

    python bench/mamba3_peers.py --receipt receipts/cpu/mamba3_peers.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time

import talea
import torch
from samples import Peak
from talea._receipt import now, write_receipt

PROBLEMS = {"SISO": (1024, 8, 1, 64), "MIMO R 4": (512, 8, 4, 16)}  # tokens, heads, rank, chunk
NAMES = ("q", "k", "v", "adt", "dt", "trap", "angles")


def draw(tokens, heads, rank, cols=128, head_dim=64):
    g = torch.Generator().manual_seed(7)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=g) * scale

    dt = torch.nn.functional.softplus(normal(1, heads, tokens) - 3)
    return {
        "q": normal(1, tokens, rank, 1, cols) / cols**0.25,
        "k": normal(1, tokens, rank, 1, cols) / cols**0.25,
        "v": normal(1, tokens, heads, head_dim), "adt": -dt * 1.5, "dt": dt,
        "trap": normal(1, heads, tokens), "angles": normal(1, tokens, 1, cols // 4),
        "q_bias": normal(heads, rank, cols, scale=0.3), "k_bias": normal(heads, rank, cols, scale=0.3),
        "d": normal(heads), "mimo_v": 1 / rank + normal(heads, rank, head_dim, scale=0.3),
        "mimo_out": 1 / rank + normal(heads, rank, head_dim, scale=0.3),
    }  # fmt: skip


def eager(t, chunk):
    """The chunk form in tensor operations: section "What is computed" over chunks of equal length."""
    (_, s, r, _, n), (h, p) = t["q"].shape, t["v"].shape[2:]
    c, m, a = s // chunk, chunk * r, t["angles"].shape[-1]
    theta = (math.pi * t["angles"].tanh() * t["dt"].mT[..., None]).cumsum(1)[:, :, :, None]
    cos, sin = theta.cos(), theta.sin()

    def rows(x, bias):
        x = x.transpose(2, 3) + bias
        u, w = x[..., :a], x[..., n // 2 : n // 2 + a]
        x = torch.cat((u * cos - w * sin, x[..., a : n // 2], u * sin + w * cos,
                       x[..., n // 2 + a :]), -1)  # fmt: skip
        return x.reshape(c, chunk, h, r, n).transpose(1, 2).reshape(c, h, m, n)

    q, k = rows(t["q"], t["q_bias"]), rows(t["k"], t["k_bias"])
    v = (t["v"][:, :, :, None] * t["mimo_v"]).reshape(c, chunk, h, r, p).transpose(1, 2)
    v = v.reshape(c, h, m, p)
    lam = t["trap"].sigmoid()
    gamma = lam * t["dt"]
    scale = gamma + torch.nn.functional.pad(((1 - lam) * t["dt"])[:, :, 1:], (0, 1))
    per_chunk = [x.reshape(h, c, chunk).transpose(0, 1) for x in (t["adt"], scale, gamma)]
    length, scale, gamma = per_chunk[0].cumsum(-1), *per_chunk[1:]
    apart = length[..., :, None] - length[..., None, :]
    seen = torch.ones(chunk, chunk, dtype=torch.bool).tril(-1)
    weight = torch.where(seen, apart, -torch.inf).exp() * scale[..., None, :]
    weight = weight + torch.diag_embed(gamma)
    weight = weight.repeat_interleave(r, -1).repeat_interleave(r, -2)
    y = (q @ k.mT * weight) @ v + t["d"][:, None, None] * v
    of_row = lambda x: x.repeat_interleave(r, -1)[..., None]  # noqa: E731
    own = (of_row((length[..., -1:] - length).exp() * scale) * v).mT @ k
    state, states = torch.zeros(h, p, n), []
    for i in range(c):
        states.append(state)
        state = length[i, :, -1].exp()[:, None, None] * state + own[i]
    y = y + of_row(length.exp()) * (q @ torch.stack(states).mT)
    y = y.reshape(c, h, chunk, r, p).permute(0, 2, 3, 1, 4).reshape(1, s, r, h, p)
    return (y * t["mimo_out"].transpose(0, 1)).sum(2)


def ours(t, chunk):
    return talea.mamba3(*(t[n] for n in NAMES), **{n: x for n, x in t.items() if n not in NAMES})


def step(form, t, up, chunk, backward=True):
    t = {n: x.detach().requires_grad_(backward) for n, x in t.items()}
    out = form(t, chunk)
    grads = torch.autograd.grad(out, list(t.values()), up) if backward else ()
    return out.detach(), grads


def product_ms(flops):
    """The same flops as one plain fp32 product of this process."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    begin = time.perf_counter()
    a @ b
    return (time.perf_counter() - begin) * 1e3 * flops / (2 * 1024**3)


def measure(name, backward, repeats):
    tokens, heads, rank, chunk = PROBLEMS[name]
    t = draw(tokens, heads, rank)
    up = torch.randn(1, tokens, heads, 64, generator=torch.Generator().manual_seed(8))
    forms = {"talea": ours, "torch eager": eager}
    done = {n: step(f, t, up, chunk, backward) for n, f in forms.items()}
    gap = max(float((a - b).norm() / b.norm()) for a, b in
              zip((done["talea"][0], *done["talea"][1]), (done["torch eager"][0], *done["torch eager"][1]),
                  strict=True))  # fmt: skip
    del done
    rows = 64
    useful = 2 * rows * rank * (128 + 64) + 4 * rank * 128 * 64
    useful *= tokens * heads * (3 if backward else 1)
    times, ratios, memory = {n: [] for n in forms}, {n: [] for n in forms}, {}
    for i in range(repeats):
        for n, form in forms.items() if i % 2 else reversed(forms.items()):
            limit = product_ms(useful)
            begin = time.perf_counter()
            step(form, t, up, chunk, backward)
            times[n].append((time.perf_counter() - begin) * 1e3)
            ratios[n].append(times[n][-1] / min(limit, product_ms(useful)))
    for n, form in forms.items():
        with Peak() as peak:
            kept = step(form, t, up, chunk, backward)
        returned = sum(x.numel() * x.element_size() for x in (kept[0], *kept[1]))
        memory[n] = max(peak.bytes - returned, 0)
        del kept
    return gap, times, ratios, memory


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--receipt")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    start, cases = now(), []
    for name in PROBLEMS:
        for backward in (True, False):
            gap, times, ratios, memory = measure(name, backward, o.repeats)
            ms = {n: statistics.median(x) for n, x in times.items()}
            faster = ms["torch eager"] / ms["talea"]
            share = memory["talea"] / max(memory["torch eager"], 1)
            passed = gap < 1e-5 and faster >= 2 and (share <= 0.1 or not backward)
            what = f"{name}, {'forward + backward' if backward else 'forward'}, {o.threads} threads"
            cases.append({"name": what, "lane": "cpu", "passed": passed, "largest_relative_gap": gap,
                          "ms": ms, "times_to_plain_product": {n: statistics.median(x) for n, x in ratios.items()},
                          "faster_than_eager": faster, "extra_bytes": memory, "memory_beside_eager": share})  # fmt: skip
            print(f"{what}: {ms['talea']:.1f} ms beside {ms['torch eager']:.1f} ({faster:.1f} x faster); "
                  f"{cases[-1]['times_to_plain_product']['talea']:.2f} x the plain product beside "
                  f"{cases[-1]['times_to_plain_product']['torch eager']:.2f}; "
                  f"{memory['talea'] / 2**20:.1f} MiB beside {memory['torch eager'] / 2**20:.1f}; gap {gap:.1e}",
                  file=sys.stderr)  # fmt: skip
    failed = sum(not c["passed"] for c in cases)
    if o.receipt:
        section = {"preset": "peers", "operator": "mamba3", "lanes": ["cpu"], "passed": len(cases) - failed,
                   "failed": failed, "cases": cases}  # fmt: skip
        write_receipt(o.receipt, "check", "Mamba-3 scan beside PyTorch's eager chunk form", failed == 0,
                      {"check": section}, start, ["python", "bench/mamba3_peers.py", *sys.argv[1:]])  # fmt: skip
    print("pass" if not failed else f"fail: {failed} of {len(cases)}")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
