"""Everything about a call that is not a tensor, as one line of text and back.

A line, because a compiled graph can carry it as a constant; parsed once, so that equal settings are
one object.
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import index
from types import SimpleNamespace

from .._abi import UsageError
from ._c import ENUMS

_TEXT = ("lane", "heads_group", "sequence_group", "batch_group")
_WHOLE = (
    "value_dim", "q_position_base", "workspace_limit_bytes", "threads", "top_k", "key_stride",
    "head_begin", "row_begin",
)  # fmt: skip
_NUMBERS = ("scale", "coeff", "denominator_value")
_FLAGS = ("causal", "gather_kv", "receipt")


def whole(name: str, value, least: int = -(2**63)) -> int:
    """What C would cut to 64 bits is refused, and so is what is no integer (or lies on a device)."""
    if hasattr(value, "data_ptr") or not hasattr(value, "__index__"):
        raise UsageError(f"{name} = {value!r}: an integer is needed")
    value = index(value)
    if not least <= value < 2**63:
        raise UsageError(f"{name} = {value}: must lie in [{least}, 2^63)")
    return value


def number(name: str, value) -> float:
    if hasattr(value, "data_ptr") or isinstance(value, str | bool):
        raise UsageError(f"{name} = {value!r}: a number is needed")
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} = {value!r}: a number is needed") from None
    if not math.isfinite(value):
        raise UsageError(f"{name} = {value}: must be finite")
    return value


def flag(name: str, value) -> bool:
    """True or False, or what equals them; "no" is neither, and a tensor may lie on a device."""
    try:
        known = not hasattr(value, "data_ptr") and value in (0, 1)
    except ValueError:  # an array
        known = False
    if not known:
        raise UsageError(f"{name} = {value!r}: True or False is needed")
    return bool(value)


def text_of(**settings) -> str:
    """One line; every value is checked by its name."""
    parts = []
    for name, value in settings.items():
        if name in ENUMS:
            if not isinstance(value, str) or value not in ENUMS[name]:
                raise UsageError(f"{name} = {value!r}: one of {', '.join(ENUMS[name])}")
        elif name == "outputs":
            value = ",".join(value)
        elif name in _WHOLE:
            value = whole(name.removesuffix("_bytes"), value)
        elif name in _NUMBERS:
            value = repr(number(name, value))
        elif name in _FLAGS:
            value = "1" if flag(name, value) else "0"
        elif not isinstance(value, str) or ";" in value or "\0" in value:
            raise UsageError(f"{name} = {value!r}: no such {name}")
        parts.append(f"{name}={value}")
    return ";".join(parts)


def _read(name: str, text: str):
    if name == "outputs":
        return tuple(part for part in text.split(",") if part)
    if name in _WHOLE:
        return int(text)
    if name in _NUMBERS:
        return float(text)
    return text == "1" if name in _FLAGS else text


@lru_cache(maxsize=512)
def parse(text: str) -> SimpleNamespace:
    pairs = (part.split("=", 1) for part in text.split(";"))
    return SimpleNamespace(**{name: _read(name, value) for name, value in pairs})
