"""DeepSeek V3.2 and GLM MoE DSA of transformers: `patch(model)` runs their sparse attention by Talea.

The model multiplies every query with every key and masks what its indexer did not select. Here a query
meets the selected latents alone, in the absorbed form: no scores [B, H, S, T], no expanded keys and values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._sparse_attention.functional import sparse_attention, sparse_select
from ._forward import replace, replaced, restore
from .transformers import ParityError

__all__ = ["ParityError", "check_parity", "patch", "unpatch"]

# Attention layers, and whether their indexer turns neighbouring columns, as the attention does, or halves.
_CLASSES = {"DeepseekV32Attention": False, "GlmMoeDsaAttention": True}
_PLAIN = ("eager", "sdpa")  # whose masks say which keys a query may see


def _layers(model) -> list[nn.Module]:
    found = [m for m in model.modules() if type(m).__name__ in _CLASSES]
    if not found:
        raise ValueError(f"patch: {type(model).__name__} has no {' and no '.join(_CLASSES)}")
    return found


def _refuse(layer: nn.Module) -> None:
    """What the absorbed form would leave out in silence."""
    how = layer.config._attn_implementation
    if how not in _PLAIN:
        raise ValueError(
            f"patch: attn_implementation={how!r}: only {' and '.join(_PLAIN)} are supported"
        )
    if type(layer.kv_b_proj) is not nn.Linear or layer.kv_b_proj.bias is not None:
        raise ValueError(
            f"patch: kv_b_proj is {type(layer.kv_b_proj).__name__}: its weight is multiplied without it, so it must "
            "be a torch.nn.Linear without a bias (no adapter, no quantised weight)"
        )


def patch(
    model, *, indexer: str = "talea", check: bool = True, tolerance: float | None = None, **options
):
    """Makes every attention layer of `model` run by `talea.sparse_attention`; returns the model.

    indexer: "talea" selects by `talea.sparse_select`, without scores of every head; "model" keeps the model's own.
    check: run one small batch both ways, compare logits and a gradient, raise ParityError.
    options: further keywords of sparse_attention (lane, workspace_limit, dkv_sum, operands). Layers that are
    patched already take the new ones.
    """
    if indexer not in ("talea", "model"):
        raise ValueError(f"patch: indexer={indexer!r} is none of 'talea', 'model'")
    unknown = set(options) - {"lane", "workspace_limit", "dkv_sum", "operands", "threads"}
    if unknown:
        raise TypeError(f"patch: {', '.join(sorted(unknown))}: no keyword that a layer passes on")
    layers = _layers(model)
    for layer in layers:
        _refuse(layer)
    for layer in layers:
        replace(layer, _forward, (indexer, options))
    if check:
        try:
            check_parity(model, tolerance)
        except Exception:
            unpatch(model)
            raise
    return model


def unpatch(model):
    """Undoes patch()."""
    for layer in _layers(model):
        if replaced(layer):
            restore(layer)
    return model


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """[B, S, T]: whether a query may see a key."""
    mask = mask[:, 0]
    return mask if mask.dtype == torch.bool else mask == 0


_spans = WeakTensorKeyDictionary()  # of masks, which the layers of a model share


def _span(mask: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [begin, end) of every query, [B, S] each. The host waits for a mask's, once."""
    version = 0 if mask.is_inference() else mask._version
    kept = _spans.get(mask)
    if kept is None or kept[0] != version:
        kept = _spans[mask] = (version, *_span_of(seen))
    return kept[1:]


