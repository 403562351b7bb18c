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


_MOST_BESIDE = 32  # a product that leaves more free than that loses more than a sum takes


def multiprocessors_of(group, device: torch.device) -> int:
    """At most so many multiprocessors of the device run the group's NCCL kernels; 0: nobody said.

    Who makes a group says so: ProcessGroupNCCL.Options().config.max_ctas.
    """
    if device.type != "cuda" or dist.get_backend(group) != "nccl":
        return 0
    try:
        most = group._get_backend(device).options.config.max_ctas
    except (AttributeError, RuntimeError):  # of this PyTorch's own
        return 0
    return most if 0 < most <= _MOST_BESIDE else 0


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
        side.multiprocessors_beside = multiprocessors_of(group, self.device)
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
        begun = self.__dict__.setdefault("begun", {})  # by group: what nobody has waited for
        if e.kind == _abi.EXCHANGE_JOIN:  # the stream waits, not the host
            for work in begun.pop(e.group, ()):
                work.wait()
            return
        group, device = self.groups[e.group], e.device == _abi.CUDA
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        begins = e.kind > _abi.EXCHANGE_REDUCE_SCATTER_SUM
        kind = e.kind - _abi.EXCHANGE_TO_BEGUN if begins else e.kind
        gather = kind == _abi.EXCHANGE_ALL_GATHER
        dtype = torch.uint8 if gather else _DTYPES[e.dtype]
        blocks = size if kind == _abi.EXCHANGE_REDUCE_SCATTER_SUM else 1
        mine = self._view(e.send, e.bytes * blocks, device, dtype)
        out = self._view(e.recv, e.bytes * (size if gather else 1), device, dtype)
        backend = dist.get_backend(group)
        if backend == "nccl" and device:  # where it lies, in stream order
            how = {"group": group, "async_op": begins}
            if gather:
                work = dist.all_gather_into_tensor(out, mine, **how)
            elif blocks == 1:
                work = dist.all_reduce(out, **how)
            else:
                work = dist.reduce_scatter_tensor(out, mine, **how)
            if begins:
                begun.setdefault(e.group, []).append(work)
            return
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
