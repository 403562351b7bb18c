"""What: sparse attention on a GPU beside the libraries people use there: FlashMLA (sgl-flash-mla) forward and
decode, the cuDNN frontend's backward, index scores and selection, torch.topk; one process, as a receipt.
Why: a time is worth something beside what else runs the same problem, on the same chip, in turn.
Never: hides a peer that refuses or is not there: its words are a row; tunes one side; takes a time without
an error beside fp64.

usage: attention_peers.py RECEIPT [--rows f1,f3,...] [--seconds S] [--lane sm90]

Each contender runs back to back for S seconds after S / 2 of the same, in two rounds, the second in reverse.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import time

import public
import talea
import torch
from public import Meter, sustained
from sparse_h200 import ROWS, error_of, gradients, truth
from sparse_serve_h200 import (
    HEADS,
    KEYS,
    QUERIES,
    TOP_K,
    dequantised,
    graphed,
    indexer,
    kernel_ms,
    peak_extra,
    right_scores,
)
from talea import _receipt

JUDGED, LISTS = 16, 3
BACKWARD = {"b1": "f1", "b1h": "f3"}
FORWARD = ("f1", "f3")
BF16 = torch.bfloat16


def version(package):
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def rows_of_lists(keys, shape):
    return [torch.randint(keys, shape, device="cuda", dtype=torch.int32) for _ in range(LISTS)]


def forward_row(row, lane):
    queries, keys, heads, slots, columns, value = ROWS[row]
    torch.manual_seed(1)
    q = torch.randn(queries, heads, columns, device="cuda", dtype=BF16)
    kv = torch.randn(keys, columns, device="cuda", dtype=BF16)
    lists = rows_of_lists(keys, (queries, slots))
    some = torch.arange(0, queries, queries // JUDGED, device="cuda")
    right = truth(q[some], kv, lists[0][some], value)
    flops = 2.0 * queries * slots * heads * (columns + value)

    def ours():
        def run(i):
            return talea.sparse_attention(q, kv, lists[i % LISTS], value_dim=value, lane=lane)

        return run

    def flash_mla():
        from flash_mla import flash_mla_sparse_fwd

        def run(i):
            return flash_mla_sparse_fwd(q, kv[:, None], lists[i % LISTS][:, None], columns**-0.5,
                                        d_v=value, use_legacy=True)[0]  # fmt: skip

        return run

    def judged(run):
        return {"relative_l2": error_of(run(0)[some], right)}

    return {f"Talea {lane}": ours, version("sgl-flash-mla"): flash_mla}, judged, flops, None


def backward_row(row, lane):
    queries, keys, heads, slots, columns, value = ROWS[BACKWARD[row]]
    torch.manual_seed(1)
    q = torch.randn(queries, heads, columns, device="cuda", dtype=BF16, requires_grad=True)
    kv = torch.randn(keys, columns, device="cuda", dtype=BF16, requires_grad=True)
    d_o = torch.randn(queries, heads, value, device="cuda", dtype=BF16)
    lists = rows_of_lists(keys, (queries, slots))
    few = [x[:JUDGED].detach().clone() for x in (q, lists[0], d_o)]
    right = gradients(few[0], kv, few[1], few[2], value)
    flops = 2.0 * queries * slots * heads * (3 * columns + 2 * value)

    def ours(dkv_sum, mebibytes):
        def attend(q, i):
            return talea.sparse_attention(q, kv, i, value_dim=value, lane=lane, dkv_sum=dkv_sum,
                                          workspace_limit=mebibytes << 20)  # fmt: skip

        saved = [attend(q, i) for i in lists]

        def run(i, few_of=None):
            if few_of is not None:
                some = few_of[0].detach().requires_grad_()
                return torch.autograd.grad(attend(some, few_of[1]), (some, kv), few_of[2])
            return torch.autograd.grad(saved[i % LISTS], (q, kv), d_o, retain_graph=True)

        return run

    def cudnn():
        from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

        none = torch.full((heads,), -torch.inf, device="cuda")  # a sink that weighs nothing

        def forward(q, i):
            with torch.no_grad():
                out = talea.sparse_attention(q, kv, i, value_dim=value, lane=lane, outputs=("lse",))
            return out.o.contiguous(), out.lse.contiguous()

        saved = [forward(q, i) for i in lists]

        def run(i, few_of=None):
            x, at, up = few_of if few_of is not None else (q, lists[i % LISTS], d_o)
            o, lse = forward(x, at) if few_of is not None else saved[i % LISTS]
            made = sparse_attention_backward_wrapper(
                x.detach(), kv.detach(), o, up, lse, none, at, softmax_scale=columns**-0.5
            )
            return made["dq"], made["dkv"]

        return run

    def judged(run):
        found = run(0, few)
        errors = {f"{n}_relative_l2": error_of(a, b) for n, a, b in
                  zip(("dq", "dkv"), found, right, strict=True)}  # fmt: skip
        again = [run(0), run(0)]
        same = all(torch.equal(a, b) for a, b in zip(*again, strict=True))
        return {"relative_l2": max(errors.values()), **errors, "repeats_bit_for_bit": same}

    ways = {
        f"Talea {lane}, atomic": lambda: ours("atomic", 256),
        f"Talea {lane}, deterministic": lambda: ours("deterministic", 2560),
        version("nvidia-cudnn-frontend"): cudnn,
    }
    return ways, judged, flops, list


def decode_row(row, lane):
    batch, keys = (128, 16384) if row == "d1" else (2, 32768)
    torch.manual_seed(2)
    q = torch.randn(batch, 2, 128, 576, device="cuda", dtype=BF16)
    packed = torch.cat(
        [talea.pack_rows(torch.randn(min(8, batch), keys, 576, device="cuda", dtype=BF16))
         for _ in range(0, batch, 8)])  # fmt: skip
    lists = rows_of_lists(keys, (batch, 2, TOP_K))
    b = batch - 1
    chosen = dequantised(packed[b][lists[0][b].long()])
    p = (torch.einsum("shd,skd->shk", q[b].double(), chosen) * 576**-0.5).softmax(-1)
    right = torch.einsum("shk,skv->shv", p, chosen[..., :512])
    flops = 2.0 * batch * 2 * TOP_K * 128 * (576 + 512)

    def in_a_graph(run):
        """A call of microseconds is replayed, as a server does; the list is that of the capture."""
        return graphed(run) if row == "d2" else run

    def ours():
        kv = talea.PackedKV(packed)
        return lambda i: talea.sparse_attention(q, kv, lists[i % LISTS], value_dim=512, lane=lane)

    def flash_mla():
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        cache = packed.view(torch.uint8).reshape(batch * keys // 64, 64, 1, 656)
        first = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None] * keys
        global_lists = [i + first for i in lists]
        meta, _ = get_mla_metadata()

        def run(i):
            return flash_mla_with_kvcache(
                q, cache, None, None, 512, meta, softmax_scale=576**-0.5, is_fp8_kvcache=True,
                indices=global_lists[i % LISTS], use_legacy=True,
            )[0]  # fmt: skip

        return run

    def judged(run):
        return {"relative_l2": error_of(run(0)[b], right)}

    ways = {f"Talea {lane}": ours, version("sgl-flash-mla"): flash_mla}
    return ways, judged, flops, None, in_a_graph


def index_row(lane):
    """Scores of causal queries and the selection of TOP_K: whole calls, as a model makes them."""
    q, k, w = indexer(QUERIES)
    flops = 2.0 * QUERIES * (QUERIES + 1) / 2 * HEADS * 128
    some = torch.arange(TOP_K, QUERIES, QUERIES // 8, device="cuda")
    right = right_scores(q, k, w, some)
    right.masked_fill_(torch.arange(KEYS, device="cuda")[None] > some[:, None], -torch.inf)
    best = torch.zeros_like(right, dtype=torch.bool).scatter_(1, right.topk(TOP_K).indices, True)

    def ours():
        return lambda _: talea.sparse_select(q, k, w, top_k=TOP_K, causal=True, lane=lane)[0]

    def cudnn(deterministic):
        from cudnn.deepseek_sparse_attention import indexer_forward_wrapper, indexer_top_k_wrapper

        lengths = torch.arange(1, QUERIES + 1, device="cuda", dtype=torch.int32)
        part = 8192  # the scores of all queries and the selection's buffers at once take 13 GB

        def run(_):
            found = []
            for at in range(0, QUERIES, part):
                rows = slice(at, at + part)
                offset = torch.full((1,), at, device="cuda", dtype=torch.int32)
                scores = indexer_forward_wrapper(
                    q[None, rows], k[None, :, None], w[None, rows], ratio=1, q_causal_offsets=offset
                )["scores"]
                found.append(indexer_top_k_wrapper(
                    scores[0], lengths[rows], TOP_K, return_val=False, deterministic=deterministic
                )["indices"])  # fmt: skip
            return torch.cat(found)

        return run

    def judged(run):
        found = run(0)[some].long()
        recall = float(best.gather(1, found.clamp(min=0)).double().mean())
        return {"recall": recall, "relative_l2": 1 - recall}

    ways = {
        f"Talea {lane}": ours,
        version("nvidia-cudnn-frontend"): lambda: cudnn(False),
        version("nvidia-cudnn-frontend") + ", deterministic": lambda: cudnn(True),
    }
    return ways, judged, flops, None


def selection_row(lane):
    """The selection alone, of given scores; ours is timed by its kernel within the call."""
    scores = torch.randn(4096, KEYS, device="cuda")
    right = scores.topk(TOP_K).indices.sort(-1).values

    def cudnn(deterministic):
        from cudnn.deepseek_sparse_attention import indexer_top_k_wrapper

        lengths = torch.full((4096,), KEYS, device="cuda", dtype=torch.int32)
        return lambda _: indexer_top_k_wrapper(
            scores, lengths, TOP_K, return_val=False, deterministic=deterministic
        )["indices"]

    def judged(run):
        found = run(0).sort(-1).values
        recall = float((found.long() == right).double().mean())
        return {"recall": recall, "relative_l2": 1 - recall}

    ways = {
        version("nvidia-cudnn-frontend"): lambda: cudnn(False),
        version("nvidia-cudnn-frontend") + ", deterministic": lambda: cudnn(True),
        "torch.topk": lambda: lambda _: torch.topk(scores, TOP_K, sorted=False).indices,
    }
    return ways, judged, None, None


def reason(error):
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def entered(row, ways, judged, kept, wrap, not_run):
    """Contenders that run and are right, with their errors and memory; the others by their words."""
    there = {}
    for name, make in ways.items():
        began = time.monotonic()
        try:
            run = make()
            facts = judged(run)
            if not facts["relative_l2"] < 1e-2:
                raise ValueError(f"off by {facts['relative_l2']:.3g} beside fp64")
            facts["extra_bytes"] = peak_extra(run, kept or (lambda result: [result]))
            there[name] = (wrap(run), facts)
        except Exception as error:  # a peer that refuses is a row of the receipt
            not_run[f"{row}: {name}"] = reason(error)
            print(f"{row:4} {name:32} not run: {reason(error)}", flush=True)
        print(
            f"{row:4} {name}: ready in {time.monotonic() - began:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        torch.cuda.empty_cache()
    return there


def stepping(run):
    """A call without arguments that takes the lists in turn."""
    count = [0]

    def step():
        count[0] += 1
        run(count[0])

    return step


def measured(row, there, product, meter, seconds, flops):
    """Two rounds, the second in reverse; limits are products of the same round, before and after."""
    each = {name: [] for name in there}
    for order in (list(there), list(there)[::-1]):
        before = sustained(product, meter, seconds)
        round_of = {name: sustained(stepping(there[name][0]), meter, seconds) for name in order}
        after = sustained(product, meter, seconds)
        rate = 2 * 8192**3 / ((before["ms"] + after["ms"]) / 2)
        for name, found in round_of.items():
            found["ratio"] = found["ms"] * rate / flops if flops else None
            each[name].append(found)
    for name, rounds in each.items():
        ms = sorted(r["ms"] for r in rounds)
        run = {"case": row, "name": name, "sustained_ms": [r["ms"] for r in rounds],
               "joules": [r["joules"] for r in rounds], "sm_mhz": rounds[-1]["sm_mhz"],
               "time": {"median_ms": sum(ms) / len(ms), "p20_ms": ms[0], "p80_ms": ms[-1],
                        "n": len(ms)}, **there[name][1]}  # fmt: skip
        if flops:
            run["ratio"] = sum(r["ratio"] for r in rounds) / len(rounds)
        if name.startswith("Talea"):
            run["lane"] = name.split()[1].rstrip(",")
        yield run


def show(run):
    ratio = f"{run['ratio']:5.2f} x" if "ratio" in run else "       "
    errors = {k: f"{v:.2e}" for k, v in run.items() if k.endswith("l2") or k == "recall"}
    rounds = " ".join(f"{ms:.3f}" for ms in run["sustained_ms"])
    print(f"{run['case']:4} {run['name']:42} {run['time']['median_ms']:9.3f} ms ({rounds}) {ratio} "
          f"{run['extra_bytes'] / 2**20:9.1f} MiB {errors} {run.get('repeats_bit_for_bit', '')}",
          flush=True)  # fmt: skip


def problem_of(row, lane):
    if row in FORWARD:
        return forward_row(row, lane)
    if row in BACKWARD:
        return backward_row(row, lane)
    if row in ("d1", "d2"):
        return decode_row(row, lane)
    return index_row(lane) if row == "i3" else selection_row(lane)


def at_once(ms):
    """What the profiler saw of five calls is one figure."""
    return {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "n": 1}


def kernels(lane, not_run):
    """Index scores and selection of ours apart, by the profiler: the call has no door to one alone."""
    q, k, w = indexer(QUERIES)
    for row, tokens, part in (("i1", QUERIES, "index_kernel"), ("i2", 4096, "select_kernel")):

        def call(_, tokens=tokens, causal=row == "i1"):
            return talea.sparse_select(
                q[:tokens], k, w[:tokens], top_k=TOP_K, causal=causal, lane=lane
            )

        try:
            ms = kernel_ms(call, part)
        except SystemExit as error:
            not_run[f"{row}: Talea {lane}"] = str(error)
            continue
        yield {"case": row, "name": f"Talea {lane}, {part} within sparse_select, by the profiler",
               "lane": lane, "time": at_once(ms)}  # fmt: skip
    yield from cudnn_scores(q, k, w, not_run)


def cudnn_scores(q, k, w, not_run):
    name = version("nvidia-cudnn-frontend")
    try:
        from cudnn.deepseek_sparse_attention import indexer_forward_wrapper

        def call(_):
            return indexer_forward_wrapper(q[None], k[None, :, None], w[None], ratio=1)["scores"]

        some = torch.arange(TOP_K, QUERIES, QUERIES // 8, device="cuda")
        right, found = right_scores(q, k, w, some), call(0)[0][some].double()
        seen = torch.arange(KEYS, device="cuda")[None] <= some[:, None]
        error = float((found[seen] - right[seen]).norm() / right[seen].norm())
        yield {"case": "i1", "name": f"{name}, index scores, by the profiler", "relative_l2": error,
               "extra_bytes": peak_extra(call, lambda r: []),
               "time": at_once(kernel_ms(call, ""))}  # fmt: skip
    except Exception as error:
        not_run[f"i1: {name}"] = reason(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--rows", default="f1,f3,d1,d2,b1,b1h,i2,i3,kernels")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--lane", default="sm90")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, meter, runs, not_run = _receipt.now(), Meter(), [], {}
    public.WARM_SECONDS = args.seconds / 2
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    c = torch.empty_like(a)

    def write():
        words = (f"its products at the rate of a plain product of 8192 cubed in this process, sustained for "
                 f"{args.seconds} s before and after each round")  # fmt: skip
        _receipt.write_receipt(
            args.receipt, "bench", "sparse attention beside its peers on a GPU, bf16", None,
            {"bench": {"limit": words, "runs": runs, "not_run": not_run},
             "notes": ["two rounds, the second in reverse order; errors beside fp64 on a sample of rows",
                       "d2: replays of a CUDA graph; i3: scores and selection, the peer's in four parts"]},
            start, ["python", "bench/attention_peers.py", *sys.argv[1:]],
        )  # fmt: skip

    for row in args.rows.split(","):
        try:
            if row == "kernels":
                for run in kernels(args.lane, not_run):
                    print(run, flush=True)
                    runs.append(run)
                write()
                continue
            ways, judged, flops, kept, *more = problem_of(row, args.lane)
            wrap = more[0] if more else (lambda run: run)
            there = entered(row, ways, judged, kept, wrap, not_run)
            grads = contextlib.nullcontext() if row in BACKWARD else torch.no_grad()
            with grads:
                for run in measured(
                    row, there, lambda: torch.mm(a, b, out=c), meter, args.seconds, flops
                ):
                    show(run)
                    runs.append(run)
            del ways, judged, there
        except Exception as error:  # one row that breaks does not lose the others
            not_run[row] = reason(error)
            print(f"{row}: {reason(error)}", flush=True)
        torch.cuda.empty_cache()
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
