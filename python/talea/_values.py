"""Values that are no tensors, checked by the name of their argument. Knows neither NumPy nor PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from ._abi import UsageError


def _is_tensor(value) -> bool:
    """Of a number that changes from call to call, which is a symbol to Dynamo, hasattr is not asked."""
    return not isinstance(value, int | float | str) and hasattr(value, "data_ptr")


def shown(value) -> str:
    """One short line; what lies on a device is not read."""
    if _is_tensor(value):
        return f"a {type(value).__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def whole(name: str, value, least: int | None = None) -> int:
    """What C would cut to 64 bits is refused, and so is what is no integer (or lies on a device)."""
    try:
        if _is_tensor(value):
            raise TypeError
        found = index(value)
        found = int(found) if found is True or found is False else found
    except TypeError:
        raise UsageError(f"{name} = {shown(value)}: an integer is needed") from None
    if not -(2**63) <= found < 2**63:
        raise UsageError(f"{name} = {found}: does not fit into 64 bits")
    if least is not None and found < least:
        raise UsageError(f"{name} = {found}: must be >= {least}")
    return found


def number(name: str, value) -> float:
    """As it is written: whether NaN is one, the library says."""
    if isinstance(value, str | bytes | bool) or _is_tensor(value):
        raise UsageError(f"{name} = {shown(value)}: a number is needed")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} = {shown(value)}: a number is needed") from None
    except OverflowError:
        raise UsageError(f"{name} = {shown(value)}: does not fit into a double") from None


def flag(name: str, value) -> bool:
    """True or False, or what equals them; "no" is neither, and a tensor may lie on a device."""
    if value is True or value is False:
        return value
    if isinstance(value, str) or _is_tensor(value) or getattr(value, "shape", ()) != ():
        known = False
    else:
        known = value in (0, 1)
    if not known:
        raise UsageError(f"{name} = {shown(value)}: True or False is needed")
    return bool(value)


def word(name: str, value, known) -> str:
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} = {shown(value)}: one of {', '.join(known)}")
    return value


def words(name: str, value, known) -> tuple[str, ...]:
    """What may be looked through once is looked through once."""
    if isinstance(value, str) or not isinstance(value, Iterable) or _is_tensor(value):
        raise UsageError(f"{name} = {shown(value)}: a tuple of names is needed")
    value = tuple(value)
    for one in value:
        if not isinstance(one, str) or one not in known:
            raise UsageError(f"{name} = {shown(value)}: {shown(one)} is none of {', '.join(known)}")
    return value


def group_name(name: str, group) -> str:
    """Of a process group of torch.distributed; "" where there is none."""
    if group is None:
        return ""
    found = getattr(group, "group_name", None)
    if not isinstance(found, str):
        raise UsageError(f"{name} = {shown(group)}: a process group of torch.distributed is needed")
    return found
