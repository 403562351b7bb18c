"""Calls on PyTorch tensors: descriptions, allocation, streams, calls found again.

What a call returns is allocated here, by a recipe that is made once for equal calls.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import lru_cache, partial
from operator import itemgetter

import torch

from .. import _fast
from .._torch import _fill
from . import _c
from ._call import Plan
from ._settings import Config

PER_TOKEN = ("lse", "target_logprob", "entropy")
# What a call can return, in this order; then the gradients of hidden, weight and bias.
RESULTS = ("loss", *PER_TOKEN, "argmax", "accuracy", "topk_values", "topk_ids", "topk_logprobs")
GRADIENTS = ("dx", "dw", "db")
NO_GRADIENT = (False, False, False)


def wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=1024)
def results_of(config: Config) -> tuple[str, ...]:
    """The names of RESULTS that a call returns."""
    return tuple(
        n for n in RESULTS if n in config.outputs or (n.startswith("topk") and config.top_k > 0)
    )


def _rows_of(config: Config, hidden: torch.Tensor) -> int:
    """Tokens of the whole call: with sequence parallelism `hidden` holds this rank's part only."""
    if not config.sequence_parallel:
        return hidden.shape[0]
    from ._ranks import size_of

    return hidden.shape[0] * size_of(config.group)


def _new(shape, dtype, device):
    return lambda given: torch.empty(shape, dtype=dtype, device=device)


def _like(tensor):
    """Half the time of making it from its description."""
    empty_like = torch.empty_like
    return lambda given: empty_like(tensor)


def recipe(config: Config, inputs, need, given=(), wide_gradients=()) -> dict:
    """By name: the place of the input that an output is like, or what makes it out of `given`.

    wide_gradients: those of GRADIENTS that are made in fp32, whatever their input's dtype.
    """
    hidden, makers = inputs[0], {}
    for name in results_of(config):
        dtype = torch.int64 if name in ("argmax", "topk_ids") else wide(hidden)
        shape = (_rows_of(config, hidden),)
        if name == "accuracy" or (name == "loss" and config.reduction != "none"):
            shape = ()
        elif name.startswith("topk"):
            shape = (*shape, config.top_k)
        makers[name] = _new(shape, dtype, hidden.device)
    for i, (name, wanted) in enumerate(zip(GRADIENTS, need, strict=True)):
        if wanted:
            like = inputs[i]
            if name in wide_gradients and like.element_size() < 4:
                makers[name] = _new(like.shape, torch.float32, like.device)
            else:
                dense = like.is_contiguous()
                makers[name] = i if dense else _new(like.shape, like.dtype, like.device)
    return {**makers, **{name: itemgetter(name) for name in given}}


def allocate(makers, inputs, given=None) -> list[torch.Tensor]:
    empty_like = torch.empty_like
    return [empty_like(inputs[m]) if type(m) is int else m(given) for m in makers]


