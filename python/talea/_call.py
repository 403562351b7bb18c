"""What every operator's call hands back."""

from __future__ import annotations

import json

from . import _abi


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
