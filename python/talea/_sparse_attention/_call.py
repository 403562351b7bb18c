"""One call of a pass: structs, workspace, exchanges, result. Knows neither NumPy nor PyTorch."""

from __future__ import annotations

import ctypes as c
from functools import lru_cache

from .. import _abi
from .._call import Receipt
from . import _c, _settings


@lru_cache(maxsize=512)
def _options(which: str, text: str):
    """The C options of a line of settings; what the pass has not, is not looked at."""
    door, settings = _c.DOORS[which], _settings.parse(text)
    options = door.options()
    options.struct_bytes = c.sizeof(options)
    door.options_init(options)
    for name, _ in options._fields_[1:]:
        if not hasattr(settings, name):
            continue
        value = getattr(settings, name)
        if name in _c.ENUMS:
            value = _c.ENUMS[name][value]
        setattr(options, name, value.encode() if name == "lane" else value)
    return options


def describe(which: str, text: str, inputs: dict, outputs: dict, fill, flags=()):
    """The args of a call; absent tensors are None. `flags`: names of the outputs' switches."""
    door = _c.DOORS[which]
    c_in, c_out, args = door.inputs(), door.outputs(), door.args()
    for struct in (c_in, c_out, args):
        struct.struct_bytes = c.sizeof(struct)
    for side, tensors in ((c_in, inputs), (c_out, outputs)):
        for name, value in tensors.items():
            if value is not None:
                fill(getattr(side, name), value, name)
    for name in flags:
        setattr(c_out, name, 1)
    args.abi_version = _abi.ABI_VERSION
    args.inputs, args.outputs = c.pointer(c_in), c.pointer(c_out)
    args.options = c.pointer(_options(which, text))
    return args


def plan(which: str, args) -> int:
    """The bytes of workspace that the call needs."""
    return _c.DOORS[which].workspace_bytes(args)


def run(
    which: str, args, workspace, stream=None, exchange=None, receipt: bool = True
) -> Receipt | None:
    """workspace(bytes) makes memory and gives (address, owner). exchange(e) does one exchange."""
    door = _c.DOORS[which]
    try:
        args.workspace_bytes = plan(which, args)
    except _abi.Error:
        if exchange is None:
            raise
        args.workspace_bytes = 0  # the call raises the same, and tells the other ranks
    args.workspace, owner = workspace(args.workspace_bytes)
    args.stream = stream
    made = door(args, receipt) if exchange is None else _by_phases(door, args, exchange)
    del owner
    return None if made is None else Receipt(made)


def _by_phases(door: _c.Door, args, exchange) -> int:
    e, result, lib = _abi.Exchange(), c.c_void_p(), _abi.lib
    e.struct_bytes = c.sizeof(e)
    phases = door.phases_begin(args)
    try:
        while True:
            _abi.check(lib.talea_phases_next(phases, c.byref(e)))
            if e.kind == _abi.EXCHANGE_NONE:
                break
            exchange(e)
        _abi.check(lib.talea_phases_finish(phases, c.byref(result)))
    finally:
        lib.talea_phases_free(phases)
    return result.value
