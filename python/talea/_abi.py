"""The neutral part of the C interface (include/talea/talea.h) as ctypes; a folder an operator has
the rest, in its _c.py.

Checked against the library's own ABI version at load time; tests/architecture/structs.py holds every
struct to the headers. Nothing here knows NumPy or PyTorch.
"""

from __future__ import annotations

import ctypes as c
import os
from pathlib import Path

ABI_VERSION = 3
CONTRACT_VERSION = 1  # TALEA_CONTRACT_VERSION: rises when the same call computes something else

F32, BF16, F16, F64, I32, I64, F8_E4M3, U8 = range(8)
MAX_RANK = 5
CPU, CUDA = 0, 1
AUTO = -1  # of workspace_limit_bytes


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
        ("multiprocessors_beside", c.c_int32),
        ("user", c.c_void_p),
        ("all_gather", c.c_void_p),
        ("all_reduce_sum", c.c_void_p),
        ("reduce_scatter_sum", c.c_void_p),
        ("error_text", c.c_void_p),
    ]


EXCHANGE_NONE, EXCHANGE_ALL_GATHER, EXCHANGE_ALL_REDUCE_SUM, EXCHANGE_REDUCE_SCATTER_SUM = range(4)
EXCHANGE_TO_BEGUN, EXCHANGE_JOIN = 3, 7  # what a begun exchange's kind is above the plain one's


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
    library.talea_linear_cross_entropy_lanes.restype = c.c_char_p  # talea.lanes()
    library.talea_fault_flag.restype = c.c_void_p
    library.talea_phases_next.argtypes = [c.c_void_p, c.POINTER(Exchange)]
    library.talea_phases_finish.argtypes = [c.c_void_p, c.POINTER(c.c_void_p)]
    library.talea_phases_free.argtypes = [c.c_void_p]
    library.talea_phases_free.restype = None
    library.talea_result_json.argtypes = [c.c_void_p]
    library.talea_result_json.restype = c.c_char_p
    library.talea_result_free.argtypes = [c.c_void_p]
    library.talea_result_free.restype = None
    found = library.talea_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"talea: libtalea.so has ABI {found}, this package needs {ABI_VERSION}")
    return library


lib = _load()


def of_status(status: int) -> type[Error]:
    return _ERRORS.get(status, Error)


def check(status: int) -> None:
    if status:
        raise of_status(status)(lib.talea_last_error().decode(errors="replace"))