class Described:
    """A call as it was described once: its plan, how its outputs are made, on which stream."""

    __slots__ = (
        "again", "config", "device_index", "fresh", "late", "makers", "names", "plan", "ranks",
        "served", "stream", "workspace",
    )  # fmt: skip

    def __init__(
        self, config: Config, inputs, need, given=None, accumulate_dw=False, waits=None
    ) -> None:
        """waits: the gradients made in fp32 and the rests that are kept; see _late.py."""
        device = inputs[0].device
        self.config, self.late, self.again = config, waits, None  # again: see _late.py
        self.served = 0  # calls that might have been found by their tensors alone: see _again.py
        wide_gradients, rests = waits or ((), ())
        makers = recipe(config, inputs, need, given or (), wide_gradients)
        if "dx_rest" in rests:
            rows, columns = inputs[0].shape
            makers["dx_rest"] = _new((rows, -(-columns // 64)), torch.uint8, device)
        if "dw_rest" in rests:
            makers["dw_rest"] = _new((0,), torch.int32, device)
        outputs = dict(zip(makers, allocate(makers.values(), inputs, given), strict=True))
        scalars = {
            n: _like(t) for n, t in outputs.items() if not t.dim() and n not in (given or ())
        }
        self.names = tuple(makers)
        self.ranks, self.stream = None, _no_stream
        if config.group or config.batch_group:
            from ._ranks import Groups

            self.ranks = Groups(config, device)
        named = {n: t for n, t in zip(_c.INPUT_NAMES, inputs, strict=False) if t is not None}
        struct = self.ranks and self.ranks.struct
        self.plan = Plan(
            config, named, outputs, _fill, accumulate_dw=accumulate_dw, ranks=struct,
            late=waits is not None,
        )  # fmt: skip
        if "dw_rest" in rests:
            shape = (self.plan.rest_bytes // 4,)
            makers["dw_rest"] = _new(shape, torch.int32, device)
            outputs["dw_rest"] = torch.empty(shape, dtype=torch.int32, device="meta")
        if device.type == "cpu":
            for name in set(GRADIENTS) & set(makers):
                t = outputs[name]
                if name not in (given or ()) and t.nbytes >= _LARGE_BYTES:
                    makers[name] = partial(_in_large_pages, t.shape, t.dtype)
        self.makers = tuple({**makers, **scalars}.values())
        size = self.plan.workspace_bytes
        self.workspace = partial(torch.empty, size, dtype=torch.uint8, device=device)
        if device.type == "cpu" and size >= _LARGE_BYTES:
            self.workspace = partial(_in_large_pages, (size,), torch.uint8)
        self.device_index = device.index
        if device.type == "cuda":
            self.stream = _fast.stream_of(device.index)
        self.fresh = None
        large = device.type == "cpu" and any(t.nbytes >= _LARGE_BYTES for t in outputs.values())
        if not given and self.ranks is None and not large and device.type in _EMPTY_STRIDED:
            new = _EMPTY_STRIDED[device.type]
            if device.type == "cpu" and size < _LARGE_BYTES:
                self.workspace = partial(new, (size,), (1,), torch.uint8)
            self.fresh = tuple(
                partial(new, tuple(t.shape), t.stride(), t.dtype) for t in outputs.values()
            )


def _no_stream() -> None:
    return None


class _Kept(threading.local):
    """A description holds the addresses of one call, so that no two threads may share it."""

    def __init__(self) -> None:
        self.calls: dict[tuple, Described] = {}


def _in_large_pages(shape, dtype, given=None) -> torch.Tensor:
    """Fresh memory, which the kernel is asked to hand out in large pages, as NumPy asks for its own.

    It comes back to the kernel when it is freed; in small pages that costs a third of a call's time.
    """
    memory = torch.empty(shape, dtype=dtype)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    begin += -begin % mmap.PAGESIZE
    _madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # a hint: may be refused
    return memory


def give_back(part: torch.Tensor) -> None:
    """The whole pages of a dense part of a tensor that nobody reads again, to the kernel."""
    begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
    begin, end = begin + -begin % mmap.PAGESIZE, end - end % mmap.PAGESIZE
    if end > begin:
        _madvise(begin, end - begin, mmap.MADV_DONTNEED)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MOST_KEPT, _LARGE_BYTES = 256, 4 << 20
_kept = _Kept()
_EMPTY_STRIDED = _fast.empty_strided()


def _described_by(inputs, key: list) -> tuple:
    """The key with the properties of the inputs, their addresses, and the bits of all addresses."""
    addresses, bits = [], 0
    for t in inputs:
        if t is None:
            key.append(None)
        else:
            address = t.data_ptr()
            key += (t.shape, t.stride(), t.dtype, t.get_device())
            addresses.append(address)
            bits |= address
    return key, addresses, bits


def call(
    config: Config, inputs, need, given=None, *, accumulate_dw=False, receipts=None
) -> list[torch.Tensor]:
    """Runs the operator on the current stream: results_of(config), the gradients that `need` names.

    inputs: in the order of _c.INPUT_NAMES, None where absent. given: outputs that exist already,
    by name; they are returned in their place, or last. receipts: a list to which the call's is
    added.
    """
    key, addresses, bits = _key_of(config, inputs, (need, accumulate_dw))
    if given is not None:
        for name, t in given.items():
            key += (name, t.shape, t.stride(), t.dtype, t.get_device())
            bits |= t.data_ptr()
    if config.group or config.batch_group:
        from ._ranks import Meeting

        with Meeting(config, inputs, (need, accumulate_dw, tuple(given or ()))) as meeting:
            described = _described(key, bits, config, inputs, need, given, accumulate_dw)
            meeting.choose(())
            return meeting.run(described, inputs, given, addresses, receipts)
    described = _described(key, bits, config, inputs, need, given, accumulate_dw)
    return run(described, inputs, given, addresses, receipts)


def _described(key, bits, *call) -> Described:
    described = kept_under(key, bits)
    if described is None:
        described = Described(*call)
        keep(key, bits, described)
    return described


def kept_under(key, bits: int) -> Described | None:
    """A lane may decline pointers that are not 16-aligned: such a call is described by itself."""
    described = None if bits & 15 else _kept.calls.get(key)
    # Groups may be made anew under an old name.
    if described is not None and described.ranks is not None and not described.ranks.current():
        return None
    return described


def described_as(config: Config, inputs, more: tuple) -> Described | None:
    """What is kept for such a call."""
    key, _, bits = _key_of(config, inputs, more)
    return kept_under(key, bits)


def keep(key, bits: int, described: Described) -> None:
    if bits & 15:
        return
    if len(_kept.calls) >= _MOST_KEPT:
        _kept.calls.clear()
    _kept.calls[key] = described


def _key_of(config: Config, inputs, more: tuple) -> tuple[tuple, list[int], int]:
    """All that a description depends on. Outputs made here are dense: the inputs describe them."""
    if len(inputs) == 4 and inputs[2] is None is not inputs[3]:  # the usual ones, in half the time
        x, w, _, y = inputs
        addresses = [x.data_ptr(), w.data_ptr(), y.data_ptr()]
        bits = addresses[0] | addresses[1] | addresses[2]
        key = (
            config, more, x.shape, x.stride(), x.dtype, x.get_device(),
            w.shape, w.stride(), w.dtype, w.get_device(),
            y.shape, y.stride(), y.dtype, y.get_device(),
        )  # fmt: skip
        return key, addresses, bits
    key, addresses, bits = _described_by(inputs, [config, more])
    return tuple(key), addresses, bits


def run(
    described: Described, inputs, given, addresses, receipts=None, fresh=None
) -> list[torch.Tensor]:
    """A described call on tensors like those it was described by.

    fresh: makes the outputs, where they have another shape than described.
    """
    index, wanted, fresh = described.device_index, receipts is not None, fresh or described.fresh
    if fresh is None or (index is not None and index != _fast.current_device()):
        return _run(described, inputs, given, addresses, receipts)
    outputs = [make() for make in fresh]
    addresses += [t.data_ptr() for t in outputs]
    plan = described.plan
    if index is None:
        workspace = described.workspace()
        receipt = plan.run(addresses, workspace.data_ptr(), None, wanted)
    else:
        stream = described.stream()
        place = _fast.allocate(plan.workspace_bytes, stream)
        try:
            receipt = plan.run(addresses, place, stream, wanted)
        finally:
            _fast.free(place)
    if wanted:
        receipts.append(receipt)
    return outputs


def _run(described: Described, inputs, given, addresses, receipts) -> list[torch.Tensor]:
    """The call by ordinary tensors: given outputs, groups, large pages, a device not the current."""
    outputs = allocate(described.makers, inputs, given)
    addresses += [t.data_ptr() for t in outputs]
    workspace = described.workspace()  # lives until the call is queued: enough, in stream order
    plan, place, wanted = described.plan, workspace.data_ptr(), receipts is not None
    if described.ranks is None:
        receipt = plan.run(addresses, place, described.stream(), wanted)
    else:
        plan.place(addresses, place, described.stream())
        receipt = described.ranks.run(plan, wanted)
    if wanted:
        receipts.append(receipt)
    return outputs
