"""Liger: LigerFusedLinearCrossEntropyLoss with the same constructor and forward.

What Liger computes differently at the edges: docs/python.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..functional import linear_cross_entropy


@dataclass
class CrossEntropyOutput:
    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        if accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype: {accum_dtype}; gradients accumulate in float32 here")
        self.ce_weight = ce_weight
        self.use_token_scaling = use_token_scaling
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.lse_square_scale = lse_square_scale
        self.options = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "softcap": softcap,
        }

    def forward(self, lin_weight, _input, target, bias=None):
        extras = ("lse",) if self.return_z_loss else ()
        extras += ("accuracy",) if self.return_token_accuracy else ()
        extras += ("argmax",) if self.return_predicted_tokens else ()
        token_weight = None
        if self.use_token_scaling:
            with torch.no_grad():
                scored = linear_cross_entropy(
                    _input, lin_weight, target, linear_bias=bias, reduction="none",
                    softcap=self.options["softcap"], ignore_index=self.options["ignore_index"],
                    outputs=("target_logprob",),
                )  # fmt: skip
                token_weight = scored.target_logprob.exp()
        out = linear_cross_entropy(
            _input,
            lin_weight,
            target,
            linear_bias=bias,
            weight=self.ce_weight,
            z_loss=self.lse_square_scale,
            token_weight=token_weight,
            outputs=("loss", *extras),
            **self.options,
        )
        if not extras:
            return out.loss
        z_loss = None
        if self.return_z_loss:
            valid = target != self.options["ignore_index"]
            z = self.lse_square_scale * out.lse.detach() ** 2 * valid
            reduction = self.options["reduction"]
            z_loss = z if reduction == "none" else z.sum()
            if reduction == "mean":
                z_loss = z_loss / valid.sum()
        return CrossEntropyOutput(out.loss, z_loss, out.accuracy, out.argmax)
