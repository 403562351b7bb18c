"""Talea: training operators, exact and fused.

`talea.linear_cross_entropy` is the output projection of a language model and its cross-entropy,
`talea.sparse_attention` attention over lists of selected keys. They need PyTorch and import it on
first use; `talea.arrays` needs NumPy only.
"""

from ._abi import DataError, Error, UnavailableError, UsageError, lib

__version__ = lib.talea_version().decode()
__all__ = [
    "DataError",
    "Error",
    "Fp8",
    "LinearCrossEntropy",
    "LinearCrossEntropyOutput",
    "PackedKV",
    "SparseAttentionOutput",
    "UnavailableError",
    "UsageError",
    "index_mask",
    "lanes",
    "linear_cross_entropy",
    "pack_rows",
    "require_clean",
    "sparse_attention",
    "sparse_index_loss",
    "sparse_select",
]
_SPARSE_ATTENTION = {"Fp8", "PackedKV", "SparseAttentionOutput", "index_mask", "pack_rows",
                     "require_clean", "sparse_attention", "sparse_index_loss", "sparse_select"}  # fmt: skip


def lanes() -> list[str]:
    """Names of the lanes of this build, best first."""
    return lib.talea_linear_cross_entropy_lanes().decode().split(",")


def __getattr__(name: str):
    if name in ("linear_cross_entropy", "LinearCrossEntropy", "LinearCrossEntropyOutput"):
        from . import functional

        globals()[name] = found = getattr(functional, name)
        return found
    if name in _SPARSE_ATTENTION:
        from ._sparse_attention import functional

        globals()[name] = found = getattr(functional, name)
        return found
    raise AttributeError(f"module 'talea' has no attribute {name!r}")
