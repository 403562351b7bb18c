"""What: selection and decode of sparse attention on a GPU: the rows of their speed table, beside the
rate of a plain product of the same process, torch.topk and, where they can be imported, other
libraries; as a receipt.
Why: what serves a model is judged by the chip's own rate, at the sizes that models have.
Never: counts a selection that is not torch.topk's own set, or an output without its error.

usage: sparse_serve_h200.py RECEIPT [--rows i1,i2,i3,d1,d2] [--seconds S] [--lanes sm90,cuda]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import talea
import torch
from sparse_h200 import product_rate, timed
from talea import _receipt

COPY_RATE = 4.24e12  # bytes a second, of a plain copy
QUERIES, KEYS, HEADS, DIM, TOP_K = 32768, 32768, 64, 128, 2048


def kernel_ms(call, part, calls=5):
    """Milliseconds a call of the kernels whose names have this part."""
    call(0)
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    spent = [e.self_device_time_total for e in seen.key_averages() if part in e.key]
    if not spent:
        sys.exit(f"no kernel has {part} in its name")
    return sum(spent) / calls * 1e-3


def peak_extra(call, kept):
    """Bytes beside inputs and what is kept."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call(0)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    return max(extra - sum(t.numel() * t.element_size() for t in kept(result)), 0)


def run_of(row, name, ms, limit_ms, extra, **more):
    print(f"{row:4} {name:12} {ms:8.3f} ms {ms / limit_ms:5.2f} x {extra:12d} bytes {more}")
    return {"case": row, "name": name, "ratio": ms / limit_ms, "extra_bytes": extra,
            "time": {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "n": 1}, **more}  # fmt: skip


def indexer(queries):
    torch.manual_seed(1)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(queries, HEADS, DIM, **new)
    k = torch.randn(KEYS, DIM, **new)
    return q, k, torch.rand(queries, HEADS, device="cuda")


def right_scores(q, k, w, some):
    z = torch.einsum("shd,kd->shk", q[some].double(), k.double()).relu()
    return torch.einsum("shk,sh->sk", z, w[some].double())


