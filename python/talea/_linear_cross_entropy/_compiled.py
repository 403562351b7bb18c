"""The operator as torch.library custom ops, so that torch.compile(fullgraph=True) can hold it.

Three ops: forward, backward with exact upstreams, and the early gradients times their scalar. They
are opaque to the compiler; the last one may recompute instead of multiplying (see _operator).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _operator
from ._settings import Config
from ._tensors import GRADIENTS, RESULTS, allocate, call, recipe, results_of

NOTHING = Config()  # no outputs but gradients

_LEN = len(_operator.TENSORS)
# An op's schema is text, so that the tensors that all three take are named once.
_INPUTS = ", ".join(f"Tensor{'' if i < 2 else '?'} {n}" for i, n in enumerate(_operator.TENSORS))
_REST = "str config, bool need_dx, bool need_dw, bool need_db) -> Tensor[]"


def _op(name: str, more: str):
    schema = f"({_INPUTS}, {more}{_REST}"
    return torch.library.custom_op(f"talea::{name}", mutates_args=(), schema=schema)


def _listed(made, names, all_names, like: Tensor) -> list[Tensor]:
    """An op returns a fixed list: what is not there is an empty tensor."""
    found = dict(zip(names, made, strict=True))
    return [found[n] if n in found else like.new_empty((0,)) for n in all_names]


def _needed(need) -> list[str]:
    return [n for n, wanted in zip(GRADIENTS, need, strict=True) if wanted]


@_op("linear_cross_entropy", "")
def forward(*arguments):
    tensors, config, need = arguments[:_LEN], Config.parse(arguments[_LEN]), arguments[-3:]
    made = call(config, tensors, need)
    names = (*results_of(config), *_needed(need))
    return _listed(made, names, (*RESULTS, *GRADIENTS), tensors[0])


@forward.register_fake
def _(*arguments):
    tensors, config, need = arguments[:_LEN], Config.parse(arguments[_LEN]), arguments[-3:]
    makers = recipe(config, tensors, need)
    made = allocate(makers.values(), tensors)
    return _listed(made, makers, (*RESULTS, *GRADIENTS), tensors[0])


def _exact(tensors, upstream, config: str, need) -> list[Tensor]:
    found = _operator.backward(Config.parse(config), tensors, upstream, need)
    return [tensors[0].new_empty((0,)) if g is None else g for g in found]


@_op("linear_cross_entropy_backward", "Tensor? g_loss, Tensor? g_lse, Tensor? g_logp, "
     "Tensor? g_entropy, ")  # fmt: skip
def backward(*arguments):
    return _exact(arguments[:_LEN], arguments[_LEN:-4], arguments[-4], arguments[-3:])


@_op("linear_cross_entropy_scaled", "Tensor[] early, Tensor g_loss, ")
def scaled(*arguments):
    early, g_loss, config, *need = arguments[_LEN:]
    wanted = [g for g, n in zip(early, need, strict=True) if n]
    if _operator.exact_scale(wanted, g_loss) is not None:
        return [g * g_loss.to(g.dtype) for g in early]
    return _exact(arguments[:_LEN], (g_loss, None, None, None), config, tuple(need))


@backward.register_fake
@scaled.register_fake
def _(*arguments):
    need = arguments[-3:]
    makers = recipe(NOTHING, arguments[:3], need)
    made = allocate(makers.values(), arguments[:3])
    return _listed(made, makers, GRADIENTS, arguments[0])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_LEN], *output[-3:])
    ctx.config = inputs[_LEN]
    ctx.early = inputs[_LEN + 1 :]
    ctx.set_materialize_grads(False)


def _gradient(ctx, grads):
    saved = ctx.saved_tensors
    tensors, early = saved[:_LEN], saved[_LEN:]
    need = [
        bool(n) and t is not None
        for n, t in zip(ctx.needs_input_grad[:3], tensors[:3], strict=True)
    ]
    tail = (None,) * (_LEN - 3 + 4)
    upstream = [g if g is None else g.contiguous() for g in grads[:4]]
    if all(g is None for g in upstream):
        return (None, None, None, *tail)
    if any(ctx.early) and upstream[0] is not None:
        found = scaled(*tensors, list(early), upstream[0], ctx.config, *need)
    else:
        found = backward(*tensors, *upstream, ctx.config, *need)
    return (*[g if n else None for g, n in zip(found, need, strict=True)], *tail)


forward.register_autograd(_gradient, setup_context=_setup)


def apply(config: Config, tensors, extras) -> tuple[Tensor, ...]:
    for name in ("main_grad", "scale"):
        if getattr(extras, name) is not None:
            name = {"scale": "grad_scale"}.get(name, name)
            raise RuntimeError(
                f"{name}: not supported under torch.compile; call it outside the graph"
            )
    need = [False] * 3
    if torch.is_grad_enabled() and _operator.forms_gradient_early(config, tensors[0]):
        need = [t is not None and t.requires_grad for t in tensors[:3]]
    found = forward(*tensors, config.text(), *need)
    names = RESULTS
    wanted = [n in config.outputs or (n[:4] == "topk" and config.top_k > 0) for n in names]
    return tuple(t for t, w in zip(found, wanted, strict=False) if w)
