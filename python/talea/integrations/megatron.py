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
    """Mixin before ColumnParallelLinear: output_layer(hidden, labels=...) -> loss [s, b]."""

    talea_vocab: int = 0  # logical vocabulary; 0: every stored row

    def forward(self, input_, weight=None, runtime_gather_output=None, *, labels=None, **options):
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        return self._loss(input_, weight, labels, options)

    def _loss(self, hidden, weight, labels, options):
        """hidden [s or s / tp, b, D]; labels [b, s] with global ids; the loss is [s, b]."""
        group = getattr(self, "tp_group", None)
        size = group.size() if group is not None else 1
        rows = weight.shape[0]
        ranks = {"vocab": self.talea_vocab or rows * size}
        if size > 1:
            ranks["tp_group"] = group
            ranks["vocab_begin"] = rows * group.rank()
            ranks["sequence_parallel"] = bool(self.sequence_parallel)
        main_grad = None
        if getattr(self, "gradient_accumulation_fusion", False):
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                raise RuntimeError("gradient_accumulation_fusion: weight.main_grad is missing")
        targets = labels.transpose(0, 1).contiguous()  # [b, s] -> [s, b], as the rows of hidden
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            targets.reshape(-1),
            linear_bias=None if self.skip_bias_add else self.bias,
            reduction="none",
            main_grad=main_grad,
            **ranks,
            **options,
        )
        return loss.reshape(targets.shape)


def fuse_output_layer(model, *, vocab: int = 0, check=True):
    """Swaps model.output_layer's class; vocab: the logical vocabulary under Megatron's padding."""
    layer = model.output_layer
    plain = type(layer)
    if not isinstance(layer, LinearCrossEntropyModule):
        name = f"LinearCrossEntropy{plain.__name__}"
        layer.__class__ = type(name, (LinearCrossEntropyModule, plain), {"__module__": __name__})
    layer.talea_vocab = vocab
    if check:
        try:
            check_swap(layer)
        except RuntimeError:
            layer.__class__ = plain
            raise
    return model


@torch.no_grad()
def check_swap(layer, tokens: int = 8, tolerance: float = 2e-2) -> float:
    """Plain layer and vocabulary-parallel loss against the fused one; raises when they differ."""
    weight = layer.weight
    group = getattr(layer, "tp_group", None)
    size = group.size() if group is not None else 1
    vocab = layer.talea_vocab or weight.shape[0] * size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, weight.shape[1], generator=generator)
    hidden = hidden.to(weight.device, weight.dtype)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator).to(weight.device)
    sequence_parallel, layer.sequence_parallel = layer.sequence_parallel, False
    try:
        fused = layer(hidden, labels=labels).double()
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
