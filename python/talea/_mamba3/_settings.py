"""Everything about a scan that is not a tensor, as one line of text and back.

A line, because a compiled graph can carry it as a constant; parsed once, so that equal settings are
one object.
"""

from __future__ import annotations

import ctypes as c
import math
from dataclasses import dataclass, fields
from functools import lru_cache

from .. import _abi
from .._abi import UsageError
from .._values import flag, number, shown, whole, word
from ._c import ENUMS, Options


@dataclass(frozen=True)
class Settings:
    """Field names are those of the C options where there is one."""

    rotary_pairs: str = "automatic"
    sequence_check: str = "automatic"
    schedule: str = "automatic"
    head_norm: bool = False
    norm_eps: float = 1e-5
    chunk: int = 0
    workspace_limit_bytes: int = 256 << 20
    threads: int = 0
    lane: str = "auto"
    final: bool = False  # the four final states are outputs
    save: bool = False  # forward keeps what backward restarts from
    heads_group: str = ""  # names of process groups; "": a world of one
    sequence_group: str = ""
    total_groups: int = 0  # of all ranks of heads_group; 0: each holds groups of its own
    shared_angles: bool = False  # of all ranks' heads, where no rank holds more than one
    receipt: bool = False  # keep the library's facts of the call
    build: str = ""  # of the library, in graphs that hold the size of `saved`: another may differ

    def text(self) -> str:
        return ";".join(f"{n}={getattr(self, n)}" for n in _KINDS)

    def but(self, **other) -> Settings:
        """The same but for some fields. By name: Dynamo of PyTorch 2.11 does not read __dict__."""
        return Settings(**({n: getattr(self, n) for n in _KINDS} | other))

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(text: str) -> Settings:
        pairs = dict(part.split("=", 1) for part in text.split(";"))
        read = {"int": int, "float": float, "str": str, "bool": lambda t: t == "True"}
        return Settings(**{n: read[kind](pairs[n]) for n, kind in _KINDS.items()})


_KINDS = {f.name: f.type for f in fields(Settings)}


def make(**given) -> Settings:
    """Settings whose values are of the right kind; the library says what is out of range."""
    for name in ("chunk", "workspace_limit_bytes", "threads", "total_groups"):
        if name in given:
            given[name] = whole(name.removesuffix("_bytes"), given[name])
    for name, table in ENUMS.items():
        word(name, given.get(name, "automatic"), table)
    given["head_norm"] = flag("head_norm", given.get("head_norm", False))
    eps = given.get("norm_eps", 1e-5)
    if not isinstance(eps, int | float) or isinstance(eps, bool):
        eps = number("norm_eps", eps)
    if eps == 1e-5:
        eps = 1e-5  # where Dynamo made a symbol of the default, it is a constant again
    elif not abs(eps) < math.inf:
        raise UsageError(f"norm_eps = {eps!r}: a finite number is needed")
    given["norm_eps"] = number("norm_eps", eps)
    lane = given.get("lane", "auto")
    if not isinstance(lane, str) or ";" in lane or "\0" in lane:
        raise UsageError(f"lane = {shown(lane)}: no such lane")
    return Settings(**given)


@lru_cache(maxsize=256)
def options(s: Settings) -> Options:
    made = Options()
    _abi.check(_abi.lib.talea_mamba3_options_init(c.byref(made), c.sizeof(made)))
    for name, table in ENUMS.items():
        setattr(made, name, table[getattr(s, name)])
    made.head_norm = int(s.head_norm)
    for name in ("norm_eps", "chunk", "workspace_limit_bytes", "threads"):
        setattr(made, name, getattr(s, name))
    made.lane = s.lane.encode()
    return made