def scores_error(q, k, w, lane, causal):
    """Of the selected scores of some queries against fp64, and how many keys torch.topk would take."""
    indices, _, scores = talea.sparse_select(
        q, k, w, top_k=TOP_K, causal=causal, return_scores=True, lane=lane
    )
    some = torch.arange(TOP_K, q.shape[0], q.shape[0] // 8, device="cuda")
    right = right_scores(q, k, w, some)
    if causal:
        right.masked_fill_(torch.arange(KEYS, device="cuda")[None] > some[:, None], -torch.inf)
    own = right.gather(1, indices[some].long())
    error = float((scores[some].double() - own).norm() / own.norm())
    best = torch.zeros_like(right, dtype=torch.bool).scatter_(1, right.topk(TOP_K).indices, True)
    recall = float(best.gather(1, indices[some].long()).double().mean())
    if not (error < 1e-5 and recall > 0.999):
        sys.exit(f"{lane}: error {error}, recall {recall}")
    return {"relative_l2": error, "recall": recall}


def scores_rows(rows, lanes, seconds, rate):
    q, k, w = indexer(QUERIES)
    limit = 2.0 * QUERIES * (QUERIES + 1) / 2 * HEADS * DIM / rate * 1e3
    for lane in lanes:

        def call(_, lane=lane):
            return talea.sparse_select(q, k, w, top_k=TOP_K, causal=True, lane=lane)

        right = scores_error(q, k, w, lane, True)
        extra = peak_extra(call, lambda r: r)
        if "i1" in rows and lane == "sm90":
            yield run_of("i1", lane, kernel_ms(call, "index_kernel"), limit, extra, **right)
        if "i3" in rows:
            yield run_of("i3", lane, statistics.median(timed(call, seconds)), limit, extra, **right)


def selection_rows(lanes, seconds):
    q, k, w = indexer(4096)
    limit = 4.0 * 4096 * KEYS / COPY_RATE * 1e3
    for lane in lanes:

        def call(_, lane=lane):
            return talea.sparse_select(q, k, w, top_k=TOP_K, lane=lane)

        right = scores_error(q, k, w, lane, False)
        yield run_of("i2", lane, kernel_ms(call, "select_kernel"), limit, 0, **right)
    scores = torch.randn(4096, KEYS, device="cuda")
    ms = statistics.median(timed(lambda _: torch.topk(scores, TOP_K, sorted=False), seconds))
    extra = peak_extra(lambda _: torch.topk(scores, TOP_K, sorted=False), lambda r: r)
    yield run_of("i2", "torch.topk", ms, limit, extra)


def dequantised(rows):
    """fp64 of packed rows [.., 656]."""
    values = rows[..., :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[..., 512:528].contiguous().view(torch.float32).double()
    rest = rows[..., 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([values * scales.repeat_interleave(128, -1), rest], -1)


def decode_row(row, lanes, seconds, rate):
    batch, keys = (128, 16384) if row == "d1" else (2, 32768)
    torch.manual_seed(2)
    q = torch.randn(batch, 2, 128, 576, device="cuda", dtype=torch.bfloat16)
    packed = torch.cat(
        [talea.pack_rows(torch.randn(8, keys, 576, device="cuda", dtype=torch.bfloat16))
         for _ in range(0, batch, 8)])[:batch]  # fmt: skip
    lists = [
        torch.randint(keys, (batch, 2, TOP_K), device="cuda", dtype=torch.int32) for _ in range(3)
    ]
    kv = talea.PackedKV(packed)
    limit = 2.0 * batch * 2 * TOP_K * 128 * (576 + 512) / rate * 1e3
    b = batch - 1
    chosen = dequantised(packed[b][lists[0][b].long()])
    p = (torch.einsum("shd,skd->shk", q[b].double(), chosen) * 576**-0.5).softmax(-1)
    right = torch.einsum("shk,skv->shv", p, chosen[..., :512])
    for lane in lanes:

        def call(i, lane=lane):
            return talea.sparse_attention(q, kv, lists[i % 3], value_dim=512, lane=lane)

        error = float((call(0)[b].double() - right).norm() / right.norm())
        if not error < 1e-2:
            sys.exit(f"{row} {lane}: relative error {error}")
        extra = peak_extra(call, lambda o: [o])
        if row == "d2":
            call = graphed(call)
        with torch.no_grad():
            ms = statistics.median(timed(call, seconds))
        yield run_of(row, lane, ms, limit, extra, relative_l2=error)


def graphed(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        kept = call(0)

    def replay(_, kept=(call, kept)):  # what the graph reads may belong to the call alone
        graph.replay()

    return replay


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--rows", default="i1,i2,i3,d1,d2")
    parser.add_argument("--lanes", default="sm90")
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    start = _receipt.now()
    rows, lanes = args.rows.split(","), args.lanes.split(",")
    rate = product_rate(args.seconds)
    print(f"plain product: {rate * 1e-12:.0f} TFLOP/s")
    runs = []
    if {"i1", "i3"} & set(rows):
        runs += scores_rows(rows, lanes, args.seconds, rate)
    if "i2" in rows:
        runs += selection_rows(lanes, args.seconds)
    for row in ("d1", "d2"):
        if row in rows:
            runs += decode_row(row, lanes, args.seconds, rate)
    _receipt.write_receipt(
        args.receipt, "bench", "sparse attention's selection and decode on a GPU, bf16", None,
        {"bench": {"limit": f"products at {rate * 1e-12:.0f} TFLOP/s: a plain product of 8192 cubed in "
                            f"this process, sustained; i2: one read at {COPY_RATE * 1e-12} TB/s",
                   "runs": runs}},
        start, ["python", "bench/sparse_serve_h200.py", *sys.argv[1:]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
