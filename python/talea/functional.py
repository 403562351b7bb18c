"""talea.linear_cross_entropy: torch.nn.functional.linear_cross_entropy's signature, and more."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import _operator
from ._abi import UsageError
from ._call import Config, Receipt


@dataclass
class LinearCrossEntropyOutput:
    """The loss and what was asked for beside it; per-token tensors are shaped as the targets."""

    loss: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    target_logprob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    accuracy: torch.Tensor | None = None
    topk_values: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    _receipt: Receipt | None = field(default=None, repr=False)

    def receipt(self) -> dict:
        """What ran in the forward call, what declined and why, and what it cost."""
        if self._receipt is None:
            raise RuntimeError("receipt: not available inside a compiled graph")
        return self._receipt.facts()


def _autocast(*tensors):
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else t
        for t in tensors
    )  # fmt: skip


def _name_of(group) -> str:
    return "" if group is None else group.group_name


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor | None,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    token_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | torch.Tensor = 1.0,
    soft_target_ids: torch.Tensor | None = None,
    vocab: int = 0,
    denominator: str | float = "valid",
    denominator_scope: str = "local",
    on_empty: str = "nan",
    outputs: tuple[str, ...] | None = None,
    top_k: int = 0,
    main_grad: torch.Tensor | None = None,
    tp_group=None,
    batch_group=None,
    vocab_begin: int = 0,
    sequence_parallel: bool = False,
    workspace_limit: int = 256 << 20,
    target_check: str = "automatic",
    lane: str = "auto",
):
    """Cross-entropy of linear(input, linear_weight, linear_bias), the logits never in memory.

    input [..., D]; linear_weight [V, D]; target [...] class ids, or probabilities [..., V], or with
    soft_target_ids [..., k] the probabilities of those ids. The first eight arguments mean what
    they mean in torch.nn.functional.linear_cross_entropy; the rest: docs/python.md. Returns the
    loss, or a LinearCrossEntropyOutput when `outputs` names anything ("loss", "lse",
    "target_logprob", "entropy", "argmax", "accuracy") or top_k > 0.

    main_grad: fp32 [V, D]; backward adds the weight's gradient into it; the weight gets none.
    """
    if type(linear_weight).__name__ == "DTensor":
        raise UsageError(
            "linear_weight: a DTensor; pass the full weight (or this rank's shard with tp_group)"
        )
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    lead, hidden = input.shape[:-1], input.reshape(-1, input.shape[-1])
    soft = target is not None and target.is_floating_point()
    targets = ids = probs = None
    if soft:
        probs = target.reshape(hidden.shape[0], -1).to(_operator._wide(hidden))
        ids = None if soft_target_ids is None else soft_target_ids.reshape(hidden.shape[0], -1)
    elif target is not None:
        targets = target.reshape(-1)
    scale, token_scale = (
        (1.0, logit_scale) if isinstance(logit_scale, torch.Tensor) else (logit_scale, None)
    )
    given = not isinstance(denominator, str)
    wanted = ("loss",) if outputs is None else tuple(outputs)
    config = Config(
        reduction=reduction,
        denominator="given" if given else denominator,
        denominator_value=float(denominator) if given else 0.0,
        denominator_scope=denominator_scope,
        on_empty=on_empty,
        target_check=target_check,
        ignore_index=-100 if ignore_index is None else ignore_index,
        vocab=vocab,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        softcap=float(softcap or 0.0),
        logit_scale=float(scale),
        workspace_limit_bytes=workspace_limit,
        lane=lane,
        outputs=wanted,
        top_k=top_k,
        vocab_begin=vocab_begin,
        sequence_parallel=sequence_parallel,
        group=_name_of(tp_group),
        batch_group=_name_of(batch_group),
    )

    def flat(t):
        return None if t is None else t.reshape(-1)

    tensors = (hidden, linear_weight, linear_bias, targets, weight, flat(token_weight))
    tensors = (*tensors, flat(token_scale), ids, probs)
    found = dict(zip(_operator.RESULTS, _operator.apply(config, tensors, main_grad), strict=True))
    rows = lead if not soft and target is None or soft else target.shape
    if reduction == "none" and "loss" in wanted:
        found["loss"] = found["loss"].reshape(rows)
    if outputs is None and top_k == 0:
        return found["loss"]
    result = LinearCrossEntropyOutput()
    if not torch.compiler.is_compiling():
        result._receipt = _operator.last_receipt
    for name in _operator.RESULTS:
        if name in ("loss", "accuracy") and name in wanted:
            setattr(result, name, found[name])
        elif name in wanted:
            setattr(result, name, found[name].reshape(rows))
        elif name.startswith("topk") and top_k > 0:
            setattr(result, name, found[name].reshape(*rows, top_k))
    return result


class LinearCrossEntropy(torch.nn.Module):
    """An output layer and its loss: holds the weight (and bias), keeps the options.

    Every keyword of `linear_cross_entropy` that is not a tensor may be given here and becomes the
    default of forward().
    """

    def __init__(
        self, in_features: int, vocab: int, bias: bool = False, device=None, dtype=None, **options
    ) -> None:
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(vocab, in_features, **like))
        self.bias = torch.nn.Parameter(torch.empty(vocab, **like)) if bias else None
        self.options = options
        bound = in_features**-0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if bias:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor, target: torch.Tensor | None = None, **options):
        return linear_cross_entropy(
            input, self.weight, target, linear_bias=self.bias, **{**self.options, **options}
        )

    def extra_repr(self) -> str:
        v, d = self.weight.shape
        return f"in_features={d}, vocab={v}, bias={self.bias is not None}, {self.options}"
