"""TRL: its trainers (SFT, DPO, GRPO, ...), and per-token log-probabilities with entropy.

`add_fused_lm_head` has the signature of trl.trainer.utils.add_fused_lm_head and returns the same
FusedCausalLMOutput, so that trainers which call `model(..., fused_lm_head=True)` run on Talea.
"""

from __future__ import annotations

import functools
import types

import torch

from ..functional import linear_cross_entropy
from ._head import head_options, head_tensors, scaled_bias

_SERVED = ("log_probs", "entropy", "is_top1")


def per_token_logps(
    hidden, head, labels, *, temperature=1.0, config=None, entropy=False, **options
):
    """(log-probabilities, entropy or None) of labels, both zero where the label is -100."""
    weight, bias = head_tensors(head)
    model_options = head_options(config) if config is not None else {}
    found = _scored(
        hidden, weight, bias, labels, temperature, model_options, options, entropy=entropy
    )
    return found.target_logprob, found.entropy


def _scored(
    hidden, weight, bias, labels, temperature, model_options, options, *, entropy, top=False
):
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be positive")
    softcap = model_options.get("softcap")
    scale = model_options.get("logit_scale", 1.0)
    if softcap and temperature != 1.0:
        # TRL divides after the cap: k tanh(a / k) / T = (k / T) tanh((a / T) / (k / T)).
        softcap = softcap / temperature
    outputs = ("target_logprob",) + (("entropy",) if entropy else ()) + (("argmax",) if top else ())
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=scaled_bias(bias, scale / temperature),
        softcap=softcap,
        logit_scale=scale / temperature,
        reduction="none",
        outputs=outputs,
        **options,
    )


def add_fused_lm_head(
    model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",), **options
):
    """Drop-in for trl.trainer.utils.add_fused_lm_head (TRL >= 1.0)."""
    unknown = set(outputs) - set(_SERVED)
    if unknown:
        raise ValueError(f"outputs: {sorted(unknown)} not served inside the boundary: {_SERVED}")
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None,
                num_items_in_batch=None, **kwargs):  # fmt: skip
        from trl.trainer.utils import FusedCausalLMOutput

        given = {"labels": labels, "shift_labels": shift_labels}
        given["num_items_in_batch"] = num_items_in_batch
        if not fused_lm_head:
            return original(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        weight, bias = head_tensors(self.get_output_embeddings())
        if cast_lm_head_to_fp32:
            hidden, weight = hidden.float(), weight.float()
            bias = None if bias is None else bias.float()
        found = _scored(
            hidden.contiguous(), weight, bias, shift_labels.contiguous(), temperature,
            head_options(self.config), options, entropy="entropy" in outputs, top="is_top1" in outputs,
        )  # fmt: skip
        mask = shift_labels != -100
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-found.target_logprob.sum() / items,
            log_probs=found.target_logprob,
            entropy=found.entropy,
            is_top1=(found.argmax == shift_labels) & mask if "is_top1" in outputs else None,
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)
    return model


def patch() -> None:
    """Makes TRL's trainers that score by a fused head use Talea's; call before building one."""
    import importlib

    import trl.trainer.utils as utils

    utils.add_fused_lm_head = add_fused_lm_head
    for name in ("sft_trainer", "grpo_trainer", "rloo_trainer", "kto_trainer", "dpo_trainer"):
        try:
            module = importlib.import_module(f"trl.trainer.{name}")
        except ImportError:
            continue
        if hasattr(module, "add_fused_lm_head"):
            module.add_fused_lm_head = add_fused_lm_head


def completion_logps(model, input_ids, attention_mask, logits_to_keep, temperature=1.0):
    """Log-probabilities and entropies of the last `logits_to_keep` tokens: [batch, kept] each."""
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :-logits_to_keep] = -100
    body = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    found = per_token_logps(
        body.last_hidden_state, model.get_output_embeddings(), shifted,
        temperature=temperature, config=model.config, entropy=True,
    )  # fmt: skip
    keep = slice(-logits_to_keep - 1, -1)
    return found[0][:, keep], found[1][:, keep]
