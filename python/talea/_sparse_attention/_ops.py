"""The passes as torch.library custom ops, so that torch.compile(fullgraph=True) can hold them.

Opaque to the compiler; an op returns a fixed list, where an empty tensor stands for what is absent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _attention, _indexer, _torch

_REST = len(_attention.REST)


def _schema(names, optional) -> str:
    return ", ".join(f"Tensor{'?' if n in optional else ''} {n}" for n in names)


def _op(name: str, schema: str):
    return torch.library.custom_op(f"talea::{name}", mutates_args=(), schema=schema)


def _listed(made: dict, names, like: Tensor) -> list[Tensor]:
    nothing = torch.float32
    return [made[n] if n in made else like.new_empty((0,), dtype=nothing) for n in names]


_INPUTS = _schema(("q", "kv", "sink", *_attention.REST), ("sink", *_attention.REST[1:]))


@_op("sparse_attention", f"({_INPUTS}, str settings) -> Tensor[]")
def attention(q, kv, sink, *rest):
    *rest, text = rest
    return _listed(_attention.forward(text, q, kv, sink, rest), _attention.RESULTS, q)


@attention.register_fake
def _(q, kv, sink, *rest):
    return _listed(_attention.outputs_of(rest[-1], q), _attention.RESULTS, q)


_MORE = "Tensor o, Tensor lse, Tensor? o_residual, Tensor? d_o, Tensor? d_lse"


@_op("sparse_attention_backward", f"({_INPUTS}, {_MORE}, str settings, bool[] need) -> Tensor[]")
def attention_backward(q, kv, sink, *rest):
    rest, (o, lse, residual, d_o, d_lse, text, need) = rest[:_REST], rest[_REST:]
    found = _attention.backward(text, q, kv, sink, rest, (o, lse, residual), (d_o, d_lse), need)
    made = {n: g for n, g in zip(_attention.GRADIENTS, found, strict=True) if g is not None}
    return _listed(made, _attention.GRADIENTS, q)


@attention_backward.register_fake
def _(q, kv, sink, *rest):
    return _listed(_attention.gradients_of(q, kv, sink, rest[-1]), _attention.GRADIENTS, q)


def _setup(ctx, inputs, output):
    o, lse, _, residual, _ = output
    ctx.save_for_backward(*inputs[:-1], o, lse, residual)
    ctx.text = inputs[-1]
    ctx.set_materialize_grads(False)


def _gradient(ctx, grads):
    *tensors, o, lse, residual = ctx.saved_tensors
    d_o, d_lse = grads[0], grads[1]
    nothing = (None,) * (_REST + 1)
    if d_o is None and d_lse is None:
        return (None, None, None, *nothing)
    need = [
        bool(n) and t is not None
        for n, t in zip(ctx.needs_input_grad[:3], tensors[:3], strict=True)
    ]
    d_o, d_lse = (None if g is None else _torch.rows_last(g) for g in (d_o, d_lse))
    if d_lse is not None and d_lse.numel() == 0 and lse.numel():
        d_lse = None
    kept = (o, lse, residual if residual.numel() else None)
    found = attention_backward(*tensors, *kept, d_o, d_lse, ctx.text, need)
    return (*[g if n else None for g, n in zip(found, need, strict=True)], *nothing)


attention.register_autograd(_gradient, setup_context=_setup)

_SELECT = _schema(_indexer.SELECT, set(_indexer.SELECT) - {"index_q", "index_k", "index_weights"})
_SELECTED = ("indices", "topk_length", "scores")


@_op("sparse_select", f"({_SELECT}, str settings) -> Tensor[]")
def select(*arguments):
    return _listed(_indexer.select(arguments[-1], arguments[:-1]), _SELECTED, arguments[0])


@select.register_fake
def _(*arguments):
    return _listed(_indexer.select_outputs(arguments[-1], arguments[0]), _SELECTED, arguments[0])


_LOSS_NEEDS = {"index_q", "index_k", "index_weights", "q", "kv"}
_LOSS = _schema(_indexer.LOSS, set(_indexer.LOSS) - _LOSS_NEEDS)
_LOST = ("loss", *_indexer.LOSS_GRADIENTS)
_TRAINED = [_indexer.LOSS.index(n) for n in ("index_q", "index_k", "index_weights")]


@_op("sparse_index_loss", f"({_LOSS}, str settings, bool[] need) -> Tensor[]")
def index_loss(*arguments):
    *tensors, text, need = arguments
    return _listed(_indexer.index_loss(text, tensors, need), _LOST, tensors[0])


@index_loss.register_fake
def _(*arguments):
    return _listed(_indexer.loss_outputs(arguments[:-2], arguments[-1]), _LOST, arguments[0])


def _loss_setup(ctx, inputs, output):
    trained = [inputs[i] for i in _TRAINED]
    ctx.save_for_backward(*output[1:], *trained)
    ctx.dtypes = [t.dtype for t in trained]
    ctx.count, ctx.need = len(inputs), inputs[-1]
    ctx.set_materialize_grads(False)


def _loss_gradient(ctx, grads):
    found = [None] * ctx.count
    if grads[0] is not None:
        formed, trained = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        if torch.is_grad_enabled():  # the graph of this backward is wanted, which there is none of
            formed = _torch.Constant.apply("sparse_index_loss", 3, *formed, *trained)
        for i, g, dtype, need in zip(_TRAINED, formed, ctx.dtypes, ctx.need, strict=True):
            if need:
                found[i] = (g * grads[0].to(g.dtype)).to(dtype)
    return tuple(found)


index_loss.register_autograd(_loss_gradient, setup_context=_loss_setup)


def apply(text: str, q, kv, sink, rest) -> dict:
    found = attention(q, kv, sink, *rest, text)
    return dict(zip(_attention.RESULTS, found, strict=True))
