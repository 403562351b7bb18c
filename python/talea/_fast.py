"""What PyTorch does faster by names that it does not promise, and the public way beside each.

Every name is looked for once; where it is missing the public one serves. Tests run both.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.autograd import forward_ad


def _private(path: str):
    found = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def empty_strided() -> dict:
    """By device type: shape, stride, dtype -> a new tensor on the current device.

    Inductor's own way, in half the time of torch.empty; {}: its callers use torch.empty.
    """
    ways = {d: _private(f"_dynamo.guards._empty_strided_{d}") for d in ("cpu", "cuda")}
    return {device: way for device, way in ways.items() if way is not None}


def tensor_guard(*tensors):
    """The same number of tensors -> whether each is like the one given, by one look in C++.

    Alike: class, dtype, device, shape, strides, requires_grad, and whatever mode or transform of
    PyTorch is on. None: there is no such look.
    """
    guards = _private("_dynamo.guards.TensorGuards")
    if guards is None:
        return None
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    try:
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except TypeError:  # made in another way by this release
        return None


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def stream_of(index: int):
    """Nothing -> the handle of the current stream of that device."""
    raw = _private("_cuda_getCurrentRawStream")
    return partial(raw or _public_stream, index)


def _public_allocate(size: int, stream: int) -> int:
    return torch.cuda.caching_allocator_alloc(size, stream=stream)


class _Exchanges:
    """Of device tensors of one group, by its own methods: torch.distributed's functions ask its tables
    and log, which takes longer than to begin the exchange. With begins: what to wait for."""

    def __init__(self, group) -> None:
        self.group = group
        self.how = {}
        for name in ("AllgatherOptions", "AllreduceOptions", "ReduceScatterOptions"):
            kind, self.how[name] = getattr(dist.distributed_c10d, name), {}
            for begins in (False, True):
                self.how[name][begins] = made = kind()
                made.asyncOp = begins
        self._base = group._allgather_base, group._reduce_scatter_base

    @staticmethod
    def _begun(work, begins: bool):
        if not begins and work is not None:
            work.wait()
        return work

    def all_gather(self, out, mine, begins: bool = False):
        work = self._base[0](out, mine, self.how["AllgatherOptions"][begins])
        return self._begun(work, begins)

    def all_reduce(self, out, begins: bool = False):
        return self._begun(
            self.group.allreduce([out], self.how["AllreduceOptions"][begins]), begins
        )

    def reduce_scatter(self, out, mine, begins: bool = False):
        work = self._base[1](out, mine, self.how["ReduceScatterOptions"][begins])
        return self._begun(work, begins)


class _PublicExchanges:
    def __init__(self, group) -> None:
        self.group = group

    def all_gather(self, out, mine, begins: bool = False):
        return dist.all_gather_into_tensor(out, mine, group=self.group, async_op=begins)

    def all_reduce(self, out, begins: bool = False):
        return dist.all_reduce(out, group=self.group, async_op=begins)

    def reduce_scatter(self, out, mine, begins: bool = False):
        return dist.reduce_scatter_tensor(out, mine, group=self.group, async_op=begins)


def exchanges_of(group):
    """all_gather, all_reduce and reduce_scatter of a process group."""
    try:
        return _Exchanges(group)
    except AttributeError:  # of another release
        return _PublicExchanges(group)


def apply_of(function):
    """Function.apply, less what it does for functorch's transforms: those are refused before."""
    if transforms_active is None:
        return function.apply
    return super(torch.autograd.Function, function).apply


def in_transform() -> bool:
    """Inside grad, vmap, vjp or jvp of torch.func; where PyTorch does not say, it refuses itself."""
    return transforms_active is not None and transforms_active()


def forward_mode() -> bool:
    """Whether a tensor may carry a tangent; where PyTorch does not say: always."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def saved_by_hooks() -> bool:
    """Whether what autograd saves goes to somebody's hooks, a checkpoint's say; not told: always."""
    try:
        return _hooks is None or _hooks(True) is not None
    except TypeError:  # asked in another way by this release
        return True


def unwatched() -> bool:
    """No mode and no trace of PyTorch looks at operators; where PyTorch does not say: never."""
    return _modes is not None and not _modes() and not torch.jit.is_tracing()


_modes = _private("_len_torch_dispatch_stack")
_hooks = _private("_autograd._top_saved_tensors_default_hooks")
# None: not told. Function.apply refuses grad, vmap, vjp and jvp of torch.func by itself.
transforms_active = _private("_are_functorch_transforms_active")
# Of the current device; memory comes from and goes back to PyTorch's allocator, in stream order.
current_device = _private("_cuda_getDevice") or torch.cuda.current_device
allocate = _private("_cuda_cudaCachingAllocator_raw_alloc") or _public_allocate
free = _private("_cuda_cudaCachingAllocator_raw_delete") or torch.cuda.caching_allocator_delete
