"""What: errors of the Mamba-3 scan against fp64: every tensor at one size, then the length swept.
Why: "flat in length" and "to the last digits of fp32" are claims, and this is their receipt.
Never: a truth of the lane under test: the recurrence of lane reference in fp64 on the same inputs.

    python bench/mamba3_accuracy.py --receipt receipts/cpu/mamba3_accuracy.json
"""

from __future__ import annotations

import argparse
import sys

import talea
import torch
from talea._receipt import now, write_receipt

STATES = ("angle", "ssm", "k", "v")
# Of section "Numerics" of docs/mamba3.md: relative L2 that a lane may have.
FP32, ROW_A = 5e-7, 6e-3


def draw(tokens, heads, cols, head_dim, rank, dtype, seed):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    ranked = (rank,) if rank > 1 else ()
    t = {
        "q": normal(1, tokens, *ranked, 1, cols) / cols**0.25,
        "k": normal(1, tokens, *ranked, 1, cols) / cols**0.25,
        "v": normal(1, tokens, heads, head_dim),
        "trap": normal(1, heads, tokens),
        "angles": normal(1, tokens, 1, cols // 4),
        "q_bias": normal(heads, *ranked, cols, scale=0.3),
        "k_bias": normal(heads, *ranked, cols, scale=0.3),
        "d": normal(heads),
        "z": normal(1, tokens, heads, head_dim),
    }
    dt = torch.nn.functional.softplus(normal(1, heads, tokens) - 3)
    t["dt"], t["adt"] = dt, -dt * (1 + normal(1, heads, 1).abs())
    if rank > 1:
        t.update({n: 1 / rank + normal(heads, rank, head_dim, scale=0.3)
                  for n in ("mimo_v", "mimo_out")})  # fmt: skip
    kept = {"adt": torch.float32, "dt": torch.float32}
    return {n: x.to(kept.get(n, dtype)) for n, x in t.items()}


def run(t, dtype, lane, chunk):
    t = {
        n: x.to(torch.float64 if dtype == torch.float64 else x.dtype).requires_grad_()
        for n, x in t.items()
    }
    names = ("q", "k", "v", "adt", "dt", "trap", "angles")
    more = {n: x for n, x in t.items() if n not in names}
    made = talea.mamba3(*(t[n] for n in names), **more, return_final=True, lane=lane, chunk=chunk)
    g = torch.Generator().manual_seed(1)
    up = torch.randn(made.out.shape, generator=g, dtype=torch.float64).to(torch.bfloat16)
    grads = torch.autograd.grad(made.out, list(t.values()), up.to(made.out.dtype))
    found = {"out": made.out.detach(), "final_ssm": made.final.ssm.detach()}
    found.update({"d_" + n: x for n, x in zip(t, grads, strict=True)})
    return found, made.receipt()


def relative_l2(ours, truth):
    truth = truth.double()
    return float((ours.double() - truth).norm() / truth.norm())


def case(name, t, dtype, lane, chunk=0):
    truth, _ = run(t, torch.float64, "reference", 0)
    ours, receipt = run(t, dtype, lane, chunk)
    errors = {n: relative_l2(ours[n], truth[n]) for n in truth}
    limit = FP32 if dtype == torch.float32 else ROW_A
    # d_angles of 16-bit operands: what turning leaves of a cancelling sum (row a: 4.2e-3 to 4.6e-3).
    passed = all(e <= (2 * limit if n == "d_angles" else limit) for n, e in errors.items())
    print(f"{name:32} lane {receipt['lane']:10} " + " ".join(f"{n} {e:.1e}" for n, e in errors.items()),
          "" if passed else "ABOVE", file=sys.stderr)  # fmt: skip
    return {"name": name, "lane": receipt["lane"], "passed": passed, "chunk": receipt["chunk_tokens"],
            "relative_l2": errors, "limit": limit}  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--lane", default="auto")
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--longest", type=int, default=65536)
    p.add_argument("--receipt")
    o = p.parse_args()
    start, cases = now(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kind = str(dtype)[6:]
        for rank, name in ((1, "SISO"), (4, "MIMO R 4")):
            t = draw(o.tokens, 4, 128, 64, rank, dtype, 11)
            cases.append(case(f"{name} {kind} {o.tokens}", t, dtype, o.lane))
    sweep, length = {}, 256
    while length <= o.longest:
        t = draw(length, 1, 64, 32, 1, torch.float32, 12)
        cases.append(case(f"length {length} float32", t, torch.float32, o.lane))
        sweep[length] = cases[-1]["relative_l2"]
        length *= 4
    anchor = sweep.get(1024, {})
    for length, errors in sweep.items():
        worst = max((errors[n] / anchor[n] for n in ("out", "d_q", "d_v", "d_adt", "d_angles") if n in anchor),
                    default=0.0)  # fmt: skip
        cases.append({"name": f"length {length} beside 1024", "lane": o.lane, "passed": worst <= 1.5,
                      "worst_ratio": worst})  # fmt: skip
    failed = sum(not c["passed"] for c in cases)
    if o.receipt:
        section = {"preset": "accuracy", "operator": "mamba3", "lanes": [cases[0]["lane"]],
                   "passed": len(cases) - failed, "failed": failed, "cases": cases}  # fmt: skip
        write_receipt(o.receipt, "check", "Mamba-3 scan: errors against fp64, and over lengths",
                      failed == 0, {"check": section}, start,
                      ["python", "bench/mamba3_accuracy.py", *sys.argv[1:]])  # fmt: skip
    print("pass" if not failed else f"fail: {failed} of {len(cases)}")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
