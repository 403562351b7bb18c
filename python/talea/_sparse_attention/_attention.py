"""Attention inside autograd: the two passes, and eager gradients from what forward kept.

Forward saves q, kv, indices, o and lse (o_residual under `split`): backward repeats no forward.
"""

from __future__ import annotations

from functools import partial

import torch

from .._call import require_room
from . import _settings, _torch

# The tensors of a call beside q, kv and sink, in the order in which ops take them.
REST = (
    "indices", "q_scale", "kv_scale", "topk_length", "cu_seqlens_q", "cu_seqlens_k", "q_positions",
    "block_table", "kv_lengths",
)  # fmt: skip
RESULTS = ("o", "lse", "row_max", "o_residual", "status")
GRADIENTS = ("dq", "dkv", "d_sink")


def _empty(name: str, q: torch.Tensor, value_dim: int) -> torch.Tensor:
    if name == "status":
        return _torch.fresh_status(q.device)
    if name in ("o", "o_residual"):
        return q.new_empty((*q.shape[:-1], value_dim), dtype=_torch.o_dtype(q))
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def outputs_of(text: str, q: torch.Tensor) -> dict:
    settings = _settings.parse(text)
    return {n: _empty(n, q, settings.value_dim) for n in RESULTS if n in settings.outputs}


def _inputs(q, kv, sink, rest) -> dict:
    return {"q": q, "kv": kv, "sink": sink, **dict(zip(REST, rest, strict=True))}


def forward(text: str, q, kv, sink, rest, need=(), main_grad=None) -> dict:
    """The outputs that the settings name. need, main_grad: of the backward to come, where one is."""
    inputs, new = _inputs(q, kv, sink, rest), partial(outputs_of, text, q)
    if not need:
        return _torch.made("forward", text, inputs, new)
    room = partial(_require_room, text, q, kv, sink, rest, need, main_grad)
    if main_grad is None:
        return _torch.made("forward", text, inputs, new, need, room)
    room()  # with what is added to, which no kept call knows
    made = new()
    _torch.call("forward", text, inputs, made)
    return made


def _require_room(text: str, q, kv, sink, rest, need, main_grad) -> None:
    """Of backward, while forward has not run: on this host, of one rank."""
    settings = _settings.parse(text)
    if not q.is_cpu or _torch.of_ranks(settings):
        return
    inputs, made = _inputs(q, kv, sink, rest), outputs_of(text, q)
    kept = {n: made.get(n) for n in ("o", "lse", "o_residual")}
    kept |= {"d_o": made["o"], "d_lse": made["lse"]}
    gradients = gradients_of(q, kv, sink, need)
    if main_grad is not None:
        gradients["dkv"] = main_grad
    require_room(
        lambda: _torch.plan("forward", text, inputs, made),
        lambda: _torch.plan("backward", text, inputs | kept, gradients),
    )


def gradients_of(q, kv, sink, need) -> dict:
    """Gradients in the dtype of their tensor; of e4m3 in fp32, since e4m3 could not hold them."""
    makers = {}
    for name, like, wanted in zip(GRADIENTS, (q, kv, sink), need, strict=True):
        if wanted:
            narrow = like.dtype == torch.float8_e4m3fn
            makers[name] = like.new_empty(like.shape, dtype=torch.float32 if narrow else like.dtype)
    return makers


def backward(text: str, q, kv, sink, rest, kept, upstream, need, *, main_grad=None) -> list:
    """dq, dkv, d_sink (None where not needed). kept: o, lse, o_residual. upstream: d_o, d_lse."""
    d_o, d_lse = (_torch.rows_last(g) for g in upstream)
    inputs = _inputs(q, kv, sink, rest) | {"d_o": d_o, "d_lse": d_lse}
    inputs |= dict(zip(("o", "lse", "o_residual"), kept, strict=True))
    new = partial(gradients_of, q, kv, sink, need)
    if main_grad is not None:
        made = new()
        summed = {**made, "dkv": main_grad}
        _torch.call("backward", text, inputs, summed, ("accumulate_dkv",))
    elif any(need):
        made = _torch.made("backward", text, inputs, new, need)
    else:
        made = {}
    return [made.get(name) for name in GRADIENTS]


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, sink, text, rest, main_grad, anchor):
        made = forward(text, q, kv, sink, rest, ctx.needs_input_grad[:3], main_grad)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            q, kv, sink, *rest, *(made.get(n) for n in ("o", "lse", "o_residual"))
        )
        ctx.text, ctx.main_grad, ctx.names = text, main_grad, tuple(made)
        fixed = [t for n, t in made.items() if n not in ("o", "lse")]
        ctx.mark_non_differentiable(*fixed)
        return tuple(made.values())

    @staticmethod
    def backward(ctx, *upstream):
        # Grad mode is off unless the graph of this backward is wanted, which there is none of.
        if not torch.is_grad_enabled():
            return _backward(ctx, *upstream)
        with torch.no_grad():
            found = _backward(ctx, *upstream)
        formed = [g for g in found if g is not None]
        if not formed:
            return found
        tensors = (*formed, *ctx.saved_tensors[:3], *upstream)
        made = iter(_torch.Constant.apply("sparse_attention", len(formed), *tensors))
        return tuple(None if g is None else next(made) for g in found)


def _backward(ctx, *upstream):
    by_name = dict(zip(ctx.names, upstream, strict=True))
    grads = by_name.get("o"), by_name.get("lse")
    if all(g is None for g in grads):
        return (None,) * 7
    q, kv, sink, *more = ctx.saved_tensors
    need = list(ctx.needs_input_grad[:3])
    if ctx.main_grad is not None:
        need[1] = False
    rest, kept = more[: len(REST)], more[len(REST) :]
    found = backward(ctx.text, q, kv, sink, rest, kept, grads, need, main_grad=ctx.main_grad)
    return (*found, None, None, None, None)


def _anchor(main_grad):
    """What requires grad where main_grad alone waits for it: backward must come here."""
    return None if main_grad is None else torch.empty(0, requires_grad=True)


def apply(text: str, q, kv, sink, rest, main_grad=None) -> dict:
    """By name, what the settings ask for; o and lse are differentiable in q, kv and sink."""
    _torch.refuse_transforms("sparse_attention", (q, kv, sink))
    if torch.is_grad_enabled() and (
        main_grad is not None or any(t is not None and t.requires_grad for t in (q, kv, sink))
    ):
        found = Attention.apply(q, kv, sink, text, tuple(rest), main_grad, _anchor(main_grad))
        return dict(
            zip((n for n in RESULTS if n in _settings.parse(text).outputs), found, strict=True)
        )
    return forward(text, q, kv, sink, rest)
