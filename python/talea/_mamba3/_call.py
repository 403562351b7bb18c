"""One call of the scan: description, workspace, errors, result; shared by NumPy and PyTorch.

`fill` writes one array into a Tensor slot.
"""

from __future__ import annotations

import ctypes as c

from .. import _abi
from .._call import Receipt
from . import _c
from ._settings import Settings, options

_PASSES = {
    _c.FORWARD: _abi.lib.talea_mamba3_forward,
    _c.BACKWARD: _abi.lib.talea_mamba3_backward,
    _c.STEP: _abi.lib.talea_mamba3_step,
}


class Call:
    """A described call. `inputs` and `outputs`: arrays by their flat names; None is left out."""

    def __init__(
        self, which: int, settings: Settings, inputs: dict, outputs: dict, fill, *, ranks=None,
        accumulate: bool = False,
    ):  # fmt: skip
        self.which, self.fill = which, fill
        read, args = _c.Inputs(), _c.Args()
        self.written = written = _c.StepTensors() if which == _c.STEP else _c.Outputs()
        for struct in (read, written, args):
            struct.struct_bytes = c.sizeof(struct)
        for struct, arrays in ((read, inputs), (written, outputs)):
            for name, array in arrays.items():
                if array is not None:
                    fill(_c.slot(struct, name), array, name)
        args.abi_version = _abi.ABI_VERSION
        args.inputs, args.options = c.pointer(read), c.pointer(options(settings))
        if which == _c.STEP:
            args.step = c.pointer(written)
        else:
            written.d.accumulate_parameters = int(accumulate)
            args.outputs = c.pointer(written)
        if ranks is not None:
            args.ranks = c.pointer(ranks)
        self.args, self.ref, self._keep = args, c.byref(args), (read, inputs, outputs, ranks)

    def saved_bytes(self) -> int:
        needed = c.c_int64()
        _abi.check(_abi.lib.talea_mamba3_saved_bytes(self.ref, c.byref(needed)))
        return needed.value

    def workspace_bytes(self) -> int:
        needed = c.c_int64()
        _abi.check(_abi.lib.talea_mamba3_workspace_bytes(self.ref, self.which, c.byref(needed)))
        self.args.workspace_bytes = needed.value
        return needed.value

    def place(self, workspace: int, stream=None) -> None:
        self.args.workspace, self.args.stream = workspace, stream

    def run(self, receipt: bool) -> Receipt | None:
        """The call, workspace placed."""
        if not receipt:
            _abi.check(_PASSES[self.which](self.ref, None))
            return None
        handle = c.c_void_p()
        _abi.check(_PASSES[self.which](self.ref, c.byref(handle)))
        return Receipt(handle.value)
