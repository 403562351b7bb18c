"""What the rounding of 16-bit gradients left, kept from forward to backward.

One piece of memory for all of it, without tensors: only the library reads it, and making tensors would
take a fifth of what Python adds to a call.
"""

from __future__ import annotations

import torch

from .. import _fast


class RestsLike:
    """The rests of equal calls: names, shapes, and where each lies in memory that holds them all."""

    __slots__ = ("bytes", "like", "offsets")

    def __init__(self, named) -> None:
        self.like, self.offsets, self.bytes = [], [], 0
        for name, t in named:
            self.offsets.append(self.bytes)
            self.like.append((name, t.shape, t.stride(), t.dtype))
            self.bytes += -(-t.nbytes // 256) * 256


class Rests:
    """Memory of PyTorch's allocator that backward needs, without tensors: nobody else sees it."""

    __slots__ = ("device", "place", "rests")

    def __init__(self, rests: RestsLike, device: torch.device, place: int) -> None:
        self.rests, self.device, self.place = rests, device, place

    def __del__(self, free=_fast.free) -> None:
        free(self.place)

    def __call__(self) -> dict:
        placed = zip(self.rests.like, self.rests.offsets, strict=True)
        return {like[0]: _Rest(self.device, self.place + at, *like[1:]) for like, at in placed}


class _Rest:
    """What is asked of a tensor that only the library reads."""

    __slots__ = ("_address", "_strides", "device", "dtype", "shape")

    def __init__(self, device, address, shape, strides, dtype) -> None:
        self.device, self.dtype, self.shape = device, dtype, shape
        self._address, self._strides = address, strides

    def data_ptr(self) -> int:
        return self._address

    def stride(self):
        return self._strides

    def dim(self) -> int:
        return len(self.shape)

    def get_device(self) -> int:
        return self.device.index
