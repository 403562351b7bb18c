"""Which rank of a torch.distributed group on hosts is missing: what gloo's own error does not say.

gloo names an address, or only that it waited. After an exchange that failed each rank leaves a word in
the group's store; whose word does not come is missing. NCCL has a watchdog of its own.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from . import _abi

_SETTLED = 1.0  # seconds after which one silent rank is the missing one
_LONGEST = 5.0  # seconds: ranks that wait for another than the missing one hear of it no sooner
_STEP = 0.02


def exchange(group, do):
    """do(), a collective of `group`."""
    begun = time.monotonic()
    try:
        return do()
    except RuntimeError as error:
        if isinstance(error, _abi.Error) or dist.get_backend(group) != "gloo":
            raise
        said = _named(group, begun)
        if said is None:
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _abi.Error(f"{said}: {first}") from error


def _timeout(group) -> float:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # of this PyTorch's own
        return _LONGEST


def _named(group, begun: float) -> str | None:
    """Text that names who is missing; None: every rank is there."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    silent = [r for r in range(size) if r != rank]
    try:
        store = group.get_group_store()
        store.set(f"talea/failed/{rank}", "1")
        now = time.monotonic()
        settled = now + _SETTLED
        last = settled + min(_LONGEST, max(0.0, begun + _timeout(group) - now))
        while silent and now < (settled if len(silent) == 1 else last):
            time.sleep(_STEP)
            silent = [r for r in silent if not store.check([f"talea/failed/{r}"])]
            now = time.monotonic()
    except (AttributeError, RuntimeError):  # nobody keeps the store now
        keeper = [r for r in range(size) if dist.get_global_rank(group, r) == 0]
        if not keeper:
            return "whoever keeps the store of the group is missing"
        if keeper[0] in silent:  # not one that said its word and left
            return f"rank {keeper[0]} is missing, or who keeps the store of the group in its place"
    if not silent:
        return None
    if len(silent) == 1:
        return f"rank {silent[0]} is missing"
    return f"ranks {', '.join(map(str, silent))} are missing, or wait for one that is"
