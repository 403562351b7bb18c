"""PyTorch tensors for the C interface."""

from __future__ import annotations

from functools import lru_cache, wraps

import torch

from . import _abi

_DTYPES = {
    torch.float32: _abi.F32,
    torch.bfloat16: _abi.BF16,
    torch.float16: _abi.F16,
    torch.float64: _abi.F64,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
    torch.float8_e4m3fn: _abi.F8_E4M3,
    torch.uint8: _abi.U8,
}


def tells(*names, always):
    """Of a public function: an error of one rank is one of all ranks of the groups named so.

    always: an argument; calls that have it, or two groups, are met for every time.
    """

    def of(function):
        @wraps(function)
        def call(*args, **given):
            groups = [given[n] for n in names if given.get(n) is not None]
            if not groups or torch.compiler.is_compiling():
                return function(*args, **given)
            from ._ranks import Telling

            value = given.get(always)
            awaited = len(groups) > 1 or (value is not None and value is not False)
            with Telling(groups, args[0] if args else None, awaited):
                return function(*args, **given)

        return call

    return of


def kept_by_values(function):
    """The same, its results kept by the arguments and their types: 1, 1.0 and True are three."""
    kept = lru_cache(maxsize=512, typed=True)(function)

    def call(**given):
        if torch.compiler.is_compiling():
            return function(**given)
        try:
            return kept(**given)
        except TypeError:  # of what has no hash the function itself says what it is
            return function(**given)

    return call


def settled(tensor):
    """The library reads what is stored: a view that PyTorch negates on reading, as numbers of its own."""
    return tensor.resolve_neg() if tensor is not None and tensor.is_neg() else tensor


def refuse_negated(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_neg():
        raise _abi.DataError(
            f"{name}: a view whose sign PyTorch keeps apart (is_neg()): its storage holds other "
            f"numbers; pass {name}.resolve_neg()"
        )


def _fill(slot: _abi.Tensor, tensor: torch.Tensor, name: str) -> None:
    refuse_negated(tensor, name)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise _abi.DataError(f"{name}: dtype {tensor.dtype} is not supported")
    rank = tensor.dim()
    if rank > _abi.MAX_RANK:
        raise _abi.DataError(f"{name}: {rank} dimensions; at most {_abi.MAX_RANK}")
    device = tensor.device
    if device.type == "cuda":
        slot.device, slot.device_index = _abi.CUDA, device.index
    elif device.type != "cpu":
        raise _abi.DataError(f"{name}: device {device} is not supported; cpu or cuda")
    slot.data = tensor.data_ptr()
    if not slot.data and tensor.numel():
        kind = type(tensor).__name__
        raise _abi.DataError(f"{name}: a {kind} of shape {list(tensor.shape)} without memory")
    slot.dtype, slot.rank, slot.present = dtype, rank, 1
    slot.shape[:rank] = tensor.shape
    slot.stride[:rank] = tensor.stride()
