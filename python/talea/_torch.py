"""PyTorch tensors for the C interface: descriptions, allocation, streams, process groups."""

from __future__ import annotations

import ctypes as c

import torch

from . import _abi
from ._call import Config, Receipt, run

_DTYPES = {
    torch.float32: _abi.F32,
    torch.bfloat16: _abi.BF16,
    torch.float16: _abi.F16,
    torch.float64: _abi.F64,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
}
_FROM_DTYPE = {
    _abi.F32: torch.float32,
    _abi.BF16: torch.bfloat16,
    _abi.F64: torch.float64,
    _abi.I64: torch.int64,
}


def _fill(slot: _abi.Tensor, tensor: torch.Tensor, name: str) -> None:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise _abi.DataError(f"{name}: dtype {tensor.dtype} is not supported")
    rank = tensor.dim()
    if rank > 4:
        raise _abi.DataError(f"{name}: {rank} dimensions; at most 4")
    slot.data = tensor.data_ptr()
    slot.dtype = dtype
    slot.rank = rank
    slot.shape[:rank] = tensor.shape
    slot.stride[:rank] = tensor.stride()
    device = tensor.device
    if device.type == "cuda":
        slot.device, slot.device_index = _abi.CUDA, device.index
    elif device.type != "cpu":
        raise _abi.DataError(f"{name}: device {device} is not supported; cpu or cuda")
    slot.present = 1


class _Group:
    """A torch.distributed process group as the library's communicator, by callbacks."""

    _cache: dict[str, _Group] = {}

    def __init__(self, name: str, device: torch.device) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _resolve_process_group

        self.dist = dist
        self.group = _resolve_process_group(name)
        self.device = device
        self.failure = b""
        self.struct = _abi.Communicator()
        self.struct.struct_bytes = c.sizeof(self.struct)
        backend = dist.get_backend(self.group)
        self.engine = f"torch.distributed {backend}".encode()
        self.struct.engine = self.engine
        self.struct.rank = dist.get_rank(self.group)
        self.struct.size = dist.get_world_size(self.group)
        self.struct.device = _abi.CUDA if device.type == "cuda" else _abi.CPU
        self.struct.all_gather = _abi.GATHER(self._guard(self._all_gather))
        self.struct.all_reduce_sum = _abi.REDUCE(self._guard(self._all_reduce))
        self.struct.reduce_scatter_sum = _abi.SCATTER(self._guard(self._reduce_scatter))
        self.struct.error_text = _abi.ERROR_TEXT(lambda _: self.failure)

    @classmethod
    def of(cls, name: str, device: torch.device) -> _Group:
        key = f"{name}/{device}"
        if key not in cls._cache:
            cls._cache[key] = cls(name, device)
        return cls._cache[key]

    def _guard(self, function):
        def call(_user, *arguments):
            try:
                function(*arguments)
                return 0
            except Exception as error:  # a C frame is above: nothing may pass through it
                self.failure = f"{type(error).__name__}: {error}".encode()
                return 1

        return call

    def _view(self, pointer: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = count * dtype.itemsize
        if self.device.type == "cuda":
            interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False)}
            holder = type("Memory", (), {"__cuda_array_interface__": {**interface, "version": 3}})()
            return torch.as_tensor(holder, device=self.device).view(dtype)
        memory = (c.c_char * nbytes).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)

    def _all_gather(self, send, recv, nbytes, _stream) -> None:
        if nbytes == 0:
            return
        mine = self._view(send, nbytes, torch.uint8)
        whole = self._view(recv, nbytes * self.struct.size, torch.uint8)
        self.dist.all_gather_into_tensor(whole, mine.clone(), group=self.group)

    def _all_reduce(self, buffer, count, dtype, _stream) -> None:
        # Gathered and summed in rank order on every rank: the same bits everywhere.
        if count == 0:
            return
        mine = self._view(buffer, count, _FROM_DTYPE[dtype])
        if self.device.type == "cuda":
            self.dist.all_reduce(mine, group=self.group)
            return
        parts = [torch.empty_like(mine) for _ in range(self.struct.size)]
        self.dist.all_gather(parts, mine.clone(), group=self.group)
        total = parts[0]
        for part in parts[1:]:
            total += part
        mine.copy_(total)

    def _reduce_scatter(self, send, recv, count, dtype, _stream) -> None:
        if count == 0:
            return
        size, kind = self.struct.size, _FROM_DTYPE[dtype]
        whole = self._view(send, count * size, kind)
        mine = self._view(recv, count, kind)
        if self.device.type == "cuda":
            self.dist.reduce_scatter_tensor(mine, whole, group=self.group)
            return
        total = whole.clone()
        self._all_reduce(total.data_ptr(), count * size, dtype, None)
        mine.copy_(total[self.struct.rank * count : (self.struct.rank + 1) * count])


def _ranks(config: Config, device: torch.device) -> _abi.Ranks | None:
    if not config.group and not config.batch_group:
        return None
    ranks = _abi.Ranks()
    ranks.struct_bytes = c.sizeof(ranks)
    if config.group:
        ranks.vocab = c.pointer(_Group.of(config.group, device).struct)
    if config.batch_group:
        ranks.batch = c.pointer(_Group.of(config.batch_group, device).struct)
    ranks.vocab_begin = config.vocab_begin
    ranks.sequence_parallel = int(config.sequence_parallel)
    return ranks


def call(config: Config, inputs: dict, outputs: dict, *, accumulate_dw: bool = False) -> Receipt:
    """Runs the operator on PyTorch tensors, on the current stream of their device."""
    device = inputs["hidden"].device

    def allocate(count: int):
        workspace = torch.empty(max(count, 1), dtype=torch.uint8, device=device)
        return workspace, workspace.data_ptr()

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return run(
        config,
        inputs,
        outputs,
        _fill,
        allocate,
        accumulate_dw=accumulate_dw,
        ranks=_ranks(config, device),
        stream=stream,
    )
