"""talea.sparse_attention, sparse_select, sparse_index_loss, index_mask, pack_rows, require_clean."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field

import torch

from .. import _abi
from .._abi import DataError, UsageError
from .._call import Receipt
from . import _attention, _call, _settings, _torch, storage
from .storage import Fp8, PackedKV

__all__ = ["Fp8", "PackedKV", "SparseAttentionOutput", "index_mask", "pack_rows", "require_clean",
           "sparse_attention", "sparse_index_loss", "sparse_select"]  # fmt: skip
OUTPUTS = _attention.RESULTS[1:]
LAYOUTS = ("bshd", "sbhd", "thd")


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


def _name_of(group) -> str:
    return "" if group is None else group.group_name


def _constant(name: str, t):
    """A tensor that gets no gradient: better said than left out."""
    if t is None:
        return None
    t = storage.tensor(name, t)
    if t.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"{name}: requires grad, and gets none here; pass {name}.detach()")
    return t


def _device_type(t: torch.Tensor) -> str:
    return "cpu" if t.is_cpu else "cuda"  # of another, the call itself says so


def _cast(t: torch.Tensor, device: str) -> torch.Tensor:
    """Under autocast: floating tensors of an operand's kind; FP8, scales and indices stay."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return t.to(torch.get_autocast_dtype(device)) if t.dtype in kinds else t


def _batch_first(layout: str, t, rank: int):
    """[S, B, ...] as [B, S, ...]: a view. Tensors below `rank` have no S and B to swap."""
    return t.transpose(0, 1) if layout == "sbhd" and t is not None and t.dim() >= rank else t


def _check_layout(layout: str, q: torch.Tensor, cu_seqlens) -> None:
    if layout not in LAYOUTS:
        raise UsageError(f"layout = {layout!r}: one of {', '.join(LAYOUTS)}")
    want = {"bshd": (3, 4), "sbhd": (4,), "thd": (3,)}[layout]
    if q.dim() not in want:
        raise DataError(
            f"q: shape {list(q.shape)} in layout {layout}: {want[-1]} extents are needed"
        )
    if layout == "thd" and cu_seqlens is None:
        raise UsageError("layout = 'thd': needs cu_seqlens_q and cu_seqlens_k")


def _check_value_dim(value_dim, columns: int) -> int:
    value_dim = _settings.whole("value_dim", value_dim)
    if not 1 <= value_dim <= columns:
        raise UsageError(f"value_dim = {value_dim}: must lie in [1, {columns}], the columns of q")
    return value_dim


def _check_main_grad(main_grad, kv: torch.Tensor) -> None:
    if main_grad is None:
        return
    if torch.compiler.is_compiling():
        raise UsageError("main_grad: not supported under torch.compile; call it outside the graph")
    storage.tensor("main_grad", main_grad)
    if main_grad.dtype != torch.float32 or main_grad.shape != kv.shape:
        raise DataError(
            f"main_grad: {main_grad.dtype} {list(main_grad.shape)} where float32 {list(kv.shape)}, as "
            "kv, is needed"
        )


def _names(outputs, q, operands: str, trained: bool) -> tuple[str, ...]:
    wanted = {"o"} if outputs is None else {"o", *outputs}
    for name in wanted - {"o"}:
        if name not in OUTPUTS:
            raise UsageError(f"outputs = {outputs}: {name!r} is none of {', '.join(OUTPUTS)}")
    if trained:
        wanted.add("lse")
        if operands == "split" and _torch.o_dtype(q) in (torch.bfloat16, torch.float16):
            wanted.add("o_residual")
    return tuple(n for n in _attention.RESULTS if n in wanted)


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
    q, q_scale = storage.open_q(q, q_scale)
    kv, kv_scale, kind = storage.open_kv(kv)
    _check_layout(layout, q, cu_seqlens_q)
    _check_main_grad(main_grad, kv)
    value_dim = _check_value_dim(value_dim, q.shape[-1])
    device = _device_type(q)
    if torch.is_autocast_enabled(device):
        q, kv = _cast(q, device), _cast(kv, device) if kind == "plain" else kv
    q = _batch_first(layout, q, 4)
    kv = kv if block_table is not None else _batch_first(layout, kv, 3)
    if sink is not None:
        sink = storage.tensor("sink", sink)
    main_grad = main_grad if block_table is not None else _batch_first(layout, main_grad, 3)
    rest = [
        _batch_first(layout, storage.tensor("indices", indices), 3),
        _constant("q_scale", q_scale),
        _constant("kv_scale", kv_scale),
        _batch_first(layout, _constant("topk_length", topk_length), 2),
        _constant("cu_seqlens_q", cu_seqlens_q),
        _constant("cu_seqlens_k", cu_seqlens_k),
        _batch_first(layout, _constant("q_positions", q_positions), 2),
        _constant("block_table", block_table),
        _constant("kv_lengths", kv_lengths),
    ]
    trained = torch.is_grad_enabled() and (
        main_grad is not None
        or q.requires_grad
        or kv.requires_grad
        or (sink is not None and sink.requires_grad)
    )
    names = _names(outputs, q, operands, trained)
    text = _settings.text_of(
        value_dim=value_dim, scale=0.0 if scale is None else scale, causal=causal,
        q_position_base=q_position_base, index_space=index_space, index_check=index_check,
        kv_storage=kind, fp8_path=fp8_path, dkv_sum=dkv_sum, operands=operands, threads=threads,
        workspace_limit_bytes=workspace_limit, lane=lane, outputs=names, gather_kv=gather_kv,
        heads_group=_name_of(heads_group), sequence_group=_name_of(sequence_group),
    )  # fmt: skip
    if torch.compiler.is_compiling():
        from . import _ops

        found, receipt = _ops.apply(text, q, kv, sink, rest), None
    else:
        found = _attention.apply(text, q, kv, sink, rest, main_grad)
        receipt = _torch.latest.receipt
    if outputs is None:
        return _batch_first(layout, found["o"], 4)
    shown = {n: _batch_first(layout, found[n], 3) for n in names if n == "o" or n in outputs}
    return SparseAttentionOutput(**shown, _receipt=receipt)


