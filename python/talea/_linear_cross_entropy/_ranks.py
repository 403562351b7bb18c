"""The vocabulary's and the batch's process groups under one call of the operator."""

from __future__ import annotations

import ctypes as c
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _abi, _ranks
from .._call import Receipt
from . import _c
from ._call import Plan
from ._settings import DX_SUMS, Config


def size_of(name: str) -> int:
    return dist.get_world_size(_resolve_process_group(name))


def all_say(name: str, device: torch.device, yes: bool) -> bool:
    """Whether every rank of the group says yes. Waits for them: only where a call is described."""
    group = _resolve_process_group(name)
    here = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    said = torch.tensor([int(yes)], dtype=torch.int32, device=here)
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())


_agreed: dict = {}  # what ranks have compared once -> the groups, so that no id comes back


class Groups(_ranks.Groups):
    """`struct` is the C side.

    same: what of the call is the same on every rank. Ranks compare their calls once for each: after
    that a call waits for no host.
    """

    def __init__(self, config: Config, device: torch.device, same: tuple) -> None:
        self.device, self.names = device, (config.group, config.batch_group)
        self.groups = self._resolved()
        fields = tuple((k, v) for k, v in config.__dict__.items() if k != "vocab_begin")
        self.same = (*map(id, self.groups), fields, same)
        self.struct = _c.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        self.struct.vocab_begin = config.vocab_begin
        self.struct.sequence_parallel = int(config.sequence_parallel)
        self.struct.dx_sum = DX_SUMS[config.dx_sum]
        self.struct.skip_handshake = int(self.same in _agreed)
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
        _agreed[self.same] = self.groups
        self.struct.skip_handshake = 1
        return kept if receipt else None
