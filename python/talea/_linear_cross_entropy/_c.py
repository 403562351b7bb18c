"""The structs of include/talea/c/linear_cross_entropy.h as ctypes.

Fields stand in the header's order; tests/architecture/structs.py holds them to it.
"""

from __future__ import annotations

import ctypes as c

from .. import _abi

REDUCTION = {"none": 0, "sum": 1, "mean": 2}
DENOMINATOR = {"valid": 0, "weighted": 1, "given": 2}
SCOPE = {"local": 0, "global": 1}
ON_EMPTY = {"nan": 0, "zero": 1}
TARGET_CHECK = {"automatic": 0, "checked": 1, "poison": 2}
INPUT_NAMES = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "class_weight",
    "token_weight",
    "token_scale",
    "soft_target_ids",
    "soft_target_probs",
    "upstream",
    "upstream_lse",
    "upstream_entropy",
    "saved_lse",
    "saved_target_logprob",
)
OUTPUT_NAMES = (
    "loss",
    "lse",
    "target_logprob",
    "entropy",
    "argmax",
    "accuracy",
    "topk_values",
    "topk_ids",
    "topk_logprobs",
    "dx",
    "dw",
    "dx_rest",
    "dw_rest",
    "db",
)


class Inputs(c.Structure):
    _fields_ = [("struct_bytes", c.c_int64)] + [(name, _abi.Tensor) for name in INPUT_NAMES]


class Outputs(c.Structure):
    _fields_ = (
        [("struct_bytes", c.c_int64)]
        + [(name, _abi.Tensor) for name in OUTPUT_NAMES]
        + [("accumulate_dw", c.c_int32), ("accumulate_db", c.c_int32)]
        + [("late_factor", c.c_int32), ("reserved", c.c_int32)]
    )


class Options(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("reduction", c.c_int32),
        ("denominator", c.c_int32),
        ("denominator_value", c.c_double),
        ("denominator_scope", c.c_int32),
        ("on_empty", c.c_int32),
        ("target_check", c.c_int32),
        ("threads", c.c_int32),
        ("ignore_index", c.c_int64),
        ("vocab", c.c_int64),
        ("label_smoothing", c.c_double),
        ("z_loss", c.c_double),
        ("softcap", c.c_double),
        ("logit_scale", c.c_double),
        ("workspace_limit_bytes", c.c_int64),
        ("dw_sum", c.c_int32),
        ("reserved", c.c_int32),
        ("lane", c.c_char_p),
    ]


class Ranks(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("vocab", c.POINTER(_abi.Communicator)),
        ("batch", c.POINTER(_abi.Communicator)),
        ("vocab_begin", c.c_int64),
        ("sequence_parallel", c.c_int32),
        ("skip_handshake", c.c_int32),
        ("dx_sum", c.c_int32),
        ("reserved", c.c_int32),
    ]


class Args(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("abi_version", c.c_int32),
        ("reserved", c.c_int32),
        ("inputs", c.POINTER(Inputs)),
        ("outputs", c.POINTER(Outputs)),
        ("options", c.POINTER(Options)),
        ("ranks", c.POINTER(Ranks)),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64),
        ("stream", c.c_void_p),
    ]


class Places(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("workspace", c.c_void_p),
        ("stream", c.c_void_p),
        ("count", c.c_int64),
        ("data", c.c_void_p * 28),
    ]


LATE_NAMES = ("factor", "expected", "dx", "dw", "dx_sum", "dw_sum", "dx_rest", "dw_rest")


class Late(c.Structure):
    _fields_ = (
        [("struct_bytes", c.c_int64)]
        + [(name, _abi.Tensor) for name in LATE_NAMES]
        + [("stream", c.c_void_p)]
    )


def _declare(lib: c.CDLL) -> None:
    args, number, handle = c.POINTER(Args), c.POINTER(c.c_int64), c.POINTER(c.c_void_p)
    lib.talea_linear_cross_entropy.argtypes = [args, handle]
    lib.talea_linear_cross_entropy_workspace_bytes.argtypes = [args, number]
    lib.talea_linear_cross_entropy_rest_bytes.argtypes = [args, number]
    lib.talea_linear_cross_entropy_phases_begin.argtypes = [args, handle]
    lib.talea_linear_cross_entropy_options_init.argtypes = [c.POINTER(Options), c.c_int64]
    lib.talea_linear_cross_entropy_prepare.argtypes = [args, handle]
    lib.talea_linear_cross_entropy_prepared_free.argtypes = [c.c_void_p]
    lib.talea_linear_cross_entropy_prepared_free.restype = None
    lib.talea_linear_cross_entropy_late.argtypes = [c.POINTER(Late)]
    explain = [args, c.c_int32, c.c_char_p, c.c_int64, number]
    lib.talea_linear_cross_entropy_explain.argtypes = explain


_declare(_abi.lib)