def _opened_index(name: str, t, scale):
    """index_q or index_k with its scale, however it was given."""
    if isinstance(t, Fp8):
        if scale is not None:
            raise UsageError(f"{name}_scale: given beside talea.Fp8, which has its own")
        t, scale = t.data, t.scale
    t = storage.tensor(name, t)
    if (t.dtype == torch.float8_e4m3fn) != (scale is not None):
        raise DataError(
            f"{name}: {t.dtype} {'without' if scale is None else 'with'} a scale; float8_e4m3fn, and "
            "nothing else, has one"
        )
    return t, _constant(f"{name}_scale", scale)


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
    top_k = _settings.whole("top_k", top_k, 0)
    if index_q.dim() not in (3, 4):
        raise DataError(f"index_q: shape {list(index_q.shape)}: [B, S, Hi, di] is needed")
    tensors = [
        index_q.detach(), index_q_scale, index_k.detach(), index_k_scale,
        storage.tensor("index_weights", index_weights).detach(), _constant("begin", begin),
        _constant("end", end), _constant("cu_seqlens_q", cu_seqlens_q),
        _constant("cu_seqlens_k", cu_seqlens_k), _constant("q_positions", q_positions),
    ]  # fmt: skip
    names = ("indices", "topk_length", "scores") if return_scores else ("indices", "topk_length")
    text = _settings.text_of(
        top_k=top_k, q_position_base=q_position_base, key_stride=key_stride, act=act,
        causal=causal, threads=threads, workspace_limit_bytes=workspace_limit, lane=lane,
        outputs=names, sequence_group=_name_of(sequence_group), gather_kv=gather_kv,
    )  # fmt: skip
    from . import _ops

    return tuple(_ops.select(*tensors, text)[: len(names)])


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
    q, q_scale = storage.open_q(q, q_scale)
    kv, kv_scale, kind = storage.open_kv(kv)
    _check_value_dim(value_dim, q.shape[-1])
    trained = (index_q, index_k, index_weights)
    need = [t.requires_grad and torch.is_grad_enabled() for t in trained]
    given = not isinstance(denominator, str)
    tensors = [
        index_q, index_q_scale, index_k, index_k_scale, index_weights, q.detach(), q_scale,
        kv.detach(), kv_scale, _constant("indices", indices), _constant("topk_length", topk_length),
        None if lse is None else storage.tensor("lse", lse).detach(),
        _constant("row_weight", row_weight), _constant("begin", begin), _constant("end", end),
        _constant("cu_seqlens_q", cu_seqlens_q), _constant("cu_seqlens_k", cu_seqlens_k),
        _constant("q_positions", q_positions),
    ]  # fmt: skip
    text = _settings.text_of(
        coeff=coeff, denominator="given" if given else denominator,
        denominator_value=denominator if given else 0.0, denominator_scope=denominator_scope,
        scale=0.0 if scale is None else scale, q_position_base=q_position_base,
        key_stride=key_stride, keys="dense" if indices is None else "sparse", act=act,
        causal=causal, index_space=index_space, index_check=index_check, kv_storage=kind,
        dindex_k_sum=dindex_k_sum, threads=threads, workspace_limit_bytes=workspace_limit,
        lane=lane, batch_group=_name_of(batch_group), heads_group=_name_of(heads_group),
        sequence_group=_name_of(sequence_group), gather_kv=gather_kv,
    )  # fmt: skip
    from . import _ops

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
    mask = _constant("mask", mask)
    inputs = {
        "indices": storage.tensor("indices", indices),
        "topk_length": _constant("topk_length", topk_length),
        "cu_seqlens_q": _constant("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _constant("cu_seqlens_k", cu_seqlens_k),
        "q_positions": _constant("q_positions", q_positions),
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
    return mask


def pack_rows(kv: torch.Tensor) -> torch.Tensor:
    """Rows of 576 (fp32, bf16, fp16) as u8 rows of 656 bytes: talea.PackedKV(pack_rows(kv))."""
    kv = storage.tensor("kv", kv).detach()
    if kv.dim() == 0 or kv.shape[-1] != 576:
        raise DataError(f"kv: shape {list(kv.shape)}: rows of 576 are needed")
    rows = kv.new_empty((*kv.shape[:-1], storage.PACKED_BYTES), dtype=torch.uint8)
    source, target = _abi.Tensor(), _abi.Tensor()
    _torch.fill(source, _torch.rows_last(kv), "kv")
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
