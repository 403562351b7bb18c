"""The scan inside autograd: forward, and one backward call for every gradient that is wanted."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from .. import _fast
from .._abi import UsageError
from . import _tensors
from ._c import FINAL, INITIAL, SCANNED
from ._settings import Settings

DIFFERENTIABLE = (*SCANNED, *INITIAL)
_BEFORE = 4  # arguments of Scan.forward before those tensors


def upstream_of(grads) -> dict:
    """Gradients of out and the final states by their names; absent ones are left out."""
    names = ("d_out", *("d_" + n for n in FINAL))
    return {n: g for n, g in zip(names, grads, strict=False) if g is not None}


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, main_grads, cu_seqlens, anchor, *tensors):
        t = dict(zip(DIFFERENTIABLE, tensors, strict=True))
        need = _needed(ctx, main_grads)
        made = _tensors.forward(settings, {**t, "cu_seqlens": cu_seqlens}, need)
        ctx.save_for_backward(*tensors, cu_seqlens, made.get("saved"))
        ctx.call = (settings, main_grads)
        ctx.set_materialize_grads(False)
        if not settings.final:
            return made["out"]
        return (made["out"], *(made[n] for n in FINAL))

    @staticmethod
    def backward(ctx, *upstream):
        # Grad mode is off unless the graph of this backward is wanted, which there is none of.
        if not torch.is_grad_enabled():
            return _backward(ctx, *upstream)
        with torch.no_grad():
            found = _backward(ctx, *upstream)
        formed = [g for g in found if g is not None]
        if not formed:
            return found
        made = iter(_Constant.apply(len(formed), *formed, *ctx.saved_tensors[:3], *upstream))
        return tuple(None if g is None else next(made) for g in found)


def _needed(ctx, main_grads) -> list[str]:
    wanted = zip(DIFFERENTIABLE, ctx.needs_input_grad[_BEFORE:], strict=True)
    return [n for n, asked in wanted if asked or n in (main_grads or ())]


def _backward(ctx, *upstream):
    settings, main_grads = ctx.call
    if all(g is None for g in upstream):
        return (None,) * (_BEFORE + len(DIFFERENTIABLE))
    *tensors, cu_seqlens, saved = ctx.saved_tensors
    t = dict(zip(DIFFERENTIABLE, tensors, strict=True))
    t["cu_seqlens"] = cu_seqlens
    ups = {**upstream_of(upstream), "saved": saved}
    made = _tensors.backward(settings, t, ups, _needed(ctx, main_grads), main_grads)
    return (*(None,) * _BEFORE, *(made.get(n) for n in DIFFERENTIABLE))


class _Constant(torch.autograd.Function):
    """Its first inputs, with the others as what they depend on, by a derivative that is an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("talea.mamba3: double backward is not supported")


def refuse_transforms(t: dict) -> None:
    if _fast.in_transform():
        raise UsageError(
            "talea.mamba3: not inside grad, vmap, vjp or jvp of torch.func (functional_call is): "
            "use torch.autograd.grad, and the axis B for batches"
        )
    if forward_ad._current_level >= 0:
        for tensor in t.values():
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise UsageError("talea.mamba3: forward-mode derivatives: not supported")


def apply(settings: Settings, t: dict, main_grads=None) -> tuple:
    """(out, then the final states where asked for), differentiable in every floating tensor."""
    refuse_transforms(t)
    tensors = [t.get(n) for n in DIFFERENTIABLE]
    asked = main_grads or any(x is not None and x.requires_grad for x in tensors)
    if torch.is_grad_enabled() and asked:
        # Requires grad where main_grads alone wait for it: backward must come here.
        anchor = torch.empty(0, requires_grad=True) if main_grads else None
        found = Scan.apply(settings, main_grads, t.get("cu_seqlens"), anchor, *tensors)
        return found if type(found) is tuple else (found,)
    made = _tensors.forward(settings.but(save=False) if settings.save else settings, t)
    return (made["out"], *(made[n] for n in FINAL if n in made))
