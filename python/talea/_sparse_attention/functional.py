"""talea.sparse_attention, sparse_select, sparse_index_loss, index_mask, pack_rows, require_clean."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field

import torch

from .. import _abi, _fast, _kept
from .._abi import DataError, UsageError
from .._call import Receipt
from .._torch import kept_by_values, tells
from .._values import flag, group_name, whole
from . import _attention, _call, _checks, _indexer, _settings, _torch, storage
from .storage import Fp8, PackedKV

__all__ = ["Fp8", "PackedKV", "SparseAttentionOutput", "index_mask", "pack_rows", "require_clean",
           "sparse_attention", "sparse_index_loss", "sparse_select"]  # fmt: skip
OUTPUTS = _attention.RESULTS[1:]
_line_of = kept_by_values(_settings.text_of)


@dataclass
class SparseAttentionOutput:
    """o and what was asked for beside it; o and lse are differentiable in q, kv and sink."""

    o: torch.Tensor
    lse: torch.Tensor | None = None
    row_max: torch.Tensor | None = None
    o_residual: torch.Tensor | None = None
    status: torch.Tensor | None = None
    _receipt: Receipt | None = field(default=None, repr=False)

    def receipt(self) -> dict:
        """What ran in the forward call, what declined and why, and what it cost."""
        if self._receipt is None:
            raise RuntimeError("receipt: not available inside a compiled graph")
        return self._receipt.facts()


def _device_type(t: torch.Tensor) -> str:
    return "cpu" if t.is_cpu else "cuda"  # of another, the call itself says so


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast: floating tensors of an operand's kind; FP8, scales and indices stay."""
    device = _device_type(tensors[0])
    if not torch.is_autocast_enabled(device):
        return tensors
    kinds, to = (torch.float32, torch.float16, torch.bfloat16), torch.get_autocast_dtype(device)
    return tuple(t.to(to) if t.dtype in kinds else t for t in tensors)


def _turned(layout: str, t):
    """[S, B, ...] as [B, S, ...] or back: a view."""
    return t.transpose(0, 1) if layout == "sbhd" and t is not None else t


def _batch_first(layout: str, t, rank: int, batch: int):
    """A given tensor as [B, S, ...]: below `rank`, or with another second extent where B is 1, it has
    no B to turn."""
    if t is None or t.dim() < rank or (batch == 1 and t.shape[1] != 1):
        return t
    return _turned(layout, t)


def _names(outputs, q, operands: str, trained: bool) -> tuple[str, ...]:
    wanted = {"o"} if outputs is None else {"o", *outputs}
    if trained:
        wanted.add("lse")
        if operands == "split" and _torch.o_dtype(q) in (torch.bfloat16, torch.float16):
            wanted.add("o_residual")
    return tuple(n for n in _attention.RESULTS if n in wanted)


