"""What: the libraries of bench/attention_peers.py, each a function of a problem's tensors that returns its call:
FlashMLA, the cuDNN frontend, TileLang's examples, Megatron-core, PyTorch.
Why: how a peer was called decides what its time is worth; it stands in one place, to be read.
Never: imports a library before its call is made; measures; falls back when a library declines.

TileLang's kernels of sparse attention are example files, not in its wheel: TILELANG_EXAMPLES names the folder
examples/deepseek_v32 of its repository.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CHUNK = 64  # queries of which PyTorch gathers the keys at once
PART = 4096  # queries whose scores exist at once where a peer selects from whole rows


def version(package):
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def given(result, who):
    """Megatron's backends say None where they decline."""
    if result is None:
        raise NotImplementedError(f"{who} declines this problem")
    return result


@functools.cache
def example(name):
    """A module of TileLang's examples, without the causal rule that its sparse attention has built in: the
    lists of these problems hold any key. The work of a masked slot is that of any other."""
    folder = os.environ.get("TILELANG_EXAMPLES")
    if not folder:
        raise ModuleNotFoundError("TILELANG_EXAMPLES names no folder of TileLang's examples")
    if "utils" not in sys.modules or not hasattr(sys.modules["utils"], "of_tilelang"):
        copy = Path(tempfile.mkdtemp()) / "examples"
        shutil.copytree(folder, copy)
        for file in copy.glob("sparse_mla_*.py"):
            text = file.read_text()
            if "<= max_kv_i" not in text:
                continue
            file.write_text(text.replace("<= max_kv_i", ">= 0"))
        sys.path.insert(0, str(copy))
        importlib.import_module("utils").of_tilelang = True
    return importlib.import_module(name)


# forward: run(i) -> o of the i-th list


def flash_mla_forward(t):
    from flash_mla import flash_mla_sparse_fwd

    def run(i):
        return flash_mla_sparse_fwd(t.q, t.kv[:, None], t.list(i)[:, None], t.scale,
                                    d_v=t.value, use_legacy=True)[0]  # fmt: skip

    return run


def cudnn_forward(t):
    from cudnn.deepseek_sparse_attention import sparse_attention_forward_wrapper

    return lambda i: sparse_attention_forward_wrapper(t.q, t.kv, t.list(i), softmax_scale=t.scale)[
        "out"
    ]


def tilelang_forward(t):
    forward = example("sparse_mla_fwd").sparse_mla_fwd_interface
    q, kv = t.q.detach()[None], t.kv.detach()[None, :, None]
    return lambda i: forward(q, kv, t.list(i)[None, :, None], sm_scale=t.scale)[0][0]


def megatron_attention(backend):
    """The hook that its attention layer calls: [S, B, H, D], one head of keys, indices [B, S, K]."""
    at = "megatron.core.transformer.experimental_attention_variant.dsa_"
    hook = importlib.import_module(f"{at}{backend}_kernels").run_fused_absorbed_sparse_attention
    who = f"its {backend} backend"
    return lambda q, kv, i, t: given(
        hook(q[:, None], kv[:, None, None], i[None], t.scale, t.value), who
    )[:, 0]


def megatron_forward(t, backend):
    attend = megatron_attention(backend)
    return lambda i: attend(t.q, t.kv, t.list(i), t)


def gathered(q, kv, indices, value):
    keys = kv[indices]
    p = (torch.einsum("shd,skd->shk", q, keys) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("shk,skv->shv", p, keys[..., :value])


def torch_gathered(t, compiled=False):
    one = torch.compile(gathered) if compiled else gathered

    def attend(q, kv, indices):
        parts = range(0, q.shape[0], CHUNK)
        return torch.cat([one(q[a : a + CHUNK], kv, indices[a : a + CHUNK], t.value)
                          for a in parts])  # fmt: skip

    return attend


def masked(q, kv, indices, value):
    """All keys for a part of the queries, and a mask."""
    mask = torch.zeros(q.shape[0], kv.shape[0], dtype=torch.bool, device=q.device)
    mask.scatter_(1, indices.long(), True)
    keys = kv.expand(1, q.shape[1], *kv.shape)
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, keys[..., :value], attn_mask=mask
    )[0].transpose(0, 1)


