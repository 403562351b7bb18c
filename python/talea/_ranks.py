"""A torch.distributed process group under the operator: its exchanges done between its phases.

The library stops at every exchange and hands over the buffers; the collective runs here, on the
caller's thread and stream, so that an error of the group is an ordinary exception.
"""

from __future__ import annotations

import ctypes as c

import torch
import torch.distributed as dist

from . import _abi
from ._call import Receipt

_DTYPES = {
    _abi.F32: torch.float32,
    _abi.BF16: torch.bfloat16,
    _abi.F64: torch.float64,
    _abi.I64: torch.int64,
}


class Groups:
    """The process groups of one call: `groups` by the number of an exchange's group, on `device`."""

    def _communicator(self, group):
        if group is None:
            return None
        side = _abi.Communicator()
        side.struct_bytes = c.sizeof(side)
        side.engine = f"torch.distributed {dist.get_backend(group)}".encode()
        side.rank, side.size = dist.get_rank(group), dist.get_world_size(group)
        side.device = _abi.CUDA if self.device.type == "cuda" else _abi.CPU
        return side

    def through_phases(self, begin) -> Receipt:
        """A call, begun by begin(phases), with every exchange that it stops at."""
        lib, phases, exchange, result = _abi.lib, c.c_void_p(), _abi.Exchange(), c.c_void_p()
        exchange.struct_bytes = c.sizeof(exchange)
        _abi.check(begin(c.byref(phases)))
        try:
            while True:
                _abi.check(lib.talea_phases_next(phases, c.byref(exchange)))
                if exchange.kind == _abi.EXCHANGE_NONE:
                    break
                self._do(exchange)
            _abi.check(lib.talea_phases_finish(phases, c.byref(result)))
        finally:
            lib.talea_phases_free(phases)
        return Receipt(result.value)

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
