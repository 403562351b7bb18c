"""The operator inside autograd: forward, exact late backward.

Forward forms the gradients at once (6 N D V) where nothing but a factor can come later, or where the
caller has said what will come; otherwise it keeps the row states, and backward forms the logits
again with the exact upstream vectors (8 N D V in all). Every gradient is rounded once.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from .. import _fast
from .._abi import UsageError
from .._torch import refuse_negated, settled
from . import _late as _late_gradients
from ._settings import Config
from ._tensors import (
    GRADIENTS,
    NO_GRADIENT,
    PER_TOKEN,
    Described,
    call,
    described_as,
    results_of,
    wide,
)

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
def _late_logprob(config: Config) -> Config:
    """Backward of target_logprob = -ce without options."""
    plain = {"reduction": "none", "label_smoothing": 0.0, "z_loss": 0.0}
    return Config(**{**_late_gradients.gradients_only(config).__dict__, **plain})


def backward(config: Config, tensors, upstream, need, main_grad=None, saved=(), receipts=None):
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
    more = {"accumulate_dw": accumulate, "receipts": receipts}
    made = None
    if g_loss is not None or g_logp is None:
        # Where there is a loss that brings nothing, that is said: without an upstream it brings 1.
        wanted = tensors[3] if tensors[3] is not None else tensors[8]
        if g_loss is None and wanted is not None:
            shape = wanted.shape[:1] if config.reduction == "none" else ()
            g_loss = tensors[0].new_zeros(shape, dtype=wide(tensors[0]))
        inputs = (*tensors, g_loss, g_lse, g_entropy, *saved)
        made = call(_late_gradients.gradients_only(config), inputs, need, given, **more)
        g_lse = g_entropy = None  # brought by this call
    if g_logp is not None:
        hidden, weight, bias, targets, _, _, *rest = tensors
        inputs = (hidden, weight, bias, targets, None, None, *rest, -g_logp, g_lse, g_entropy)
        again = call(_late_logprob(config), (*inputs, *saved), need, given, **more)
        if made is None:
            return in_places(again, need)
        for tensor, other in zip(made, again, strict=True):
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


def forms_gradient_early(config: Config, hidden: torch.Tensor) -> bool:
    """In a compiled graph, where early gradients have their final dtype.

    fp16 never: a loss scale must enter before its small gradients underflow, not after.
    """
    return hidden.dtype != torch.float16 and scalar_upstream(config)


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


class Extras:
    """What few calls have: a main gradient, the upstream announced, receipts wanted."""

    __slots__ = ("main_grad", "receipts", "scale")

    def __init__(self, main_grad=None, scale=None, receipts=None) -> None:
        self.main_grad, self.scale, self.receipts = main_grad, scale, receipts


NO_EXTRAS = Extras()


class _Waiting:
    """What forward leaves to backward."""

    __slots__ = (
        "config", "described", "kept", "main_grad", "need", "receipts", "said", "saved", "stream",
    )  # fmt: skip

    def __init__(self, config, need, extras) -> None:
        self.config, self.need = config, need
        self.main_grad, self.receipts = extras.main_grad, extras.receipts
        self.kept, self.saved, self.said, self.stream, self.described = {}, (), None, None, None


class Operator(torch.autograd.Function):
    """Eager autograd. Gradients formed early are handed out once; a second backward recomputes."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, config, extras, rest):
        tensors = (hidden, weight, bias, *rest)
        ctx.save_for_backward(*tensors)
        waiting = ctx.waiting = _Waiting(config, ctx.needs_input_grad[:3], extras)
        if extras is NO_EXTRAS or (extras.main_grad is None and extras.scale is None):
            made = _form(waiting, tensors)
        else:
            made = _form_with(waiting, tensors, extras.scale)
        names = results_of(config)
        if len(names) == 1:
            return made[names[0]]
        ctx.set_materialize_grads(False)
        fixed = (made[n] for n in names if n not in ("loss", *PER_TOKEN))
        ctx.mark_non_differentiable(*fixed)
        return tuple(made[n] for n in names)

    @staticmethod
    def backward(ctx, *upstream):
        return form_late(ctx.waiting, ctx.saved_tensors, upstream)


def form_late(waiting: _Waiting, tensors, upstream) -> tuple:
    # Grad mode is off unless the graph of this backward is wanted, which there is none of.
    way = _without_derivative if torch.is_grad_enabled() else _backward
    return way(waiting, tensors, upstream)


def _form(waiting: _Waiting, tensors) -> dict:
    described, made = _late_gradients.forward(
        waiting.config, tensors, waiting.need, waiting.receipts
    )
    waiting.stream = described.stream
    if described.late is not None:
        waiting.described = described
        waiting.kept = {n: made[n] for n in (*GRADIENTS, *_late_gradients.RESTS) if n in made}
    elif described.config is not waiting.config:
        waiting.saved = tuple(made[n].detach() for n in PER_TOKEN[:2])
    return made


