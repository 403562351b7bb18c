"""talea.linear_cross_entropy and its module, by the path that callers import them from."""

from ._linear_cross_entropy.functional import (
    LinearCrossEntropy,
    LinearCrossEntropyOutput,
    linear_cross_entropy,
)

__all__ = ["LinearCrossEntropy", "LinearCrossEntropyOutput", "linear_cross_entropy"]
