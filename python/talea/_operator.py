"""The operator inside autograd: forward, exact late backward, and the same under torch.compile.

Forward forms the gradients at once (6 N D V) where the upstream gradient can only be a scalar that
multiplies them; otherwise it keeps nothing and backward recomputes the logits with the exact
upstream vectors (8 N D V in all). A scalar that would round a gradient twice is never multiplied.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from ._abi import UsageError
from ._call import Config
from ._torch import NO_GRADIENT, PER_TOKEN, call, results_of, wide

TENSORS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "class_weight",
    "token_weight",
    "token_scale",
    "soft_target_ids",
    "soft_target_probs",
)


@lru_cache(maxsize=1024)
def _late(config: Config) -> Config:
    """The backward call: no outputs but gradients."""
    return Config(**{**config.__dict__, "outputs": (), "top_k": 0, "receipt": False})


@lru_cache(maxsize=1024)
def _late_logprob(config: Config) -> Config:
    """Backward of target_logprob = -ce without options."""
    plain = {"reduction": "none", "label_smoothing": 0.0, "z_loss": 0.0}
    return Config(**{**_late(config).__dict__, **plain})


def backward(config: Config, tensors, upstream, need, main_grad=None) -> list:
    """GRADIENTS for exact upstreams (loss, lse, target_logprob, entropy); None where not needed."""
    # An output that was not asked for has no gradient, whatever a compiled graph may send.
    names = ("loss", *PER_TOKEN)
    g_loss, g_lse, g_logp, g_entropy = (
        g if n in config.outputs else None for n, g in zip(names, upstream, strict=True)
    )
    given = None if main_grad is None else {"dw": main_grad}
    accumulate = main_grad is not None
    if not any(need) and not accumulate:
        return [None] * 3
    if g_loss is None and tensors[3] is not None:
        shape = tensors[3].shape if config.reduction == "none" else ()
        g_loss = tensors[0].new_zeros(shape, dtype=wide(tensors[0]))
    inputs = (*tensors, g_loss, g_lse, g_entropy)
    made = call(_late(config), inputs, need, given, accumulate_dw=accumulate)
    if g_logp is not None:
        hidden, weight, bias, targets, _, _, *rest = tensors
        inputs = (hidden, weight, bias, targets, None, None, *rest, -g_logp, None, None)
        more = call(_late_logprob(config), inputs, need, given, accumulate_dw=accumulate)
        for tensor, other in zip(made, more, strict=True):
            if tensor is not main_grad:
                tensor += other
    return in_places(made, need)


def in_places(made, need) -> list:
    """One value a gradient: the next of `made` where it is needed, else None."""
    made = iter(made)
    return [next(made) if n else None for n in need]


def scalar_upstream(config: Config) -> bool:
    """Whether nothing but a scalar can multiply the gradients."""
    if config.outputs == ("loss",):
        return config.reduction != "none"
    return config.reduction != "none" and not any(n in config.outputs for n in PER_TOKEN)


_kept_scalar_upstream = lru_cache(maxsize=1024)(scalar_upstream)


def forms_gradient_early(
    config: Config, main_grad, hidden: torch.Tensor, scalar=_kept_scalar_upstream
) -> bool:
    """fp16 never: a loss scale must enter before its small gradients underflow, not after."""
    return main_grad is None and hidden.dtype != torch.float16 and scalar(config)


def exact_scale(gradients, scalar: torch.Tensor) -> float | torch.Tensor | None:
    """What the early gradients may be multiplied by without a second 16-bit rounding, or None.

    fp32: the scalar, unread on a device. bf16: the scalar where it is a power of two. To know that
    on a device it has to be read, which waits for the forward call; a stream under capture cannot
    wait: None.
    """
    if all(g.element_size() >= 4 for g in gradients):
        return scalar.item() if scalar.is_cpu else scalar
    if scalar.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    value = scalar.item()
    return value if value and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5 else None


class Operator(torch.autograd.Function):
    """Eager autograd. Gradients formed early are handed out once; a second backward recomputes."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, config, main_grad, rest):
        need = ctx.needs_input_grad[:3]
        early = forms_gradient_early(config, main_grad, hidden)
        if main_grad is not None:
            main_grad = main_grad if need[1] else None
            need = (need[0], False, need[2])
        tensors = (hidden, weight, bias, *rest)
        ctx.save_for_backward(*tensors)
        made = call(config, tensors, need if early else NO_GRADIENT)
        names = results_of(config)
        count = len(names)
        ctx.call = (config, need, main_grad, made[count:])
        if count == 1:
            return made[0]
        ctx.set_materialize_grads(False)
        results = made[:count]
        fixed = (t for n, t in zip(names, results, strict=True) if n not in ("loss", *PER_TOKEN))
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream):
        # Grad mode is off unless the graph of this backward is wanted, which there is none of.
        if torch.is_grad_enabled():
            return _without_derivative(ctx, *upstream)
        return _backward(ctx, *upstream)


