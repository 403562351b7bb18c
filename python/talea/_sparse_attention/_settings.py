"""Everything about a call that is not a tensor, as one line of text and back.

A line, because a compiled graph can carry it as a constant; parsed once, so that equal settings are
one object.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace

from .. import _values
from .._abi import UsageError
from .._values import flag, shown, whole, word
from ._c import ENUMS

_TEXT = ("lane", "heads_group", "sequence_group", "batch_group")
_WHOLE = (
    "value_dim", "q_position_base", "workspace_limit_bytes", "threads", "top_k", "key_stride",
    "head_begin", "row_begin",
)  # fmt: skip
_NUMBERS = ("scale", "coeff", "denominator_value")
_FLAGS = ("causal", "gather_kv", "receipt")


def number(name: str, value) -> float:
    value = _values.number(name, value)
    if not abs(value) < math.inf:  # of a symbol, too: Dynamo knows no isfinite
        raise UsageError(f"{name} = {value}: must be finite")
    return value


def text_of(**settings) -> str:
    """One line; every value is checked by its name."""
    parts = []
    for name, value in settings.items():
        if name in ENUMS:
            word(name, value, ENUMS[name])
        elif name == "outputs":
            value = ",".join(value)
        elif name in _WHOLE:
            value = whole(name.removesuffix("_bytes"), value)
        elif name in _NUMBERS:
            value = number(name, value)
        elif name in _FLAGS:
            value = "1" if flag(name, value) else "0"
        elif not isinstance(value, str) or ";" in value or "\0" in value:
            raise UsageError(f"{name} = {shown(value)}: no such {name}")
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
