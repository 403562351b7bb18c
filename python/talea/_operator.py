"""The operator inside autograd: forward, exact late backward, and the same two under torch.compile.

Forward forms the gradients at once (6 N D V) where the upstream gradient can only be a scalar that
multiplies them; otherwise it keeps nothing and backward recomputes the logits with the exact
upstream vectors (8 N D V in all).
"""

from __future__ import annotations

import math

import torch

from ._call import Config, Receipt
from ._torch import call

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
# What the forward returns, in this order; what was not asked for is an empty tensor.
RESULTS = ("loss", *PER_TOKEN, "argmax", "accuracy", "topk_values", "topk_ids", "topk_logprobs")
GRADIENTS = ("dx", "dw", "db")
last_receipt: Receipt | None = None  # of this process's latest call


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _rows(config: Config, hidden: torch.Tensor) -> int:
    if not config.sequence_parallel:
        return hidden.shape[0]
    from ._torch import _Group

    return hidden.shape[0] * _Group.of(config.group, hidden.device).struct.size


def allocate_results(config: Config, hidden: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Empty tensors for RESULTS; size 0 where not requested."""
    wide, per_row, k = _wide(hidden), (rows,), config.top_k
    shapes = {
        "loss": (per_row if config.reduction == "none" else (), wide),
        "lse": (per_row, wide),
        "target_logprob": (per_row, wide),
        "entropy": (per_row, wide),
        "argmax": (per_row, torch.int64),
        "accuracy": ((), wide),
        "topk_values": ((rows, k), wide),
        "topk_ids": ((rows, k), torch.int64),
        "topk_logprobs": ((rows, k), wide),
    }
    results = []
    for name in RESULTS:
        shape, dtype = shapes[name]
        wanted = name in config.outputs or (name.startswith("topk") and k > 0)
        results.append(hidden.new_empty(shape if wanted else (0,), dtype=dtype))
    return results


def allocate_gradients(tensors, need: tuple[bool, bool, bool]) -> list[torch.Tensor]:
    likes = (tensors[0], tensors[1], tensors[2])
    return [
        like.new_empty(like.shape) if wanted else tensors[0].new_empty((0,))
        for like, wanted in zip(likes, need, strict=True)
    ]


def _present(name: str, tensor: torch.Tensor, config: Config) -> bool:
    return name in config.outputs or (name.startswith("topk") and config.top_k > 0)


def forward(config: Config, tensors, need) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """RESULTS, and GRADIENTS for an upstream of 1 where `need` says so."""
    global last_receipt
    results = allocate_results(config, tensors[0], _rows(config, tensors[0]))
    gradients = allocate_gradients(tensors, need)
    outputs = {n: t for n, t in zip(RESULTS, results, strict=True) if _present(n, t, config)}
    outputs.update(
        {n: t for n, t, wanted in zip(GRADIENTS, gradients, need, strict=True) if wanted}
    )
    last_receipt = call(config, dict(zip(TENSORS, tensors, strict=True)), outputs)
    return results, gradients


def backward(config: Config, tensors, upstream, need, main_grad=None) -> list[torch.Tensor]:
    """GRADIENTS for exact upstreams (loss, lse, target_logprob, entropy); None is no gradient."""
    global last_receipt
    # An output that was not asked for is an empty tensor; a compiled graph may send it a gradient.
    names = ("loss", *PER_TOKEN)
    g_loss, g_lse, g_logp, g_entropy = (
        g if n in config.outputs else None for n, g in zip(names, upstream, strict=True)
    )
    gradients = allocate_gradients(tensors, need)
    targets = dict(zip(GRADIENTS, gradients, strict=True))
    wanted = {n: targets[n] for n, w in zip(GRADIENTS, need, strict=True) if w}
    if main_grad is not None:
        wanted["dw"] = main_grad
    inputs = dict(zip(TENSORS, tensors, strict=True))
    inputs.update(upstream=g_loss, upstream_lse=g_lse, upstream_entropy=g_entropy)
    if g_loss is None and inputs["targets"] is not None:
        inputs["upstream"] = tensors[0].new_zeros(
            tensors[3].shape if config.reduction == "none" else (), dtype=_wide(tensors[0])
        )
    late = Config(**{**config.__dict__, "outputs": (), "top_k": 0})
    if wanted:
        last_receipt = call(late, inputs, wanted, accumulate_dw=main_grad is not None)
    if g_logp is not None and wanted:
        # logp_y = -ce without options: one more pass with that upstream.
        plain = {"reduction": "none", "label_smoothing": 0.0, "z_loss": 0.0}
        again = Config(**{**late.__dict__, **plain})
        inputs.update(upstream=-g_logp, upstream_lse=None, upstream_entropy=None)
        inputs.update(class_weight=None, token_weight=None)
        more = {n: (t if t is main_grad else torch.empty_like(t)) for n, t in wanted.items()}
        last_receipt = call(again, inputs, more, accumulate_dw=main_grad is not None)
        for name, tensor in wanted.items():
            if tensor is not main_grad:
                tensor += more[name]
    return gradients


def forms_gradient_early(config: Config, main_grad) -> bool:
    differentiable = any(name in config.outputs for name in PER_TOKEN)
    return config.reduction != "none" and not differentiable and main_grad is None


def _power_of_two(value: float) -> bool:
    return value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


class Operator(torch.autograd.Function):
    """Eager autograd. Gradients formed early are handed out once; a second backward recomputes."""

    @staticmethod
    def forward(ctx, config, main_grad, *tensors):
        wants = [
            bool(n) and t is not None
            for n, t in zip(ctx.needs_input_grad[2:5], tensors, strict=False)
        ]
        need = (wants[0], wants[1] and main_grad is None, wants[2])
        ctx.early = forms_gradient_early(config, main_grad) and any(need)
        results, gradients = forward(config, tensors, need if ctx.early else (False,) * 3)
        ctx.save_for_backward(*tensors)
        ctx.config, ctx.need, ctx.main_grad = config, need, main_grad
        ctx.main = main_grad is not None and wants[1]
        ctx.gradients = gradients if ctx.early else None
        ctx.mark_non_differentiable(*results[4:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_loss, g_lse, g_logp, g_entropy, *_):
        nothing = (None,) * (2 + len(TENSORS))
        upstream = (g_loss, g_lse, g_logp, g_entropy)
        if all(g is None for g in upstream):
            return nothing
        gradients = None
        if ctx.gradients is not None:
            exact = True
            if g_loss.device.type == "cpu":
                scale = g_loss.item()
                wide = all(g.element_size() >= 4 for g in ctx.gradients if g.numel())
                exact = wide or _power_of_two(scale)
            if exact:
                # Handed out once, so scaling in place cannot scale twice.
                gradients, ctx.gradients = ctx.gradients, None
                if g_loss.device.type != "cpu" or scale != 1.0:
                    for gradient in gradients:
                        gradient.mul_(g_loss)
        if gradients is None:
            main = ctx.main_grad if ctx.main else None
            gradients = backward(ctx.config, ctx.saved_tensors, upstream, ctx.need, main)
        grads = [g if wanted else None for g, wanted in zip(gradients, ctx.need, strict=True)]
        return (None, None, *grads, *((None,) * (len(TENSORS) - 3)))


@torch.library.custom_op("talea::linear_cross_entropy", mutates_args=())
def compiled_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    soft_target_ids: torch.Tensor | None,
    soft_target_probs: torch.Tensor | None,
    config: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> list[torch.Tensor]:
    tensors = (hidden, weight, bias, targets, class_weight, token_weight, token_scale)
    tensors = (*tensors, soft_target_ids, soft_target_probs)
    results, gradients = forward(Config.parse(config), tensors, (need_dx, need_dw, need_db))
    return [*results, *gradients]


@compiled_forward.register_fake
def _(hidden, weight, bias, *rest):
    config, need = Config.parse(rest[-4]), rest[-3:]
    results = allocate_results(config, hidden, hidden.shape[0])
    return [*results, *allocate_gradients((hidden, weight, bias), need)]


@torch.library.custom_op("talea::linear_cross_entropy_backward", mutates_args=())
def compiled_backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    soft_target_ids: torch.Tensor | None,
    soft_target_probs: torch.Tensor | None,
    g_loss: torch.Tensor | None,
    g_lse: torch.Tensor | None,
    g_logp: torch.Tensor | None,
    g_entropy: torch.Tensor | None,
    config: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> list[torch.Tensor]:
    tensors = (hidden, weight, bias, targets, class_weight, token_weight, token_scale)
    tensors = (*tensors, soft_target_ids, soft_target_probs)
    upstream = (g_loss, g_lse, g_logp, g_entropy)
    return backward(Config.parse(config), tensors, upstream, (need_dx, need_dw, need_db))


@compiled_backward.register_fake
def _(hidden, weight, bias, *rest):
    return allocate_gradients((hidden, weight, bias), rest[-3:])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output[-3:])
    ctx.config = inputs[len(TENSORS)]
    ctx.early = inputs[len(TENSORS) + 1 :]
    ctx.set_materialize_grads(False)


def _compiled_gradient(ctx, grads):
    saved = ctx.saved_tensors
    tensors, early = saved[: len(TENSORS)], saved[len(TENSORS) :]
    need = tuple(
        bool(n) and t is not None for n, t in zip(ctx.needs_input_grad[:3], tensors, strict=False)
    )
    tail = (None,) * (len(TENSORS) - 3 + 4)
    if any(ctx.early):
        if grads[0] is None:
            return (None, None, None, *tail)
        scaled = [g * grads[0] if n else None for g, n in zip(early, need, strict=True)]
        return (
            *[s if s is None else s.to(t.dtype) for s, t in zip(scaled, tensors, strict=False)],
            *tail,
        )
    upstream = [g if g is None else g.contiguous() for g in grads[:4]]
    if all(g is None for g in upstream):
        return (None, None, None, *tail)
    found = compiled_backward(*tensors, *upstream, ctx.config, *need)
    return (*[g if n else None for g, n in zip(found, need, strict=True)], *tail)


compiled_forward.register_autograd(_compiled_gradient, setup_context=_setup)


def apply(config: Config, tensors, main_grad=None) -> tuple[torch.Tensor, ...]:
    """RESULTS, differentiable in loss and the per-token outputs."""
    if not torch.compiler.is_compiling():
        return Operator.apply(config, main_grad, *tensors)
    if main_grad is not None:
        raise RuntimeError(
            "main_grad: not supported under torch.compile; call it outside the graph"
        )
    need = [False] * 3
    if torch.is_grad_enabled() and forms_gradient_early(config, None):
        need = [t is not None and t.requires_grad for t in tensors[:3]]
    return tuple(compiled_forward(*tensors, config.text(), *need)[: len(RESULTS)])
