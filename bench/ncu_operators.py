#!/usr/bin/env python3
"""What: hardware counters of lane sm90's kernels of sparse attention and of the scan, as a receipt: the public
Python call of a row of their speed tables under Nsight Compute.
Why: where a goal is missed, the reason must be a measured one.
Never: times anything for a ratio: under the profiler kernels run alone and clocks differ.

usage, on a machine with a Hopper GPU: bench/ncu_operators.py RECEIPT attention|scan [ROW,ROW,..]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from ncu_h200 import SECTIONS, read
from talea import _receipt

# row: launches of its call that are left out, launches read
ATTENTION = {
    "f1": (0, 4), "f3": (0, 4), "f4_h16": (0, 4), "f5_128_64": (0, 4), "f5_192_128": (0, 4),
    "f5_288_256": (0, 4), "f5_96_64": (0, 4), "d1": (0, 6), "d2": (0, 6), "b1": (0, 8), "b1h": (0, 8),
    "b2": (0, 12), "i1": (0, 4), "i1_e4m3": (0, 4), "i2": (0, 6),
}  # fmt: skip
# Backward: the first gradients come behind the states of all segments but the last.
SCAN = {
    "M1 forward": (0, 8), "M1 backward": (32, 16), "M2 forward": (0, 8), "M2 backward": (20, 16),
    "S1 forward": (0, 4), "S1 backward": (16, 16), "S2 forward": (0, 8), "S2 backward": (0, 14),
}  # fmt: skip
OPERATORS = {"attention": ATTENTION, "scan": SCAN}


def attention_call(row):
    import sparse_h200 as of
    import sparse_serve_h200 as serve
    import talea
    import torch

    torch.manual_seed(1)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    if row in ("d1", "d2"):
        batch, keys = (128, 16384) if row == "d1" else (2, 32768)
        q = torch.randn(batch, 2, 128, 576, **half)
        packed = torch.cat(
            [talea.pack_rows(torch.randn(1, keys, 576, **half)) for _ in range(batch)]
        )
        chosen = torch.randint(keys, (batch, 2, 2048), device="cuda", dtype=torch.int32)
        kv = talea.PackedKV(packed)
        return lambda: talea.sparse_attention(q, kv, chosen, value_dim=512, lane="sm90")
    if row in ("i1", "i1_e4m3", "i2"):
        q, k, w = serve.indexer(4096 if row == "i2" else serve.QUERIES)
        if row == "i1_e4m3":
            ones = torch.ones(q.shape[:2], device="cuda"), torch.ones(len(k), device="cuda")
            q, k = (
                talea.Fp8(x.to(torch.float8_e4m3fn), s) for x, s in zip((q, k), ones, strict=True)
            )
        causal = row != "i2"
        return lambda: talea.sparse_select(q, k, w, top_k=2048, causal=causal, lane="sm90")
    name, dkv_sum, mebibytes = of.BACKWARD.get(row, (row, "deterministic", 256))
    queries, keys, heads, slots, columns, value = of.ROWS[name]
    q = torch.randn(queries, heads, columns, **half)
    kv = torch.randn(keys, columns, **half)
    chosen = torch.randint(keys, (queries, slots), device="cuda", dtype=torch.int32)
    if row not in of.BACKWARD:
        return lambda: talea.sparse_attention(q, kv, chosen, value_dim=value, lane="sm90")
    q.requires_grad_(), kv.requires_grad_()
    o = talea.sparse_attention(
        q, kv, chosen, value_dim=value, lane="sm90", dkv_sum=dkv_sum, workspace_limit=mebibytes << 20
    )  # fmt: skip
    up = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, (q, kv), up, retain_graph=True)


def scan_call(row):
    import talea
    import torch
    from mamba3_device import PROBLEMS, draw

    name, pass_ = row.rsplit(" ", 1)
    t = {n: x.requires_grad_() for n, x in draw(PROBLEMS[name], torch.bfloat16).items()}
    if pass_ == "forward":
        with torch.no_grad():
            return lambda: talea.mamba3(**{n: x.detach() for n, x in t.items()})
    out = talea.mamba3(**t)
    up = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, list(t.values()), up, retain_graph=True)


def profiled(operator, row):
    """The second call of a row, between the profiler's marks."""
    import torch

    call = {"attention": attention_call, "scan": scan_call}[operator](row)
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counters(operator, row, skip, count, folder):
    log = Path(folder) / "log.csv"
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--profile-from-start",
        "off",
    ]
    command += ["--launch-skip", str(skip), "--launch-count", str(count), *sections]
    command += ["--log-file", str(log), sys.executable, __file__, "--profiled", operator, row]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    kernels = list(read(log))
    if not kernels:
        raise SystemExit(f"ncu_operators: {operator} {row}: no kernel was read")
    return {"name": row, "lane": "sm90", "passed": True, "kernels": kernels}


def main():
    if sys.argv[1:2] == ["--profiled"]:
        return profiled(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("rows", nargs="?")
    o = parser.parse_args()
    start, rows, cases = _receipt.now(), OPERATORS[o.operator], []
    asked = o.rows.split(",") if o.rows else list(rows)
    if unknown := [row for row in asked if row not in rows]:
        parser.error(f"{', '.join(unknown)}: no row of {o.operator}, whose are {', '.join(rows)}")
    if not Path(o.receipt).resolve().parent.is_dir():
        parser.error(f"{o.receipt}: no such folder")
    title = f"hardware counters of {o.operator}, kernel by kernel"
    for row in asked:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(counters(o.operator, row, *rows[row], folder))
        print(f"{row}: {len(cases[-1]['kernels'])} kernels", flush=True)
        # Anew behind each row: a run that is cut has those before.
        check = {"preset": "counters", "passed": len(cases), "failed": 0, "cases": cases}
        _receipt.write_receipt(
            o.receipt, "check", title, None, {"check": check}, start,
            ["python", "bench/ncu_operators.py", *sys.argv[1:]],
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