def _span_of(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = seen.to(torch.uint8)
    count, begin = seen.sum(-1, dtype=torch.int32), bits.argmax(-1).to(torch.int32)
    behind = bits.flip(-1).argmax(-1).to(torch.int32)
    if not bool(((seen.shape[-1] - behind - begin == count) | (count == 0)).all()):
        raise ValueError(
            "the mask leaves out keys between others: patch(model, indexer='model') takes such masks"
        )
    return begin, begin + count


def _rotated(q, k, cos, sin):
    """Columns 2 i and 2 i + 1 turn together and come back as halves; queries [B, S, H, D], keys [B, S, D]."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]

    def turned(x, c, s):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    return turned(q, cos.unsqueeze(2), sin.unsqueeze(2)), turned(k, cos, sin)


def _halves(q, k, cos, sin):
    """The same of columns i and i + D / 2."""

    def turned(x, c, s):
        low, high = x.chunk(2, -1)
        return x * c + torch.cat([-high, low], -1) * s

    return turned(q, cos.unsqueeze(2), sin.unsqueeze(2)), turned(k, cos, sin)


@torch.no_grad()
def _selected(layer, hidden, q_resid, cos, sin, span, cache, with_scores: bool = False):
    """The indexer's own projections and rotation, its selection by Talea: [B, S, K], -1 where there is no key."""
    indexer = layer.indexer
    batch, length = hidden.shape[:2]
    turn = _rotated if _CLASSES[type(layer).__name__] else _halves
    q = indexer.wq_b(q_resid).view(batch, length, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden))
    at = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    (q_turn, q_pass), (k_turn, k_pass) = q.split(at, -1), k.split(at, -1)
    q_turn, k_turn = turn(q_turn, k_turn, cos, sin)
    q, k = torch.cat([q_turn, q_pass], -1), torch.cat([k_turn, k_pass], -1)
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    tensors = q.contiguous(), k.to(q.dtype).contiguous(), weights
    begin, end = (x.expand(batch, -1) for x in span)  # a mask may serve the whole batch

    def best(top_k, **more):
        return sparse_select(*tensors, top_k=top_k, begin=begin, end=end, **more)

    indices, _ = best(min(indexer.index_topk, k.shape[1]))
    if not with_scores:
        return indices
    every, _, found = best(k.shape[1], return_scores=True)
    found = torch.where(every >= 0, found, 0).float()
    scores = torch.zeros_like(found).scatter_add(-1, every.long().clamp(min=0), found)
    return indices, scores


def _known(chosen, seen) -> torch.Tensor:
    """Without keys that the query may not see, which fill the list up where it sees fewer."""
    known = seen.expand(chosen.shape[0], -1, -1).gather(-1, chosen.long().clamp(min=0)) & (
        chosen >= 0
    )
    return torch.where(known, chosen, -1).to(torch.int32)


def _selection_error(theirs, ours, scores) -> float:
    """How far the selected scores are apart: where scores are equal, either key may be taken."""

    def taken(chosen):
        found = scores.gather(-1, chosen.long().clamp(min=0)).double()
        return torch.where(chosen >= 0, found, 0).sort(-1).values

    a, b = taken(theirs), taken(ours)
    return float((a - b).norm() / a.norm().clamp(min=1e-30)) + float(
        (theirs >= 0).sum() != (ours >= 0).sum()
    )


