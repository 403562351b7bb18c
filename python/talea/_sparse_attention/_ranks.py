"""torch.distributed process groups under the passes: who holds which heads and rows."""

from __future__ import annotations

import ctypes as c

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _ranks
from . import _c


def _groups_of(settings) -> dict:
    names = {
        _c.HEADS: getattr(settings, "heads_group", ""),
        _c.SEQUENCE: getattr(settings, "sequence_group", ""),
        _c.BATCH: getattr(settings, "batch_group", ""),
    }
    return {k: _resolve_process_group(n) if n else None for k, n in names.items()}


class Meeting(_ranks.Meeting):
    """of: what of the call is the same on every rank, beside its tensors."""

    def __init__(self, settings, device: torch.device, tensors: dict, of: tuple) -> None:
        groups = _groups_of(settings)
        heads, gathers = groups[_c.HEADS] is not None, getattr(settings, "gather_kv", False)
        whole = heads or gathers  # else ranks have queries, or all, of their own
        shared = ("kv", "index_k") if groups[_c.SEQUENCE] is not None else ()
        of += tuple(
            (name, t.dtype, tuple(t.shape) if whole or name in shared else ())
            for name, t in tensors.items()
            if t is not None
        )
        # Of two groups neither knows whom the other one met.
        alone = sum(g is not None for g in groups.values()) == 1
        super().__init__(groups.values(), device, of if alone else None, always=gathers)


class Groups(_ranks.Groups):
    """The groups of one call; `struct` is the C side, `do` one exchange."""

    def __init__(self, settings, inputs: dict, meeting: Meeting) -> None:
        super().__init__(_groups_of(settings), meeting.device)
        self.struct = _c.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        for kind, field in ((_c.HEADS, "heads"), (_c.SEQUENCE, "sequence"), (_c.BATCH, "batch")):
            if side := self._communicator(self.groups[kind]):
                setattr(self.struct, field, c.pointer(side))
        by_heads = self.groups[_c.HEADS] is not None and inputs.get("q") is not None
        gathers = getattr(settings, "gather_kv", False)
        heads = inputs["q"].shape[-2] if by_heads else 0
        keys = "kv" if inputs.get("index_k") is None else "index_k"
        rows = _rows_of_keys(inputs, keys) if gathers else 0
        said = self.meet(meeting, [heads, rows])
        if by_heads:
            shares = self.share(said, _c.HEADS, 0)
            self.struct.head_begin, self.struct.total_heads = shares
        if gathers:
            shares = self.share(said, _c.SEQUENCE, 1)
            self.struct.row_begin, self.struct.total_kv_rows = shares
            self.struct.gather_kv = 1

    def do(self, exchange) -> None:
        self._do(exchange)


def _rows_of_keys(inputs: dict, name: str) -> int:
    """S_kv of [B, S_kv, ...]; a batch stands in front where the queries have one."""
    keys, queries = inputs[name], inputs["q" if name == "kv" else "index_q"]
    return keys.shape[1 if queries.dim() == 4 else 0]
