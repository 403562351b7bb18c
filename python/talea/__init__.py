"""Talea: operators for training language models, exact and fused.

`talea.linear_cross_entropy` is the output projection of a language model and its cross-entropy,
`talea.sparse_attention` attention over lists of selected keys, `talea.mamba3` the Mamba-3 scan. They
need PyTorch and import it on first use; `talea.arrays` needs NumPy only.
"""

from __future__ import annotations

import importlib

from ._abi import CONTRACT_VERSION, DataError, Error, UnavailableError, UsageError, lib

__version__ = lib.talea_version().decode()
# By name: the module that has it, and what it is called there.
_LAZY = {
    "linear_cross_entropy": ("_linear_cross_entropy.functional", "linear_cross_entropy"),
    "LinearCrossEntropy": ("_linear_cross_entropy.functional", "LinearCrossEntropy"),
    "LinearCrossEntropyOutput": ("_linear_cross_entropy.functional", "LinearCrossEntropyOutput"),
    "mamba3": ("_mamba3.functional", "mamba3"),
    "mamba3_step": ("_mamba3.functional", "mamba3_step"),
    "mamba3_group_rows": ("_mamba3.functional", "group_rows"),
    "mamba3_lanes": ("_mamba3.functional", "lanes"),
    "Mamba3State": ("_mamba3.functional", "Mamba3State"),
    "Mamba3Output": ("_mamba3.functional", "Mamba3Output"),
    **{
        name: ("_sparse_attention.functional", name)
        for name in (
            "Fp8", "PackedKV", "SparseAttentionOutput", "index_mask", "pack_rows",
            "sparse_attention", "sparse_index_loss", "sparse_select",
        )
    },
}  # fmt: skip
# What registers the custom ops of a module, torch.ops.talea.*: there from the first use of any name
# of it, called or compiled.
_OPS = {
    "_mamba3.functional": "_mamba3._compiled",
    "_sparse_attention.functional": "_sparse_attention._ops",
}
__all__ = [
    "CONTRACT_VERSION",
    "DataError",
    "Error",
    "UnavailableError",
    "UsageError",
    "lanes",
    "require_clean",
    *_LAZY,
]


def lanes() -> list[str]:
    """Names of the lanes of linear cross-entropy of this build, best first."""
    return lib.talea_linear_cross_entropy_lanes().decode().split(",")


def require_clean(status=None) -> None:
    """Raises what linear cross-entropy on a device found wrong after it had returned, once; with
    the `status` of a sparse attention, what that has counted."""
    if status is None:
        from ._linear_cross_entropy._late import require_clean as check
    else:
        from functools import partial

        from ._sparse_attention.functional import require_clean as check_status

        check = partial(check_status, status)
    check()


def __getattr__(name: str):
    if name in _LAZY:
        module, inside = _LAZY[name]
        found = getattr(importlib.import_module("." + module, __name__), inside)
        if module in _OPS:
            importlib.import_module("." + _OPS[module], __name__)
        globals()[name] = found
        return found
    if name == "arrays":
        return importlib.import_module(".arrays", __name__)
    raise AttributeError(f"module 'talea' has no attribute {name!r}")
