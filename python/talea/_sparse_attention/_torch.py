"""PyTorch tensors for the passes: what a call is given, what it makes, on which stream."""

from __future__ import annotations

import ctypes
import threading

import torch
from torch.autograd import forward_ad

from .. import _abi, _fast, _kept
from .._torch import _fill as fill
from .._torch import settled
from . import _c, _call, _settings

latest = threading.local()  # .receipt: of this thread's latest call that kept one
# Of their own: checking arguments against their types takes as long as passing them.
_RUN = {which: _abi.lib[door.run] for which, door in _c.DOORS.items()}


def refuse_transforms(name: str, tensors) -> None:
    """Derivatives that are not backward's would be left out in silence."""
    if _fast.in_transform():
        raise _abi.UsageError(
            f"talea.{name}: not inside grad, vmap, vjp or jvp of torch.func: use "
            "torch.autograd.grad, and the leading dimension for batches"
        )
    if not _fast.forward_mode():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise _abi.UsageError(f"talea.{name}: forward-mode derivatives: not supported")


class Constant(torch.autograd.Function):
    """Its first tensors, with the others as what they depend on, by a derivative that is an error."""

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError(f"talea.{ctx.name}: double backward is not supported")


def stream_of(device: torch.device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def of_ranks(settings) -> bool:
    groups = ("heads_group", "sequence_group", "batch_group")
    return any(getattr(settings, g, "") for g in groups)


def made(which: str, text: str, inputs: dict, outputs, need=(), before=None) -> dict:
    """A pass and what it makes: as one like it did before, or with outputs() of this call.

    need: what outputs() depends on beside text and inputs. before: checks what is to come.
    """
    given = {name: t for name, t in inputs.items() if t is not None}
    key = which, text, tuple(need), tuple(given), torch.get_num_threads()
    if (found := _kept.again(key, given.values())) is not None:
        return found
    if before is not None:
        before()
    found, settings = outputs(), _settings.parse(text)
    args = call(which, text, inputs, found)
    if not of_ranks(settings) and "status" not in found:  # that one is read, too
        sides = ((args.inputs.contents, given), (args.outputs.contents, found))
        slots = [getattr(side, name) for side, names in sides for name in names]
        receipts = latest if _keeps_receipt(settings) else None
        _kept.keep(key, given.values(), slots, found, args, _RUN[which], receipts)
    return found


def _keeps_receipt(settings) -> bool:
    return getattr(settings, "receipt", False)


def call(which: str, text: str, inputs: dict, outputs: dict, flags=()):
    """Runs a pass on the current stream of the first input's device; its args."""
    inputs = {name: settled(t) for name, t in inputs.items()}
    device = next(t for t in inputs.values() if t is not None).device
    settings = _settings.parse(text)
    if of_ranks(settings):
        from ._ranks import Meeting

        with Meeting(settings, device, {**inputs, **outputs}, (which, text, flags)) as meeting:
            return _call_with(meeting, settings, device, which, text, inputs, outputs, flags)
    return _call_with(None, settings, device, which, text, inputs, outputs, flags)


def plan(which: str, text: str, inputs, outputs) -> int:
    """The bytes of workspace that the call of one rank needs."""
    inputs = {name: settled(t) for name, t in inputs.items()}
    return _call.plan(which, _call.describe(which, text, inputs, outputs, fill))


def _call_with(meeting, settings, device, which: str, text: str, inputs, outputs, flags):
    """meeting: of a call of ranks."""
    args, groups = _call.describe(which, text, inputs, outputs, fill, flags), None
    if meeting is not None:
        from ._ranks import Groups

        groups = Groups(settings, inputs, meeting)
        args.ranks = ctypes.pointer(groups.struct)

    def workspace(size):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory.data_ptr(), memory

    do, asked = None if groups is None else groups.do, _keeps_receipt(settings)
    if device.type == "cuda":
        with torch.cuda.device(device):
            receipt = _call.run(which, args, workspace, stream_of(device), do, asked)
    else:
        receipt = _call.run(which, args, workspace, None, do, asked)
    if asked:
        latest.receipt = receipt
    return args


def fresh_status(device) -> torch.Tensor:
    status = torch.zeros(4, dtype=torch.int64, device=device)
    status[1:2].fill_(-1)
    return status


def o_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def rows_last(t: torch.Tensor | None) -> torch.Tensor | None:
    """The last stride must be 1; expanded upstreams (of a sum) are laid out row by row."""
    if t is None or t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    return t.contiguous()
