"""A torch.distributed process group under the operator: its exchanges done between its phases.

The library stops at every exchange and hands over the buffers; the collective runs here, on the
caller's thread and stream, so that an error of the group is an ordinary exception.

Before the first exchange of a call every rank says whether it can make the call: an error of one
rank is an error of all, at once. On a host always; on a device once for each kind of call, so that a
step waits for no host.
"""

from __future__ import annotations

import ctypes as c
import threading

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


_NUMBERS = 4  # that a rank may tell beside its error


class _State(threading.local):
    met = False  # the ranks of the call that this thread is in have told each other
    inside = False  # such a call


_state = _State()
_once: dict = {}  # groups, by their ids, that have met on a device; held, so that no id comes back


def waits_for_no_host(groups, device) -> bool:
    return device.type == "cuda" or any(dist.get_backend(g) == "nccl" for g in groups)


def inside() -> bool:
    """Whether this thread is in a call whose errors are told."""
    return _state.inside


def met_before(groups) -> bool:
    return tuple(map(id, groups)) in _once


def tell(groups, device, numbers=(), error: BaseException | None = None) -> list[list[list[int]]]:
    """By group, its ranks' numbers. A rank that has an error brings it: then every rank raises.

    What one group hears is told in the next: no rank of any of them makes the call.
    """
    _state.met = True
    found, raised = [], None
    for group in groups:
        away = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        said = [int(error is not None), *numbers]
        mine = torch.tensor(said + [0] * (1 + _NUMBERS - len(said)), dtype=torch.int64, device=away)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        rows = [part.tolist() for part in parts]
        found.append([row[1:] for row in rows])
        if not any(row[0] for row in rows):
            continue
        texts = [None] * len(rows)
        dist.all_gather_object(texts, _said(error), group=group)
        if error is None:
            rank = next(r for r, row in enumerate(rows) if row[0])
            kind, text = texts[rank]
            error = raised = _abi.of_status(kind)(f"rank {rank}: {text}")
    if raised is not None:
        raise raised
    if error is None and waits_for_no_host(groups, device):
        _once[tuple(map(id, groups))] = list(groups)
    return found


def _said(error) -> tuple[int, str]:
    if error is None:
        return 0, ""
    if isinstance(error, _abi.Error):
        return error.status, str(error)
    return _abi.DataError.status, f"{type(error).__name__}: {error}"


class Telling:
    """A call that others wait for: what it raises before its ranks have met is told to them."""

    def __init__(self, groups, of) -> None:
        """of: a device, or a tensor of the call (or what was given in its place)."""
        self.groups = [g for g in groups if isinstance(g, dist.ProcessGroup)]
        device = getattr(of, "device", of)
        self.device = device if isinstance(device, torch.device) else torch.device("cpu")

    def __enter__(self) -> Telling:
        self.before = _state.met, _state.inside
        _state.met, _state.inside = False, True
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception) and self.groups and not _state.met:
            # After that the others of a device wait for no word.
            if not (waits_for_no_host(self.groups, self.device) and met_before(self.groups)):
                self._tell(error)
        met, _state.inside = self.before
        _state.met = _state.met or met

    def _tell(self, error) -> None:
        try:
            tell(self.groups, self.device, error=error)
        except Exception:  # of the group, or of another rank: this rank's own comes first
            return


class Groups:
    """The process groups of one call: `groups` by the number of an exchange's group, on `device`."""

    def meet(self, numbers, needed: bool) -> dict:
        """The numbers of all ranks, by the number of a group. Where they are not needed, ranks on a
        device meet once."""
        given = {k: g for k, g in self.groups.items() if g is not None}
        groups = list(given.values())
        if not needed and waits_for_no_host(groups, self.device) and met_before(groups):
            return {}
        return dict(zip(given, tell(groups, self.device, numbers), strict=True))

    def share(self, said: dict, number: int, which: int) -> tuple[int, int]:
        """(what the ranks of a group before this one hold, what all hold)."""
        held = [row[which] for row in said[number]]
        return sum(held[: dist.get_rank(self.groups[number])]), sum(held)

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
