"""The structs of include/talea/c/sparse_attention.h as ctypes, and one table of its passes.

Field names stand in the header's order; the library refuses a struct of another size.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass

from .. import _abi

F8_E4M3, U8 = 6, 7
ENUMS = {
    "index_space": {"rows": 0, "sequence": 1, "slots": 2},
    "index_check": {"ignore": 0, "report": 1, "checked": 2},
    "kv_storage": {"plain": 0, "fp8_scaled": 1, "fp8_656": 2},
    "fp8_path": {"any": 0, "in_kernel": 1},
    "dkv_sum": {"deterministic": 0, "atomic": 1},
    "dindex_k_sum": {"deterministic": 0, "atomic": 1},
    "operands": {"native": 0, "split": 1},
    "act": {"relu": 0, "identity": 1},
    "keys": {"sparse": 0, "dense": 1},
    "denominator": {"valid": 0, "given": 1},
    "denominator_scope": {"local": 0, "global": 1},
}
HEADS, SEQUENCE, BATCH = 2, 3, 1  # groups of an exchange

INPUTS = (
    "q", "q_scale", "kv", "kv_scale", "indices", "topk_length", "sink", "cu_seqlens_q",
    "cu_seqlens_k", "q_positions", "block_table", "kv_lengths", "d_o", "d_lse", "o", "o_residual",
    "lse",
)  # fmt: skip
OUTPUTS = ("o", "o_residual", "lse", "row_max", "status", "dq", "dkv", "d_sink")
SELECT_INPUTS = (
    "index_q", "index_q_scale", "index_k", "index_k_scale", "index_weights", "begin", "end",
    "cu_seqlens_q", "cu_seqlens_k", "q_positions",
)  # fmt: skip
SELECT_OUTPUTS = ("indices", "topk_length", "scores", "status")
LOSS_INPUTS = (
    "index_q", "index_q_scale", "index_k", "index_k_scale", "index_weights", "q", "q_scale", "kv",
    "kv_scale", "indices", "topk_length", "lse", "row_weight", "begin", "end", "cu_seqlens_q",
    "cu_seqlens_k", "q_positions",
)  # fmt: skip
LOSS_OUTPUTS = ("loss", "dindex_q", "dindex_k", "dindex_weights", "status")


def _struct(name: str, *fields) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": [("struct_bytes", c.c_int64), *fields]})


def _tensors(names: tuple[str, ...]) -> list:
    return [(name, _abi.Tensor) for name in names]


def _numbers(kind, *names: str) -> list:
    return [(name, kind) for name in names]


_LIMIT = [("workspace_limit_bytes", c.c_int64), ("lane", c.c_char_p)]
Options = _struct(
    "Options",
    ("value_dim", c.c_int64),
    ("scale", c.c_double),
    ("q_position_base", c.c_int64),
    *_numbers(c.c_int32, "causal", "index_space", "index_check", "kv_storage", "fp8_path",
              "dkv_sum", "operands", "threads"),
    *_LIMIT,
)  # fmt: skip
SelectOptions = _struct(
    "SelectOptions",
    *_numbers(c.c_int64, "top_k", "q_position_base", "key_stride"),
    *_numbers(c.c_int32, "act", "causal", "threads", "reserved"),
    *_LIMIT,
)
LossOptions = _struct(
    "LossOptions",
    *_numbers(c.c_double, "coeff", "denominator_value", "scale"),
    *_numbers(c.c_int64, "q_position_base", "key_stride"),
    *_numbers(c.c_int32, "keys", "denominator", "denominator_scope", "act", "causal",
              "index_space", "index_check", "kv_storage", "dindex_k_sum", "threads"),
    *_LIMIT,
)  # fmt: skip
Ranks = _struct(
    "Ranks",
    *_numbers(c.POINTER(_abi.Communicator), "heads", "sequence", "batch"),
    *_numbers(c.c_int64, "head_begin", "row_begin", "total_heads", "total_kv_rows"),
    *_numbers(c.c_int32, "gather_kv", "skip_handshake"),
)


def _args(inputs, outputs, options) -> type[c.Structure]:
    return _struct(
        "Args",
        ("abi_version", c.c_int32),
        ("reserved", c.c_int32),
        ("inputs", c.POINTER(inputs)),
        ("outputs", c.POINTER(outputs)),
        ("options", c.POINTER(options)),
        ("ranks", c.POINTER(Ranks)),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64),
        ("stream", c.c_void_p),
    )


@dataclass(frozen=True)
class Door:
    """A pass: its structs and its C functions. `which`: the number that tells forward and backward
    apart, where they share a function."""

    inputs: type
    outputs: type
    options: type
    args: type
    prefix: str
    run: str
    which: tuple[int, ...] = ()

    def _function(self, name: str):
        return getattr(_abi.lib, name)

    def options_init(self, options) -> None:
        _abi.check(
            self._function(self.prefix + "_options_init")(c.byref(options), c.sizeof(options))
        )

    def workspace_bytes(self, args) -> int:
        needed = c.c_int64()
        call = self._function(self.prefix + "_workspace_bytes")
        _abi.check(call(c.byref(args), *self.which, c.byref(needed)))
        return needed.value

    def __call__(self, args, receipt: bool = True) -> int | None:
        """receipt: whether a result is handed back."""
        result = c.c_void_p() if receipt else None
        _abi.check(self._function(self.run)(c.byref(args), c.byref(result) if receipt else None))
        return result.value if receipt else None

    def phases_begin(self, args) -> c.c_void_p:
        phases = c.c_void_p()
        call = self._function(self.prefix + "_phases_begin")
        _abi.check(call(c.byref(args), *self.which, c.byref(phases)))
        return phases


_NAME = "talea_sparse_attention"
_TAIL = [("accumulate_dkv", c.c_int32), ("reserved", c.c_int32)]
Inputs = _struct("Inputs", *_tensors(INPUTS))
Outputs = _struct("Outputs", *_tensors(OUTPUTS), *_TAIL)
Args = _args(Inputs, Outputs, Options)
_SelectInputs = _struct("SelectInputs", *_tensors(SELECT_INPUTS))
_SelectOutputs = _struct("SelectOutputs", *_tensors(SELECT_OUTPUTS))
_LossInputs = _struct("LossInputs", *_tensors(LOSS_INPUTS))
_LossOutputs = _struct(
    "LossOutputs", *_tensors(LOSS_OUTPUTS), *_numbers(c.c_int32, "accumulate_dindex_k", "reserved")
)
DOORS = {
    "forward": Door(Inputs, Outputs, Options, Args, _NAME, _NAME + "_forward", (0,)),
    "backward": Door(Inputs, Outputs, Options, Args, _NAME, _NAME + "_backward", (1,)),
    "select": Door(
        _SelectInputs,
        _SelectOutputs,
        SelectOptions,
        _args(_SelectInputs, _SelectOutputs, SelectOptions),
        _NAME + "_select",
        _NAME + "_select",
    ),
    "index_loss": Door(
        _LossInputs,
        _LossOutputs,
        LossOptions,
        _args(_LossInputs, _LossOutputs, LossOptions),
        _NAME + "_index_loss",
        _NAME + "_index_loss",
    ),
}


def _declare() -> None:
    lib, pointer = _abi.lib, c.c_void_p
    for door in DOORS.values():
        getattr(lib, door.run).argtypes = [pointer, pointer]
        getattr(lib, door.prefix + "_options_init").argtypes = [pointer, c.c_int64]
        which = [c.c_int32] * len(door.which)
        for name in ("_workspace_bytes", "_phases_begin"):
            getattr(lib, door.prefix + name).argtypes = [pointer, *which, pointer]
    lib.talea_sparse_attention_index_mask.argtypes = [pointer, pointer]
    lib.talea_sparse_attention_pack_rows.argtypes = [pointer, pointer, pointer]
    lib.talea_sparse_attention_require_clean.argtypes = [pointer, pointer]
    lib.talea_sparse_attention_lanes.restype = c.c_char_p


_declare()
