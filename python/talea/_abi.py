"""The C interface of include/talea/talea.h as ctypes.

One mirror of the header, checked against the library's own ABI version at load time. Nothing here
knows NumPy or PyTorch.
"""

from __future__ import annotations

import ctypes as c
import os
from pathlib import Path

ABI_VERSION = 3

F32, BF16, F16, F64, I32, I64, F8_E4M3, U8 = range(8)
MAX_RANK = 5
CPU, CUDA = 0, 1
REDUCTION = {"none": 0, "sum": 1, "mean": 2}
DENOMINATOR = {"valid": 0, "weighted": 1, "given": 2}
SCOPE = {"local": 0, "global": 1}
ON_EMPTY = {"nan": 0, "zero": 1}
TARGET_CHECK = {"automatic": 0, "checked": 1, "poison": 2}


class Error(RuntimeError):
    """A failure reported by the library; `status` is its code (see talea.h)."""

    status = 4


class UsageError(Error, ValueError):
    """An option or argument that no data could make right."""

    status = 2


class UnavailableError(Error):
    """This machine or build lacks something, named in the text."""

    status = 3


class DataError(Error, ValueError):
    """A tensor, shape, dtype or target that breaks the contract."""

    status = 5


_ERRORS = {2: UsageError, 3: UnavailableError, 5: DataError}


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("dtype", c.c_int32),
        ("rank", c.c_int32),
        ("shape", c.c_int64 * MAX_RANK),
        ("stride", c.c_int64 * MAX_RANK),
        ("device", c.c_int32),
        ("device_index", c.c_int32),
        ("present", c.c_int32),
        ("reserved", c.c_int32),
    ]


class Communicator(c.Structure):
    """Rank and size; the callbacks stay null, because the exchanges are done between phases."""

    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("engine", c.c_char_p),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("device", c.c_int32),
        ("reserved", c.c_int32),
        ("user", c.c_void_p),
        ("all_gather", c.c_void_p),
        ("all_reduce_sum", c.c_void_p),
        ("reduce_scatter_sum", c.c_void_p),
        ("error_text", c.c_void_p),
    ]


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
AUTO = -1  # of workspace_limit_bytes


class Inputs(c.Structure):
    _fields_ = [("struct_bytes", c.c_int64)] + [(name, Tensor) for name in INPUT_NAMES]


class Outputs(c.Structure):
    _fields_ = (
        [("struct_bytes", c.c_int64)]
        + [(name, Tensor) for name in OUTPUT_NAMES]
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
        ("vocab", c.POINTER(Communicator)),
        ("batch", c.POINTER(Communicator)),
        ("vocab_begin", c.c_int64),
        ("sequence_parallel", c.c_int32),
        ("skip_handshake", c.c_int32),
        ("dx_sum", c.c_int32),
        ("reserved", c.c_int32),
    ]


EXCHANGE_NONE, EXCHANGE_ALL_GATHER, _, EXCHANGE_REDUCE_SCATTER_SUM = range(4)


class Exchange(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_int64),
        ("kind", c.c_int32),
        ("group", c.c_int32),
        ("device", c.c_int32),
        ("dtype", c.c_int32),
        ("send", c.c_void_p),
        ("recv", c.c_void_p),
        ("count", c.c_int64),
        ("bytes", c.c_int64),
        ("stream", c.c_void_p),
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


LATE_NAMES = ("factor", "expected", "dx", "dw", "dx_sum", "dw_sum", "dx_rest", "dw_rest")


class Late(c.Structure):
    _fields_ = (
        [("struct_bytes", c.c_int64)]
        + [(name, Tensor) for name in LATE_NAMES]
        + [("stream", c.c_void_p)]
    )


def _find() -> str:
    """The library beside this package (the wheel), else a path given by TALEA_LIBRARY."""
    beside = Path(__file__).parent / "lib" / "libtalea.so"
    if beside.exists():
        return str(beside)
    given = os.environ.get("TALEA_LIBRARY")
    if given:
        return given
    raise ImportError(
        f"talea: {beside} is missing; install the wheel, or point TALEA_LIBRARY at libtalea.so"
    )


def _load() -> c.CDLL:
    library = c.CDLL(_find())
    library.talea_version.restype = c.c_char_p
    library.talea_build_revision.restype = c.c_char_p
    library.talea_last_error.restype = c.c_char_p
    library.talea_linear_cross_entropy_lanes.restype = c.c_char_p
    library.talea_linear_cross_entropy_workspace_bytes.argtypes = [
        c.POINTER(Args),
        c.POINTER(c.c_int64),
    ]
    library.talea_linear_cross_entropy_rest_bytes.argtypes = [
        c.POINTER(Args),
        c.POINTER(c.c_int64),
    ]
    library.talea_linear_cross_entropy_late.argtypes = [c.POINTER(Late)]
    library.talea_fault_flag.restype = c.c_void_p
    library.talea_linear_cross_entropy.argtypes = [c.POINTER(Args), c.POINTER(c.c_void_p)]
    library.talea_linear_cross_entropy_options_init.argtypes = [c.POINTER(Options), c.c_int64]
    library.talea_linear_cross_entropy_phases_begin.argtypes = [
        c.POINTER(Args),
        c.POINTER(c.c_void_p),
    ]
    library.talea_phases_next.argtypes = [c.c_void_p, c.POINTER(Exchange)]
    library.talea_phases_finish.argtypes = [c.c_void_p, c.POINTER(c.c_void_p)]
    library.talea_phases_free.argtypes = [c.c_void_p]
    library.talea_phases_free.restype = None
    library.talea_result_json.argtypes = [c.c_void_p]
    library.talea_result_json.restype = c.c_char_p
    library.talea_result_free.argtypes = [c.c_void_p]
    library.talea_result_free.restype = None
    library.talea_linear_cross_entropy_explain.argtypes = [
        c.POINTER(Args),
        c.c_int32,
        c.c_char_p,
        c.c_int64,
        c.POINTER(c.c_int64),
    ]
    found = library.talea_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"talea: libtalea.so has ABI {found}, this package needs {ABI_VERSION}")
    return library


lib = _load()


def check(status: int) -> None:
    if status:
        raise _ERRORS.get(status, Error)(lib.talea_last_error().decode(errors="replace"))
