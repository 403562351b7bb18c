"""Hugging Face transformers: `patch(model)` computes the loss inside the fused boundary.

The logits are not formed while labels are given; without labels (generation) the model is
unchanged. At patch time one batch runs both ways on the user's own model, and a difference raises.
"""

from __future__ import annotations

import functools
import types

import torch
import torch.nn.functional as F

from ..functional import linear_cross_entropy
from ._head import head_options, head_tensors


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
    return linear_cross_entropy(
        hidden,
        weight,
        shift_labels.to(hidden.device),
        linear_bias=bias,
        ignore_index=ignore_index,
        **{**head_options(config), **options},
    )


def _divided_by(items, tokens: int, device) -> dict:
    """The sum over tokens / items as options: a division afterwards would round 16 bits twice."""
    items = torch.as_tensor(items)
    weight = items.to(device=device, dtype=torch.float32).reciprocal()
    return {"reduction": "sum", "token_weight": weight.reshape(1).expand(tokens)}


def patch(model, *, check=True, tolerance: float | None = None, **options):
    """Makes `model(..., labels=...)` compute its loss by Talea; returns the model.

    check: run one small batch dense and fused, compare loss and head gradient, raise ParityError.
    options: further keywords of linear_cross_entropy (lane, workspace_limit, z_loss, ...).
    """
    if getattr(model.config, "output_router_logits", False):
        raise ValueError("patch: output_router_logits adds a router loss that is not supported")
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, labels=None, **kwargs):
        if labels is None and kwargs.get("shift_labels") is None:
            return original(*args, **kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        shift = kwargs.pop("shift_labels", None)
        kwargs.pop("logits_to_keep", None)
        kwargs["use_cache"] = False
        body = self.base_model(*args, **kwargs)
        loss = causal_lm_loss(
            body.last_hidden_state,
            self.get_output_embeddings(),
            self.config,
            labels,
            num_items_in_batch=items,
            shift_labels=shift,
            **options,
        )
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(
            loss=loss,
            logits=None,
            hidden_states=getattr(body, "hidden_states", None),
            attentions=getattr(body, "attentions", None),
        )

    model.forward = types.MethodType(forward, model)
    model._talea_original_forward = original
    if check:
        try:
            check_parity(model, tolerance)
        except ParityError:
            unpatch(model)
            raise
    return model


def unpatch(model):
    """Undoes patch()."""
    model.forward = model.__dict__.pop("_talea_original_forward")
    return model


def check_parity(model, tolerance: float | None = None) -> dict:
    """One batch dense and fused on the patched model; raises ParityError when they differ."""
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
    found = {}
    try:
        for name, forward in (("dense", model._talea_original_forward), ("fused", model.forward)):
            loss = forward(input_ids=ids, labels=labels).loss
            gradient = torch.autograd.grad(loss, leaf)[0] if leaf is not None else loss.detach()
            found[name] = (loss.detach().double(), gradient.double())
    finally:
        model.train(was_training)
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
