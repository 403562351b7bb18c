"""The operator as torch.library custom ops, so that torch.compile(fullgraph=True) can hold it.

Three ops: forward, backward with exact upstreams, and the early gradients times their scalar. They
are opaque to the compiler; the last one may recompute instead of multiplying (see _operator).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _operator
from ._call import Config

_LEN = len(_operator.TENSORS)


def _listed(found: dict, names, like: Tensor) -> list[Tensor]:
    """An op returns a fixed list: what is not there is an empty tensor."""
    return [found[n] if n in found else like.new_empty((0,)) for n in names]


@torch.library.custom_op("talea::linear_cross_entropy", mutates_args=())
def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    token_scale: Tensor | None,
    soft_target_ids: Tensor | None,
    soft_target_probs: Tensor | None,
    config: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> list[Tensor]:
    tensors = (hidden, weight, bias, targets, class_weight, token_weight, token_scale)
    tensors = (*tensors, soft_target_ids, soft_target_probs)
    need = (need_dx, need_dw, need_db)
    results, gradients = _operator.forward(Config.parse(config), tensors, need)
    names = (*_operator.RESULTS, *_operator.GRADIENTS)
    return _listed({**results, **gradients}, names, hidden)


@forward.register_fake
def _(hidden, weight, bias, *rest):
    results = _operator.allocate_results(Config.parse(rest[-4]), hidden)
    gradients = _operator.allocate_gradients((hidden, weight, bias), rest[-3:])
    names = (*_operator.RESULTS, *_operator.GRADIENTS)
    return _listed({**results, **gradients}, names, hidden)


@torch.library.custom_op("talea::linear_cross_entropy_backward", mutates_args=())
def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    token_scale: Tensor | None,
    soft_target_ids: Tensor | None,
    soft_target_probs: Tensor | None,
    g_loss: Tensor | None,
    g_lse: Tensor | None,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    config: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> list[Tensor]:
    tensors = (hidden, weight, bias, targets, class_weight, token_weight, token_scale)
    tensors = (*tensors, soft_target_ids, soft_target_probs)
    upstream = (g_loss, g_lse, g_logp, g_entropy)
    need = (need_dx, need_dw, need_db)
    found = _operator.backward(Config.parse(config), tensors, upstream, need)
    return _listed(found, _operator.GRADIENTS, hidden)


@backward.register_fake
def _(hidden, weight, bias, *rest):
    found = _operator.allocate_gradients((hidden, weight, bias), rest[-3:])
    return _listed(found, _operator.GRADIENTS, hidden)


@torch.library.custom_op("talea::linear_cross_entropy_scaled", mutates_args=())
def scaled(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    token_scale: Tensor | None,
    soft_target_ids: Tensor | None,
    soft_target_probs: Tensor | None,
    early: list[Tensor],
    g_loss: Tensor,
    config: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> list[Tensor]:
    need = (need_dx, need_dw, need_db)
    wanted = [g for g, n in zip(early, need, strict=True) if n]
    if _operator.exact_scale(wanted, g_loss) is not None:
        return [g * g_loss.to(g.dtype) for g in early]
    tensors = (hidden, weight, bias, targets, class_weight, token_weight, token_scale)
    tensors = (*tensors, soft_target_ids, soft_target_probs)
    upstream = (g_loss, None, None, None)
    found = _operator.backward(Config.parse(config), tensors, upstream, need)
    return _listed(found, _operator.GRADIENTS, hidden)


@scaled.register_fake
def _(hidden, weight, bias, *rest):
    found = _operator.allocate_gradients((hidden, weight, bias), rest[-3:])
    return _listed(found, _operator.GRADIENTS, hidden)


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


def apply(config: Config, tensors, main_grad=None) -> tuple[Tensor, ...]:
    if main_grad is not None:
        raise RuntimeError(
            "main_grad: not supported under torch.compile; call it outside the graph"
        )
    need = [False] * 3
    if torch.is_grad_enabled() and _operator.forms_gradient_early(config, None, tensors[0]):
        need = [t is not None and t.requires_grad for t in tensors[:3]]
    found = forward(*tensors, config.text(), *need)
    names = _operator.RESULTS
    wanted = [n in config.outputs or (n[:4] == "topk" and config.top_k > 0) for n in names]
    return tuple(t for t, w in zip(found, wanted, strict=False) if w)
