"""What a call asks for that cannot be had, or that would change nothing: refused, or said."""

from __future__ import annotations

import warnings

import torch

from .._abi import DataError, UsageError
from .._values import flag, whole, word, words
from . import _c, storage

LAYOUTS = {"bshd": (3, 4), "sbhd": (4,), "thd": (3,)}  # the extents of q


def output_names(outputs, known) -> tuple[str, ...] | None:
    return None if outputs is None else words("outputs", outputs, known)


def check_words(**given) -> None:
    """Before anything is decided by them."""
    for name, value in given.items():
        word(name, value, _c.ENUMS[name])


def check_gather(gather_kv, sequence_group) -> None:
    if flag("gather_kv", gather_kv) and sequence_group is None:
        raise UsageError("gather_kv: needs sequence_group, whose ranks hold the rows of the keys")


def warn_unused(causal, q_positions, q_position_base, key_stride=1) -> None:
    """Of a caller who forgot `causal`: the keys ahead of a query are not left out."""
    if torch.compiler.is_compiling():
        return
    flag("causal", causal)
    whole("q_position_base", q_position_base)
    whole("key_stride", key_stride)
    if causal is not False:
        return
    given = {"q_positions": q_positions is not None, "q_position_base": q_position_base != 0,
             "key_stride": key_stride != 1}  # fmt: skip
    for name in (name for name, told in given.items() if told):
        warnings.warn(f"{name}: bounds nothing without causal=True", stacklevel=3)


def check_report(index_check: str, has_status: bool, instead: str) -> None:
    if index_check == "report" and not has_status:
        raise UsageError(f"index_check = 'report': counts into a status, {instead}")


def constant(name: str, t):
    """A tensor that gets no gradient: better said than left out."""
    if t is None:
        return None
    t = storage.tensor(name, t)
    if t.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"{name}: requires grad, and gets none here; pass {name}.detach()")
    return t


def check_layout(layout: str, q: torch.Tensor, cu_seqlens) -> None:
    word("layout", layout, LAYOUTS)
    want = LAYOUTS[layout]
    if q.dim() not in want:
        raise DataError(
            f"q: shape {list(q.shape)} in layout {layout}: {want[-1]} extents are needed"
        )
    if layout == "thd" and cu_seqlens is None:
        raise UsageError("layout = 'thd': needs cu_seqlens_q and cu_seqlens_k")


def check_value_dim(value_dim, columns: int) -> int:
    value_dim = whole("value_dim", value_dim)
    if not 1 <= value_dim <= columns:
        raise UsageError(f"value_dim = {value_dim}: must lie in [1, {columns}], the columns of q")
    return value_dim


def check_fp8_grad(main_grad=None, **pairs) -> None:
    """Of (as given, its data): autograd would round a gradient to the type of its tensor, and knows
    nothing of a wrapper's payload."""
    for name, (given, data) in pairs.items():
        asked = data.requires_grad or getattr(given, "requires_grad", False)
        if data.dtype != torch.float8_e4m3fn or not asked or not torch.is_grad_enabled():
            continue
        if name == "kv" and main_grad is not None:
            continue
        instead = "; main_grad takes the gradient in fp32" if name == "kv" else ""
        raise UsageError(
            f"{name}: float8_e4m3fn requires grad, and none is given in e4m3: detach it{instead}"
        )


def check_main_grad(main_grad, kv: torch.Tensor) -> None:
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
