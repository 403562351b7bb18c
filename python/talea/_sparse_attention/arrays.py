"""The passes on NumPy arrays: no PyTorch needed. Tensors by the C names, the rest are options."""

from __future__ import annotations

import ctypes as c

import numpy as np

from .. import _abi
from .._values import flag, shown, whole, words
from . import _c, _call, _settings


def _wide(dtype) -> type:
    return np.float64 if dtype == np.float64 else np.float32


def _options_text(which: str, arguments: dict) -> str:
    names = {n for n, _ in _c.DOORS[which].options._fields_}
    for name in arguments:
        if name not in names:
            raise _abi.UsageError(f"{name}: neither a tensor nor an option of {which}")
    return _settings.text_of(**arguments) if arguments else "outputs="


def _run(which: str, arguments: dict, shapes, fill, as_array) -> dict:
    door = _c.DOORS[which]
    tensors = [n for n, kind in door.inputs._fields_ if kind is _abi.Tensor]
    inputs = {n: as_array(arguments.pop(n, None), n) for n in tensors}
    text = _options_text(which, arguments)
    made = shapes(inputs)
    args = _call.describe(which, text, inputs, made, fill)

    def workspace(size):
        memory = np.empty(max(size, 1), dtype=np.uint8)
        return memory.ctypes.data, memory

    receipt = _call.run(which, args, workspace)
    return {**made, "receipt": receipt.facts()}


def _attention_shapes(outputs, value_dim: int, o_dtype):
    def shapes(inputs: dict) -> dict:
        q, kv, sink, made = inputs["q"], inputs["kv"], inputs["sink"], {}
        if q is None or q.ndim not in (3, 4):
            found = "None" if q is None else f"shape {list(q.shape)}"
            raise _abi.DataError(f"q: {found}; [B, S, H, D] is needed")
        if not 1 <= value_dim <= q.shape[-1]:
            raise _abi.UsageError(f"value_dim = {value_dim}: must lie in [1, {q.shape[-1]}]")
        narrow = q.dtype if o_dtype is None else _dtype_of("o_dtype", o_dtype)
        for name in outputs:
            if name in ("o", "o_residual"):
                made[name] = np.empty((*q.shape[:-1], value_dim), narrow)
            elif name in ("lse", "row_max"):
                made[name] = np.empty(q.shape[:-1], np.float32)
            elif name == "status":
                made[name] = np.array([0, -1, 0, 0], np.int64)
            elif name in ("dq", "dkv", "d_sink"):
                like = {"dq": q, "dkv": kv, "d_sink": sink}[name]
                if like is None:
                    raise _abi.UsageError(
                        f"{name}: needs {'sink' if name == 'd_sink' else name[1:]}"
                    )
                byte = like.dtype.itemsize == 1
                made[name] = np.empty(like.shape, np.float32 if byte else like.dtype)
        return made

    return shapes


def _dtype_of(name: str, given) -> np.dtype:
    try:
        found = np.dtype(given)
    except (TypeError, ValueError):
        found = None
    if given is None or found is None or found.name not in _FLOATS:
        raise _abi.UsageError(f"{name} = {shown(given)}: one of {', '.join(_FLOATS)}")
    return found


_FLOATS = ("float32", "bfloat16", "float16", "float64")
_OUTPUTS = ("o", "lse", "row_max", "o_residual", "status", "dq", "dkv", "d_sink")
_LOSS_OUTPUTS = ("loss", "dindex_q", "dindex_k", "dindex_weights")


