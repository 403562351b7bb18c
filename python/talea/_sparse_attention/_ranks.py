"""torch.distributed process groups under the passes: who holds which heads and rows."""

from __future__ import annotations

import ctypes as c

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _ranks
from . import _c


class Groups(_ranks.Groups):
    """The groups of one call; `struct` is the C side, `do` one exchange."""

    def __init__(self, settings, inputs: dict, device: torch.device) -> None:
        self.device = device
        names = {
            _c.HEADS: getattr(settings, "heads_group", ""),
            _c.SEQUENCE: getattr(settings, "sequence_group", ""),
            _c.BATCH: getattr(settings, "batch_group", ""),
        }
        self.groups = {k: _resolve_process_group(n) if n else None for k, n in names.items()}
        self.struct = _c.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        for kind, field in ((_c.HEADS, "heads"), (_c.SEQUENCE, "sequence"), (_c.BATCH, "batch")):
            if side := self._communicator(self.groups[kind]):
                setattr(self.struct, field, c.pointer(side))
        if self.groups[_c.HEADS] is not None and inputs.get("q") is not None:
            heads = self._shares(self.groups[_c.HEADS], inputs["q"].shape[-2])
            self.struct.head_begin, self.struct.total_heads = heads
        if getattr(settings, "gather_kv", False):
            keys = "kv" if inputs.get("index_k") is None else "index_k"
            rows = _rows_of_keys(inputs, keys)
            shares = self._shares(self.groups[_c.SEQUENCE], rows)
            self.struct.row_begin, self.struct.total_kv_rows = shares
            self.struct.gather_kv = 1

    def do(self, exchange) -> None:
        self._do(exchange)

    def _shares(self, group, mine: int) -> tuple[int, int]:
        """(what the ranks before this one hold, what all hold)."""
        away = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        sent = torch.tensor([mine], dtype=torch.int64, device=away)
        parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, sent, group=group)
        counts = [int(part) for part in parts]
        return sum(counts[: dist.get_rank(group)]), sum(counts)


def _rows_of_keys(inputs: dict, name: str) -> int:
    """S_kv of [B, S_kv, ...]; a batch stands in front where the queries have one."""
    keys, queries = inputs[name], inputs["q" if name == "kv" else "index_q"]
    return keys.shape[1 if queries.dim() == 4 else 0]
