"""Described calls of an operator, kept for the next one like them.

Filling the structs of a call, asking for its workspace and forming the shapes of what it makes take
several times what making it does. Of a call like one before only the addresses are new. Nothing
here decides whether a call is right: the public functions check every one, and the library checks
and plans every one. Where it refuses a kept one, that one is described anew, which says what is
wrong.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import torch

from . import _abi, _fast
from ._call import Receipt

_MOST_PLACES, _MOST_OF_A_PLACE = 256, 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Usage, unavailable and data errors: said before any work is done.
_REFUSALS = frozenset(_abi._ERRORS)
_NEW = _fast.empty_strided()


class _Calls(threading.local):
    """A thread's own: a kept call holds the addresses of the one that is being made."""

    def __init__(self) -> None:
        # By the key and the shape of the first tensor; an empty list: seen once.
        self.by_place: dict[tuple, list[Kept]] = {}


_calls = _Calls()


class Kept:
    """A described call. Tensors are alike where nothing that a description reads tells them apart:
    class, dtype, device, shape, strides, requires_grad, and the modes that are on."""

    __slots__ = (
        "alike", "args", "device_index", "function", "latest", "makers", "names", "ref", "slots",
        "stream", "workspace",
    )  # fmt: skip

    def __init__(self, alike, slots, made: dict, args, function, latest) -> None:
        like = next(iter(made.values()))
        new = _NEW[like.device.type]
        self.alike, self.slots, self.args, self.function = alike, slots, args, function
        self.ref, self.latest = ctypes.byref(args), latest
        self.names = tuple(made)
        self.makers = [partial(new, tuple(t.shape), t.stride(), t.dtype) for t in made.values()]
        self.workspace = partial(new, (args.workspace_bytes,), (1,), torch.uint8)
        self.device_index = like.device.index
        self.stream = None if like.is_cpu else _fast.stream_of(like.device.index)

    def run(self, tensors) -> dict | None:
        """What the call makes, by name; None: the library refuses it."""
        made = [make() for make in self.makers]
        workspace = self.workspace()  # lives until the call is queued: enough, in stream order
        for slot, t in zip(self.slots, (*tensors, *made), strict=True):
            slot.data = t.data_ptr()
        self.args.workspace = workspace.data_ptr()
        if self.stream is not None:
            self.args.stream = self.stream()
        handle = None if self.latest is None else ctypes.c_void_p()
        status = self.function(self.ref, None if handle is None else ctypes.byref(handle))
        if status in _REFUSALS:
            return None
        _abi.check(status)
        if handle is not None:
            self.latest.receipt = Receipt(handle.value)
        return dict(zip(self.names, made, strict=True))


def _nested(tensors) -> bool:
    """A look at the strides of a nested tensor ends the process."""
    for t in tensors:  # noqa: SIM110  (in half the time of any())
        if t.is_nested:
            return True
    return False


def plain(tensors) -> bool:
    """Whether all that are there are tensors of torch's own, with memory that the library knows."""
    for t in tensors:
        if t is not None and (type(t) not in _PLAIN or not (t.is_cpu or t.is_cuda) or t.is_nested):
            return False
    return True


def _place(key: tuple | None, tensors) -> tuple | None:
    first = next(iter(tensors))
    return None if first.is_nested else (key, first.shape)


def again(key: tuple | None, tensors) -> dict | None:
    """What a call makes that is like one before; None: there was none, or the library refuses it.

    key: all that a description reads beside the tensors; None: that cannot be said.
    """
    entries = _calls.by_place.get(_place(key, tensors))
    if not entries or _nested(tensors):
        return None
    for kept in entries:
        if kept.alike(*tensors):
            index = kept.device_index
            if index is not None and index != _fast.current_device():
                return None  # memory is made on the current one
            made = kept.run(tensors)
            if made is None:
                entries.remove(kept)
            return made
    return None


def keep(key: tuple, tensors, slots, made: dict, args, function, latest=None) -> None:
    """After a call that was described and made, its workspace's size among its `args`.

    Kept from the second one of a shape on: where each call has another, none costs more. slots: of
    the tensors that it reads, in their order, then of what it made, dense. latest: takes the receipt
    of each call; None: nobody asks for one.
    """
    calls, place = _calls.by_place, _place(key, tensors)
    entries = calls.get(place)
    if entries is None:
        if len(calls) >= _MOST_PLACES:
            once = [p for p, e in calls.items() if not e]
            for p in once if 2 * len(once) > len(calls) else list(calls):
                del calls[p]
        calls[place] = []
        return
    tensors, results = list(tensors), list(made.values())
    if not results or results[0].device.type not in _NEW or not plain((*tensors, *results)):
        return
    if any(t.is_neg() for t in tensors):
        return  # the library read something else than these
    alike = _fast.tensor_guard(*tensors)
    if alike is None:
        return
    entries.insert(0, Kept(alike, slots, made, args, function, latest))
    del entries[_MOST_OF_A_PLACE:]
