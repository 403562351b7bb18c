"""What every integration must know of a model's output layer: weight, bias, scaling, softcap."""

from __future__ import annotations

import torch


def head_tensors(head: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of an output layer; LoRA adapters on it are merged differentiably."""
    base = head.base_layer if hasattr(head, "base_layer") else head
    weight, bias = base.weight, getattr(base, "bias", None)
    if not hasattr(head, "lora_A"):
        return weight, bias
    if getattr(head, "merged", False) or getattr(head, "disable_adapters", False):
        return weight, bias
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        if head.training and not isinstance(head.lora_dropout[name], torch.nn.Identity):
            raise ValueError(f"lm_head: LoRA adapter {name!r} has dropout, which cannot be merged")
        if getattr(head, "use_dora", {}).get(name):
            raise ValueError(f"lm_head: LoRA adapter {name!r} uses DoRA, which is not supported")
        weight = weight + head.get_delta_weight(name).to(weight.dtype)
    return weight, bias


def scaled_bias(bias, scale: float):
    """Models scale their logits with the bias in them; the operator adds it behind the scale."""
    return bias if bias is None or scale == 1.0 else bias * scale


def head_options(config) -> dict:
    """softcap and logit_scale of a Hugging Face text config (Gemma, Cohere, Granite, Falcon-H1)."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = next(
        (
            value
            for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")
            if (value := getattr(config, name, None)) is not None
        ),
        None,
    )
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    options = {"softcap": getattr(config, "final_logit_softcapping", None)}
    return {**options, "logit_scale": 1.0 if scale is None else float(scale)}
