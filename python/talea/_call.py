"""One call of the operator: options, description, workspace, errors, result.

Shared by the NumPy and the PyTorch side. `fill` writes one array into a Tensor slot.
"""

from __future__ import annotations

import ctypes as c
import json
from dataclasses import dataclass
from functools import lru_cache

from . import _abi


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


_ENUMS = {
    "reduction": _abi.REDUCTION,
    "denominator": _abi.DENOMINATOR,
    "denominator_scope": _abi.SCOPE,
    "on_empty": _abi.ON_EMPTY,
    "target_check": _abi.TARGET_CHECK,
}
# Every other field of the C struct that a number fits into.
_NUMBERS = [
    name
    for name, _ in _abi.Options._fields_
    if _PLAIN.get(name, "str") != "str" and name not in _ENUMS
]


@lru_cache(maxsize=256)
def _options(config: Config) -> _abi.Options:
    options = _abi.Options()
    size = c.sizeof(options)
    _abi.check(_abi.lib.talea_linear_cross_entropy_options_init(c.byref(options), size))
    for name, table in _ENUMS.items():
        value = getattr(config, name)
        if value not in table:
            raise _abi.UsageError(f"{name} = {value!r}: one of {', '.join(table)}")
        setattr(options, name, table[value])
    for name in _NUMBERS:
        value = getattr(config, name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # C would cut it
            raise _abi.UsageError(f"{name} = {value}: does not fit into 64 bits")
        setattr(options, name, value)
    if config.dw_sum not in ("fp32", "weight"):
        raise _abi.UsageError(f"dw_sum = {config.dw_sum!r}: one of fp32, weight")
    options.lane = config.lane.encode()
    return options


class Receipt:
    """What ran: the library's facts, held until asked for. A copy holds them as text."""

    __slots__ = ("_handle", "_text")

    def __init__(self, handle: int, text: bytes = b"") -> None:
        self._handle, self._text = handle, text

    def __reduce__(self):  # one object frees the handle; another process has no such address
        return Receipt, (0, self._facts())

    def __del__(self, free=_abi.lib.talea_result_free) -> None:  # modules may be gone at the end
        if self._handle:
            free(self._handle)

    def _facts(self) -> bytes:
        return self._text or _abi.lib.talea_result_json(self._handle)

    def facts(self) -> dict:
        return json.loads(self._facts())


def explained(args) -> dict:
    """What the library says of a call before it is made."""
    explain, needed = _abi.lib.talea_linear_cross_entropy_explain, c.c_int64()
    _abi.check(explain(c.byref(args), 1, None, 0, c.byref(needed)))
    text = c.create_string_buffer(needed.value)
    _abi.check(explain(c.byref(args), 1, text, needed.value, None))
    return json.loads(text.value)


class Plan:
    """A call described once. Every struct is filled; only the addresses change from call to call.

    `inputs` and `outputs` name what is present, in the order in which run() takes the addresses.
    dw_rest among them is described by its bytes, which the library says: `rest_bytes`.
    """

    __slots__ = ("_args", "_keep", "_slots", "ref", "rest_bytes", "workspace_bytes")

    def __init__(
        self, config, inputs: dict, outputs: dict, fill, *, accumulate_dw=False, ranks=None,
        late=False,
    ):  # fmt: skip
        c_in, c_out, args = _abi.Inputs(), _abi.Outputs(), _abi.Args()
        for struct in (c_in, c_out, args):
            struct.struct_bytes = c.sizeof(struct)
        self._slots = []
        for c_side, arrays in ((c_in, inputs), (c_out, outputs)):
            for name, array in arrays.items():
                slot = getattr(c_side, name)
                fill(slot, array, name)
                self._slots.append(slot)
        c_out.accumulate_dw, c_out.late_factor = int(accumulate_dw), int(late)
        args.abi_version = _abi.ABI_VERSION
        args.inputs, args.outputs = c.pointer(c_in), c.pointer(c_out)
        options = _options(config)
        if config.dw_sum == "weight" and "dw" in outputs:
            options = type(options).from_buffer_copy(options)
            options.dw_sum = c_in.weight.dtype
        args.options = c.pointer(options)
        if ranks is not None:
            args.ranks = c.pointer(ranks)
        needed, self.rest_bytes = c.c_int64(), 0
        if "dw_rest" in outputs:
            ask = _abi.lib.talea_linear_cross_entropy_rest_bytes
            _abi.check(ask(c.byref(args), c.byref(needed)))
            self.rest_bytes = needed.value
            if not needed.value:
                raise _abi.UsageError("dw_rest: none is kept within the workspace limit")
            c_out.dw_rest.shape[0] = needed.value // 4
        _abi.check(
            _abi.lib.talea_linear_cross_entropy_workspace_bytes(c.byref(args), c.byref(needed))
        )
        self.workspace_bytes = args.workspace_bytes = needed.value
        if ranks is not None and options.workspace_limit_bytes == _abi.AUTO:  # chosen once, here
            options = type(options).from_buffer_copy(options)
            args.options = c.pointer(options)
            options.workspace_limit_bytes = explained(args)["workspace_limit_bytes"]
        self._args, self.ref, self._keep = args, c.byref(args), (c_in, c_out, ranks, options)

    def place(self, addresses, workspace: int, stream=None) -> None:
        """Where the tensors of the next call lie."""
        for slot, address in zip(self._slots, addresses, strict=True):
            slot.data = address
        self._args.workspace = workspace
        self._args.stream = stream

    def run(self, addresses, workspace: int, stream=None, receipt=True) -> Receipt | None:
        """Runs the operator on tensors of the described shapes. Not for two threads at once."""
        for slot, address in zip(self._slots, addresses):  # noqa: B905  (place(), without a call)
            slot.data = address
        self._args.workspace = workspace
        self._args.stream = stream
        if not receipt:
            status = _abi.lib.talea_linear_cross_entropy(self.ref, None)
            if status:
                _abi.check(status)
            return None
        handle = c.c_void_p()
        _abi.check(_abi.lib.talea_linear_cross_entropy(self.ref, c.byref(handle)))
        return Receipt(handle.value)