def _form_with(waiting: _Waiting, tensors, scale) -> dict:
    """With a main gradient, or with the upstream that backward will bring."""
    config, (need_x, need_w, need_b) = waiting.config, waiting.need
    main_grad = waiting.main_grad = waiting.main_grad if need_w else None
    if main_grad is not None:  # the weight itself gets no gradient
        waiting.need = (need_x, False, need_b)
    if scale is None or not (main_grad is not None or any(waiting.need)):
        if main_grad is None:
            return _form(waiting, tensors)
        given = {"dw": main_grad}
        _late_gradients.require_room(config, tensors, waiting.need, given)
        states = _late_gradients.with_states(config, tensors)
        made = call(states, tensors, NO_GRADIENT, receipts=waiting.receipts)
        made = dict(zip(results_of(states), made, strict=True))
        if states is not config:
            waiting.saved = tuple(made[n].detach() for n in PER_TOKEN[:2])
        return made
    if not scalar_upstream(config):
        raise UsageError(
            "grad_scale: needs reduction mean or sum, and no output a token beside the loss"
        )
    waiting.said = _late_gradients.announced(scale, tensors[0])
    given = None if main_grad is None else {"dw": main_grad}
    inputs = (*tensors, *(None,) * (len(TENSORS) - len(tensors)), waiting.said)
    names = (*results_of(config), *(n for n, w in zip(GRADIENTS, waiting.need, strict=True) if w))
    made = call(config, inputs, waiting.need, given, accumulate_dw=main_grad is not None,
                receipts=waiting.receipts)  # fmt: skip
    made = dict(zip(names, made, strict=False))
    waiting.kept = {n: made[n] for n in GRADIENTS if n in made}
    if tensors[0].is_cuda:
        waiting.stream = _fast.stream_of(tensors[0].device.index)
    return made


def _backward(waiting: _Waiting, tensors, upstream) -> tuple:
    if all(g is None for g in upstream):
        return (None,) * 6
    upstream = tuple(settled(g) for g in upstream)
    tensors += (None,) * (len(TENSORS) - len(tensors))
    kept, said = waiting.kept, waiting.said
    waiting.kept, waiting.said = {}, None  # handed out once, so that nothing is scaled twice
    stream = waiting.stream() if waiting.stream is not None else None
    if said is not None:
        _late_gradients.compare(said, upstream[0], kept.get("dx"), stream)
        found = [kept.get(n) for n in GRADIENTS]
    elif kept:
        factor = upstream[0]
        if waiting.config.outputs == ("target_logprob",):
            factor = -factor
        described, made = waiting.described, kept
        again = described is not None and described.again is not None
        if not (again and _late_gradients.multiply_again(described, kept, factor, stream)):
            made = _late_gradients.multiply(described, kept, tensors, factor, stream)
        found = [made.get(n) for n in GRADIENTS]
    else:
        by_name = dict(zip(results_of(waiting.config), upstream, strict=True))
        exact = [by_name.get(name) for name in ("loss", *PER_TOKEN)]
        found = backward(
            waiting.config, tensors, exact, waiting.need, waiting.main_grad, waiting.saved,
            waiting.receipts,
        )  # fmt: skip
    return (*found, None, None, None)


def _without_derivative(waiting: _Waiting, tensors, upstream) -> tuple:
    """Gradients that raise when they are differentiated, whatever the upstream gradient was.

    once_differentiable lets them pass as constants where the upstream gradient requires none, and
    that is every plain loss: a gradient penalty would add nothing, and nobody would be told.
    """
    with torch.no_grad():
        found = _backward(waiting, tensors, upstream)
    formed = [g for g in found if g is not None]
    if not formed:
        return found
    made = iter(_Constant.apply(len(formed), *formed, *tensors[:3], *upstream))
    return tuple(None if g is None else next(made) for g in found)


class _Constant(torch.autograd.Function):
    """Its first inputs, with the others as what they depend on, by a derivative that is an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *upstream):
        raise RuntimeError("talea.linear_cross_entropy: double backward is not supported")


_apply = _fast.apply_of(Operator)


def apply(config: Config, hidden, weight, bias, rest: tuple, extras: Extras = NO_EXTRAS) -> tuple:
    """The results of results_of(config), differentiable in loss and the per-token outputs.

    rest: the other TENSORS, without the last where those are None.
    """
    if _fast.in_transform() or _fast.forward_mode():
        _refuse_transforms(hidden, weight, bias, *rest)
    hidden, weight, bias = settled(hidden), settled(weight), settled(bias)
    rest = tuple(settled(t) for t in rest)
    if extras.main_grad is not None:
        refuse_negated(extras.main_grad, "main_grad")
    if torch.is_grad_enabled() and (
        weight.requires_grad or hidden.requires_grad or (bias is not None and bias.requires_grad)
    ):
        found = _apply(hidden, weight, bias, config, extras, rest)
        return found if type(found) is tuple else (found,)
    tensors = (hidden, weight, bias, *rest)
    return tuple(call(config, tensors, NO_GRADIENT, receipts=extras.receipts))


def described_before(config: Config, tensors, need) -> Described | None:
    """The description by which apply() just made such a call, where it was known before."""
    more = (need, "forward") if any(need) else (NO_GRADIENT, False)
    described = described_as(config, tensors, more)
    if described is None:
        return None
    described.served += 1
    return described if described.served > 1 else None


def _refuse_transforms(*tensors) -> None:
    if _fast.in_transform():
        raise UsageError(
            "talea.linear_cross_entropy: not inside grad, vmap, vjp or jvp of torch.func "
            "(functional_call is): use torch.autograd.grad, and [..., D] for batches"
        )
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise UsageError("talea.linear_cross_entropy: forward-mode derivatives: not supported")
