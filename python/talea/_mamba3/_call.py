"""One call of the scan: description, workspace, errors, result; shared by NumPy and PyTorch.

`fill` writes one array into a Tensor slot.
"""

from __future__ import annotations

import ctypes as c

from .. import _abi
from .._call import Receipt
from . import _c
from ._settings import Settings, options

# Of their own: checking arguments against their types takes as long as passing them.
_PASSES = {
    which: _abi.lib["talea_mamba3_" + name]
    for which, name in ((_c.FORWARD, "forward"), (_c.BACKWARD, "backward"), (_c.STEP, "step"))
}


class Call:
    """A described call. `inputs` and `outputs`: arrays by their flat names; None is left out.

    slots: where they lie in the structs, by the same names.
    """

    def __init__(
        self, which: int, settings: Settings, inputs: dict, outputs: dict, fill, *,
        accumulate: bool = False,
    ):  # fmt: skip
        self.which, self.function, self.slots, self._fill = which, _PASSES[which], {}, fill
        read, args = _c.Inputs(), _c.Args()
        self.written = written = _c.StepTensors() if which == _c.STEP else _c.Outputs()
        for struct in (read, written, args):
            struct.struct_bytes = c.sizeof(struct)
        for struct, arrays in ((read, inputs), (written, outputs)):
            for name, array in arrays.items():
                if array is not None:
                    self._describe(struct, name, array)
        args.abi_version = _abi.ABI_VERSION
        args.inputs, args.options = c.pointer(read), c.pointer(options(settings))
        if which == _c.STEP:
            args.step = c.pointer(written)
        else:
            written.d.accumulate_parameters = int(accumulate)
            args.outputs = c.pointer(written)
        self.args, self.ref, self._keep = args, c.byref(args), (read, inputs, outputs)
        self.groups = None

    def _describe(self, struct, name: str, array) -> None:
        slot = self.slots[name] = _c.slot(struct, name)
        self._fill(slot, array, name)

    def add_output(self, name: str, array) -> None:
        self._describe(self.written, name, array)

    def join(self, groups) -> None:
        """The call is one of the ranks of these groups."""
        self.groups, self.args.ranks = groups, c.pointer(groups.struct)

    def saved_bytes(self) -> int:
        return self._asked(_abi.lib.talea_mamba3_saved_bytes)

    def workspace_bytes(self) -> int:
        self.args.workspace_bytes = self._asked(_abi.lib.talea_mamba3_workspace_bytes, self.which)
        return self.args.workspace_bytes

    def _asked(self, function, *more) -> int:
        needed = c.c_int64()
        status = function(self.ref, *more, c.byref(needed))
        if self.groups is None:
            _abi.check(status)
        return 0 if status else needed.value  # the call raises the same, and tells the other ranks

    def place(self, workspace: int, stream=None) -> None:
        self.args.workspace, self.args.stream = workspace, stream

    def run(self, receipt: bool) -> Receipt | None:
        """The call, workspace placed."""
        if not receipt:
            _abi.check(self.function(self.ref, None))
            return None
        handle = c.c_void_p()
        _abi.check(self.function(self.ref, c.byref(handle)))
        return Receipt(handle.value)
