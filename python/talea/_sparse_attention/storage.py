"""What lies in memory: plain tensors, FP8 with its scale, packed rows; wrappers by their payload.

Dispatch looks at the storage. A logical dtype that a wrapper reports is never read, and nothing is
dequantised behind the caller's back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._abi import DataError, UsageError

PACKED_BYTES = 656
_DECLINED = {
    name: getattr(torch, name)
    for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
                 "float4_e2m1fn_x2")
    if hasattr(torch, name)
}  # fmt: skip


@dataclass
class Fp8:
    """e4m3 values and what they are multiplied by: x = data * scale, any positive finite scale.

    data: torch.float8_e4m3fn. scale fp32. Of kv: a scalar, [S_kv] or [S_kv, ceil(D / 128)], with B in
    front where kv has it. Of q: a scalar, [S] or [S, H].
    """

    data: torch.Tensor
    scale: torch.Tensor


@dataclass
class PackedKV:
    """Rows of 656 bytes as pack_rows() writes them: 512 e4m3, 4 fp32 scales, 64 bf16."""

    rows: torch.Tensor


def is_plain(t: torch.Tensor) -> bool:
    """A tensor without a dispatch of its own; what a compiler traces with counts as one."""
    if type(t) in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return True
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(t, FakeTensor | FunctionalTensor):
        return True
    return type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def tensor(name: str, value) -> torch.Tensor:
    """A plain tensor, or an error that names the class."""
    if (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.dtype not in _DECLINED.values()
    ):
        return value
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"{name}: {type(value).__name__} where a torch.Tensor is needed; talea.arrays takes NumPy's"
        )
    if not is_plain(value):
        raise DataError(
            f"{name}: a {type(value).__name__}, which has a dispatch of its own; looked for a plain "
            "torch.Tensor, talea.Fp8(data, scale) or talea.PackedKV(rows). Pass what it holds"
        )
    if value.layout != torch.strided:
        raise DataError(f"{name}: a tensor of layout {value.layout}; torch.strided is needed")
    for dtype_name, dtype in _DECLINED.items():
        if value.dtype == dtype:
            raise UsageError(f"{name}: {dtype_name}: not in this version; float8_e4m3fn is")
    return value


def _payload(name: str, value):
    """The e4m3 payload and scale of Transformer Engine's Float8Tensor; None for anything else."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return None
    if not any(base.__name__ in ("Float8Tensor", "Float8TensorBase", "Float8TensorStorage")
               for base in type(value).__mro__):  # fmt: skip
        return None
    data, scale = getattr(value, "_data", None), getattr(value, "_scale_inv", None)
    for part, what in ((data, "_data"), (scale, "_scale_inv")):
        if not isinstance(part, torch.Tensor) or (part.numel() and not part.data_ptr()):
            raise DataError(
                f"{name}: a {type(value).__name__} without reachable storage: looked for its {what}"
            )
    kind = str(getattr(value, "_fp8_dtype", "unknown"))
    if not kind.lower().endswith(("e4m3", "e4m3fn")):
        raise UsageError(f"{name}: a {type(value).__name__} of {kind}: e4m3 is needed")
    data = data if data.dtype == torch.float8_e4m3fn else data.view(torch.float8_e4m3fn)
    return data, scale.reshape(()) if scale.numel() == 1 else scale


def _scaled(name: str, data, scale):
    data, scale = tensor(f"{name}.data", data), tensor(f"{name}.scale", scale)
    if data.dtype != torch.float8_e4m3fn:
        raise DataError(f"{name}.data: {data.dtype} with a scale: float8_e4m3fn is needed")
    if scale.dtype != torch.float32:
        raise DataError(f"{name}.scale: {scale.dtype} where float32 is needed")
    if scale.device != data.device:
        raise DataError(f"{name}.scale: on {scale.device} beside {name}.data on {data.device}")
    return data, scale


def open_q(q, q_scale):
    """(data, scale or None)."""
    if isinstance(q, Fp8):
        if q_scale is not None:
            raise UsageError("q_scale: given beside talea.Fp8, which has its own")
        return _scaled("q", q.data, q.scale)
    if found := _payload("q", q):
        return found if q_scale is None else _scaled("q", found[0], q_scale)
    q = tensor("q", q)
    if q.dtype == torch.float8_e4m3fn:
        if q_scale is None:
            raise DataError(
                "q: float8_e4m3fn without a scale: give q_scale or talea.Fp8(data, scale)"
            )
        return _scaled("q", q, q_scale)
    if q_scale is not None:
        raise DataError(f"q_scale: given for q of {q.dtype}; only float8_e4m3fn has a scale")
    return q, None


def open_kv(kv):
    """(data, scale or None, kv_storage)."""
    if isinstance(kv, Fp8):
        return *_scaled("kv", kv.data, kv.scale), "fp8_scaled"
    if isinstance(kv, PackedKV):
        return packed("kv.rows", kv.rows), None, "fp8_656"
    if found := _payload("kv", kv):
        return *found, "fp8_scaled"
    kv = tensor("kv", kv)
    if kv.dtype == torch.float8_e4m3fn:
        raise DataError("kv: float8_e4m3fn without a scale: talea.Fp8(data, scale) names it")
    if kv.dtype == torch.uint8:
        raise DataError("kv: uint8 without a layout: talea.PackedKV(rows) names rows of 656 bytes")
    return kv, None, "plain"


def packed(name: str, rows) -> torch.Tensor:
    rows = tensor(name, rows)
    if rows.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise DataError(f"{name}: {rows.dtype} where uint8 (or float8_e4m3fn) is needed")
    if rows.dim() == 0 or rows.shape[-1] != PACKED_BYTES:
        known = ": not in this version" if rows.dim() and rows.shape[-1] in (584, 528, 288) else ""
        raise DataError(
            f"{name}: shape {list(rows.shape)}: rows of {PACKED_BYTES} bytes are needed{known}"
        )
    return rows
