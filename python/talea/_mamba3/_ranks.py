"""torch.distributed groups under the scan: heads and tokens, exchanged between its phases."""

from __future__ import annotations

import ctypes as c

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import _abi
from .._call import Receipt
from .._ranks import Groups, Meeting
from . import _c
from ._call import Call
from ._settings import Settings


class ScanMeeting(Meeting):
    """of: what of the call is the same on every rank, beside the settings."""

    def __init__(self, settings: Settings, device: torch.device, of: tuple) -> None:
        names = (settings.heads_group, settings.sequence_group)
        groups = [_resolve_process_group(n) for n in names if n]
        # A piece of tokens may be another where this rank's is what it was. Of two groups neither
        # knows whom the other one met.
        kind = None if all(names) else (settings, *of)
        super().__init__(groups, device, kind, always=bool(settings.sequence_group))


class ScanGroups(Groups):
    """The groups of one call; `struct` is the C side. The exchanges themselves are the parent's."""

    def __init__(self, settings: Settings, meeting: ScanMeeting, heads: int, tokens: int) -> None:
        super().__init__({}, meeting.device)
        self.struct = _c.Ranks()
        self.struct.struct_bytes = c.sizeof(self.struct)
        for number, name, member in (
            (_c.GROUP_HEADS, settings.heads_group, "heads"),
            (_c.GROUP_SEQUENCE, settings.sequence_group, "sequence"),
        ):
            if name:
                self.groups[number] = _resolve_process_group(name)
                side = self._communicator(self.groups[number])
                setattr(self.struct, member, c.pointer(side))
        self.struct.shared_angles = settings.shared_angles
        said = self.meet(meeting, [heads, tokens])  # pieces of any size, not all alike
        if settings.heads_group:
            begin, total = self.share(said, _c.GROUP_HEADS, 0)
            self.struct.head_begin = begin
            if settings.total_groups:
                self.struct.total_heads = total
                self.struct.total_groups = settings.total_groups
        if settings.sequence_group:
            self.struct.token_begin = self.share(said, _c.GROUP_SEQUENCE, 1)[0]

    def run_call(self, call: Call, receipt: bool) -> Receipt | None:
        phases, exchange, result = c.c_void_p(), _abi.Exchange(), c.c_void_p()
        exchange.struct_bytes = c.sizeof(exchange)
        lib = _abi.lib
        _abi.check(lib.talea_mamba3_phases_begin(call.ref, call.which, c.byref(phases)))
        try:
            while True:
                _abi.check(lib.talea_phases_next(phases, c.byref(exchange)))
                if exchange.kind == _abi.EXCHANGE_NONE:
                    break
                self._do(exchange)
            _abi.check(lib.talea_phases_finish(phases, c.byref(result)))
        finally:
            lib.talea_phases_free(phases)
        kept = Receipt(result.value)
        return kept if receipt else None
