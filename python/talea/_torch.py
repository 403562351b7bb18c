"""PyTorch tensors for the C interface: descriptions, allocation, streams, plans found again."""

from __future__ import annotations

import torch

from . import _abi
from ._call import Config, Plan, Receipt

_DTYPES = {
    torch.float32: _abi.F32,
    torch.bfloat16: _abi.BF16,
    torch.float16: _abi.F16,
    torch.float64: _abi.F64,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
}


def _fill(slot: _abi.Tensor, tensor: torch.Tensor, name: str) -> None:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise _abi.DataError(f"{name}: dtype {tensor.dtype} is not supported")
    rank = tensor.dim()
    if rank > 4:
        raise _abi.DataError(f"{name}: {rank} dimensions; at most 4")
    slot.data = tensor.data_ptr()
    slot.dtype = dtype
    slot.rank = rank
    slot.shape[:rank] = tensor.shape
    slot.stride[:rank] = tensor.stride()
    device = tensor.device
    if device.type == "cuda":
        slot.device, slot.device_index = _abi.CUDA, device.index
    elif device.type != "cpu":
        raise _abi.DataError(f"{name}: device {device} is not supported; cpu or cuda")
    slot.present = 1


def rows_of(config: Config, hidden: torch.Tensor) -> int:
    """Tokens of the whole call: with sequence parallelism `hidden` holds this rank's part only."""
    if not config.sequence_parallel:
        return hidden.shape[0]
    from ._ranks import size_of

    return hidden.shape[0] * size_of(config.group)


_MOST_PLANS = 256
_plans: dict[tuple, Plan] = {}


def _plan(config, inputs, outputs: dict, accumulate_dw, ranks=None) -> Plan:
    given = {n: t for n, t in zip(_abi.INPUT_NAMES, inputs, strict=False) if t is not None}
    return Plan(config, given, outputs, _fill, accumulate_dw=accumulate_dw, ranks=ranks)


def call(config: Config, inputs: tuple, outputs: dict, *, accumulate_dw=False) -> Receipt | None:
    """Runs the operator on PyTorch tensors, on the current stream of their device.

    inputs: in the order of _abi.INPUT_NAMES, None where absent. A call like an earlier one finds
    its plan again; a plan in use is out of the table, so that threads never share one.
    """
    # All that a plan depends on. Outputs are fresh and dense, so their inputs describe them.
    key, addresses = [config, *outputs], []
    for t in inputs:
        if t is None:
            key.append(None)
        else:
            address = t.data_ptr()
            # A lane may decline pointers that are not 16-aligned.
            key.append((t.shape, t.stride(), t.dtype, t.get_device(), address & 15))
            addresses.append(address)
    key = tuple(key)
    # Ranks and foreign outputs are described anew each time.
    ranks = None
    kept = not (accumulate_dw or config.group or config.batch_group)
    plan = _plans.pop(key, None) if kept else None
    if plan is None:
        if config.group or config.batch_group:
            from ._ranks import Groups

            ranks = Groups(config, inputs[0].device)
        plan = _plan(config, inputs, outputs, accumulate_dw, ranks and ranks.struct)
    for t in outputs.values():
        addresses.append(t.data_ptr())
    stream = None
    if inputs[0].is_cpu:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    else:
        device = inputs[0].device
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
    address = workspace.data_ptr()
    if ranks is not None:
        plan.place(addresses, address, stream)
        return ranks.run(plan, config.receipt)
    receipt = plan.run(addresses, address, stream, config.receipt)
    if kept:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return receipt
