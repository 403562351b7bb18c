"""Talea: the output projection of a language model and its cross-entropy, exact and fused.

`talea.linear_cross_entropy` and `talea.LinearCrossEntropy` need PyTorch and import it on first use;
`talea.arrays` needs NumPy only.
"""

from ._abi import DataError, Error, UnavailableError, UsageError, lib

__version__ = lib.talea_version().decode()
__all__ = [
    "DataError",
    "Error",
    "LinearCrossEntropy",
    "LinearCrossEntropyOutput",
    "UnavailableError",
    "UsageError",
    "lanes",
    "linear_cross_entropy",
]


def lanes() -> list[str]:
    """Names of the lanes of this build, best first."""
    return lib.talea_linear_cross_entropy_lanes().decode().split(",")


def __getattr__(name: str):
    if name in ("linear_cross_entropy", "LinearCrossEntropy", "LinearCrossEntropyOutput"):
        from . import functional

        globals()[name] = found = getattr(functional, name)
        return found
    raise AttributeError(f"module 'talea' has no attribute {name!r}")
