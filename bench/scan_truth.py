"""What: the scan of Mamba-3 and its step in fp64, by tensor operations, and the errors of a call beside them.
Why: a time is given with the error of every output and gradient, whoever made them.
Never: asks a lane of ours what is right.
"""

from __future__ import annotations

import math

import torch
from mamba3_peers import eager

ORDER = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")
BY_TOKEN = ("q", "k", "v", "z", "angles")  # the others that have tokens have them last
ROWS = 64  # of a chunk
TOKEN_HEADS = 1 << 16  # what one truth may hold: each takes about 70 KB with R 4


def names_of(t):
    return tuple(n for n in (*ORDER, "mimo_v", "mimo_z", "mimo_out") if n in t)


def in_fp64(form, chunk):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with form["q"].device:
            return eager(form, chunk)
    finally:
        torch.set_default_dtype(before)


def of_tokens(t, begin, end):
    """Some tokens of every tensor that has them."""
    cut = {n: x[:, begin:end] for n, x in t.items() if n in BY_TOKEN}
    cut |= {n: t[n][:, :, begin:end] for n in ("adt", "dt", "trap")}
    return {n: cut.get(n, x) for n, x in t.items()}


def whole_chunks(t, chunk):
    """Tokens without a step or an input behind the last one change nothing before them."""
    short = -t["v"].shape[1] % chunk
    pad = torch.nn.functional.pad
    made = dict(t)
    for n in BY_TOKEN:
        made[n] = pad(t[n], (0,) * (2 * (t[n].dim() - 2)) + (0, short))
    return made | {n: pad(t[n], (0, short)) for n in ("adt", "dt", "trap")}


