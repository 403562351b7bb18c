"""What: tiny calls of the scan and of sparse attention, for bench/python_overhead.py.
Why: their calls carry up to twenty tensors, each of which Python has to look at.
Never: times a kernel; a call is a token or two.
"""

import talea
import torch
from talea import _kept


def _numbers(device, trained):
    def drawn(*shape, dtype=torch.float32):
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(trained)

    return drawn


def scan(device, trained):
    """One token of one head, bfloat16 on a device, where lane sm90 takes it."""
    new = _numbers(device, trained)
    kind, n, p = (torch.bfloat16, 128, 64) if device == "cuda" else (torch.float32, 16, 8)
    q, k = new(1, 1, 1, n, dtype=kind), new(1, 1, 1, n, dtype=kind)
    v, z = new(1, 1, 1, p, dtype=kind), new(1, 1, 1, p, dtype=kind)
    adt = (-torch.rand(1, 1, 1, device=device)).requires_grad_(trained)
    dt = torch.rand(1, 1, 1, device=device).requires_grad_(trained)
    trap, angles = new(1, 1, 1), new(1, 1, 1, n // 4)
    more = {"q_bias": new(1, 1, n), "k_bias": new(1, 1, n), "d": new(1), "z": z}
    leaves = (q, k, v, adt, dt, trap, angles, *more.values())
    return (lambda: talea.mamba3(q, k, v, adt, dt, trap, angles, **more)), leaves


def step(device):
    new = _numbers(device, False)
    kind, n, p = (torch.bfloat16, 128, 64) if device == "cuda" else (torch.float32, 16, 8)
    state = talea.Mamba3State.zeros(1, 1, 1, n, p, n // 4, device=device)
    q, k = new(1, 1, n, dtype=kind), new(1, 1, n, dtype=kind)
    v, z = new(1, 1, p, dtype=kind), new(1, 1, p, dtype=kind)
    adt, dt, trap, angles = -new(1, 1).abs(), new(1, 1).abs(), new(1, 1), new(1, 1, n // 4)
    more = {"q_bias": new(1, 1, n), "k_bias": new(1, 1, n), "d": new(1), "z": z}
    return lambda: talea.mamba3_step(state, q, k, v, adt, dt, trap, angles, **more)


def attention(device, trained):
    """One query over four keys."""
    new, kind = _numbers(device, trained), torch.bfloat16 if device == "cuda" else torch.float32
    heads, dim = (64, 576) if device == "cuda" else (1, 16)
    q, kv = new(1, heads, dim, dtype=kind), new(64, dim, dtype=kind)
    indices = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    value = dim - dim // 9
    return (lambda: talea.sparse_attention(q, kv, indices, value_dim=value)), (q, kv)


def packed(device):
    """The same over packed rows."""
    new, heads = _numbers(device, False), 64 if device == "cuda" else 1
    q = new(1, heads, 576, dtype=torch.bfloat16)
    kv = talea.PackedKV(talea.pack_rows(new(64, 576)))
    indices = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    return lambda: talea.sparse_attention(q, kv, indices, value_dim=512)


def select(device):
    new, kind = _numbers(device, False), torch.bfloat16 if device == "cuda" else torch.float32
    q, k, weights = new(1, 1, 128, dtype=kind), new(64, 128, dtype=kind), new(1, 1)
    return lambda: talea.sparse_select(q, k, weights, top_k=4)


def backward_of(call, leaves):
    upstream = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, upstream)


class Nothing(torch.autograd.Function):
    """What torch itself takes for a call of as many tensors, and for its backward."""

    @staticmethod
    def forward(ctx, out, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty_like(out)

    @staticmethod
    def backward(ctx, upstream):
        return None, *(torch.empty_like(t) for t in ctx.saved_tensors)


def nothing(call, leaves):
    out = call().detach()
    return lambda: Nothing.apply(out, *leaves)


def calls_of(device):
    """By name: the calls to be timed."""
    made = {}
    for name, build in (("scan", scan), ("attention", attention)):
        call, _ = build(device, False)
        trained, leaves = build(device, True)
        empty = nothing(trained, leaves)
        made[f"{name}, no gradient"] = call
        made[f"{name}, forward"] = trained
        made[f"{name}, forward and backward"] = backward_of(trained, leaves)
        made[f"torch's own, as {name}"] = backward_of(empty, leaves)
    made["scan, a step"] = step(device)
    made["attention, packed rows"] = packed(device)
    made["select"] = select(device)
    return made


class Inside:
    """Counts the time in the library's functions, of every call that is kept."""

    def __init__(self, clock):
        self.clock, self.seconds = clock, 0.0
        for entries in _kept._calls.by_place.values():
            for kept in entries:
                kept.function = self._timed(kept.function)

    def _timed(self, function):
        def timed(*arguments):
            begin = self.clock()
            status = function(*arguments)
            self.seconds += self.clock() - begin
            return status

        return timed
