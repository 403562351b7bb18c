"""The operators on NumPy arrays (and anything with DLPack on the CPU): no PyTorch needed."""

from __future__ import annotations

import numpy as np

from . import _abi
from ._linear_cross_entropy import _c
from ._linear_cross_entropy._call import Plan
from ._linear_cross_entropy._settings import of_one_process
from ._values import words

_DTYPES = {
    "float32": _abi.F32,
    "bfloat16": _abi.BF16,  # ml_dtypes
    "float16": _abi.F16,
    "float64": _abi.F64,
    "int32": _abi.I32,
    "int64": _abi.I64,
    "float8_e4m3fn": _abi.F8_E4M3,  # ml_dtypes
    "uint8": _abi.U8,
}


def _fill(slot: _abi.Tensor, array: np.ndarray, name: str) -> None:
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        raise _abi.DataError(f"{name}: dtype {array.dtype} is not supported")
    if not array.dtype.isnative:
        raise _abi.DataError(f"{name}: dtype {array.dtype.str}: bytes in another order than here")
    if any(stride % array.itemsize for stride in array.strides):
        raise _abi.DataError(
            f"{name}: strides of {array.strides} bytes: no multiple of the {array.itemsize} of "
            f"{array.dtype}"
        )
    if array.ndim > _abi.MAX_RANK:
        raise _abi.DataError(f"{name}: {array.ndim} dimensions; at most {_abi.MAX_RANK}")
    slot.data = array.ctypes.data
    slot.dtype = dtype
    slot.rank = array.ndim
    for i in range(array.ndim):
        slot.shape[i] = array.shape[i]
        slot.stride[i] = array.strides[i] // array.itemsize
    slot.device = _abi.CPU
    slot.present = 1


def _as_array(value, name: str):
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise _abi.DataError(f"{name}: a masked array; what lies behind the mask would be read")
    if value is None or isinstance(value, np.ndarray):
        return value
    try:
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        said = f"{name}: {type(value).__name__}, of which NumPy makes no array: {error}"
        raise _abi.DataError(said) from None


def _of_rank(t: dict, name: str, *ranks: int) -> None:
    """The array of that name is there, with as many extents as its pages say."""
    array = t[name]
    if array is None or array.ndim not in ranks:
        found = "None" if array is None else f"shape {list(array.shape)}"
        many = " or ".join(map(str, ranks))
        raise _abi.DataError(f"{name}: {found}; an array of {many} dimensions is needed")


_OUTPUTS = (
    "loss", "lse", "target_logprob", "entropy", "argmax", "accuracy", "topk", "dx", "dw", "db",
)  # fmt: skip


def linear_cross_entropy(hidden, weight, targets=None, *, outputs=("loss",), **arguments):
    """Loss and whatever else `outputs` names, as a dict of arrays plus "receipt".

    outputs: any of loss, lse, target_logprob, entropy, argmax, accuracy, dx, dw, db, and topk with
    top_k=K (gives topk_values, topk_ids, topk_logprobs). Tensor arguments by the C names (bias,
    class_weight, token_weight, token_scale, soft_target_ids, soft_target_probs, upstream,
    upstream_lse, upstream_entropy); everything else is an option (see docs/python.md), and `threads`.
    """
    given = {"hidden": hidden, "weight": weight, "targets": targets}
    for name in _c.INPUT_NAMES:
        if name in arguments:
            given[name] = arguments.pop(name)
    tensors = {name: _as_array(value, name) for name, value in given.items()}
    _of_rank(tensors, "hidden", 2)
    _of_rank(tensors, "weight", 2)
    outputs = words("outputs", outputs, _OUTPUTS)
    config = of_one_process(outputs, arguments)
    x, w = tensors["hidden"], tensors["weight"]
    n = x.shape[0]
    wide = np.float64 if x.dtype == np.float64 else np.float32
    per_token = {"lse", "target_logprob", "entropy"}
    out = {}
    for name in outputs:
        if name == "loss":
            out[name] = np.empty((n,) if config.reduction == "none" else (), wide)
        elif name in per_token:
            out[name] = np.empty(n, wide)
        elif name == "argmax":
            out[name] = np.empty(n, np.int64)
        elif name == "accuracy":
            out[name] = np.empty((), wide)
        elif name == "topk":
            out["topk_values"] = np.empty((n, config.top_k), wide)
            out["topk_ids"] = np.empty((n, config.top_k), np.int64)
            out["topk_logprobs"] = np.empty((n, config.top_k), wide)
        elif name in ("dx", "dw", "db"):
            like = {"dx": x, "dw": w, "db": tensors.get("bias")}[name]
            if like is None:
                raise _abi.UsageError("db: needs a bias")
            out[name] = np.empty(like.shape, like.dtype)
    tensors = {name: array for name, array in tensors.items() if array is not None}
    plan = Plan(config, tensors, out, _fill)
    workspace = np.empty(max(plan.workspace_bytes, 1), dtype=np.uint8)
    addresses = [array.ctypes.data for array in (*tensors.values(), *out.values())]
    receipt = plan.run(addresses, workspace.ctypes.data)
    return {**out, "receipt": receipt.facts()}


def sparse_attention(q, kv, indices, *, value_dim, outputs=("o", "lse"), o_dtype=None, **arguments):
    """What `outputs` names, as a dict of arrays plus "receipt": o, lse, row_max, o_residual, status,
    dq, dkv, d_sink. Tensors by the C names (sink, topk_length, d_o, d_lse, ...); the rest are options
    of talea_sparse_attention_options. o_dtype: of o, where it is not that of q.
    """
    from ._sparse_attention import arrays

    found = {"value_dim": value_dim, "outputs": outputs, "o_dtype": o_dtype, **arguments}
    return arrays.sparse_attention(_fill, _as_array, q, kv, indices, **found)


def sparse_select(index_q, index_k, index_weights, *, top_k, return_scores=False, **arguments):
    """indices, topk_length (and scores) as a dict of arrays plus "receipt"."""
    from ._sparse_attention import arrays

    given = (index_q, index_k, index_weights)
    return arrays.sparse_select(
        _fill, _as_array, *given, top_k=top_k, scores=return_scores, **arguments
    )


def sparse_index_loss(index_q, index_k, index_weights, q, kv, *, outputs=("loss",), **arguments):
    """Any of loss, dindex_q, dindex_k, dindex_weights as a dict of arrays plus "receipt"."""
    from ._sparse_attention import arrays

    given = (index_q, index_k, index_weights, q, kv)
    return arrays.sparse_index_loss(_fill, _as_array, *given, outputs=outputs, **arguments)


def index_mask(mask, indices, topk_length=None, **arguments):
    """In place: element (s, j) becomes 0 where a valid slot of query s names key j. Returns mask."""
    from ._sparse_attention import arrays

    return arrays.index_mask(_fill, _as_array, mask, indices, topk_length, **arguments)


def pack_rows(kv):
    """Rows of 576 as u8 rows of 656 bytes."""
    from ._sparse_attention import arrays

    return arrays.pack_rows(_fill, _as_array, kv)


from ._mamba3.arrays import mamba3, mamba3_step  # noqa: E402, F401  (they use what is above)
