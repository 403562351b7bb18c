"""One call of the operator: description, workspace, errors, result.

Shared by the NumPy and the PyTorch side. `fill` writes one array into a Tensor slot.
"""

from __future__ import annotations

import ctypes as c
import json
import struct
from functools import partial

from .. import _abi
from .._call import Receipt
from . import _c
from ._settings import options_of

# Of its own: checking both arguments against their types takes longer than the call itself.
operate = _abi.lib["talea_linear_cross_entropy"]
operate.restype = c.c_int32
operate_again = _abi.lib["talea_linear_cross_entropy_again"]
operate_again.restype = c.c_int32


# Of a tensor's name, an output's or not: its place in the C structs, inputs first.
_ORDER = {(name, False): i for i, name in enumerate(_c.INPUT_NAMES)} | {
    (name, True): len(_c.INPUT_NAMES) + i for i, name in enumerate(_c.OUTPUT_NAMES)
}


def explained(args) -> dict:
    """What the library says of a call before it is made."""
    explain, needed = _abi.lib.talea_linear_cross_entropy_explain, c.c_int64()
    _abi.check(explain(c.byref(args), 1, None, 0, c.byref(needed)))
    text = c.create_string_buffer(needed.value)
    _abi.check(explain(c.byref(args), 1, text, needed.value, None))
    return json.loads(text.value)


class _Prepared:
    """The library's half of a call that is made again: nothing is left to check but addresses."""

    __slots__ = ("handle", "places", "put", "ref")

    def __init__(self, args, tensors: int) -> None:
        self.handle = c.c_void_p()
        _abi.check(_abi.lib.talea_linear_cross_entropy_prepare(args, c.byref(self.handle)))
        self.places = _c.Places(c.sizeof(_c.Places), None, None, tensors)
        self.ref = c.byref(self.places)
        # Workspace, stream, count and addresses, one behind the other: in one go.
        self.put = partial(struct.Struct(f"3Q{tensors}Q").pack_into, self.places, 8)

    def __del__(self, free=_abi.lib.talea_linear_cross_entropy_prepared_free) -> None:
        if self.handle:
            free(self.handle)


class Plan:
    """A call described once. Every struct is filled; only the addresses change from call to call.

    `inputs` and `outputs` name what is present, in the order in which run() takes the addresses.
    dw_rest among them is described by its bytes, which the library says: `rest_bytes`.
    """

    __slots__ = (
        "_args", "_keep", "_order", "_prepared", "_slots", "ref", "rest_bytes", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, config, inputs: dict, outputs: dict, fill, *, accumulate_dw=False, ranks=None,
        late=False,
    ):  # fmt: skip
        c_in, c_out, args = _c.Inputs(), _c.Outputs(), _c.Args()
        for made in (c_in, c_out, args):
            made.struct_bytes = c.sizeof(made)
        self._slots, self._prepared = [], None
        for c_side, arrays in ((c_in, inputs), (c_out, outputs)):
            for name, array in arrays.items():
                slot = getattr(c_side, name)
                fill(slot, array, name)
                self._slots.append(slot)
        # The library takes addresses in the order of its structs, whatever the order here.
        names = [*inputs, *outputs]
        order = sorted(range(len(names)), key=lambda i: _ORDER[names[i], i >= len(inputs)])
        self._order = None if order == list(range(len(names))) else tuple(order)
        c_out.accumulate_dw, c_out.late_factor = int(accumulate_dw), int(late)
        args.abi_version = _abi.ABI_VERSION
        args.inputs, args.outputs = c.pointer(c_in), c.pointer(c_out)
        options = options_of(config)
        if config.dw_sum == "weight" and "dw" in outputs:
            options = type(options).from_buffer_copy(options)
            options.dw_sum = c_in.weight.dtype
        args.options = c.pointer(options)
        if ranks is not None:
            args.ranks = c.pointer(ranks)
        needed, self.rest_bytes = c.c_int64(), 0
        if "dw_rest" in outputs:
            ask = _abi.lib.talea_linear_cross_entropy_rest_bytes
            _abi.check(ask(c.byref(args), c.byref(needed)))
            self.rest_bytes = needed.value
            if not needed.value:
                raise _abi.UsageError("dw_rest: none is kept within the workspace limit")
            c_out.dw_rest.shape[0] = needed.value // 4
        _abi.check(
            _abi.lib.talea_linear_cross_entropy_workspace_bytes(c.byref(args), c.byref(needed))
        )
        self.workspace_bytes = args.workspace_bytes = needed.value
        if ranks is not None and options.workspace_limit_bytes == _abi.AUTO:  # chosen once, here
            options = type(options).from_buffer_copy(options)
            args.options = c.pointer(options)
            options.workspace_limit_bytes = explained(args)["workspace_limit_bytes"]
        self._args, self.ref, self._keep = args, c.byref(args), (c_in, c_out, ranks, options)

    def place(self, addresses, workspace: int, stream=None) -> None:
        """Where the tensors of the next call lie."""
        for slot, address in zip(self._slots, addresses, strict=True):
            slot.data = address
        self._args.workspace = workspace
        self._args.stream = stream

    def run(self, addresses, workspace: int, stream=None, receipt=True) -> Receipt | None:
        """Runs the operator on tensors of the described shapes. Not for two threads at once."""
        if not receipt:
            prepared = self._prepared
            if prepared is None:
                prepared = self._prepared = _Prepared(self.ref, len(self._slots))
            if self._order is not None:
                addresses = [addresses[i] for i in self._order]
            prepared.put(workspace, stream or 0, len(addresses), *addresses)
            status = operate_again(prepared.handle, prepared.ref)
            if status:
                _abi.check(status)
            return None
        self.place(addresses, workspace, stream)
        handle = c.c_void_p()
        _abi.check(operate(self.ref, c.byref(handle)))
        return Receipt(handle.value)
