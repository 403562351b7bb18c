"""Hugging Face transformers: `patch(model)` computes the loss inside the fused boundary.

The logits are not formed while labels are given; without labels (generation) the model is
unchanged. At patch time one batch runs both ways on the user's own model, and a difference raises.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..functional import linear_cross_entropy
from ._forward import replace, restore
from ._head import head_options, head_tensors, scaled_bias


class ParityError(RuntimeError):
    """The fused loss does not match the model's own at patch time."""


def causal_lm_loss(
    hidden, head, config, labels, *, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    **options,
):  # fmt: skip
    """The loss of transformers' ForCausalLMLoss from hidden states and an output layer."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    weight, bias = head_tensors(head)
    if num_items_in_batch is not None:
        options.update(_divided_by(num_items_in_batch, shift_labels.numel(), hidden.device))
    options = {**head_options(config), **options}
    return linear_cross_entropy(
        hidden,
        weight,
        shift_labels.to(hidden.device),
        linear_bias=scaled_bias(bias, options["logit_scale"]),
        ignore_index=ignore_index,
        **options,
    )


def _divided_by(items, tokens: int, device) -> dict:
    """The sum over tokens / items as options: a division afterwards would round 16 bits twice."""
    items = torch.as_tensor(items)
    weight = items.to(device=device, dtype=torch.float32).reciprocal()
    return {"reduction": "sum", "token_weight": weight.reshape(1).expand(tokens)}


# What changes the loss on purpose: the check at patch time leaves it out.
_PENALTIES = ("label_smoothing", "z_loss")


def patch(model, *, check=True, tolerance: float | None = None, **options):
    """Makes `model(..., labels=...)` compute its loss by Talea; returns the model.

    check: run one small batch dense and fused, compare loss and head gradient, raise ParityError.
    options: further keywords of linear_cross_entropy (lane, workspace_limit, z_loss, ...). A model
    that is patched already takes the new options; PEFT's wrapper keeps its own forward.
    """
    base = _language_model(model)
    if getattr(base.config, "output_router_logits", False):
        raise ValueError("patch: output_router_logits adds a router loss that is not supported")
    unknown = set(options) - set(linear_cross_entropy.__kwdefaults__)
    if unknown:
        raise TypeError(f"patch: {', '.join(sorted(unknown))}: no keyword of linear_cross_entropy")

    @functools.wraps(type(base).forward)  # the signature is read by trainers
    def forward(self, *args, **kwargs):
        return _forward(self, *args, **kwargs)

    replace(base, forward, options)
    if check:
        try:
            check_parity(base, tolerance)
        except Exception:
            unpatch(base)
            raise
    return model


def _forward(self, *args, labels=None, **kwargs):
    if labels is None and kwargs.get("shift_labels") is None:
        return self._talea_original_forward(*args, **kwargs)
    ours = ("num_items_in_batch", "shift_labels", "ignore_index")
    given = {n: kwargs.pop(n) for n in ours if kwargs.get(n) is not None}
    as_tuple = kwargs.pop("return_dict", None) is False
    kwargs.pop("logits_to_keep", None)
    kwargs["use_cache"] = False
    body = self.base_model(*args, **kwargs, return_dict=True)
    loss = causal_lm_loss(
        body.last_hidden_state,
        self.get_output_embeddings(),
        self.config,
        labels,
        **{**self._talea_options, **given},
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast

    out = CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        hidden_states=getattr(body, "hidden_states", None),
        attentions=getattr(body, "attentions", None),
    )
    return out.to_tuple() if as_tuple else out


def _language_model(model):
    """The model with the output layer: PEFT wraps it, adapters and all."""
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(c.is_prompt_learning for c in model.peft_config.values()):
            raise ValueError("patch: prompt learning adds tokens that are not supported")
        model = model.get_base_model()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ValueError(f"patch: {type(model).__name__} has no output embeddings (lm_head)")
    return model


def unpatch(model):
    """Undoes patch()."""
    base = _language_model(model)
    restore(base)
    return model


def check_parity(model, tolerance: float | None = None) -> dict:
    """One batch dense and fused on the patched model; raises ParityError when they differ."""
    model = _language_model(model)
    weight, _ = head_tensors(model.get_output_embeddings())
    device, sixteen = weight.device, weight.dtype in (torch.bfloat16, torch.float16)
    tolerance = tolerance if tolerance is not None else (3e-2 if sixteen else 1e-4)
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (2, 16), generator=generator).to(device)
    labels = ids.clone()
    labels[:, :5] = -100
    leaf = next((p for p in model.get_output_embeddings().parameters() if p.requires_grad), None)
    was_training = model.training
    model.eval()
    options = model._talea_options
    model._talea_options = {k: v for k, v in options.items() if k not in _PENALTIES}
    found = {}
    try:
        for name, forward in (("dense", model._talea_original_forward), ("fused", model.forward)):
            loss = forward(input_ids=ids, labels=labels).loss
            gradient = torch.autograd.grad(loss, leaf)[0] if leaf is not None else loss.detach()
            found[name] = (loss.detach().double(), gradient.double())
    finally:
        model.train(was_training)
        model._talea_options = options
    errors = {}
    for what, dense, fused in zip(("loss", "head gradient"), *found.values(), strict=True):
        error = float((dense - fused).norm() / dense.norm().clamp(min=1e-30))
        errors[what] = error
        if not error <= tolerance:
            raise ParityError(
                f"{type(model).__name__}: {what} differs by {error:.2e} (relative), more than "
                f"{tolerance:.0e}: it does something to its logits that patch() does not know"
            )
    return errors
