"""The scan as torch.library custom ops, so that torch.compile(fullgraph=True) can hold it.

talea::mamba3, talea::mamba3_backward and talea::mamba3_step, opaque to the compiler. Settings travel
as one line of text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._abi import UsageError, lib
from . import _c, _tensors
from ._c import FINAL, SCANNED, STATES
from ._call import Call
from ._operator import DIFFERENTIABLE, upstream_of
from ._settings import Settings
from .functional import lanes

# A compiled graph is kept on disk by its constants: one of another library's would have its sizes.
_BUILD = f"{lib.talea_build_revision().decode()} {','.join(lanes())}"
_NEEDED = ("q", "k", "v", "adt", "dt", "trap")
_TENSORS = (*DIFFERENTIABLE, "cu_seqlens")
_RESULTS = ("out", "saved", *FINAL)
_UPSTREAM = ("g_out", *("g_" + n for n in FINAL), "saved")


def _listed(names) -> str:
    return ", ".join(f"Tensor{'' if n in _NEEDED else '?'} {n}" for n in names)


def _op(name: str, schema: str, mutates=()):
    return torch.library.custom_op(f"talea::{name}", mutates_args=mutates, schema=schema)


def _present(found: dict, like: Tensor, names) -> list[Tensor]:
    """An op returns a fixed list: what is not there is an empty tensor."""
    return [found[n] if n in found else like.new_empty((0,)) for n in names]


def _named(arguments) -> dict:
    return dict(zip(_TENSORS, arguments, strict=False))


@_op("mamba3", f"({_listed(_TENSORS)}, str settings) -> Tensor[]")
def forward(*arguments):
    t = _named(arguments)
    return _present(_tensors.forward(Settings.parse(arguments[-1]), t), t["q"], _RESULTS)


def _describe(slot, tensor, name) -> None:
    """As the fill of tensors, without an address: nothing here has one."""
    slot.dtype, slot.rank, slot.present = _tensors.code_of(tensor, name), tensor.dim(), 1
    slot.shape[: tensor.dim()] = tensor.shape
    slot.stride[: tensor.dim()] = tensor.stride()
    if tensor.device.type == "cuda":
        slot.device, slot.device_index = 1, tensor.device.index or 0


@forward.register_fake
def _(*arguments):
    t, settings = _named(arguments), Settings.parse(arguments[-1])
    made = {"out": t["q"].new_empty(_tensors.out_shape(t))}
    if settings.final:
        made.update(_tensors.final_tensors(t))
    if settings.save:
        sizes = [s for x in t.values() if x is not None for s in (*x.shape, *x.stride())]
        known = all(type(s) is int for s in sizes)
        size = (
            Call(_c.FORWARD, settings, t, made, _describe).saved_bytes()
            if known
            else torch.library.get_ctx().new_dynamic_size()
        )
        made["saved"] = t["q"].new_empty((size,), dtype=torch.uint8)
    return _present(made, t["q"], _RESULTS)


_MORE = ", ".join(f"Tensor? {n}" for n in _UPSTREAM)


@_op(
    "mamba3_backward", f"({_listed(_TENSORS)}, {_MORE}, str settings, bool[] need) -> Tensor[]"
)  # fmt: skip
def backward(*arguments):
    t, (text, need) = _named(arguments), arguments[-2:]
    *grads, saved = arguments[len(_TENSORS) : -2]
    names = [n for n, wanted in zip(DIFFERENTIABLE, need, strict=True) if wanted]
    ups = {**upstream_of(grads), "saved": saved}
    made = _tensors.backward(Settings.parse(text), t, ups, names)
    return _present(made, t["q"], DIFFERENTIABLE)


@backward.register_fake
def _(*arguments):
    t, need = _named(arguments), arguments[-1]
    made = {
        n: _tensors.gradient_like(n, t[n], False)
        for n, wanted in zip(DIFFERENTIABLE, need, strict=True)
        if wanted
    }
    return _present(made, t["q"], DIFFERENTIABLE)


def _setup(ctx, inputs, output):
    ctx.settings = Settings.parse(inputs[-1])
    saved = output[1] if ctx.settings.save else None
    ctx.save_for_backward(*inputs[: len(_TENSORS)], saved)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grads):
    *tensors, saved = ctx.saved_tensors
    nothing = (None,) * (len(_TENSORS) + 1)
    finals = grads[2:] if ctx.settings.final else (None,) * len(FINAL)
    grads = (grads[0], *finals)
    if all(g is None for g in grads):
        return nothing
    need = [
        bool(n) and x is not None
        for n, x in zip(ctx.needs_input_grad[: len(DIFFERENTIABLE)], tensors, strict=False)
    ]
    found = backward(*tensors, *grads, saved, ctx.settings.text(), need)
    return (*(g if n else None for g, n in zip(found, need, strict=True)), None, None)


forward.register_autograd(_gradient, setup_context=_setup)

_STATE = ", ".join(f"Tensor({a}!)? state_{n}" for a, n in zip("abcd", STATES, strict=True))


@_op(
    "mamba3_step", f"({_listed(SCANNED)}, {_STATE}, Tensor? slots, str settings) -> Tensor",
    mutates=tuple("state_" + n for n in STATES),
)  # fmt: skip
def step(*arguments):
    t = dict(zip(SCANNED, arguments, strict=False))
    *state, slots, text = arguments[len(SCANNED) :]
    return _tensors.step(Settings.parse(text), t, dict(zip(STATES, state, strict=True)), slots)


@step.register_fake
def _(*arguments):
    t = dict(zip(SCANNED, arguments, strict=False))
    return t["q"].new_empty(_tensors.out_shape(t, tokens=False))


def apply(settings: Settings, t: dict, main_grads=None) -> tuple:
    if main_grads:
        raise UsageError("main_grads: not under torch.compile; call it outside the graph")
    needs = torch.is_grad_enabled() and any(
        t.get(n) is not None and t[n].requires_grad for n in DIFFERENTIABLE
    )
    if settings.save and not needs:
        settings = settings.but(save=False)
    if settings.save:
        settings = settings.but(build=_BUILD)
    found = forward(*(t.get(n) for n in _TENSORS), settings.text())
    return (found[0], *(found[2:] if settings.final else ()))


def apply_step(settings: Settings, t: dict, state: dict, slots) -> Tensor:
    tensors = (t.get(n) for n in SCANNED)
    return step(*tensors, *(state[n] for n in STATES), slots, settings.text())
