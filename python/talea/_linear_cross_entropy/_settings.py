"""Everything about a call that is not a tensor, and the C options it stands for."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from functools import lru_cache

from .. import _abi
from .._values import number, shown, whole, word
from . import _c

DX_SUMS = {"fp32": _abi.F32, "bf16": _abi.BF16}


@dataclass(frozen=True, eq=False)
class Config:
    """Everything about a call that is not a tensor. Field names are the C options'.

    Compared and hashed by identity, so that a plan is found again in no time: make one and keep it.
    """

    reduction: str = "mean"
    denominator: str = "valid"
    denominator_value: float = 0.0
    denominator_scope: str = "local"
    on_empty: str = "nan"
    target_check: str = "automatic"
    ignore_index: int = -100
    vocab: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    workspace_limit_bytes: int = _abi.AUTO
    dw_sum: str = "fp32"  # or "weight": the weight's own dtype
    threads: int = 0
    lane: str = "auto"
    outputs: tuple[str, ...] = ()  # beside the loss: "lse", "entropy", ..., "topk"
    top_k: int = 0
    vocab_begin: int = 0
    sequence_parallel: bool = False
    dx_sum: str = "fp32"  # of the ranks' shares of dX; or "bf16"
    group: str = ""  # name of the vocabulary ranks' process group; "": a world of one
    batch_group: str = ""

    def text(self) -> str:
        """One line that a compiled graph can carry as a constant (and Dynamo can form)."""
        parts = [f"{name}={getattr(self, name)}" for name in _PLAIN]
        return ";".join(parts) + ";outputs=" + ",".join(self.outputs)

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Config:
        pairs = dict(part.split("=", 1) for part in text.split(";"))
        fields = {name: _read(kind, pairs[name]) for name, kind in _PLAIN.items()}
        return Config(**fields, outputs=tuple(n for n in pairs["outputs"].split(",") if n))


_PLAIN = {f: Config.__annotations__[f] for f in Config.__annotations__ if f != "outputs"}


def _read(kind: str, text: str):
    if kind == "bool":
        return text == "True"
    return {"int": int, "float": float, "str": str}[kind](text)


_OF_RANKS = ("vocab_begin", "sequence_parallel", "dx_sum", "group", "batch_group")


def softcap_of(value) -> float:
    if value is None:
        return 0.0
    found = number("softcap", value)
    if not found > 0:
        raise _abi.UsageError(f"softcap = {value}: must be > 0 (None turns it off)")
    return found


def limit_of(value) -> int:
    if isinstance(value, str) and value == "auto":
        return _abi.AUTO
    limit = whole("workspace_limit", value)
    if limit < 0:
        raise _abi.UsageError(f'workspace_limit = {limit} bytes: must be >= 0, or "auto"')
    return limit


def of_one_process(outputs: tuple[str, ...], arguments: dict) -> Config:
    """Options as docs/python.md has them, where there are no ranks; nothing is left aside."""
    given = dict(arguments)
    for name in given:
        if name in _OF_RANKS:
            raise _abi.UsageError(f"{name}: ranks are those of talea.linear_cross_entropy")
        if name != "workspace_limit" and (name not in _PLAIN or name == "outputs"):
            raise _abi.UsageError(f"{name}: no such argument")
    if "workspace_limit" in given:
        given["workspace_limit_bytes"] = limit_of(given.pop("workspace_limit"))
    denominator = given.get("denominator", "valid")
    if not isinstance(denominator, str):
        value = number("denominator", denominator)
        given.update(denominator="given", denominator_value=value)
    elif denominator != "given" and "denominator_value" in given:
        raise _abi.UsageError("denominator_value: needs denominator='given'")
    given["softcap"] = softcap_of(given.get("softcap"))
    for name, kind in _PLAIN.items():  # one that C would cut, or cannot be hashed, is not kept
        if name in given and kind in ("int", "float"):
            given[name] = (whole if kind == "int" else number)(name, given[name])
    for name, known in WORDS.items():
        if name in given:
            word(name, given[name], known)
    if not isinstance(given.get("lane", "auto"), str):
        raise _abi.UsageError(f"lane = {shown(given['lane'])}: the name of a lane is needed")
    if ("topk" in outputs) != (given.get("top_k", 0) != 0):
        raise _abi.UsageError("outputs and top_k: topk and top_k=K go together")
    return Config(**given)


_ENUMS = {
    "reduction": _c.REDUCTION,
    "denominator": _c.DENOMINATOR,
    "denominator_scope": _c.SCOPE,
    "on_empty": _c.ON_EMPTY,
    "target_check": _c.TARGET_CHECK,
}
WORDS = {
    **{n: t for n, t in _ENUMS.items() if n != "denominator"},
    "dw_sum": ("fp32", "weight"),
}
# Every other field of the C struct that a number fits into.
_NUMBERS = [
    name
    for name, _ in _c.Options._fields_
    if _PLAIN.get(name, "str") != "str" and name not in _ENUMS
]


@lru_cache(maxsize=256)
def options_of(config: Config) -> _c.Options:
    options = _c.Options()
    size = c.sizeof(options)
    _abi.check(_abi.lib.talea_linear_cross_entropy_options_init(c.byref(options), size))
    for name, table in _ENUMS.items():
        setattr(options, name, table[word(name, getattr(config, name), table)])
    for name in _NUMBERS:
        value = getattr(config, name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # C would cut it
            raise _abi.UsageError(f"{name} = {value}: does not fit into 64 bits")
        try:
            setattr(options, name, value)
        except TypeError:
            raise _abi.UsageError(f"{name} = {value!r}: a number is needed") from None
        if isinstance(value, int) and getattr(options, name) != value:
            raise _abi.UsageError(f"{name} = {value}: does not fit into 32 bits")
    word("dw_sum", config.dw_sum, WORDS["dw_sum"])
    options.lane = config.lane.encode()
    return options
