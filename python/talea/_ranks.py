"""A torch.distributed process group under the operator: its exchanges done between its phases.

The library stops at every exchange and hands over the buffers; the collective runs here, on the
caller's thread and stream, so that an error of the group is an ordinary exception.

Before the first exchange of a call every rank says whether it can make the call: an error of one
rank is an error of all, at once. On a host always; on a device once for each kind of call, so that a
step waits for no host. Where ranks may hold other pieces than before without this one's knowing,
they meet in every call, and that is all they say once each of them has made such a call before.
"""

from __future__ import annotations

import ctypes as c
import itertools
import threading
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist

from . import _abi, _fast, _missing
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


_MOST_SAID = 4  # numbers that a rank may tell beside its error


class _State(threading.local):
    met = False  # the ranks of the call that this thread is in have told each other
    inside = False  # such a call


class _Heard:
    """What the ranks of one kind of call told each other when they met."""

    def __init__(self, groups, said) -> None:
        self.groups = groups  # held, so that no id comes back
        self.said = said  # by group, its ranks' numbers
        self.struct = None  # what a call that is known is described by
        self.words = {}  # of hosts in the call itself: what came back, by group and what was sent


_state = _State()
_heard: dict[tuple, _Heard] = {}  # of ranks on devices, by kinds of call
_once: dict = {}  # groups, by their ids, that have met on a device; held, so that no id comes back
_numbers: dict = {}  # kinds of call whose ranks always meet -> the number that this rank says of one
_next_number = itertools.count(1)
_MOST_KEPT = 4096  # kinds of call


def _keep(kept: dict, key, value):
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value


class _Facts:
    """Of a group, asked once: PyTorch looks for each in its tables, which takes as long as to begin an
    exchange."""

    __slots__ = ("backend", "engine", "exchanges", "group", "multiprocessors", "rank", "size")

    def __init__(self, group) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.engine = f"torch.distributed {self.backend}".encode()
        self.multiprocessors = {}  # by device
        self.exchanges = _fast.exchanges_of(group)


_facts: dict[int, _Facts] = {}  # by the ids of groups, which they hold, so that no id comes back


def _facts_of(group) -> _Facts:
    return _facts.get(id(group)) or _keep(_facts, id(group), _Facts(group))


def waits_for_no_host(groups, device) -> bool:
    return device.type == "cuda" or any(_facts_of(g).backend == "nccl" for g in groups)


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
        said = [int(error is not None), *numbers]
        rows = _gathered(group, device, said + [0] * (1 + _MOST_SAID - len(said)))
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


def _gathered(group, device, said: list[int]) -> list[list[int]]:
    """What each rank says. On a device beside what is queued there: the host waits for the exchanges
    that were before, not for the kernels behind them."""
    facts = _facts_of(group)
    nccl = facts.backend == "nccl"
    with torch.cuda.stream(_stream_of_words(device)) if nccl else nullcontext():
        away = device if nccl else torch.device("cpu")
        mine = torch.tensor(said, dtype=torch.int64, device=away)
        if nccl:
            out = mine.new_empty((facts.size, len(said)))
            facts.exchanges.all_gather(out.view(-1), mine)
            return out.tolist()
        parts = [torch.empty_like(mine) for _ in range(facts.size)]
        _missing.exchange(group, lambda: dist.all_gather(parts, mine, group=group))
        return [part.tolist() for part in parts]


_words: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of_words(device: torch.device):
    return _words.get(device) or _keep(_words, device, torch.cuda.Stream(device, priority=-1))


def _said(error) -> tuple[int, str]:
    if error is None:
        return 0, ""
    if isinstance(error, _abi.Error):
        return error.status, str(error)
    return _abi.DataError.status, f"{type(error).__name__}: {error}"


class Telling:
    """A call that others wait for: what it raises before its ranks have met is told to them.

    always: they wait for a word in every such call, on a device, too.
    """

    def __init__(self, groups, of, always: bool = False) -> None:
        """of: a device, or a tensor of the call (or what was given in its place)."""
        self.groups = [g for g in groups if isinstance(g, dist.ProcessGroup)]
        device = getattr(of, "device", of)
        self.device = device if isinstance(device, torch.device) else torch.device("cpu")
        self.always = always
        self.known = False  # this rank knows what the others would say: no word has to go

    def __enter__(self):
        self.before = _state.met, _state.inside
        _state.met, _state.inside = self.known, True
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception) and self.groups and not _state.met and self._is_awaited():
            self._tell(error)
        met, _state.inside = self.before
        _state.met = _state.met or met

    def _is_awaited(self) -> bool:
        """Ranks that know a call's kind would take a word for one of the call's own exchanges."""
        devices = waits_for_no_host(self.groups, self.device)
        return self.always or not (devices and met_before(self.groups))

    def _tell(self, error) -> None:
        try:
            tell(self.groups, self.device, error=error)
        except Exception:  # of the group, or of another rank: this rank's own comes first
            return


