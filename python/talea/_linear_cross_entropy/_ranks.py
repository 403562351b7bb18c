"""The vocabulary's and the batch's process groups under one call of the operator."""

from __future__ import annotations

import ctypes as c
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _abi, _ranks
from .._call import Receipt
from . import _c
from ._call import Plan
from ._settings import DX_SUMS, Config
from ._tensors import run


def size_of(name: str) -> int:
    return dist.get_world_size(_resolve_process_group(name))


_numbers: dict[tuple, int] = {}


@lru_cache(maxsize=512)
def _of(config: Config) -> int:
    """One number for settings that differ in nothing but this rank's place."""
    fields = tuple((k, v) for k, v in config.__dict__.items() if k != "vocab_begin")
    return _numbers.setdefault(fields, len(_numbers))


class Meeting(_ranks.Meeting):
    """`more`: what of the call is the same on every rank, beside settings and tensors."""

    def __init__(self, config: Config, inputs, more: tuple) -> None:
        groups = [_resolve_process_group(n) for n in (config.group, config.batch_group) if n]
        self.voters = int(bool(config.group))  # the batch's ranks go each its own way
        given = tuple(t is not None for t in inputs)
        # Ranks of a batch have tokens of their own, a number that may change on one alone.
        shape = () if config.batch_group else inputs[0].shape
        kind = (_of(config), given, shape, inputs[0].dtype, more)
        super().__init__(groups, inputs[0], kind)

    def choose(self, fits) -> int | None:
        """The first way that fits every rank of the vocabulary; None: none does."""
        own = [int(f) for f in fits]
        said = self.meet(own)
        votes = said[0] if self.voters else [own]
        ways = (i for i in range(len(fits)) if all(v[i] for v in votes))
        return next(ways, None)

    def run(self, described, *call):
        described.ranks.struct.skip_handshake = int(self.known)
        return run(described, *call)


class Groups(_ranks.Groups):
    """`struct` is the C side."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.names = (config.group, config.batch_group)
        super().__init__(self._resolved(), device)
        self.struct = _c.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        self.struct.vocab_begin = config.vocab_begin
        self.struct.sequence_parallel = int(config.sequence_parallel)
        self.struct.dx_sum = DX_SUMS[config.dx_sum]
        sides = [self._communicator(group) for group in self.groups]
        if sides[0]:
            self.struct.vocab = c.pointer(sides[0])
        if sides[1]:
            self.struct.batch = c.pointer(sides[1])

    def _resolved(self) -> list:
        return [_resolve_process_group(name) if name else None for name in self.names]

    def current(self) -> bool:
        """Whether the names still are those of the same groups."""
        return all(a is b for a, b in zip(self.groups, self._resolved(), strict=True))

    def run(self, plan: Plan, receipt: bool) -> Receipt | None:
        """The call that `plan` holds, addresses set."""
        begin = partial(_abi.lib.talea_linear_cross_entropy_phases_begin, plan.ref)
        kept = self.through_phases(begin)
        return kept if receipt else None
