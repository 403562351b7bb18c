"""A plain call that was made before, found by one look at its tensors.

A training step makes the same call each time; most of what Python takes for it would go into
describing what is known. Everything that is not plain goes the long way, through _operator.
"""

from __future__ import annotations

import threading
from functools import partial

import torch

from .. import _fast
from . import _operator
from ._tensors import GRADIENTS, PER_TOKEN, Described, run

_MOST_SETTINGS, _MOST_SHAPES = 64, 8


class Entry:
    """`check` tells whether tensors are like those of the call, in all that a description reads.

    Described is a call of rows; tokens may have more dimensions, and then so has what is made.
    """

    __slots__ = ("check", "config", "described", "flat", "fresh", "grad", "need", "places")

    def __init__(self, config, described: Described, need, x, w, y) -> None:
        self.check = _fast.tensor_guard(x, w, y)
        self.config, self.described, self.need = config, described, need
        self.grad, self.flat, self.fresh = any(need), x.dim() == 2, list(described.fresh)
        for i, name in enumerate(described.names):
            shape = y.shape if name == "loss" and config.reduction == "none" else None
            shape = x.shape if name == "dx" else shape
            if shape is not None:
                new, (_, _, dtype) = described.fresh[i].func, described.fresh[i].args
                strides = torch.empty(shape, device="meta").stride()
                self.fresh[i] = partial(new, tuple(shape), strides, dtype)
        made = [n for n in described.names[1:] if n in GRADIENTS]
        # Of dx and dw in what the call leaves behind its loss; None where they are not formed.
        self.places = [made.index(n) if n in made else None for n in GRADIENTS[:2]]


class _Calls(threading.local):
    """As descriptions are: a thread's own."""

    def __init__(self) -> None:
        self.by_settings: dict[tuple, list[Entry]] = {}


_calls = _Calls()


def _nested(*tensors) -> bool:
    """A look at the strides of a nested tensor ends the process; the long way says what it is."""
    try:
        return any(t.is_nested for t in tensors)
    except AttributeError:  # no tensor of torch
        return True


def find(settings: tuple, x, w, y):
    """The loss, by the way of an equal call before; None: there was none."""
    entries = _calls.by_settings.get(settings)
    if entries is None or _fast.forward_mode() or _nested(x, w, y):
        return None
    grad = torch.is_grad_enabled()
    for entry in entries:
        if entry.check(x, w, y) and (not entry.grad or grad):
            break
    else:
        return None
    addresses = [x.data_ptr(), w.data_ptr(), y.data_ptr()]
    described = entry.described
    index = described.device_index
    if (addresses[0] | addresses[1] | addresses[2]) & 15 or (
        index is not None and index != _fast.current_device()
    ):
        return None
    if entry.grad:
        # A checkpoint holds what forward saved to what its second run saves: rows, the long way.
        if not entry.flat and _fast.saved_by_hooks():
            return None
        return _apply(x, w, None, entry, addresses, y)
    return run(described, None, None, addresses, None, entry.fresh)[0]


def remember(settings: tuple, config, x, w, y, rows) -> None:
    """After a call that went the long way: kept where its description served it again.

    rows: tokens and targets in the shapes described.
    """
    grad = torch.is_grad_enabled()
    need = (grad and x.requires_grad, grad and w.requires_grad, False)
    if not grad and (x.requires_grad or w.requires_grad):
        return  # the guard reads what a tensor asks for, not whether anybody listens
    hidden, targets = rows
    if hidden.data_ptr() != x.data_ptr() or targets.data_ptr() != y.data_ptr():
        return  # copied
    described = _operator.described_before(config, (hidden, w, None, targets), need)
    if described is None or described.fresh is None or _fast.tensor_guard(y) is None:
        return
    if len(_calls.by_settings) >= _MOST_SETTINGS:
        _calls.by_settings.clear()
    entries = _calls.by_settings.setdefault(settings, [])
    entries.insert(0, Entry(config, described, need, x, w, y))
    del entries[_MOST_SHAPES:]


class _Again(_operator.Operator):
    """Operator, where forward need not look at anything."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, entry, addresses, targets):
        ctx.save_for_backward(hidden, weight, bias, targets)
        made = run(entry.described, None, None, addresses, None, entry.fresh)
        loss = made.pop(0)
        ctx.waiting = entry, made
        return loss

    @staticmethod
    def backward(ctx, factor):
        entry, made = ctx.waiting
        described = entry.described
        if described.late is not None:
            ctx.waiting = entry, None  # handed out once
        if made is not None and described.again is not None and not torch.is_grad_enabled():
            call, dtype = described.again
            if (
                factor.dtype is dtype and not factor.dim() and not factor.is_neg()
                and factor.get_device() == described.device_index
            ):  # fmt: skip
                call((factor, *made), described.stream())
                dx, dw = entry.places
                return (
                    None if dx is None else made[dx], None if dw is None else made[dw],
                    None, None, None, None,
                )  # fmt: skip
        return _the_long_way(entry, made, ctx.saved_tensors, factor)


def _the_long_way(entry: Entry, made, tensors, factor) -> tuple:
    """Backward from what the long way would have left; made None: the gradients are handed out."""
    described = entry.described
    waiting = _operator._Waiting(entry.config, entry.need, _operator.NO_EXTRAS)
    waiting.stream = described.stream
    hidden, weight, bias, targets = tensors
    if described.late is not None:
        waiting.described = described
        if made is not None:
            waiting.kept = dict(zip(described.names[1:], made, strict=True))
            if not entry.flat and "dx" in waiting.kept:
                waiting.kept["dx"] = waiting.kept["dx"].view(-1, hidden.shape[-1])
    elif made is not None and described.config is not entry.config:
        waiting.saved = tuple(made[described.names.index(n) - 1] for n in PER_TOKEN[:2])
    if entry.flat:
        return _operator.form_late(waiting, tensors, (factor,))
    rows = hidden.reshape(-1, hidden.shape[-1])
    if entry.config.reduction == "none":
        factor = factor.reshape(-1)
    dx, *rest = _operator.form_late(waiting, (rows, weight, bias, targets.reshape(-1)), (factor,))
    return (None if dx is None else dx.view(hidden.shape), *rest)


_apply = _fast.apply_of(_Again)