def sparse_attention(
    fill, as_array, q, kv, indices, *, value_dim, outputs, o_dtype, **more
) -> dict:
    value_dim = whole("value_dim", value_dim)
    outputs = words("outputs", outputs, _OUTPUTS)
    backward = any(name in ("dq", "dkv", "d_sink") for name in outputs)
    tensors = {"q": q, "kv": kv, "indices": indices, "value_dim": value_dim, **more}
    upstream = ("d_o", "d_lse", "o", "o_residual", "lse")
    given = [n for n in upstream if more.get(n) is not None]
    if given and not backward:
        raise _abi.UsageError(f"{given[0]}: of a gradient; outputs names none of dq, dkv, d_sink")
    ahead = [n for n in outputs if n not in ("dq", "dkv", "d_sink")]
    made: dict = {}
    if ahead or not backward:
        plain = {k: v for k, v in tensors.items() if k not in upstream}
        made = _run("forward", plain, _attention_shapes(ahead, value_dim, o_dtype), fill, as_array)
    if backward:
        behind = [n for n in outputs if n not in ahead]
        found = _run(
            "backward", dict(tensors), _attention_shapes(behind, value_dim, None), fill, as_array
        )
        made = {**made, **found}
    return made


def sparse_select(
    fill, as_array, index_q, index_k, index_weights, *, top_k, scores, **more
) -> dict:
    top_k, scores = whole("top_k", top_k, 0), flag("return_scores", scores)
    if top_k >= 2**31:
        raise _abi.UsageError(f"top_k = {top_k}: indices of 32 bits name fewer keys")

    def shapes(inputs: dict) -> dict:
        index_q = inputs["index_q"]
        if index_q is None or index_q.ndim not in (3, 4):
            found = "None" if index_q is None else f"shape {list(index_q.shape)}"
            raise _abi.DataError(f"index_q: {found}: [B, S, Hi, di] is needed")
        rows = index_q.shape[:-2]
        made = {
            "indices": np.empty((*rows, top_k), np.int32),
            "topk_length": np.empty(rows, np.int32),
        }
        return {**made, "scores": np.empty((*rows, top_k), np.float32)} if scores else made

    tensors = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    return _run("select", {**tensors, "top_k": top_k, **more}, shapes, fill, as_array)


def sparse_index_loss(
    fill, as_array, index_q, index_k, index_weights, q, kv, *, outputs, **more
) -> dict:
    outputs = words("outputs", outputs, _LOSS_OUTPUTS)

    def shapes(inputs: dict) -> dict:
        made = {}
        for name in outputs:
            like = inputs["index_q" if name == "loss" else name[1:]]
            if like is None:
                raise _abi.DataError(f"{'index_q' if name == 'loss' else name[1:]}: None; needed")
            made[name] = np.empty(() if name == "loss" else like.shape, _wide(like.dtype))
        return made

    tensors = {
        "index_q": index_q,
        "index_k": index_k,
        "index_weights": index_weights,
        "q": q,
        "kv": kv,
    }
    more.setdefault("keys", "dense" if more.get("indices") is None else "sparse")
    return _run("index_loss", {**tensors, **more}, shapes, fill, as_array)


def index_mask(fill, as_array, mask, indices, topk_length=None, **more):
    if not isinstance(mask, np.ndarray) or not mask.flags.writeable:
        kind = "a read-only array" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise _abi.DataError(f"mask: {kind}; it is written in place: a writable array is needed")
    tensors = {
        n: as_array(more.pop(n, None), n) for n in ("cu_seqlens_q", "cu_seqlens_k", "q_positions")
    }
    tensors |= {n: as_array(t, n) for n, t in (("indices", indices), ("topk_length", topk_length))}
    args = _call.describe("forward", _options_text("forward", more), tensors, {}, fill)
    slot = _abi.Tensor()
    fill(slot, mask, "mask")
    _abi.check(_abi.lib.talea_sparse_attention_index_mask(c.byref(args), c.byref(slot)))
    return mask


def pack_rows(fill, as_array, kv):
    kv = as_array(kv, "kv")
    if kv is None or kv.ndim == 0 or kv.shape[-1] != 576:
        shape = "None" if kv is None else f"shape {list(kv.shape)}"
        raise _abi.DataError(f"kv: {shape}: rows of 576 are needed")
    rows = np.empty((*kv.shape[:-1], 656), np.uint8)
    source, target = _abi.Tensor(), _abi.Tensor()
    fill(source, kv, "kv")
    fill(target, rows, "rows")
    _abi.check(_abi.lib.talea_sparse_attention_pack_rows(c.byref(source), c.byref(target), None))
    return rows