class Meeting(Telling):
    """One call of ranks: before its first exchange every rank says whether it can make it. Ranks on
    a host do so in every call.

    kind: all of the call that, where it is the same on this rank, is the same on the others; None:
    nothing is. always: the others may hold other pieces all the same.
    """

    def __init__(self, groups, of, kind: tuple | None = None, always: bool = False) -> None:
        super().__init__(groups, of, always or kind is None)
        self.kind, self._heard, self._words = None, None, Counter()
        if kind is not None and waits_for_no_host(self.groups, self.device):
            self.kind = (*map(id, self.groups), *kind)
            self._heard = None if always else _heard.get(self.kind)
        self.known = self._heard is not None

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self._heard is not None and not self.known:
            _keep(_heard, self.kind, self._heard)
        super().__exit__(kind, error, trace)

    def meet(self, numbers=()) -> list[list[list[int]]]:
        """By group, the numbers of its ranks."""
        if self.known:
            return self._heard.said
        remembers = self.kind is not None
        if remembers and self.always:
            own = _numbers.get(self.kind) or _keep(_numbers, self.kind, next(_next_number))
            numbers = [*numbers, own]
        said = tell(self.groups, self.device, numbers)
        if remembers and self.always:  # the same rows on all ranks: all know them, or none does
            self.kind = (*map(id, self.groups), *(tuple(r) for rows in said for r in rows))
            self._heard = _heard.get(self.kind)
            self.known = self._heard is not None
        if remembers and not self.known:
            self._heard = _Heard(self.groups, said)
        return said

    def kept(self, make):
        """make(), once for all calls of a kind that is known."""
        if not self.known:
            return make()
        if self._heard.struct is None:
            self._heard.struct = make()
        return self._heard.struct

    def word(self, e: _abi.Exchange, size: int, do) -> None:
        """One exchange of host memory in a call on a device: what is known already is not asked."""
        if self._heard is None:
            return do(e)
        # Not by its place among all words: a call that is known leaves the handshake out.
        word = (e.group, c.string_at(e.send, e.bytes))
        words, key = self._heard.words, (*word, self._words[word])
        self._words[word] += 1
        if not self.known:
            do(e)
            words[key] = c.string_at(e.recv, e.bytes * size)
        elif key in words:
            c.memmove(e.recv, words[key], e.bytes * size)
        else:
            raise _abi.Error(
                "ranks: a word that this rank did not say when they met for such calls"
            )


_views: dict[tuple, torch.Tensor] = {}  # of device memory, which they do not hold


def _device_view(pointer: int, nbytes: int, dtype, device) -> torch.Tensor:
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    holder = type("Memory", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(holder, device=device).view(dtype)


class Groups:
    """The process groups of one call: `groups` by the number of an exchange's group, on `device`."""

    meeting: Meeting | None = None

    def __init__(self, groups: dict, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.begun: dict[int, list] = {}  # by group: what nobody has waited for

    def meet(self, meeting: Meeting, numbers) -> dict:
        """The numbers of all ranks, by the number of a group."""
        self.meeting = meeting
        given = [k for k, g in self.groups.items() if g is not None]
        said = dict(zip(given, meeting.meet(numbers), strict=True))
        self.struct.skip_handshake = int(meeting.known)
        return said

    def share(self, said: dict, number: int, which: int) -> tuple[int, int]:
        """(what the ranks of a group before this one hold, what all hold)."""
        held = [row[which] for row in said[number]]
        return sum(held[: _facts_of(self.groups[number]).rank]), sum(held)

    def _communicator(self, group):
        if group is None:
            return None
        facts, side = _facts_of(group), _abi.Communicator()
        side.struct_bytes = c.sizeof(side)
        side.engine = facts.engine
        side.rank, side.size = facts.rank, facts.size
        side.device = _abi.CUDA if self.device.type == "cuda" else _abi.CPU
        if self.device not in facts.multiprocessors:
            facts.multiprocessors[self.device] = multiprocessors_of(group, self.device)
        side.multiprocessors_beside = facts.multiprocessors[self.device]
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
        if on_device:  # a step's workspace mostly lies where that of the step before lay
            key = pointer, nbytes, dtype, self.device
            found = _views.get(key)
            return _keep(_views, key, _device_view(*key)) if found is None else found
        memory = (c.c_char * nbytes).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)

    def _do(self, e: _abi.Exchange) -> None:
        if e.kind == _abi.EXCHANGE_JOIN:  # the stream waits, not the host
            for work in self.begun.pop(e.group, ()):
                work.wait()
            return
        if e.device != _abi.CUDA and self.device.type == "cuda" and self.meeting is not None:
            return self.meeting.word(e, _facts_of(self.groups[e.group]).size, self._exchange)
        self._exchange(e)

    def _exchange(self, e: _abi.Exchange) -> None:
        group, device = self.groups[e.group], e.device == _abi.CUDA
        facts = _facts_of(group)
        size, rank, backend = facts.size, facts.rank, facts.backend
        begins = e.kind > _abi.EXCHANGE_REDUCE_SCATTER_SUM
        kind = e.kind - _abi.EXCHANGE_TO_BEGUN if begins else e.kind
        gather = kind == _abi.EXCHANGE_ALL_GATHER
        dtype = torch.uint8 if gather else _DTYPES[e.dtype]
        blocks = size if kind == _abi.EXCHANGE_REDUCE_SCATTER_SUM else 1
        mine = self._view(e.send, e.bytes * blocks, device, dtype)
        out = self._view(e.recv, e.bytes * (size if gather else 1), device, dtype)
        if backend == "nccl" and device:  # where it lies, in stream order
            if gather:
                work = facts.exchanges.all_gather(out, mine, begins)
            elif blocks == 1:
                work = facts.exchanges.all_reduce(out, begins)
            else:
                work = facts.exchanges.reduce_scatter(out, mine, begins)
            if begins:
                self.begun.setdefault(e.group, []).append(work)
            return
        # NCCL moves device memory alone, and the handshake lies on the host; gloo moves host memory.
        away = {"nccl": self.device, "gloo": torch.device("cpu")}.get(backend, mine.device)
        sent = mine.clone() if mine.device == away else mine.to(away)
        parts = [torch.empty_like(sent) for _ in range(size)]
        _missing.exchange(group, lambda: dist.all_gather(parts, sent, group=group))
        if gather:
            out.copy_(torch.cat(parts))
        else:  # summed in rank order on every rank: the same bits everywhere
            total = parts[0]
            for part in parts[1:]:
                total += part
            out.copy_(total.view(blocks, -1)[rank if blocks > 1 else 0])