def torch_masked(t, compiled=False):
    one = torch.compile(masked) if compiled else masked
    return lambda q, kv, i: one(q, kv, i, t.value)


def torch_forward(t, way, compiled=False):
    attend = way(t, compiled)
    return lambda i: attend(t.q, t.kv, t.list(i))


# backward: run(i, d_o) -> dq, dkv; those that ask for o and lse get the ones of t.forward


def cudnn_backward(t):
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

    none = torch.full((t.q.shape[1],), -torch.inf, device="cuda")  # a sink that weighs nothing
    q, kv = t.q.detach(), t.kv.detach()

    def run(i, d_o):
        o, lse = t.forward(i)
        made = sparse_attention_backward_wrapper(
            q, kv, o, d_o, lse, none, t.list(i), softmax_scale=t.scale
        )
        return made["dq"], made["dkv"]

    return run


def tilelang_backward(t):
    backward = example("sparse_mla_bwd").sparse_mla_bwd
    return in_base_2(t, lambda q, kv, o, d_o, i, lse: backward(q, kv, o, d_o, i, lse, t.scale))


def megatron_kernels_backward(t):
    from megatron.core.transformer.experimental_attention_variant.ops import sparse_mla

    def backward(q, kv, o, d_o, i, lse):
        delta = sparse_mla.sparse_mla_delta(o, d_o)
        return sparse_mla.sparse_mla_bwd(q, kv, None, d_o, i, lse, sm_scale=t.scale, delta=delta)

    return in_base_2(t, backward)


def in_base_2(t, backward):
    """TileLang's kernels, its own and Megatron's: a batch, a head of keys, lse in base 2."""
    q, kv = t.q.detach()[None], t.kv.detach()[None, :, None]
    in_2 = functools.cache(lambda i: (t.forward(i)[0][None], t.forward(i)[1][None] / math.log(2)))

    def run(i, d_o):
        o, lse = in_2(i % len(t.lists))
        dq, dkv = backward(q, kv, o, d_o[None], t.list(i)[None, :, None], lse)
        return dq[0], dkv[0, :, 0]

    return run


def by_autograd(t, attend):
    """One list: what autograd keeps of a forward would not be there three times."""
    saved = attend(t.q, t.kv, t.list(0))
    return lambda i, d_o: torch.autograd.grad(saved, (t.q, t.kv), d_o, retain_graph=True)


def megatron_backward(t, backend):
    attend = megatron_attention(backend)
    return by_autograd(t, lambda q, kv, i: attend(q, kv, i, t))


def torch_backward(t, way, compiled=False):
    return by_autograd(t, way(t, compiled))


# decode of packed rows: run(i) -> o


def flash_mla_decode(t):
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    batch, keys = t.packed.shape[:2]
    cache = t.packed.view(torch.uint8).reshape(batch * keys // 64, 64, 1, 656)
    first = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None, None] * keys
    lists = [i + first for i in t.lists]
    meta, _ = get_mla_metadata()

    def run(i):
        return flash_mla_with_kvcache(
            t.q, cache, None, None, t.value, meta, softmax_scale=t.scale, is_fp8_kvcache=True,
            indices=lists[i % len(lists)], use_legacy=True,
        )[0]  # fmt: skip

    return run


