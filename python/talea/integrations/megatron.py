"""Megatron-Core: an output layer that returns the per-token loss instead of logits.

`fuse_output_layer(model)` swaps the class of `model.output_layer` (ColumnParallelLinear) in place:
same parameters, same checkpoints. Called with labels it returns the loss [s, b]; without labels it
is the plain layer. The gradient of the weight goes into `weight.main_grad` when
gradient_accumulation_fusion is on. check_swap() compares the swapped layer with the plain one.
"""

from __future__ import annotations

import torch

from ..functional import linear_cross_entropy


class LinearCrossEntropyModule:
    """Mixin before ColumnParallelLinear: output_layer(hidden, labels=...) -> loss [s, b].

    With output_cross_entropy_loss=True, as newer Megatron-Core calls its own class of this name,
    the loss comes as [b, s], the shape of the labels.
    """

    talea_vocab: int = 0  # logical vocabulary; 0: every stored row

    def forward(
        self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False,
        labels=None, reduction="none", ignore_index=-100, **options,
    ):  # fmt: skip
        if labels is None:
            if output_cross_entropy_loss:
                raise ValueError("output_cross_entropy_loss: needs labels")
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        options = {"reduction": reduction, "ignore_index": ignore_index, **options}
        loss = self._loss(input_, weight, labels, options)
        return (
            loss.transpose(0, 1).contiguous() if output_cross_entropy_loss and loss.dim() else loss
        )

    def _loss(self, hidden, weight, labels, options):
        """hidden [s or s / tp, b, D]; labels [b, s] with global ids; the loss is [s, b]."""
        group = getattr(self, "tp_group", None)
        size = group.size() if group is not None else 1
        spread = size > 1 and bool(self.sequence_parallel)
        tokens = [hidden.shape[1], hidden.shape[0] * (size if spread else 1)]
        if list(labels.shape) != tokens:
            raise ValueError(
                f"labels: shape {list(labels.shape)} where [b, s] = {tokens} is needed"
            )
        rows = weight.shape[0]
        ranks = {"vocab": self.talea_vocab or rows * size}
        if size > 1:
            ranks["tp_group"] = group
            ranks["vocab_begin"] = rows * group.rank()
            ranks["sequence_parallel"] = spread
        main_grad = None
        wanted = torch.is_grad_enabled() and weight.requires_grad
        if wanted and getattr(self, "gradient_accumulation_fusion", False):
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                raise RuntimeError("gradient_accumulation_fusion: weight.main_grad is missing")
            if hasattr(weight, "grad_added_to_main_grad"):
                weight = _Told.apply(weight)
        targets = labels.transpose(0, 1).contiguous()  # [b, s] -> [s, b], as the rows of hidden
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            targets.reshape(-1),
            linear_bias=None if self.skip_bias_add else self.bias,
            main_grad=main_grad,
            **ranks,
            **options,
        )
        return loss.reshape(targets.shape) if loss.dim() else loss


class _Told(torch.autograd.Function):
    """Tells Megatron's data parallelism of a gradient that lies in main_grad already.

    Its hook needs a weight.grad, zeros here, and adds it to main_grad unless told not to.
    """

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, nothing):
        ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.weight)


def fuse_output_layer(model, *, vocab: int = 0, check=True):
    """Swaps model.output_layer's class; vocab: the logical vocabulary under Megatron's padding."""
    layer = model.output_layer
    plain = type(layer)
    was = getattr(layer, "talea_vocab", 0)
    if not isinstance(layer, LinearCrossEntropyModule):
        name = f"LinearCrossEntropy{plain.__name__}"
        layer.__class__ = type(name, (LinearCrossEntropyModule, plain), {"__module__": __name__})
    layer.talea_vocab = vocab
    if check:
        try:
            check_swap(layer, _weight_of(model))
        except Exception:
            layer.__class__, layer.talea_vocab = plain, was
            raise
    return model


def _weight_of(model):
    """The output layer's own, or the embeddings' where they share one."""
    if model.output_layer.weight is not None or not hasattr(
        model, "shared_embedding_or_output_weight"
    ):
        return model.output_layer.weight
    return model.shared_embedding_or_output_weight()


@torch.no_grad()
def check_swap(layer, weight=None, tokens: int = 8, tolerance: float = 2e-2) -> float:
    """Plain layer and vocabulary-parallel loss against the fused one; raises when they differ."""
    weight = layer.weight if weight is None else weight
    if weight is None:
        raise RuntimeError("output layer swap: a layer without a weight of its own needs its model")
    group = getattr(layer, "tp_group", None)
    size = group.size() if group is not None else 1
    vocab = layer.talea_vocab or weight.shape[0] * size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, weight.shape[1], generator=generator)
    hidden = hidden.to(weight.device, weight.dtype)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator).to(weight.device)
    sequence_parallel, layer.sequence_parallel = layer.sequence_parallel, False
    try:
        fused = layer(hidden, weight, labels=labels).double()
    finally:
        layer.sequence_parallel = sequence_parallel
    z = torch.nn.functional.linear(hidden, weight, None if layer.skip_bias_add else layer.bias)
    if size > 1:
        parts = [torch.empty_like(z) for _ in range(size)]
        torch.distributed.all_gather(parts, z.contiguous(), group=group)
        z = torch.cat(parts, -1)
    dense = torch.nn.functional.cross_entropy(z[:, 0, :vocab].double(), labels[0], reduction="none")
    error = float((fused[:, 0] - dense).norm() / dense.norm().clamp(min=1e-30))
    if not error <= tolerance:
        raise RuntimeError(f"output layer swap: the loss differs by {error:.2e} (relative)")
    return error
