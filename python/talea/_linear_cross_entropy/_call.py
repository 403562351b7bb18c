"""One call of the operator: description, workspace, errors, result.

Shared by the NumPy and the PyTorch side. `fill` writes one array into a Tensor slot.
"""

from __future__ import annotations

import ctypes as c
import json

from .. import _abi
from .._call import Receipt
from . import _c
from ._settings import options_of

# Of its own: checking both arguments against their types takes longer than the call itself.
operate = _abi.lib["talea_linear_cross_entropy"]
operate.restype = c.c_int32


def explained(args) -> dict:
    """What the library says of a call before it is made."""
    explain, needed = _abi.lib.talea_linear_cross_entropy_explain, c.c_int64()
    _abi.check(explain(c.byref(args), 1, None, 0, c.byref(needed)))
    text = c.create_string_buffer(needed.value)
    _abi.check(explain(c.byref(args), 1, text, needed.value, None))
    return json.loads(text.value)


class Plan:
    """A call described once. Every struct is filled; only the addresses change from call to call.

    `inputs` and `outputs` name what is present, in the order in which run() takes the addresses.
    dw_rest among them is described by its bytes, which the library says: `rest_bytes`.
    """

    __slots__ = ("_args", "_keep", "_slots", "ref", "rest_bytes", "workspace_bytes")

    def __init__(
        self, config, inputs: dict, outputs: dict, fill, *, accumulate_dw=False, ranks=None,
        late=False,
    ):  # fmt: skip
        c_in, c_out, args = _c.Inputs(), _c.Outputs(), _c.Args()
        for struct in (c_in, c_out, args):
            struct.struct_bytes = c.sizeof(struct)
        self._slots = []
        for c_side, arrays in ((c_in, inputs), (c_out, outputs)):
            for name, array in arrays.items():
                slot = getattr(c_side, name)
                fill(slot, array, name)
                self._slots.append(slot)
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
        for slot, address in zip(self._slots, addresses):  # noqa: B905  (place(), without a call)
            slot.data = address
        self._args.workspace = workspace
        self._args.stream = stream
        if not receipt:
            status = operate(self.ref, None)
            if status:
                _abi.check(status)
            return None
        handle = c.c_void_p()
        _abi.check(operate(self.ref, c.byref(handle)))
        return Receipt(handle.value)