def _backward(ctx, *upstream):
    config, need, main_grad, early = ctx.call
    if all(g is None for g in upstream):
        return (None,) * 6
    gradients = _scaled(early, upstream[0]) if early else None
    if gradients is None:
        by_name = dict(zip(results_of(config), upstream, strict=True))
        exact = [by_name.get(name) for name in ("loss", *PER_TOKEN)]
        tensors = ctx.saved_tensors
        tensors += (None,) * (len(TENSORS) - len(tensors))
        gradients = backward(config, tensors, exact, need, main_grad)
    else:
        # Handed out once, so scaling in place cannot scale twice.
        ctx.call = (config, need, main_grad, None)
        gradients = in_places(gradients, need)
    return (*gradients, None, None, None)


def _scaled(gradients, scalar):
    scale = exact_scale(gradients, scalar)
    if scale is None:
        return None
    if not isinstance(scale, float) or scale != 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
    return gradients


def _without_derivative(ctx, *upstream):
    """Gradients that raise when they are differentiated, whatever the upstream gradient was.

    once_differentiable lets them pass as constants where the upstream gradient requires none, and
    that is every plain loss: a gradient penalty would add nothing, and nobody would be told.
    """
    with torch.no_grad():
        found = _backward(ctx, *upstream)
    formed = [g for g in found if g is not None]
    if not formed:
        return found
    made = iter(_Constant.apply(len(formed), *formed, *ctx.saved_tensors[:3], *upstream))
    return tuple(None if g is None else next(made) for g in found)


class _Constant(torch.autograd.Function):
    """Its first inputs, with the others as what they depend on, by a derivative that is an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("talea.linear_cross_entropy: double backward is not supported")


# Function.apply, less what it does for functorch's transforms.
_apply = super(torch.autograd.Function, Operator).apply


def apply(config: Config, hidden, weight, bias, rest: tuple, main_grad=None) -> tuple:
    """The results of results_of(config), differentiable in loss and the per-token outputs.

    rest: the other TENSORS, without the last where those are None.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        _refuse_transforms(hidden, weight, bias, *rest)
    if torch.is_grad_enabled() and (
        weight.requires_grad or hidden.requires_grad or (bias is not None and bias.requires_grad)
    ):
        found = _apply(hidden, weight, bias, config, main_grad, rest)
        return found if type(found) is tuple else (found,)
    return tuple(call(config, (hidden, weight, bias, *rest), NO_GRADIENT))


def _refuse_transforms(*tensors) -> None:
    if torch._C._are_functorch_transforms_active():
        raise UsageError(
            "talea.linear_cross_entropy: not inside grad, vmap, vjp or jvp of torch.func "
            "(functional_call is): use torch.autograd.grad, and [..., D] for batches"
        )
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise UsageError("talea.linear_cross_entropy: forward-mode derivatives: not supported")
