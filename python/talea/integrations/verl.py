"""verl: linear_cross_entropy(hidden, weight, labels, temperature, reduction, group).

Returns (log-probabilities, entropy) of each token, both differentiable, with the vocabulary sharded
over `dist_process_group`. Ids and padding are exact for any vocabulary.
"""

from __future__ import annotations

import torch

from ..functional import linear_cross_entropy as _fused


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [..., D], weight [V / ranks, D], labels [...]; flat results, as verl's kernel gives.

    reduction: of the log-probabilities ("none", "sum", "mean"); the entropy stays per token.
    """
    if labels.dim() > 1 and hidden.dim() > 2 and labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels: shape {list(labels.shape)} beside {list(hidden.shape)} of hidden"
        )
    if not temperature or not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be positive")
    ranks = {}
    if dist_process_group is not None:
        import torch.distributed as dist

        size, rank = dist.get_world_size(dist_process_group), dist.get_rank(dist_process_group)
        rows = weight.shape[0]
        ranks = {"tp_group": dist_process_group, "vocab": rows * size, "vocab_begin": rows * rank}
    out = _fused(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        logit_scale=1.0 / temperature,
        reduction="none",
        outputs=("target_logprob", "entropy"),
        **ranks,
    )
    logprobs = out.target_logprob
    reduction = str(reduction).lower()
    if reduction == "sum":
        logprobs = logprobs.sum()
    elif reduction == "mean":
        logprobs = logprobs.mean()
    elif reduction != "none":
        raise ValueError(f"reduction = {reduction!r}: one of none, sum, mean")
    return logprobs, out.entropy


def patch() -> None:
    """Replaces verl's linear_cross_entropy, also where verl has imported it by name already."""
    import sys

    import verl.utils.kernel.linear_cross_entropy as module

    original = module.linear_cross_entropy
    for name, found in list(sys.modules.items()):
        if name.split(".")[0] == "verl" and vars(found).get("linear_cross_entropy") is original:
            found.linear_cross_entropy = linear_cross_entropy