def sequence(wide):
    """out of one sequence, from leaves in fp64."""
    tokens, heads, head_dim = wide["v"].shape[1:]
    rank = wide["q"].shape[2] if "mimo_z" in wide else 1
    t = whole_chunks(wide, ROWS // rank)
    share = heads // t["q"].shape[-2]
    t |= {n: t[n].repeat_interleave(share, -2) for n in ("q", "k")}
    if "mimo_z" in t:
        gate = torch.nn.functional.silu(t["z"][:, :, :, None] * t["mimo_z"])
        outs = (t["mimo_out"] * gate).transpose(2, 3).transpose(0, 1)  # as eager takes it
        return in_fp64(t | {"mimo_out": outs}, ROWS // rank)[:, :tokens]
    form = {n: t[n] for n in ("v", "adt", "dt", "trap", "angles", "d")}
    # SISO turns neighbours; the eager form turns columns half a row apart: the same under one order of both.
    columns = t["q"].shape[-1]
    order = [*range(0, columns, 2), *range(1, columns, 2)]
    form |= {n: t[n][..., order].unsqueeze(2) for n in ("q", "k")}
    form |= {n: t[n][..., order].unsqueeze(1) for n in ("q_bias", "k_bias")}
    ones = torch.ones(heads, 1, head_dim, dtype=torch.float64, device=t["q"].device)
    out = in_fp64(form | {"mimo_v": ones, "mimo_out": ones}, ROWS)
    return (out * torch.nn.functional.silu(t["z"]))[:, :tokens]


def truth(t, up):
    """out and every gradient in fp64 of what is kept of t: dense sequences, or a pack with its cu_seqlens."""
    kept = kept_of(t)
    t, up = few_of(t, kept), few_of({"out": up}, kept)["out"]
    wide = {n: t[n].detach().double().requires_grad_() for n in names_of(t)}
    ends = t["cu_seqlens"].tolist() if "cu_seqlens" in t else [0, t["v"].shape[1]]
    pieces = zip(ends[:-1], ends[1:], strict=True)
    out = torch.cat([sequence(of_tokens(wide, a, b)) for a, b in pieces if a < b], 1)
    grads = torch.autograd.grad(out, list(wide.values()), up.double())
    return {"out": out.detach()} | {f"d_{n}": g for n, g in zip(wide, grads, strict=True)}


def relative(found, right):
    """Relative L2; beside what is zero but for rounding (a turn of the only token), the norm itself."""
    apart, norm = (found.detach().double() - right).norm(), right.norm()
    return float((apart / norm if norm > 1e-9 else apart).detach())


def ssd_truth(t, up):
    """Of Mamba-2's recurrence: no turn, no bias, all of a step at its end, decays of -dt."""
    still = {n: torch.zeros_like(t[n]) for n in ("angles", "q_bias", "k_bias")}
    right = truth(t | still | {"trap": torch.full_like(t["trap"], 100.0), "adt": -t["dt"]}, up)
    return right | {"d_dt": right["d_dt"] - right["d_adt"]}


def kept_of(t):
    """(heads, groups) that fp64 can hold of the first sequence or the pack: some heads of one group, or
    whole groups where there is room."""
    tokens, heads = t["v"].shape[1:3]
    share = heads // t["q"].shape[-2]
    most = max(min(TOKEN_HEADS // tokens, heads), 1)
    most = most // share * share if most >= share else most
    return slice(0, most), slice(0, max(most // share, 1))


def few_of(named, kept):
    """Tensors, or gradients d_.. of them, cut to the first sequence and what is kept of it."""
    (heads, groups), made = kept, {}
    for name, x in named.items():
        n = name.removeprefix("d_") if name != "d" else name
        if n in ("q", "k"):
            x = x[:1, ..., groups, :]
        elif n == "angles":
            x = x[:1]
        elif n in ("v", "z", "out"):
            x = x[:1, :, heads]
        elif n in ("adt", "dt", "trap"):
            x = x[:1, heads]
        elif n != "cu_seqlens":
            x = x[heads]
        made[name] = x.detach().contiguous()
    return made


def errors_of(call, t, up, right, names):
    """Of out and of the gradients of `names` beside fp64, of the call at its full size: upstream is
    zero but for what is kept, and so is what everything else adds to sums."""
    kept = kept_of(t)
    alone = torch.zeros_like(up)
    alone[:1, :, kept[0]] = up[:1, :, kept[0]]
    leaves = {n: x.detach() for n, x in t.items()}
    leaves |= {n: t[n].detach().requires_grad_() for n in names}
    out = call(leaves)
    grads = torch.autograd.grad(out, [leaves[n] for n in names], alone)
    named = {"out": out, **{f"d_{n}": g for n, g in zip(names, grads, strict=True)}}
    return {n: relative(x, right[n]) for n, x in few_of(named, kept).items()}


def turned(x, bias, theta, neighbours):
    """Rows [B, R, H, N] with their bias, turned by theta [B, H, A]."""
    x = x + bias
    pairs, half = theta.shape[-1], x.shape[-1] // 2
    u = slice(0, 2 * pairs, 2) if neighbours else slice(0, pairs)
    w = slice(1, 2 * pairs, 2) if neighbours else slice(half, half + pairs)
    cos, sin, made = theta.cos()[:, None], theta.sin()[:, None], x.clone()
    made[..., u] = x[..., u] * cos - x[..., w] * sin
    made[..., w] = x[..., u] * sin + x[..., w] * cos
    return made


def step_truth(one, state):
    """out of one token in fp64, and the states behind it: the recurrence as docs/mamba3.md has it."""
    t = {n: x.double() for n, x in one.items()}
    heads, head_dim = t["v"].shape[1:]
    many = t["q"].dim() == 4
    rows = [x if many else x[:, None] for x in (t["q"], t["k"])]
    rows = [x.repeat_interleave(heads // x.shape[2], 2) for x in rows]
    biases = [t[n].transpose(0, 1) if many else t[n] for n in ("q_bias", "k_bias")]
    ones = torch.ones(heads, 1, head_dim, dtype=torch.float64, device=t["v"].device)
    into, gate, onto = (t.get(n, ones).transpose(0, 1) for n in ("mimo_v", "mimo_z", "mimo_out"))
    theta = state.angle.double() + math.pi * t["angles"].tanh() * t["dt"][..., None]
    q, k = (turned(x, b, theta, not many) for x, b in zip(rows, biases, strict=True))
    trap, weight = t["trap"].sigmoid(), lambda x: x[..., None, None]
    v, v_in = t["v"][:, None] * into, state.v.double()[:, None] * into
    before = torch.einsum("brhp,brhn->bhpn", v_in, state.k.double())
    now = torch.einsum("brhp,brhn->bhpn", v, k)
    h = weight(t["adt"].exp()) * (state.ssm.double() + weight((1 - trap) * t["dt"]) * before)
    h = h + weight(trap * t["dt"]) * now
    y = torch.einsum("bhpn,brhn->brhp", h, q) + t["d"][:, None] * v
    y = (y * torch.nn.functional.silu(t["z"][:, None] * gate) * onto).sum(1)
    return {"out": y, "ssm": h, "k": k}