@tells("heads_group", "sequence_group", always="gather_kv")
def sparse_attention(
    q: torch.Tensor | Fp8,
    kv: torch.Tensor | Fp8 | PackedKV,
    indices: torch.Tensor,
    *,
    value_dim: int,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    causal: bool = False,
    q_positions: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    layout: str = "bshd",
    index_space: str = "rows",
    index_check: str = "ignore",
    outputs: tuple[str, ...] | None = None,
    main_grad: torch.Tensor | None = None,
    dkv_sum: str = "deterministic",
    operands: str = "native",
    heads_group=None,
    sequence_group=None,
    workspace_limit: int = 256 << 20,
    lane: str = "auto",
    q_position_base: int = 0,
    q_scale: torch.Tensor | None = None,
    fp8_path: str = "any",
    gather_kv: bool = False,
    threads: int = 0,
):
    """Attention of every query over its list of keys; a row of kv is key and (its first columns) value.

    q [B, S, H, D]; kv [B, S_kv, G, D], G or B left out where they are 1; indices [B, S, G, K] of
    int32 or int64, -1 for an absent slot; o [B, S, H, value_dim]. Shapes, storages and edges:
    docs/sparse_attention.md. Returns o, or a SparseAttentionOutput when `outputs` names anything
    ("lse", "row_max", "o_residual", "status"). Gradients reach q, kv and sink.

    main_grad: fp32, shaped as kv; backward adds the gradient of kv into it; kv gets none.
    """
    given = {"q": q, "kv": kv}
    q, q_scale = storage.open_q(q, q_scale)
    kv, kv_scale, kind = storage.open_kv(kv)
    _checks.check_layout(layout, q, cu_seqlens_q)
    _checks.check_words(index_space=index_space, index_check=index_check, operands=operands)
    _checks.check_main_grad(main_grad, kv)
    _checks.check_fp8_grad(main_grad, q=(given["q"], q), kv=(given["kv"], kv))
    value_dim = _checks.check_value_dim(value_dim, q.shape[-1])
    q, kv = _cast(q, kv)
    outputs = _checks.output_names(outputs, OUTPUTS)
    _checks.check_gather(gather_kv, sequence_group)
    _checks.check_report(index_check, "status" in (outputs or ()), "which is none of outputs")
    _checks.warn_unused(causal, q_positions, q_position_base)
    q = _turned(layout, q)
    batch = q.shape[0]
    # Pages of a cache are no sequence: they lie as they lie, whatever the layout.
    rows = "bshd" if block_table is not None or index_space == "slots" else layout
    kv, main_grad = (_batch_first(rows, t, 3, batch) for t in (kv, main_grad))
    if sink is not None:
        sink = storage.tensor("sink", sink)
    rest = [
        _batch_first(layout, storage.tensor("indices", indices), 3, batch),
        _batch_first(layout, _checks.constant("q_scale", q_scale), 2, batch),
        _batch_first(rows, _checks.constant("kv_scale", kv_scale), 2, batch),
        _batch_first(layout, _checks.constant("topk_length", topk_length), 2, batch),
        _checks.constant("cu_seqlens_q", cu_seqlens_q),
        _checks.constant("cu_seqlens_k", cu_seqlens_k),
        _batch_first(layout, _checks.constant("q_positions", q_positions), 2, batch),
        _checks.constant("block_table", block_table),
        _checks.constant("kv_lengths", kv_lengths),
    ]
    trained = torch.is_grad_enabled() and (
        main_grad is not None
        or q.requires_grad
        or kv.requires_grad
        or (sink is not None and sink.requires_grad)
    )
    names, compiling = _names(outputs, q, operands, trained), torch.compiler.is_compiling()
    text = _line_of(
        value_dim=value_dim, scale=0.0 if scale is None else scale, causal=causal,
        q_position_base=q_position_base, index_space=index_space, index_check=index_check,
        kv_storage=kind, fp8_path=fp8_path, dkv_sum=dkv_sum, operands=operands, threads=threads,
        workspace_limit_bytes=workspace_limit, lane=lane, outputs=names, gather_kv=gather_kv,
        heads_group=group_name("heads_group", heads_group), sequence_group=group_name("sequence_group", sequence_group),
        receipt=bool(outputs) and not compiling,
    )  # fmt: skip
    if compiling:
        from . import _ops

        found = _ops.apply(text, q, kv, sink, rest)
    else:
        found = _attention.apply(text, q, kv, sink, rest, main_grad)
    if not outputs:
        return _turned(layout, found["o"])
    receipt = None if compiling else _torch.latest.receipt
    shown = {n: found[n] for n in names if n == "o" or n in outputs}
    shown = {n: t if n == "status" else _turned(layout, t) for n, t in shown.items()}
    return SparseAttentionOutput(**shown, _receipt=receipt)


def _opened_index(name: str, t, scale):
    """index_q or index_k with its scale, however it was given."""
    if isinstance(t, Fp8):
        if scale is not None:
            raise UsageError(f"{name}_scale: given beside talea.Fp8, which has its own")
        t, scale = t.data, t.scale
    t, scale = storage.tensor(name, t), _checks.constant(f"{name}_scale", scale)
    if (t.dtype == torch.float8_e4m3fn) != (scale is not None):
        without = f"{name}_scale: none" if scale is None else f"{name}_scale: given"
        raise DataError(
            f"{without} beside {name} of {t.dtype}; float8_e4m3fn, and nothing else, has one"
        )
    return t, scale


