"""torch.distributed groups under the scan: heads and tokens, exchanged between its phases."""

from __future__ import annotations

import ctypes as c
from functools import partial

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
        for number, name in (
            (_c.GROUP_HEADS, settings.heads_group), (_c.GROUP_SEQUENCE, settings.sequence_group),
        ):  # fmt: skip
            if name:
                self.groups[number] = _resolve_process_group(name)
        self.struct = _c.Ranks()
        said = self.meet(meeting, [heads, tokens])  # pieces of any size, not all alike
        self.struct = meeting.kept(lambda: self._described(settings, said))

    def _described(self, settings: Settings, said: dict) -> _c.Ranks:
        made = _c.Ranks()
        made.struct_bytes = c.sizeof(made)
        made.skip_handshake = self.struct.skip_handshake
        for number, member in ((_c.GROUP_HEADS, "heads"), (_c.GROUP_SEQUENCE, "sequence")):
            if number in self.groups:
                setattr(made, member, c.pointer(self._communicator(self.groups[number])))
        made.shared_angles = settings.shared_angles
        if settings.heads_group:
            begin, total = self.share(said, _c.GROUP_HEADS, 0)
            made.head_begin = begin
            if settings.total_groups:
                made.total_heads = total
                made.total_groups = settings.total_groups
        if settings.sequence_group:
            made.token_begin = self.share(said, _c.GROUP_SEQUENCE, 1)[0]
        return made

    def run_call(self, call: Call, receipt: bool) -> Receipt | None:
        begin = partial(_abi.lib.talea_mamba3_phases_begin, call.ref, call.which)
        kept = self.through_phases(begin)
        return kept if receipt else None
