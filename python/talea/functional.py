"""talea.linear_cross_entropy: torch.nn.functional.linear_cross_entropy's signature, and more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from . import _operator, _torch
from ._abi import UsageError
from ._call import Config, Receipt

OUTPUTS = tuple(n for n in _torch.RESULTS if not n.startswith("topk"))  # those come with top_k


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


def _autocast(device: str, *tensors):
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else t
        for t in tensors
    )  # fmt: skip


def _name_of(group) -> str:
    return group.group_name


def _make_config(
    reduction, denominator, denominator_scope, on_empty, target_check, ignore_index, vocab,
    label_smoothing, z_loss, softcap, logit_scale, workspace_limit, lane, outputs, top_k,
    vocab_begin, sequence_parallel, group, batch_group, receipt,
) -> Config:  # fmt: skip
    for name in outputs:
        if name not in OUTPUTS:
            raise UsageError(f"outputs = {outputs}: {name!r} is none of {', '.join(OUTPUTS)}")
    if top_k < 0:
        raise UsageError(f"top_k = {top_k}: must be >= 0")
    if vocab_begin and not group:
        raise UsageError(
            f"vocab_begin = {vocab_begin}: needs tp_group, the ranks of the other rows"
        )
    if sequence_parallel and not group:
        raise UsageError("sequence_parallel = True: needs tp_group, the ranks of the other tokens")
    given = not isinstance(denominator, str)
    return Config(
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
        logit_scale=float(logit_scale),
        workspace_limit_bytes=workspace_limit,
        lane=lane,
        outputs=outputs,
        top_k=top_k,
        vocab_begin=vocab_begin,
        sequence_parallel=sequence_parallel,
        group=group or "",
        batch_group=batch_group or "",
        receipt=receipt,
    )


# One object for equal settings: plans are found by it.
_kept_config = lru_cache(maxsize=512)(_make_config)


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
    device = "cpu" if input.is_cpu else "cuda" if input.is_cuda else input.device.type
    if torch.is_autocast_enabled(device):
        input, linear_weight, linear_bias = _autocast(device, input, linear_weight, linear_bias)
    hidden = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    targets = ids = probs = token_scale = None
    if target is None:
        pass
    elif target.is_floating_point():
        probs = target.reshape(hidden.shape[0], -1).to(_torch.wide(hidden))
        ids = None if soft_target_ids is None else soft_target_ids.reshape(hidden.shape[0], -1)
    else:
        targets = target if target.dim() == 1 else target.reshape(-1)
    if isinstance(logit_scale, torch.Tensor):
        token_scale, logit_scale = _flat(logit_scale), 1.0
    plain = outputs is None and top_k == 0
    compiling = torch.compiler.is_compiling()
    make = _make_config if compiling else _kept_config
    config = make(
        reduction, denominator, denominator_scope, on_empty, target_check, ignore_index, vocab,
        label_smoothing, z_loss, softcap, logit_scale, workspace_limit, lane,
        ("loss",) if outputs is None else tuple(outputs), top_k, vocab_begin, sequence_parallel,
        tp_group and _name_of(tp_group), batch_group and _name_of(batch_group), not plain,
    )  # fmt: skip
    if token_weight is not None:
        token_weight = _flat(token_weight)
    rest = (targets, weight, token_weight, token_scale, ids, probs)
    if compiling:
        from . import _compiled

        found = _compiled.apply(config, (hidden, linear_weight, linear_bias, *rest), main_grad)
    else:
        if weight is token_weight is token_scale is ids is probs is None:
            rest = (targets,)  # what is not there costs time, too
        found = _operator.apply(config, hidden, linear_weight, linear_bias, rest, main_grad)
    if plain and reduction != "none":
        return found[0]
    rows = input.shape[:-1] if targets is None else target.shape
    return found[0].reshape(rows) if plain else _output(config, found, rows)


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t if t.dim() == 1 else t.reshape(-1)


def _output(config: Config, found: tuple, rows) -> LinearCrossEntropyOutput:
    result = LinearCrossEntropyOutput()
    if not torch.compiler.is_compiling():
        result._receipt = _torch.latest.receipt
    scalars = ("accuracy",) if config.reduction == "none" else ("accuracy", "loss")
    found = iter(found)
    for name in _torch.RESULTS:
        top = name[:4] == "topk" and config.top_k > 0
        if name not in config.outputs and not top:
            continue
        value = next(found)
        if name not in scalars:
            value = value.reshape(*rows, config.top_k) if top else value.reshape(rows)
        setattr(result, name, value)
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
