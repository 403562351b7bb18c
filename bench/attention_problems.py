"""What: the problems of bench/attention_peers.py: tensors, who runs on them, how a result is judged beside fp64.
Why: all contenders of a row get the same tensors and the same judge; measuring them is another matter.
Never: times anything; gives one side another problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import attention_contenders as of
import talea
import torch
from attention_contenders import BF16, E4M3, version
from sparse_h200 import ROWS, error_of, gradients, truth
from sparse_serve_h200 import HEADS, KEYS, QUERIES, TOP_K, dequantised, graphed, right_scores

JUDGED, LISTS, SELECTED = 16, 3, 4096
BACKWARD = {"b1": "f1", "b1h": "f3"}
PROFILED = {"i1": "index_kernel", "i1_fp8": "index_kernel", "i2": "select_kernel"}
ALL = ("f1", "f3", "d1", "d2", "b1", "b1h", "i1", "i1_fp8", "i2", "i3")
FLASH, CUDNN = version("sgl-flash-mla"), version("nvidia-cudnn-frontend")
TILELANG, MEGATRON, TORCH = version("tilelang"), version("megatron-core"), version("torch")


@dataclass
class Problem:
    ways: dict[str, Callable]  # name -> makes the call
    judged: Callable  # (call) -> its errors
    flops: float | None = None
    kept: Callable = lambda result: result if isinstance(result, tuple) else [result]
    wrap: Callable = lambda call: call


def slow(name):
    """Compiled by nvcc or Triton at its first call, which may take its time, or never end."""
    return name.startswith((TILELANG, MEGATRON)) or "compile" in name


def lists_of(keys, shape):
    """Lists of distinct keys: a mask, which is one way to run them, cannot hold a key twice."""
    return [torch.rand(*shape[:-1], keys, device="cuda").argsort(-1)[..., : shape[-1]].int()
            for _ in range(LISTS)]  # fmt: skip


def drawn(lists, **tensors):
    t = SimpleNamespace(lists=lists, **tensors)
    t.list = lambda i: lists[i % LISTS]
    return t


def attention_tensors(row, small, gradients_too):
    queries, keys, heads, slots, columns, value = ROWS[row]
    if small:
        queries, keys = 256, 4096
    torch.manual_seed(1)
    new = {"device": "cuda", "dtype": BF16}
    q = torch.randn(queries, heads, columns, **new, requires_grad=gradients_too)
    kv = torch.randn(keys, columns, **new, requires_grad=gradients_too)
    lists = lists_of(keys, (queries, slots))
    return drawn(lists, q=q, kv=kv, value=value, scale=columns**-0.5)


def forward_problem(row, lane, small):
    t = attention_tensors(row, small, False)
    queries, heads, columns = t.q.shape
    some = torch.arange(0, queries, queries // JUDGED, device="cuda")
    right = functools.cache(lambda: truth(t.q[some], t.kv, t.lists[0][some], t.value))

    def ours():
        return lambda i: talea.sparse_attention(
            t.q, t.kv, t.list(i), value_dim=t.value, lane=lane
        )  # fmt: skip

    def judged(run):
        return {"relative_l2": error_of(run(0)[some], right())}

    ways = {
        f"Talea {lane}": ours,
        FLASH: partial(of.flash_mla_forward, t),
        CUDNN: partial(of.cudnn_forward, t),
        TILELANG: partial(of.tilelang_forward, t),
        f"{MEGATRON}, tilelang": partial(of.megatron_forward, t, "tilelang"),
        f"{MEGATRON}, cudnn": partial(of.megatron_forward, t, "cudnn"),
        f"{TORCH}, gathered in chunks": partial(of.torch_forward, t, of.torch_gathered),
        f"{TORCH}, gathered, torch.compile": partial(of.torch_forward, t, of.torch_gathered, True),
        f"{TORCH}, all keys and a mask": partial(of.torch_forward, t, of.torch_masked),
    }
    flops = 2.0 * queries * t.lists[0].shape[1] * heads * (columns + t.value)
    return Problem(ways, judged, flops)


def backward_problem(row, lane, small):
    t = attention_tensors(BACKWARD[row], small, True)
    queries, heads, columns = t.q.shape
    d_o = torch.randn(queries, heads, t.value, device="cuda", dtype=BF16)
    some = torch.arange(0, queries, queries // JUDGED, device="cuda")
    few = torch.zeros_like(d_o).index_copy_(0, some, d_o[some])  # one shape for all: some compile
    right = functools.cache(
        lambda: gradients(t.q[some], t.kv, t.lists[0][some], d_o[some], t.value)
    )

    @functools.cache
    def kept_forward(i):
        with torch.no_grad():
            out = talea.sparse_attention(
                t.q, t.kv, t.list(i), value_dim=t.value, lane=lane, outputs=("lse",)
            )
        return out.o.contiguous(), out.lse.contiguous()

    t.forward = lambda i: kept_forward(i % LISTS)

    def ours(dkv_sum, mebibytes):
        saved = [talea.sparse_attention(t.q, t.kv, i, value_dim=t.value, lane=lane, dkv_sum=dkv_sum,
                                        workspace_limit=mebibytes << 20) for i in t.lists]  # fmt: skip
        return lambda i, d_o: torch.autograd.grad(
            saved[i % LISTS], (t.q, t.kv), d_o, retain_graph=True
        )

    def judged(run):
        dq, dkv = run(0, few)
        errors = {"dq_relative_l2": error_of(dq[some], right()[0]),
                  "dkv_relative_l2": error_of(dkv, right()[1])}  # fmt: skip
        return {"relative_l2": max(errors.values()), **errors}

    def upstream(make):
        """Calls that take a list's number alone; the judge gives its own upstream gradient."""

        def made():
            run = make()
            return lambda i, up=d_o: run(i, up)

        return made

    ways = {
        f"Talea {lane}, atomic": partial(ours, "atomic", 256),
        f"Talea {lane}, deterministic": partial(ours, "deterministic", 2560),
        CUDNN: partial(of.cudnn_backward, t),
        TILELANG: partial(of.tilelang_backward, t),
        f"{MEGATRON}, tilelang": partial(of.megatron_backward, t, "tilelang"),
        f"{MEGATRON}, tilelang, its kernels alone": partial(of.megatron_kernels_backward, t),
        f"{MEGATRON}, cudnn": partial(of.megatron_backward, t, "cudnn"),
        f"{TORCH}, gathered in chunks": partial(of.torch_backward, t, of.torch_gathered),
        f"{TORCH}, gathered, torch.compile": partial(of.torch_backward, t, of.torch_gathered, True),
    }
    flops = 2.0 * queries * t.lists[0].shape[1] * heads * (3 * columns + 2 * t.value)
    return Problem({n: upstream(make) for n, make in ways.items()}, judged, flops)