def _forward(
    self,
    hidden_states,
    position_embeddings,
    attention_mask,
    past_key_values=None,
    position_ids=None,
    prev_topk_indices=None,
    **kwargs,
):
    if self.training and self.attention_dropout:
        raise ValueError(
            f"attention_dropout = {self.attention_dropout}: dropout of weights that are never formed"
        )
    _refuse(self)
    indexer, options = self._talea_options
    batch, length = hidden_states.shape[:2]
    cos, sin = position_embeddings
    q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_resid).view(batch, length, -1, self.qk_head_dim)
    q_pass, q_turn = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    latent, k_turn = self.kv_a_proj_with_mqa(hidden_states).split(
        [self.kv_lora_rank, self.qk_rope_head_dim], -1
    )
    latent = self.kv_a_layernorm(latent)
    q_turn, k_turn = _rotated(q_turn, k_turn, cos, sin)
    if past_key_values is not None:
        kept = past_key_values.update(latent.unsqueeze(1), k_turn.unsqueeze(1), self.layer_idx)
        latent, k_turn = (x.squeeze(1) for x in kept)
    seen = _seen(attention_mask)
    if self.indexer is None:  # a layer that takes the selection of the one before
        chosen = prev_topk_indices
    elif indexer == "talea":
        span = _span(attention_mask, seen)
        chosen = _selected(self, hidden_states, q_resid, cos, sin, span, past_key_values)
    else:
        chosen = self.indexer(
            hidden_states, q_resid, position_embeddings, attention_mask[:, 0], position_ids,
            past_key_values=past_key_values,
        )  # fmt: skip
    chosen = _known(chosen, seen)
    if indexer == "both" and self.indexer is not None:
        span = _span(attention_mask, seen)
        other = _selected(self, hidden_states, q_resid, cos, sin, span, None, with_scores=True)
        self._talea_selection = _selection_error(chosen, *other)
    # Keys and values are rows of kv_b_proj times a latent: it multiplies the query, and what comes out, instead.
    by_head = self.kv_b_proj.weight.view(
        -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
    )
    of_keys, of_values = by_head.split([self.qk_nope_head_dim, self.v_head_dim], 1)
    q = torch.cat([torch.einsum("bshd,hdl->bshl", q_pass, of_keys), q_turn], -1)
    o = sparse_attention(
        q,
        torch.cat([latent, k_turn], -1),
        chosen,
        value_dim=self.kv_lora_rank,
        scale=self.scaling,
        **options,
    )
    out = torch.einsum("bshl,hvl->bshv", o, of_values)
    made = self.o_proj(out.reshape(batch, length, -1))
    return (made, None, chosen) if _CLASSES[type(self).__name__] else (made, None)


def check_parity(model, tolerance: float | None = None) -> dict:
    """One batch by the model and by Talea on the patched model; raises ParityError when they differ."""
    layers = _layers(model)
    weight = layers[0].kv_b_proj.weight
    sixteen = weight.dtype in (torch.bfloat16, torch.float16)
    tolerance = tolerance if tolerance is not None else (5e-2 if sixteen else 1e-4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=generator).to(weight.device)
    leaf = weight if weight.requires_grad else None
    ours, given = [layer.forward for layer in layers], [layer._talea_options for layer in layers]
    was_training = model.training
    model.eval()
    found = {}
    try:
        for layer, (_, options) in zip(layers, given, strict=True):
            layer._talea_options = (
                "both",
                options,
            )  # one selection both ways; Talea's is compared by its scores
        for name, forwards in (
            ("model", [layer._talea_original_forward for layer in layers]),
            ("talea", ours),
        ):
            for layer, forward in zip(layers, forwards, strict=True):
                layer.forward = forward
            with torch.set_grad_enabled(leaf is not None):
                made = model(input_ids=ids, use_cache=False)[0]
                gradient = (
                    torch.autograd.grad(made.float().square().mean(), leaf)[0]
                    if leaf is not None
                    else made
                )
            found[name] = (made.detach().double(), gradient.detach().double())
    finally:
        for layer, forward, settings in zip(layers, ours, given, strict=True):
            layer.forward, layer._talea_options = forward, settings
        model.train(was_training)
    chosen = [
        layer.__dict__.pop("_talea_selection") for layer in layers if layer.indexer is not None
    ]
    errors = {"selection": max(chosen)}
    if not errors["selection"] <= tolerance:
        raise ParityError(
            f"{type(model).__name__}: scores of selected keys differ by {errors['selection']:.2e} (relative)"
        )
    for what, plain, sparse in zip(
        ("output", "gradient of kv_b_proj"), *found.values(), strict=True
    ):
        error = float((plain - sparse).norm() / plain.norm().clamp(min=1e-30))
        errors[what] = error
        if not error <= tolerance:
            raise ParityError(
                f"{type(model).__name__}: {what} differs by {error:.2e} (relative), more than {tolerance:.0e}"
            )
    return errors
