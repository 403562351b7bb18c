"""What: sparse attention on a GPU, forward and backward: the rows of its speed table, beside the rate of a plain
product of the same process and, where they can be imported, other libraries; as a receipt.
Why: a lane is judged by the chip's own rate, at the sizes that models have, and by its error.
Never: repeats one list of keys: indices differ between repeats, as they do in a model.

usage: sparse_h200.py RECEIPT [--rows f1,f2,..] [--seconds S] [--lanes sm90,cuda]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import talea
import torch
from talea import _receipt

# queries, keys, heads, slots, columns of a row, of its value
ROWS = {
    "f1": (4096, 8192, 128, 2048, 576, 512),
    "f2": (4096, 131072, 128, 2048, 576, 512),
    "f3": (4096, 8192, 64, 2048, 576, 512),
    "f4_h16": (4096, 8192, 16, 2048, 576, 512),
    "f5_128_64": (4096, 8192, 128, 256, 128, 64),
    "f5_192_128": (4096, 8192, 32, 512, 192, 128),
    "f5_288_256": (4096, 8192, 48, 512, 288, 256),
    "f5_96_64": (4096, 8192, 28, 256, 96, 64),
}
# a row above, how dkv is summed, MiB of workspace
BACKWARD = {
    "b1": ("f1", "atomic", 256),
    "b1h": ("f3", "atomic", 256),
    "b2": ("f1", "deterministic", 2560),
    "b2_256": ("f1", "deterministic", 256),
}
LISTS, JUDGED = 3, 16


def timed(call, seconds):
    """Milliseconds of each call, back to back; the first calls warm up."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    spent = 0.0
    while spent < seconds * 1e3 or len(marks) < 10:
        for _ in range(3):
            call(len(marks))
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        marks[-1].synchronize()
        spent = marks[0].elapsed_time(marks[-1])
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def product_rate(seconds):
    """FLOP a second of one plain product, sustained."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / (statistics.median(timed(lambda _: a @ b, seconds)) * 1e-3)


def truth(q, kv, indices, value):
    """fp64, of some queries."""
    keys = kv[indices.long()].double()
    p = (torch.einsum("shd,skd->shk", q.double(), keys) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("shk,skv->shv", p, keys[..., :value])


def others(value):
    """Libraries that compute the same, by name."""
    try:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd
    except ImportError:
        return {}
    return {
        "FlashMLA": lambda q, kv, indices: flash_mla_sparse_fwd(
            q, kv[:, None], indices[:, None], q.shape[-1] ** -0.5, d_v=value
        )[0]
    }


def row_runs(name, lanes, seconds, rate):
    queries, keys, heads, slots, columns, value = ROWS[name]
    torch.manual_seed(1)
    q = torch.randn(queries, heads, columns, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys, columns, device="cuda", dtype=torch.bfloat16)
    lists = [
        torch.randint(keys, (queries, slots), device="cuda", dtype=torch.int32)
        for _ in range(LISTS)
    ]
    some = torch.arange(0, queries, queries // JUDGED, device="cuda")
    right = truth(q[some], kv, lists[0][some], value)
    flops = 2.0 * queries * slots * heads * (columns + value)
    ways = {
        lane: (lambda q, kv, i, lane=lane: talea.sparse_attention(q, kv, i, value_dim=value, lane=lane))
        for lane in lanes
    } | others(value)  # fmt: skip
    for way, call in ways.items():
        try:
            found = call(q, kv, lists[0])
        except (RuntimeError, ValueError, AssertionError) as refused:
            print(f"{name:11} {way:10} refused: {str(refused).splitlines()[0]}")
            continue
        error = float((found[some].double() - right).norm() / right.norm())
        if not error < 1e-2:
            sys.exit(f"{name} {way}: relative error {error}")
        del found
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call(q, kv, lists[0])
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - kept.numel() * kept.element_size()
        del kept
        with torch.no_grad():
            ms = timed(lambda i, call=call: call(q, kv, lists[i % LISTS]), seconds)
        median = statistics.median(ms)
        cuts = statistics.quantiles(ms, n=5, method="inclusive")
        limit = flops / rate * 1e3
        print(
            f"{name:11} {way:10} {median:8.3f} ms {flops / median * 1e-9:6.0f} TFLOP/s"
            f" {median / limit:5.2f} x {extra:12d} bytes  error {error:.2e}"
        )
        yield {
            "case": name, "name": way, "ratio": median / limit, "extra_bytes": max(extra, 0),
            "relative_l2": error, "tflops": flops / median * 1e-9,
            "time": {"median_ms": median, "p20_ms": cuts[0], "p80_ms": cuts[3], "n": len(ms)},
        }  # fmt: skip


def gradients(q, kv, indices, d_o, value):
    """dq, dkv in fp64 by autograd."""
    q, kv = (x.detach().double().requires_grad_() for x in (q, kv))
    return torch.autograd.grad(truth(q, kv, indices, value), (q, kv), d_o.double())


def error_of(found, right):
    return float((found.double() - right).norm() / right.norm())


def backward_runs(name, lanes, seconds, rate):
    row, dkv_sum, mebibytes = BACKWARD[name]
    queries, keys, heads, slots, columns, value = ROWS[row]
    torch.manual_seed(1)
    q = torch.randn(queries, heads, columns, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_o = torch.randn(queries, heads, value, device="cuda", dtype=torch.bfloat16)
    lists = [
        torch.randint(keys, (queries, slots), device="cuda", dtype=torch.int32)
        for _ in range(LISTS)
    ]
    few = [x[:JUDGED].detach().clone() for x in (q, lists[0], d_o)]
    right = gradients(few[0], kv, few[1], few[2], value)
    q.requires_grad_()
    flops = 2.0 * queries * slots * heads * (3 * columns + 2 * value)
    for lane in lanes:

        def attend(q, i, lane=lane):
            return talea.sparse_attention(
                q, kv, i, value_dim=value, lane=lane, dkv_sum=dkv_sum,
                workspace_limit=mebibytes << 20,
            )  # fmt: skip

        some = few[0].requires_grad_()
        try:
            found = torch.autograd.grad(attend(some, few[1]), (some, kv), few[2])
        except (RuntimeError, ValueError) as refused:
            print(f"{name:11} {lane:10} refused: {str(refused).splitlines()[0]}")
            continue
        errors = [error_of(a, b) for a, b in zip(found, right, strict=True)]
        if not max(errors) < 1e-2:
            sys.exit(f"{name} {lane}: relative errors {errors}")
        saved = [attend(q, i) for i in lists]

        def call(i, saved=saved):
            return torch.autograd.grad(saved[i % LISTS], (q, kv), d_o, retain_graph=True)

        call(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call(0)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        extra -= sum(x.numel() * x.element_size() for x in kept)
        again = call(0)
        same = all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
        del kept, again
        ms = timed(call, seconds)
        median = statistics.median(ms)
        cuts = statistics.quantiles(ms, n=5, method="inclusive")
        limit = flops / rate * 1e3
        print(
            f"{name:11} {lane:10} {median:8.3f} ms {flops / median * 1e-9:6.0f} TFLOP/s"
            f" {median / limit:5.2f} x {extra:12d} bytes  dq {errors[0]:.2e} dkv {errors[1]:.2e}"
            f" {'repeats bit for bit' if same else 'differs between runs'}"
        )
        yield {
            "case": name, "name": lane, "ratio": median / limit, "extra_bytes": max(extra, 0),
            "relative_l2": max(errors), "tflops": flops / median * 1e-9,
            "time": {"median_ms": median, "p20_ms": cuts[0], "p80_ms": cuts[3], "n": len(ms)},
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--rows", default=",".join([*ROWS, *BACKWARD]))
    parser.add_argument("--lanes", default="sm90")
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    start = _receipt.now()
    rate = product_rate(args.seconds)
    print(f"plain product: {rate * 1e-12:.0f} TFLOP/s")
    runs = []
    for name in args.rows.split(","):
        runs_of = backward_runs if name in BACKWARD else row_runs
        runs += runs_of(name, args.lanes.split(","), args.seconds, rate)
    _receipt.write_receipt(
        args.receipt, "bench", "sparse attention on a GPU, bf16", None,
        {"bench": {"limit": f"its products at {rate * 1e-12:.0f} TFLOP/s: a plain product of 8192 "
                            "cubed in this process, sustained", "runs": runs}},
        start, ["python", "bench/sparse_h200.py", *sys.argv[1:]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
