"""A torch.distributed process group under the operator: its exchanges done between its phases.

The library stops at every exchange and hands over the buffers; the collective runs here, on the
caller's thread and stream, so that an error of the group is an ordinary exception.
"""

from __future__ import annotations

import ctypes as c

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from . import _abi
from ._call import Config, Plan, Receipt

_DTYPES = {
    _abi.F32: torch.float32,
    _abi.BF16: torch.bfloat16,
    _abi.F64: torch.float64,
    _abi.I64: torch.int64,
}


def size_of(name: str) -> int:
    return dist.get_world_size(_resolve_process_group(name))


_agreed: dict = {}  # what ranks have compared once -> the groups, so that no id comes back


class Groups:
    """The vocabulary's and the batch's process groups of one call; `struct` is the C side.

    same: what of the call is the same on every rank. Ranks compare their calls once for each: after
    that a call waits for no host.
    """

    def __init__(self, config: Config, device: torch.device, same: tuple) -> None:
        self.device, self.names = device, (config.group, config.batch_group)
        self.groups = self._resolved()
        fields = tuple((k, v) for k, v in config.__dict__.items() if k != "vocab_begin")
        self.same = (*map(id, self.groups), fields, same)
        self.struct = _abi.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        self.struct.vocab_begin = config.vocab_begin
        self.struct.sequence_parallel = int(config.sequence_parallel)
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

    def _communicator(self, group):
        if group is None:
            return None
        side = _abi.Communicator()
        side.struct_bytes = c.sizeof(side)
        side.engine = f"torch.distributed {dist.get_backend(group)}".encode()
        side.rank, side.size = dist.get_rank(group), dist.get_world_size(group)
        side.device = _abi.CUDA if self.device.type == "cuda" else _abi.CPU
        return side

    def run(self, plan: Plan, receipt: bool) -> Receipt | None:
        """The call that `plan` holds, addresses set."""
        phases, exchange, result = c.c_void_p(), _abi.Exchange(), c.c_void_p()
        exchange.struct_bytes = c.sizeof(exchange)
        lib = _abi.lib
        _abi.check(lib.talea_linear_cross_entropy_phases_begin(plan.ref, c.byref(phases)))
        try:
            while True:
                _abi.check(lib.talea_phases_next(phases, c.byref(exchange)))
                if exchange.kind == _abi.EXCHANGE_NONE:
                    break
                self._do(exchange)
            _abi.check(lib.talea_phases_finish(phases, c.byref(result)))
        finally:
            lib.talea_phases_free(phases)
        _agreed[self.same] = self.groups
        self.struct.skip_handshake = 1
        kept = Receipt(result.value)
        return kept if receipt else None

    def _view(self, pointer: int, nbytes: int, on_device: bool, dtype) -> torch.Tensor:
        if on_device:
            interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False)}
            holder = type("Memory", (), {"__cuda_array_interface__": {**interface, "version": 3}})()
            return torch.as_tensor(holder, device=self.device).view(dtype)
        memory = (c.c_char * nbytes).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)

    def _do(self, e: _abi.Exchange) -> None:
        group, device = self.groups[e.group], e.device == _abi.CUDA
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        gather = e.kind == _abi.EXCHANGE_ALL_GATHER
        dtype = torch.uint8 if gather else _DTYPES[e.dtype]
        blocks = size if e.kind == _abi.EXCHANGE_REDUCE_SCATTER_SUM else 1
        mine = self._view(e.send, e.bytes * blocks, device, dtype)
        out = self._view(e.recv, e.bytes * (size if gather else 1), device, dtype)
        backend = dist.get_backend(group)
        if backend == "nccl" and device:  # where it lies, in stream order
            if gather:
                return dist.all_gather_into_tensor(out, mine, group=group)
            if blocks == 1:
                return dist.all_reduce(out, group=group)
            return dist.reduce_scatter_tensor(out, mine, group=group)
        # NCCL moves device memory alone, and the handshake lies on the host; gloo moves host memory.
        away = {"nccl": self.device, "gloo": torch.device("cpu")}.get(backend, mine.device)
        sent = mine.clone() if mine.device == away else mine.to(away)
        if gather:
            parts = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(parts, sent, group=group)
            out.copy_(torch.cat(parts))
        else:
            # Gathered and summed in rank order on every rank: the same bits everywhere.
            parts = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(parts, sent, group=group)
            total = parts[0]
            for part in parts[1:]:
                total += part
            out.copy_(total.view(blocks, -1)[rank if blocks > 1 else 0])
