"""What: sparse attention beside PyTorch's ways to the same numbers, and its selection beside
torch.topk, interleaved in one process: time and peak memory, as a receipt.
Why: a user of PyTorch chooses among these lines, not between a kernel and its limit.
Never: tunes one side; all have the same tensors, threads and dtype, and are held to one result.

usage: sparse_peers.py RECEIPT [THREADS] [REPEATS]
"""

from __future__ import annotations

import sys
import time

import talea
import torch
import torch.nn.functional as F
from samples import Peak, time_stats
from talea import _receipt
from torch.utils.checkpoint import checkpoint

S, KEYS, HEADS, K, DIM, VALUE, CHUNK = 512, 4096, 16, 512, 576, 512, 64
INDEX_HEADS, INDEX_DIM = 16, 64


def gathered(q, kv, indices):
    keys = kv[indices]
    p = (torch.einsum("shd,skd->shk", q, keys) * DIM**-0.5).softmax(-1)
    return torch.einsum("shk,skv->shv", p, keys[..., :VALUE])


def chunked(q, kv, indices, one=gathered):
    parts = [slice(i, i + CHUNK) for i in range(0, S, CHUNK)]
    return torch.cat([one(q[p], kv, indices[p]) for p in parts])


def recomputed(q, kv, indices):
    return chunked(q, kv, indices, lambda *a: checkpoint(gathered, *a, use_reentrant=False))


def dense(q, kv, indices):
    mask = torch.zeros(S, KEYS, dtype=torch.bool).scatter_(1, indices.long(), True)
    keys = kv.expand(1, HEADS, KEYS, DIM)
    done = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, keys[..., :VALUE], attn_mask=mask
    )
    return done[0].transpose(0, 1)


def ours(q, kv, indices):
    return talea.sparse_attention(q, kv, indices, value_dim=VALUE)


def index_scores(iq, ik, iw):
    return torch.cat([
        (torch.einsum("shd,kd->shk", iq[i : i + CHUNK], ik).relu() * iw[i : i + CHUNK, :, None]).sum(1)
        for i in range(0, S, CHUNK)
    ])  # fmt: skip


def measured(ways, repeats, check):
    """Median ms and peak bytes of each way; the ways take turns. Results must agree."""
    first, peaks, times = None, {}, {name: [] for name in ways}
    for name, call in ways.items():
        found = call()
        first = found if first is None else first
        check(name, found, first)
        del found
        with Peak() as peak:
            kept = call()
        returned = sum(t.numel() * t.element_size() for t in kept)
        peaks[name] = max(peak.bytes - returned, 0)
        del kept
    for _ in range(repeats):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times, peaks


def close(name, found, first):
    for a, b in zip(found, first, strict=True):
        error = float((a - b).norm() / b.norm())
        if not error <= 2e-5:
            sys.exit(f"{name}: relative difference {error}")


def same_keys(name, found, first):
    """Scores that differ in their last place may change hands."""
    a, b = (t[0].sort(-1).values for t in (found, first))
    if not float((a.long() == b.long()).float().mean()) >= 0.99:
        sys.exit(f"{name}: other keys")


def runs_of(case, figures, best_of):
    times, peaks = figures
    rows = []
    for name, ms in times.items():
        rows.append(
            {"case": case, "name": name, "extra_bytes": peaks[name], "time": time_stats(ms)}
        )
    peers = [r for r in rows if r["name"] != "talea" and r["name"] in best_of]
    fastest = min(peers, key=lambda r: r["time"]["median_ms"])
    mine = next(r for r in rows if r["name"] == "talea")
    for r in rows:
        r["ratio"] = r["time"]["median_ms"] / fastest["time"]["median_ms"]
        print(f"{case:10} {r['name']:34} {r['time']['median_ms']:9.1f} ms {r['ratio']:6.2f}"
              f" {r['extra_bytes'] / 2**20:9.1f} MiB")  # fmt: skip
    share = mine["extra_bytes"] / max(fastest["extra_bytes"], 1)
    print(f"{case:10} memory beside {fastest['name']}: {share:.3f}")
    return rows


def attention_runs(repeats):
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(S, HEADS, DIM, generator=draw).requires_grad_()
    kv = torch.randn(KEYS, DIM, generator=draw).requires_grad_()
    indices = torch.rand(S, KEYS, generator=draw).topk(K).indices.sort(-1).values.int()
    d_o = torch.randn(S, HEADS, VALUE, generator=draw)
    ways = {"talea": ours, "chunked gather": chunked, "chunked gather, recomputed": recomputed,
            "dense masked SDPA": dense, "chunked gather, torch.compile": torch.compile(chunked),
            "dense masked SDPA, torch.compile": torch.compile(dense)}  # fmt: skip

    def forward(way):
        with torch.no_grad():
            return (way(q, kv, indices),)

    def step(way):
        return torch.autograd.grad(way(q, kv, indices), (q, kv), d_o)

    rows = []
    for case, run in (("forward", forward), ("step", step)):
        calls = {n: (lambda run=run, w=w: run(w)) for n, w in ways.items()}
        rows += runs_of(case, measured(calls, repeats, close), ways)
    return rows


def selection_runs(repeats):
    draw = torch.Generator().manual_seed(2)
    iq = torch.randn(S, INDEX_HEADS, INDEX_DIM, generator=draw)
    ik = torch.randn(KEYS, INDEX_DIM, generator=draw)
    iw = torch.randn(S, INDEX_HEADS, generator=draw)
    known = index_scores(iq, ik, iw)
    whole = "scores and topk"
    calls = {
        "talea": lambda: talea.sparse_select(iq, ik, iw, top_k=K)[:1],
        whole: lambda: (index_scores(iq, ik, iw).topk(K).indices,),
        "topk alone": lambda: (known.topk(K).indices,),
    }
    return runs_of("select", measured(calls, 3 * repeats, same_keys), (whole,))


def main():
    receipt = sys.argv[1]
    given = [int(a) for a in sys.argv[2:4]]
    threads, repeats = given + [2, 5][len(given) :]
    torch.set_num_threads(threads)
    start = _receipt.now()
    rows = attention_runs(repeats) + selection_runs(repeats)
    case = f"S {S} S_kv {KEYS} H {HEADS} K {K} {DIM}/{VALUE}, fp32, {threads} threads"
    _receipt.write_receipt(
        receipt, "bench", f"sparse attention beside PyTorch: {case}", None,
        {"bench": {"limit": "the fastest of PyTorch's ways to the same numbers", "runs": rows}},
        start, ["python", "bench/sparse_peers.py", *sys.argv[1:]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