@tells("sequence_group", always="gather_kv")
def sparse_select(
    index_q: torch.Tensor | Fp8,
    index_k: torch.Tensor | Fp8,
    index_weights: torch.Tensor,
    *,
    top_k: int,
    act: str = "relu",
    causal: bool = False,
    begin: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    key_stride: int = 1,
    index_q_scale: torch.Tensor | None = None,
    index_k_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    q_positions: torch.Tensor | None = None,
    return_scores: bool = False,
    lane: str = "auto",
    q_position_base: int = 0,
    sequence_group=None,
    gather_kv: bool = False,
    workspace_limit: int = 256 << 20,
    threads: int = 0,
):
    """(indices [B, S, top_k], topk_length [B, S][, scores]): each query's keys of the largest score.

    index_q [B, S, Hi, di], index_k [B, S_kv, di], index_weights [B, S, Hi]. Indices are written
    ascending, then -1. Ties go to the lower index, -Inf is never selected, NaN comes first.
    """
    index_q, index_q_scale = _opened_index("index_q", index_q, index_q_scale)
    index_k, index_k_scale = _opened_index("index_k", index_k, index_k_scale)
    index_q, index_k = _cast(index_q, index_k)
    _checks.check_gather(gather_kv, sequence_group)
    _checks.warn_unused(causal, q_positions, q_position_base, key_stride)
    top_k = whole("top_k", top_k, 0)
    if top_k >= 2**31:
        raise UsageError(f"top_k = {top_k}: indices of 32 bits name fewer keys")
    return_scores = flag("return_scores", return_scores)
    if index_q.dim() not in (3, 4):
        raise DataError(f"index_q: shape {list(index_q.shape)}: [B, S, Hi, di] is needed")
    tensors = [
        index_q.detach(), index_q_scale, index_k.detach(), index_k_scale,
        storage.tensor("index_weights", index_weights).detach(), _checks.constant("begin", begin),
        _checks.constant("end", end), _checks.constant("cu_seqlens_q", cu_seqlens_q),
        _checks.constant("cu_seqlens_k", cu_seqlens_k), _checks.constant("q_positions", q_positions),
    ]  # fmt: skip
    names = ("indices", "topk_length", "scores") if return_scores else ("indices", "topk_length")
    text = _line_of(
        top_k=top_k, q_position_base=q_position_base, key_stride=key_stride, act=act,
        causal=causal, threads=threads, workspace_limit_bytes=workspace_limit, lane=lane,
        outputs=names, sequence_group=group_name("sequence_group", sequence_group), gather_kv=gather_kv,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        _torch.refuse_transforms("sparse_select", (index_q, index_k, index_weights))
        if _kept.plain(tensors) and _fast.unwatched():  # past torch's dispatch
            made = _indexer.select(text, tensors)
            return tuple(made[n] for n in names)
    from . import _ops

    return tuple(_ops.select(*tensors, text)[: len(names)])


@tells("heads_group", "sequence_group", "batch_group", always="gather_kv")
def sparse_index_loss(
    index_q: torch.Tensor | Fp8,
    index_k: torch.Tensor | Fp8,
    index_weights: torch.Tensor,
    q: torch.Tensor | Fp8,
    kv: torch.Tensor | Fp8 | PackedKV,
    *,
    value_dim: int,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scale: float | None = None,
    coeff: float = 1.0,
    row_weight: torch.Tensor | None = None,
    denominator: str | float = "valid",
    denominator_scope: str = "local",
    batch_group=None,
    causal: bool = False,
    act: str = "relu",
    begin: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    key_stride: int = 1,
    index_q_scale: torch.Tensor | None = None,
    index_k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    q_positions: torch.Tensor | None = None,
    q_position_base: int = 0,
    index_space: str = "rows",
    index_check: str = "ignore",
    dindex_k_sum: str = "deterministic",
    heads_group=None,
    sequence_group=None,
    gather_kv: bool = False,
    workspace_limit: int = 256 << 20,
    lane: str = "auto",
    threads: int = 0,
) -> torch.Tensor:
    """KL(attention's mean distribution || softmax of the index scores), a scalar.

    Over the keys of `indices`, or over all keys in bounds (None: the dense warm-up). Gradients reach
    index_q, index_k and index_weights; the attention's q and kv are constants. lse: of attention over
    the same keys, which spares a pass. value_dim is what the attention has, for the check of shapes.
    """
    index_q, index_q_scale = _opened_index("index_q", index_q, index_q_scale)
    index_k, index_k_scale = _opened_index("index_k", index_k, index_k_scale)
    index_weights = storage.tensor("index_weights", index_weights)
    _checks.check_fp8_grad(index_q=(index_q, index_q), index_k=(index_k, index_k))
    q, q_scale = storage.open_q(q, q_scale)
    kv, kv_scale, kind = storage.open_kv(kv)
    index_q, index_k, q, kv = _cast(index_q, index_k, q, kv)
    _checks.check_gather(gather_kv, sequence_group)
    _checks.check_words(index_check=index_check)
    _checks.check_report(index_check, False, "and a loss gives none; 'checked' is an error")
    _checks.warn_unused(causal, q_positions, q_position_base, key_stride)
    if q.dim() not in (3, 4):
        raise DataError(f"q: shape {list(q.shape)}: [B, S, H, D] is needed")
    _checks.check_value_dim(value_dim, q.shape[-1])
    trained = (index_q, index_k, index_weights)
    need = [t.requires_grad and torch.is_grad_enabled() for t in trained]
    given = not isinstance(denominator, str)
    tensors = [
        index_q, index_q_scale, index_k, index_k_scale, index_weights, q.detach(), q_scale,
        kv.detach(), kv_scale, _checks.constant("indices", indices), _checks.constant("topk_length", topk_length),
        None if lse is None else storage.tensor("lse", lse).detach(),
        _checks.constant("row_weight", row_weight), _checks.constant("begin", begin), _checks.constant("end", end),
        _checks.constant("cu_seqlens_q", cu_seqlens_q), _checks.constant("cu_seqlens_k", cu_seqlens_k),
        _checks.constant("q_positions", q_positions),
    ]  # fmt: skip
    text = _settings.text_of(
        coeff=coeff, denominator="given" if given else denominator,
        denominator_value=denominator if given else 0.0, denominator_scope=denominator_scope,
        scale=0.0 if scale is None else scale, q_position_base=q_position_base,
        key_stride=key_stride, keys="dense" if indices is None else "sparse", act=act,
        causal=causal, index_space=index_space, index_check=index_check, kv_storage=kind,
        dindex_k_sum=dindex_k_sum, threads=threads, workspace_limit_bytes=workspace_limit,
        lane=lane, batch_group=group_name("batch_group", batch_group), heads_group=group_name("heads_group", heads_group),
        sequence_group=group_name("sequence_group", sequence_group), gather_kv=gather_kv,
    )  # fmt: skip
    from . import _ops

    if not torch.compiler.is_compiling():
        _torch.refuse_transforms("sparse_index_loss", (index_q, index_k, index_weights, q, kv))
    return _ops.index_loss(*tensors, text, need)[0]


def index_mask(
    mask: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    causal: bool = False,
    q_positions: torch.Tensor | None = None,
    q_position_base: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    index_space: str = "rows",
    index_check: str = "ignore",
) -> torch.Tensor:
    """In place: element (s, j) of an additive fp32 mask [B, S, S_kv] becomes 0 where a valid slot of
    query s names key j; the others stay. No host read: legal while a graph is captured."""
    _checks.warn_unused(causal, q_positions, q_position_base)
    mask = _checks.constant("mask", storage.tensor("mask", mask))
    inputs = {
        "indices": storage.tensor("indices", indices),
        "topk_length": _checks.constant("topk_length", topk_length),
        "cu_seqlens_q": _checks.constant("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _checks.constant("cu_seqlens_k", cu_seqlens_k),
        "q_positions": _checks.constant("q_positions", q_positions),
    }
    text = _settings.text_of(
        causal=causal, q_position_base=q_position_base, index_space=index_space,
        index_check=index_check,
    )  # fmt: skip
    args = _call.describe("forward", text, inputs, {}, _torch.fill)
    args.stream = _torch.stream_of(mask.device)
    slot = _abi.Tensor()
    _torch.fill(slot, mask, "mask")
    _abi.check(_abi.lib.talea_sparse_attention_index_mask(c.byref(args), c.byref(slot)))
    if not mask.is_inference():
        torch.autograd.graph.increment_version(mask)
    return mask


def pack_rows(kv: torch.Tensor) -> torch.Tensor:
    """Rows of 576 (fp32, bf16, fp16) as u8 rows of 656 bytes: talea.PackedKV(pack_rows(kv))."""
    kv = _torch.rows_last(storage.tensor("kv", kv).detach())  # a name: the call reads its memory
    if kv.dim() == 0 or kv.shape[-1] != 576:
        raise DataError(f"kv: shape {list(kv.shape)}: rows of 576 are needed")
    rows = kv.new_empty((*kv.shape[:-1], storage.PACKED_BYTES), dtype=torch.uint8)
    source, target = _abi.Tensor(), _abi.Tensor()
    _torch.fill(source, kv, "kv")
    _torch.fill(target, rows, "rows")
    pack = _abi.lib.talea_sparse_attention_pack_rows
    _abi.check(pack(c.byref(source), c.byref(target), _torch.stream_of(kv.device)))
    return rows


def require_clean(status: torch.Tensor) -> None:
    """Waits for the device; DataError with count, first slot and value where an index was foreign."""
    slot = _abi.Tensor()
    _torch.fill(slot, storage.tensor("status", status), "status")
    clean = _abi.lib.talea_sparse_attention_require_clean
    _abi.check(clean(c.byref(slot), _torch.stream_of(status.device)))
