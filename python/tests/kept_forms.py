"""Small calls of the scan and of sparse attention, and what differs from them in one thing."""

import mamba3_forms as scans
import sparse_forms as sparse
import talea
import torch
from talea import _kept


def with_gradients(t, made):
    leaves = [x for x in t.values() if x.requires_grad]
    if not made.requires_grad or not leaves:
        return (made.detach(),)
    return made.detach(), *torch.autograd.grad(made, leaves, torch.ones_like(made).cos())


def scan(t, **options):
    return with_gradients(t, scans.scan(t, **options))


def attention(t, **options):
    options = {"value_dim": 16, **options}
    more = {n: x for n, x in t.items() if n not in ("q", "kv", "indices")}
    made = talea.sparse_attention(t["q"], t["kv"], t["indices"], **more, **options)
    return with_gradients(t, made)


def select(t, **options):
    options = {"top_k": 3, **options}
    return talea.sparse_select(t["index_q"], t["index_k"], t["index_weights"], **options)


def step(t, **options):
    t = {n: x.detach() for n, x in t.items()}
    state = [t.pop("initial_" + n).clone() for n in scans.STATES]
    versions = [s._version for s in state if not s.is_inference()]
    out = talea.mamba3_step(talea.Mamba3State(*state), **t, **options)
    assert [s._version for s in state if not s.is_inference()] == [v + 1 for v in versions]
    return out, *state


def drawn(call, device="cpu", dtype=torch.float32, more=0):
    """more: entries of the first axis, beyond the usual."""
    if call is attention:
        q, kv, indices, sink = sparse.problem(s=5 + more, dtype=dtype)
        t = {"q": q, "kv": kv, "indices": indices, "sink": sink}
    elif call is select:
        t = dict(
            zip(("index_q", "index_k", "index_weights"), sparse.indexer(5 + more), strict=False)
        )
        t = {n: x.detach().to(dtype) for n, x in t.items()}
    else:
        t = plain_scan(batch=2 + more, dtype=dtype)
        if call is step:
            t = {n: x.detach()[:, 0] if n in "qkvz" or n == "angles" else x for n, x in t.items()}
            t = {n: x[..., 0] if n in ("adt", "dt", "trap") else x for n, x in t.items()}
    return moved(t, device)


def plain_scan(**how):
    t = scans.draw(tokens=5, rank=1, axis=False, without=("norm_weight",), **how)
    return {n: x for n, x in t.items() if not n.startswith("mimo")}


def moved(t, device=None):
    """The same at other addresses."""
    return {n: x.detach().to(device).clone().requires_grad_(x.requires_grad) for n, x in t.items()}


def strided(x):
    """The same numbers, with room behind each row."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
    return wide[..., :-8].copy_(x.detach()).requires_grad_(x.requires_grad)


def same(a, b):
    return len(a) == len(b) and all(
        p.dtype == q.dtype and p.shape == q.shape and torch.equal(p, q)
        for p, q in zip(a, b, strict=True)
    )


def known(call, *arguments, **options):
    """Made twice: once more, and it is found."""
    call(*arguments, **options)
    return call(*arguments, **options)


def forget():
    """Of every thread: backward on a device is made in one of torch's."""
    _kept._calls = _kept._Calls()


def afresh(call, *arguments, **options):
    """By the long way."""
    before = _kept._calls
    forget()
    try:
        return call(*arguments, **options)
    finally:
        _kept._calls = before


CALLS = (scan, attention, select, step)


def shifted(x):
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x.detach()).requires_grad_(x.requires_grad)


def shorter(x):
    return x.detach()[: len(x) // 2].clone().requires_grad_(x.requires_grad)


def negated(x):
    return torch._neg_view(-x.detach()).requires_grad_(x.requires_grad)


def variations(call) -> list[tuple]:
    """(tensors, options) of two calls that are alike but in one thing: the first one is known."""
    t = drawn(call)
    first = next(iter(t))
    usual, constant = (t, {}), {**t, first: t[first].detach()}
    made = [
        (usual, (drawn(call, more=2), {})),
        (usual, (drawn(call, dtype=torch.float64), {})),
        (usual, ({**t, first: strided(t[first])}, {})),
        (usual, ({**t, first: negated(t[first])}, {})),
        (usual, (constant, {})),
        ((constant, {}), usual),
        (usual, ({**t, first: shifted(t[first])}, {})),
    ]
    if call in (scan, step):
        t = {n: x.detach() if n.endswith("bias") else x for n, x in t.items()}
        usual = (t, {})
        one = {n: x for n, x in t.items() if n != "q_bias"}
        other = {n: x for n, x in t.items() if n != "k_bias"}
        made.append((usual, (one, {})))
        made.append(((one, {}), usual))
        made.append(((one, {}), (other, {})))
        made.append((usual, (t, {"rotary_pairs": "halves"})))
    if call is scan:
        packed = plain_scan(batch=1, n=2, dtype=torch.float32)
        packed = {n: x for n, x in packed.items() if not n.startswith("initial")}
        two, three = (torch.tensor(e, dtype=torch.int32) for e in ((0, 2, 5), (0, 2, 3, 5)))
        made.append((({**packed, "cu_seqlens": two}, {}), ({**packed, "cu_seqlens": three}, {})))
    if call in (attention, select):
        keys = "kv" if call is attention else "index_k"
        made.append((({**t, keys: shorter(t[keys])}, {}), usual))
    if call is attention:
        without = {n: x for n, x in t.items() if n != "sink"}
        made.append((usual, (without, {})))
        made.append((usual, (t, {"scale": 0.5})))
    if call is select:
        made.append((usual, (t, {"top_k": 2})))
        made.append((usual, (t, {"act": "identity"})))
    return made