def decode_problem(row, lane, small):
    batch, keys = (128, 16384) if row == "d1" else (2, 32768)
    if small:
        batch, keys = min(batch, 8), 4096
    torch.manual_seed(2)
    q = torch.randn(batch, 2, 128, 576, device="cuda", dtype=BF16)
    packed = torch.cat(
        [talea.pack_rows(torch.randn(min(8, batch), keys, 576, device="cuda", dtype=BF16))
         for _ in range(0, batch, 8)])  # fmt: skip
    t = drawn(lists_of(keys, (batch, 2, TOP_K)), q=q, packed=packed, value=512, scale=576**-0.5)
    b = batch - 1
    chosen = dequantised(packed[b][t.lists[0][b].long()])
    p = (torch.einsum("shd,skd->shk", q[b].double(), chosen) * t.scale).softmax(-1)
    right = torch.einsum("shk,skv->shv", p, chosen[..., : t.value])

    def ours():
        kv = talea.PackedKV(packed)
        return lambda i: talea.sparse_attention(q, kv, t.list(i), value_dim=t.value, lane=lane)

    def judged(run):
        return {"relative_l2": error_of(run(0)[b], right)}

    ways = {
        f"Talea {lane}": ours,
        FLASH: partial(of.flash_mla_decode, t),
        f"{TORCH}, gathered and widened": partial(of.torch_decode, t),
    }
    flops = 2.0 * batch * 2 * TOP_K * 128 * (576 + 512)
    # A call of microseconds is replayed, as a server does; the list is that of the capture.
    return Problem(ways, judged, flops, wrap=graphed if row == "d2" else lambda run: run)


