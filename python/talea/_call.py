"""What every operator's call hands back."""

from __future__ import annotations

import json
import re

from . import _abi
from ._abi import UsageError


def least_of(error: UsageError) -> int | None:
    """The bytes that a refusal of the workspace limit names."""
    named = re.search(r"workspace_limit.* at least (\d+) bytes", str(error))
    return int(named[1]) if named else None


def require_room(*plans) -> None:
    """Before a forward call: the workspace limit is that of all calls to come. Each plans one, and
    where some refuse it, that which needs most speaks."""
    refused = []
    for plan in plans:
        try:
            plan()
        except UsageError as error:
            if least_of(error) is None:  # of another kind: that call itself says so
                return
            refused.append(error)
    if refused:
        raise max(refused, key=least_of)


class Receipt:
    """What ran: the library's facts, held until asked for. A copy holds them as text."""

    __slots__ = ("_handle", "_text")

    def __init__(self, handle: int, text: bytes = b"") -> None:
        self._handle, self._text = handle, text

    def __reduce__(self):  # one object frees the handle; another process has no such address
        return Receipt, (0, self._facts())

    def __del__(self, free=_abi.lib.talea_result_free) -> None:  # modules may be gone at the end
        if self._handle:
            free(self._handle)

    def _facts(self) -> bytes:
        return self._text or _abi.lib.talea_result_json(self._handle)

    def facts(self) -> dict:
        return json.loads(self._facts())