def torch_decode(t):
    entry = torch.arange(t.q.shape[0], device="cuda")[:, None, None]

    def run(i):
        rows = t.packed[entry, t.list(i).long()]
        scales = rows[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
        latent = rows[..., :512].contiguous().view(E4M3).float() * scales
        keys = torch.cat([latent.to(BF16), rows[..., 528:].contiguous().view(BF16)], -1)
        p = (torch.einsum("bshd,bskd->bshk", t.q, keys) * t.scale).softmax(-1)
        return torch.einsum("bshk,bskv->bshv", p, keys[..., : t.value])

    return run


# index scores of causal queries: run(_) -> [S, S_kv]; selection: run(_) -> indices


def cudnn_scores(t):
    from cudnn.deepseek_sparse_attention import indexer_forward_wrapper

    def part(rows, first):
        more = {}
        if t.q.dtype == E4M3:
            ones = torch.ones(1, t.k.shape[0], 1, device="cuda")
            more = {
                "precision": "fp8",
                "q_scale": torch.ones_like(t.w[None, rows]),
                "k_scale": ones,
            }
        at = torch.full((1,), first, device="cuda", dtype=torch.int32)
        return indexer_forward_wrapper(
            t.q[None, rows], t.k[None, :, None], t.w[None, rows], ratio=1, q_causal_offsets=at, **more
        )["scores"][0]  # fmt: skip

    return part


def whole(part):
    return lambda _: part(slice(None), 0)


def tilelang_scores(t):
    scores = example("fp8_lighting_indexer").mqa_attn_return_logits_interface
    ones = torch.ones(t.k.shape[0], device="cuda")
    return lambda _: scores(t.q, t.k, ones, t.w, t.begin, t.end)


def megatron_scores(t):
    from megatron.core.transformer.experimental_attention_variant.ops.indexer import (
        indexer_fwd_interface,
    )

    return lambda _: indexer_fwd_interface(t.q, t.k, t.w, t.begin, t.end)


def cudnn_selection(scores, lengths, top_k, deterministic):
    from cudnn.deepseek_sparse_attention import indexer_top_k_wrapper

    return indexer_top_k_wrapper(
        scores, lengths, top_k, return_val=False, deterministic=deterministic
    )["indices"]


def cudnn_index(t, deterministic):
    scores = cudnn_scores(t)

    def run(_):
        found = []
        for first in range(0, t.q.shape[0], PART):
            rows = slice(first, first + PART)
            found.append(cudnn_selection(scores(rows, first), t.end[rows], t.top_k, deterministic))
        return torch.cat(found)

    return run


def megatron_index(t, backend):
    at = "megatron.core.transformer.experimental_attention_variant.dsa_"
    hook = importlib.import_module(f"{at}{backend}_kernels").run_fused_qk_topk
    return lambda _: given(
        hook(t.q[:, None], t.k[:, None], t.w[:, None], t.top_k, t.begin, t.end, 8192),
        f"its {backend} backend",
    )[0][0]


def torch_index(t):
    def run(_):
        found = []
        for a in range(0, t.q.shape[0], 256):
            z = torch.einsum("shd,kd->shk", t.q[a : a + 256], t.k).relu_()
            scores = torch.einsum("shk,sh->sk", z.float(), t.w[a : a + 256])
            later = torch.arange(t.k.shape[0], device="cuda") >= t.end[a : a + 256, None]
            found.append(scores.masked_fill_(later, -torch.inf).topk(t.top_k, sorted=False).indices)
        return torch.cat(found)

    return run


def cudnn_select(t, deterministic):
    lengths = torch.full((t.scores.shape[0],), t.scores.shape[1], device="cuda", dtype=torch.int32)
    return lambda _: cudnn_selection(t.scores, lengths, t.top_k, deterministic)


def tilelang_select(t):
    select = example("topk_selector").tl_topk
    begin = torch.zeros(t.scores.shape[0], device="cuda", dtype=torch.int32)
    end = torch.full_like(begin, t.scores.shape[1])
    return lambda _: select(t.scores, begin, end, t.top_k)


def torch_select(t):
    return lambda _: torch.topk(t.scores, t.top_k, sorted=False).indices
