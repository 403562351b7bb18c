"""Selection and the indexer's loss: the passes on tensors of torch."""

from __future__ import annotations

from functools import partial

import torch

from . import _c, _settings, _torch

SELECT = _c.SELECT_INPUTS
LOSS = _c.LOSS_INPUTS
LOSS_GRADIENTS = ("dindex_q", "dindex_k", "dindex_weights")
_OF = {"dindex_q": "index_q", "dindex_k": "index_k", "dindex_weights": "index_weights"}


def select_outputs(text: str, index_q: torch.Tensor) -> dict:
    settings, rows = _settings.parse(text), index_q.shape[:-2]
    made = {
        "indices": index_q.new_empty((*rows, settings.top_k), dtype=torch.int32),
        "topk_length": index_q.new_empty(rows, dtype=torch.int32),
    }
    if "scores" in settings.outputs:
        made["scores"] = index_q.new_empty((*rows, settings.top_k), dtype=torch.float32)
    return made


def select(text: str, tensors) -> dict:
    inputs = dict(zip(SELECT, tensors, strict=True))
    return _torch.made("select", text, inputs, partial(select_outputs, text, inputs["index_q"]))


def loss_outputs(tensors, need) -> dict:
    """The loss, and the gradients in fp32 (fp64 of fp64): they are still multiplied by upstream."""
    by_name = dict(zip(LOSS, tensors, strict=True))
    q = by_name["index_q"]
    made = {"loss": q.new_empty((), dtype=_wide(q))}
    for name, wanted in zip(LOSS_GRADIENTS, need, strict=True):
        like = by_name[_OF[name]]
        if wanted:
            made[name] = like.new_empty(like.shape, dtype=_wide(like))
    return made


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def index_loss(text: str, tensors, need) -> dict:
    inputs = dict(zip(LOSS, tensors, strict=True))
    return _torch.made("index_loss", text, inputs, partial(loss_outputs, tensors, need), need)