def index_tensors(queries, small, dtype=BF16):
    """Causal queries: each selects among the keys up to its own place."""
    keys = 8192 if small else KEYS
    queries = min(queries, keys)
    torch.manual_seed(1)
    new = {"device": "cuda", "dtype": BF16}
    q, k = torch.randn(queries, HEADS, 128, **new), torch.randn(keys, 128, **new)
    w = torch.rand(queries, HEADS, device="cuda")
    end = torch.arange(1, queries + 1, device="cuda", dtype=torch.int32)
    t = SimpleNamespace(q=q.to(dtype), k=k.to(dtype), w=w, begin=torch.zeros_like(end), end=end,
                        top_k=TOP_K)  # fmt: skip
    ones = (torch.ones(queries, HEADS, device="cuda"), torch.ones(keys, device="cuda"))
    fp8 = dtype == E4M3
    t.wide = t.q.to(BF16), t.k.to(BF16)
    t.ours = [talea.Fp8(x, s) if fp8 else x for x, s in zip((t.q, t.k), ones, strict=True)]
    t.some = torch.arange(TOP_K, queries, (queries - TOP_K) // 8, device="cuda")
    return t


def right_of(t):
    """fp64 scores of some queries, -Inf behind each, and the set of their TOP_K."""
    right = right_scores(*t.wide, t.w, t.some)
    right.masked_fill_(
        torch.arange(t.k.shape[0], device="cuda")[None] >= t.end[t.some, None], -torch.inf
    )
    best = torch.zeros_like(right, dtype=torch.bool).scatter_(1, right.topk(TOP_K).indices, True)
    return right, best


def recall_of(found, best):
    recall = float(best.gather(1, found.long().clamp(min=0)).double().mean())
    return {"recall": recall, "relative_l2": 1 - recall}


def scores_problem(row, lane, small):
    t = index_tensors(QUERIES, small, E4M3 if row == "i1_fp8" else BF16)
    right = functools.cache(lambda: right_of(t)[0])

    def ours():
        return lambda _: talea.sparse_select(
            *t.ours, t.w, top_k=TOP_K, causal=True, return_scores=True, lane=lane
        )

    def judged(run):
        """Scores of the keys up to the query's own; of ours those that it selected."""
        found = run(0)
        if isinstance(found, tuple):
            own, found = right().gather(1, found[0][t.some].long()), found[2][t.some]
        else:
            seen = torch.isfinite(right())
            own, found = right()[seen], found[t.some][seen]
        return {"relative_l2": error_of(found, own)}

    ways = {f"Talea {lane}": ours, CUDNN: lambda: of.whole(of.cudnn_scores(t))}
    if row == "i1":
        ways[f"{MEGATRON}, tilelang"] = partial(of.megatron_scores, t)
    else:
        ways[TILELANG] = partial(of.tilelang_scores, t)
    queries = t.q.shape[0]
    flops = 2.0 * queries * (queries + 1) / 2 * HEADS * 128
    return Problem(ways, judged, flops, kept=lambda result: [])


def selection_problem(row, lane, small):
    """Of scores that lie there; ours forms them in the same call, and its selection alone is counted."""
    t = index_tensors(SELECTED, small)
    t.end = torch.full_like(t.end, t.k.shape[0])
    t.scores = torch.cat([
        torch.einsum("shk,sh->sk", torch.einsum("shd,kd->shk", q.float(), t.k.float()).relu_(), w)
        for q, w in zip(t.q.split(of.CHUNK), t.w.split(of.CHUNK), strict=True)
    ])  # fmt: skip
    t.some = t.some[: JUDGED // 2]
    right = functools.cache(lambda: right_of(t)[1])

    def ours():
        return lambda _: talea.sparse_select(*t.ours, t.w, top_k=TOP_K, lane=lane)[0]

    def judged(run):
        return recall_of(run(0)[t.some], right())

    ways = {
        f"Talea {lane}": ours,
        CUDNN: partial(of.cudnn_select, t, False),
        f"{CUDNN}, deterministic": partial(of.cudnn_select, t, True),
        TILELANG: partial(of.tilelang_select, t),
        f"{TORCH}, topk": partial(of.torch_select, t),
    }
    return Problem(ways, judged)


def index_problem(row, lane, small):
    """Scores and selection: whole calls, as a model makes them."""
    t = index_tensors(QUERIES, small)
    right = functools.cache(lambda: right_of(t)[1])

    def ours():
        return lambda _: talea.sparse_select(*t.ours, t.w, top_k=TOP_K, causal=True, lane=lane)[0]

    def judged(run):
        return recall_of(run(0)[t.some], right())

    ways = {
        f"Talea {lane}": ours,
        CUDNN: partial(of.cudnn_index, t, False),
        f"{CUDNN}, deterministic": partial(of.cudnn_index, t, True),
        f"{MEGATRON}, tilelang": partial(of.megatron_index, t, "tilelang"),
        f"{MEGATRON}, cudnn": partial(of.megatron_index, t, "cudnn"),
        f"{TORCH}, scores in chunks and topk": partial(of.torch_index, t),
    }
    queries = t.q.shape[0]
    return Problem(ways, judged, 2.0 * queries * (queries + 1) / 2 * HEADS * 128)


def problem_of(row, lane, small=False):
    if row in BACKWARD:
        return backward_problem(row, lane, small)
    kinds = {"d1": decode_problem, "d2": decode_problem, "i1": scores_problem,
             "i1_fp8": scores_problem, "i2": selection_problem, "i3": index_problem}  # fmt: skip
    return kinds.get(row, forward_problem)(row, lane, small)
