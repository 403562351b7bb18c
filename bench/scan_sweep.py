"""What: the public call of the scan on a GPU over lengths of 1 to 65536 tokens and over groups: times of forward
and backward, sustained, memory, and every output's and gradient's error beside fp64.
Why: no cliff and no growth of errors is a claim about every size, not about those of a table.
Never: a time without its errors; a truth of a lane of ours.

    python bench/scan_sweep.py --receipt receipts/h200/scan_sweep.json

Lengths: one sequence of 32 heads and one group. Groups: two sequences of 2048 tokens, 32 heads. bf16 with biases,
gate, skip and shared angles, as a model has them. The receipt is written anew behind each form.
"""

from __future__ import annotations

import argparse
import sys

import public
import torch
from attention_peers import stepping
from mamba3_device import draw
from public import Meter, sustained
from scan_contenders import lane_of, ours
from scan_peers import PASSES, passes_of, peak
from scan_truth import errors_of, few_of, kept_of, names_of, truth
from talea import _receipt

HEADS, COLUMNS, VALUES = 32, 128, 64
FORMS = {"MIMO R 4": 4, "SISO": 1}
LENGTHS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)
GROUPS = (1, 2, 8, 16, HEADS)
AT_LENGTH = 1024  # beside whose errors growth is counted
# Gradients of parameters are sums of all tokens: one lucky number at 1024 says nothing of growth.
BY_TOKEN = ("out", "d_q", "d_k", "d_v", "d_z", "d_adt", "d_dt", "d_trap", "d_angles")
# Of a few tokens an angle and a decay have nothing or little behind them: their gradients are rounding alone.
SETTLED = 64


def measured(problem, meter, seconds):
    t = draw(problem, torch.bfloat16)
    up = torch.randn_like(t["v"])
    errors = errors_of(ours, t, up, truth(t, up), names_of(t))
    passes = passes_of(ours, t, up, names_of(t))
    found = {
        "errors": errors,
        "relative_l2": max(errors.values()),
        "lane": lane_of(few_of(t, kept_of(t))),
    }
    for which in PASSES[:2]:
        run = passes[which]
        peak(run)
        extra = peak(run)
        took = sustained(stepping(run), meter, seconds)
        found[which] = {**took, "extra_bytes": extra}
    return found


def runs_of(case, form, tokens, problem, o):
    """A run a pass, as receipts of benches have them."""
    found = measured(problem, o.meter, o.seconds)
    for which in PASSES[:2]:
        took = found[which]
        time = dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), took["ms"]) | {"n": 1}
        yield {"case": case, "name": f"{form}, {which}", "lane": found["lane"], "tokens": tokens, "time": time,
               "joules": took["joules"], "sm_mhz": took["sm_mhz"], "extra_bytes": took["extra_bytes"],
               "ns_a_token_head": took["ms"] * 1e6 / (tokens * HEADS),
               "errors": found["errors"], "relative_l2": found["relative_l2"]}  # fmt: skip
    worst = max(found["errors"], key=found["errors"].get)
    print(f"{case:14} {form:9} forward {found['forward']['ms']:9.4f} ms, backward "
          f"{found['backward']['ms']:9.4f} ms, out {found['errors']['out']:.1e}, "
          f"{worst} {found['errors'][worst]:.1e}", flush=True)  # fmt: skip


def grown(runs):
    """Errors beside those of the same form at AT_LENGTH, largest first: which, where, how many times."""
    found = []
    for form in FORMS:
        mine = {r["tokens"]: r["errors"] for r in runs
                if r["name"] == f"{form}, forward" and r["case"].startswith("length")}  # fmt: skip
        at = mine.get(AT_LENGTH, {})
        found += [(e / at[n], f"{form}, {tokens} tokens, {n}") for tokens, errors in mine.items()
                  if tokens >= SETTLED for n, e in errors.items() if n in BY_TOKEN and at.get(n)]  # fmt: skip
    return sorted(found, reverse=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--receipt", required=True)
    p.add_argument("--seconds", type=float, default=0.3)
    p.add_argument("--longest", type=int, default=LENGTHS[-1])
    p.add_argument("--note", action="append", default=[], help="what else the receipt must say")
    o = p.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, runs, o.meter = _receipt.now(), [], Meter()
    public.WARM_SECONDS = o.seconds / 2
    plans = [(f"length {n}", form, n, (1, n, HEADS, 1, rank, COLUMNS, VALUES))
             for form, rank in FORMS.items() for n in LENGTHS if n <= o.longest]  # fmt: skip
    plans += [(f"groups {g}", form, 4096, (2, 2048, HEADS, g, rank, COLUMNS, VALUES))
              for form, rank in FORMS.items() for g in GROUPS]  # fmt: skip
    for i, (case, form, tokens, problem) in enumerate(plans):
        runs += runs_of(case, form, tokens, problem, o)
        if i + 1 < len(plans) and (plans[i + 1][0][:6], plans[i + 1][1]) == (case[:6], form):
            continue
        torch.cuda.empty_cache()
        growth = grown(runs)
        notes = [
            f"each back to back for {o.seconds} s after half of that; errors of what fp64 can hold",
            *o.note,
        ]
        if growth:
            notes.append(
                f"largest growth of an error beside {AT_LENGTH} tokens: {growth[0][0]:.2f} x ({growth[0][1]})"
            )
            print(notes[-1], flush=True)
        _receipt.write_receipt(
            o.receipt, "bench", "the scan over lengths and groups on a GPU, bf16", None,
            {"bench": {"limit": "none: times over sizes", "runs": runs}, "notes": notes},
            start, ["python", "bench/scan_sweep.py", *sys.argv[1:]],
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
