"""The structs of include/talea/c/mamba3.h as ctypes, and where a tensor's name lies in them.

A tensor has one flat name everywhere: "q", "initial_ssm", "d_out", "final_k", "d_initial_v".
"""

from __future__ import annotations

import ctypes as c

from .. import _abi

FORWARD, BACKWARD, STEP = range(3)
GROUP_HEADS, GROUP_SEQUENCE = 2, 3
ENUMS = {
    "rotary_pairs": {"automatic": 0, "interleaved": 1, "halves": 2},
    "sequence_check": {"automatic": 0, "checked": 1, "clamp": 2},
    "schedule": {"automatic": 0, "sequential": 1, "parallel": 2},
}
STATES = ("angle", "ssm", "k", "v")
# Everything floating that a scan reads, in the order of the C struct.
SCANNED = (
    "q", "k", "v", "z", "adt", "dt", "trap", "angles", "q_bias", "k_bias", "d", "mimo_v", "mimo_z",
    "mimo_out", "norm_weight",
)  # fmt: skip
PARAMETERS = SCANNED[8:]
SHAPING = ("q", "v")  # what the shapes of a result are taken from
INITIAL = tuple("initial_" + n for n in STATES)
FINAL = tuple("final_" + n for n in STATES)


def _struct(name: str, *fields, sized: bool = True) -> type[c.Structure]:
    head = [("struct_bytes", c.c_int64)] if sized else []
    return type(name, (c.Structure,), {"_fields_": [*head, *fields]})


def _tensors(*names: str) -> list:
    return [(name, _abi.Tensor) for name in names]


States = _struct("States", *_tensors(*STATES), sized=False)
Gradients = _struct(
    "Gradients", *_tensors(*SCANNED), ("initial_states", States),
    ("accumulate_parameters", c.c_int32), ("reserved", c.c_int32), sized=False,
)  # fmt: skip
Inputs = _struct(
    "Inputs", *_tensors(*SCANNED, "cu_seqlens"), ("initial_states", States),
    *_tensors("d_out", "saved"), ("d_final_states", States),
)  # fmt: skip
Outputs = _struct(
    "Outputs", *_tensors("out", "saved", "status"), ("final_states", States), ("d", Gradients)
)
StepTensors = _struct("StepTensors", *_tensors("slots", "out", "status"), ("state", States))
Options = _struct(
    "Options",
    ("rotary_pairs", c.c_int32), ("sequence_check", c.c_int32), ("schedule", c.c_int32),
    ("head_norm", c.c_int32), ("norm_eps", c.c_double), ("chunk", c.c_int64),
    ("workspace_limit_bytes", c.c_int64), ("threads", c.c_int32), ("reserved", c.c_int32),
    ("lane", c.c_char_p),
)  # fmt: skip
Ranks = _struct(
    "Ranks",
    ("heads", c.POINTER(_abi.Communicator)), ("sequence", c.POINTER(_abi.Communicator)),
    ("head_begin", c.c_int64), ("total_heads", c.c_int64), ("total_groups", c.c_int64),
    ("token_begin", c.c_int64), ("skip_handshake", c.c_int32), ("shared_angles", c.c_int32),
)  # fmt: skip
Args = _struct(
    "Args", ("abi_version", c.c_int32), ("reserved", c.c_int32), ("inputs", c.POINTER(Inputs)),
    ("outputs", c.POINTER(Outputs)), ("step", c.POINTER(StepTensors)),
    ("options", c.POINTER(Options)), ("ranks", c.POINTER(Ranks)), ("workspace", c.c_void_p),
    ("workspace_bytes", c.c_int64), ("stream", c.c_void_p),
)  # fmt: skip


def slot(struct: c.Structure, name: str) -> _abi.Tensor:
    """The tensor of a flat name in Inputs, Outputs or StepTensors."""
    for prefix, member in (
        ("initial_", "initial_states"), ("d_final_", "d_final_states"),
        ("final_", "final_states"), ("state_", "state"),
    ):  # fmt: skip
        if name.startswith(prefix):
            return getattr(getattr(struct, member), name[len(prefix) :])
    if name.startswith("d_") and isinstance(struct, Outputs):
        return slot(struct.d, name[2:])
    return getattr(struct, name)


def _declare(lib) -> None:
    args, number, handle = c.POINTER(Args), c.POINTER(c.c_int64), c.POINTER(c.c_void_p)
    lib.talea_mamba3_options_init.argtypes = [c.POINTER(Options), c.c_int64]
    lib.talea_mamba3_workspace_bytes.argtypes = [args, c.c_int32, number]
    lib.talea_mamba3_saved_bytes.argtypes = [args, number]
    lib.talea_mamba3_phases_begin.argtypes = [args, c.c_int32, handle]
    for name in ("forward", "backward", "step"):
        getattr(lib, "talea_mamba3_" + name).argtypes = [args, handle]
    lib.talea_mamba3_lanes.restype = c.c_char_p


_declare(_abi.lib)
