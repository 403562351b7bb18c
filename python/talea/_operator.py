"""The operator inside autograd: forward, exact late backward, and the same under torch.compile.

Forward forms the gradients at once (6 N D V) where the upstream gradient can only be a scalar that
multiplies them; otherwise it keeps nothing and backward recomputes the logits with the exact
upstream vectors (8 N D V in all). A scalar that would round a gradient twice is never multiplied.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import torch

from ._call import Config
from ._torch import call, rows_of

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
PER_TOKEN = ("lse", "target_logprob", "entropy")
# What the forward can return, in this order.
RESULTS = ("loss", *PER_TOKEN, "argmax", "accuracy", "topk_values", "topk_ids", "topk_logprobs")
GRADIENTS = ("dx", "dw", "db")
latest = threading.local()  # .receipt: of this thread's latest call that kept one


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=1024)
def results_of(config: Config) -> tuple[str, ...]:
    """The names of RESULTS that a call returns."""
    return tuple(
        n for n in RESULTS if n in config.outputs or (n.startswith("topk") and config.top_k > 0)
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


def _allocate_result(name: str, config: Config, hidden: torch.Tensor, rows: int) -> torch.Tensor:
    if name == "loss":
        shape = (rows,) if config.reduction == "none" else ()
    elif name == "accuracy":
        shape = ()
    else:
        shape = (rows, config.top_k) if name.startswith("topk") else (rows,)
    integer = name in ("argmax", "topk_ids")
    return hidden.new_empty(shape, dtype=torch.int64 if integer else _wide(hidden))


def allocate_results(config: Config, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    if config.outputs == ("loss",) and config.reduction != "none" and not config.top_k:
        return {"loss": hidden.new_empty((), dtype=_wide(hidden))}
    rows = rows_of(config, hidden)
    return {name: _allocate_result(name, config, hidden, rows) for name in results_of(config)}


def allocate_gradients(tensors, need) -> dict[str, torch.Tensor]:
    """Dense, in the dtype of what each is the gradient of."""
    found = {}
    for name, like, wanted in zip(GRADIENTS, tensors, need, strict=False):
        if wanted:
            if like.is_contiguous():
                found[name] = torch.empty_like(like)
            else:
                found[name] = like.new_empty(like.shape)
    return found


def forward(config: Config, tensors, need) -> tuple[dict, dict]:
    """Results, and gradients for an upstream of 1 where `need` says so; both by name."""
    results = allocate_results(config, tensors[0])
    gradients = allocate_gradients(tensors, need)
    receipt = call(config, tensors, results | gradients)
    if receipt is not None:
        latest.receipt = receipt
    return results, gradients


def backward(config: Config, tensors, upstream, need, main_grad=None) -> dict[str, torch.Tensor]:
    """Gradients for exact upstreams (loss, lse, target_logprob, entropy); None is no gradient."""
    # An output that was not asked for has no gradient, whatever a compiled graph may send.
    names = ("loss", *PER_TOKEN)
    g_loss, g_lse, g_logp, g_entropy = (
        g if n in config.outputs else None for n, g in zip(names, upstream, strict=True)
    )
    gradients = allocate_gradients(tensors, need)
    wanted = gradients if main_grad is None else {**gradients, "dw": main_grad}
    if not wanted:
        return gradients
    accumulate = main_grad is not None
    if g_loss is None and tensors[3] is not None:
        shape = tensors[3].shape if config.reduction == "none" else ()
        g_loss = tensors[0].new_zeros(shape, dtype=_wide(tensors[0]))
    inputs = (*tensors, g_loss, g_lse, g_entropy)
    call(_late(config), inputs, wanted, accumulate_dw=accumulate)
    if g_logp is not None:
        hidden, weight, bias, targets, _, _, *rest = tensors
        inputs = (hidden, weight, bias, targets, None, None, *rest, -g_logp, None, None)
        more = {n: (t if t is main_grad else torch.empty_like(t)) for n, t in wanted.items()}
        call(_late_logprob(config), inputs, more, accumulate_dw=accumulate)
        for name, tensor in gradients.items():
            tensor += more[name]
    return gradients


def forms_gradient_early(config: Config, main_grad, hidden: torch.Tensor) -> bool:
    """fp16 never: a loss scale must enter before its small gradients underflow, not after."""
    if main_grad is not None or hidden.dtype == torch.float16:
        return False
    if config.reduction == "none":
        return False
    return config.outputs == ("loss",) or not any(n in config.outputs for n in PER_TOKEN)


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
        need_x, need_w, need_b, _, _, _ = ctx.needs_input_grad
        need = (need_x, need_w and main_grad is None, need_b)
        early = forms_gradient_early(config, main_grad, hidden)
        tensors = (hidden, weight, bias, *rest)
        results, gradients = forward(config, tensors, need if early else (False, False, False))
        ctx.save_for_backward(*tensors)
        ctx.call = (config, need, main_grad if need_w else None)
        ctx.gradients = gradients
        if len(results) > 1:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(
                *(t for n, t in results.items() if n not in ("loss", *PER_TOKEN))
            )
        return tuple(results.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        config, need, main_grad = ctx.call
        if all(g is None for g in upstream):
            return (None,) * 6
        gradients = Operator._early(ctx, upstream[0]) if ctx.gradients else None
        if gradients is None:
            by_name = dict(zip(results_of(config), upstream, strict=True))
            exact = [by_name.get(name) for name in ("loss", *PER_TOKEN)]
            gradients = backward(config, ctx.saved_tensors, exact, need, main_grad)
        dx, dw, db = (gradients.get(name) for name in GRADIENTS)
        return dx, dw, db, None, None, None

    @staticmethod
    def _early(ctx, scalar):
        scale = exact_scale(ctx.gradients.values(), scalar)
        if scale is None:
            return None
        # Handed out once, so scaling in place cannot scale twice.
        gradients, ctx.gradients = ctx.gradients, None
        if not isinstance(scale, float) or scale != 1.0:
            for gradient in gradients.values():
                gradient.mul_(scalar)
        return gradients


def apply(config: Config, hidden, weight, bias, rest: tuple, main_grad=None) -> tuple:
    """The results of results_of(config), differentiable in loss and the per-token outputs.

    rest: the other TENSORS.
    """
    if torch.compiler.is_compiling():
        from . import _compiled

        return _compiled.apply(config, (hidden, weight, bias, *rest), main_grad)
    if torch.is_grad_enabled() and (
        weight.requires_grad or hidden.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return Operator.apply(hidden, weight, bias, config, main_grad, rest)
    results, _ = forward(config, (hidden, weight, bias, *rest), (False, False, False))
    return tuple(results.values())
