"""What the sparse attention tests compare with: gather and softmax; and drawn problems.

Shares no code with the library: every list is gathered, gradients are autograd's.
"""

import torch


def problem(s=7, keys=19, h=4, d=32, slots=6, g=1, b=None, dtype=torch.float32, device="cpu"):
    lead = () if b is None else (b,)
    like = {"dtype": dtype, "device": device}
    q = torch.randn(*lead, s, h, d, **like).requires_grad_()
    kv = torch.randn(*lead, keys, g, d, **like).requires_grad_()
    indices = torch.randint(0, keys, (*lead, s, g, slots), device=device)
    indices[..., 1, :, :] = -1  # a row without keys
    indices[..., 2, :, 3:] = -1
    sink = torch.randn(h, device=device).requires_grad_()
    return q, kv, indices, sink


def eager(q, kv, indices, value_dim, *, sink=None, scale=None, keep=None):
    """[B, S, H, D] by gather and softmax; a slot counts as often as it stands in the list."""
    if q.dim() == 3:
        keep = None if keep is None else keep[None]
        o, lse = eager(
            q[None], kv[None], indices[None], value_dim, sink=sink, scale=scale, keep=keep
        )
        return o[0], lse[0]
    b, s, h, d = q.shape
    g, slots = indices.shape[2:]
    valid = (indices >= 0) & (indices < kv.shape[1])
    if keep is not None:
        valid = valid & keep
    safe = torch.where(valid, indices, 0).long()
    batch = torch.arange(b, device=q.device)[:, None, None, None]
    group = torch.arange(g, device=q.device)[None, None, :, None]
    rows = kv[batch, safe, group].repeat_interleave(h // g, 2)  # [B, S, H, K, D]
    valid = valid.repeat_interleave(h // g, 2)
    logits = (q[..., None, :] * rows).sum(-1) * (d**-0.5 if scale is None else scale)
    logits = logits.masked_fill(~valid, -torch.inf)
    empty = ~valid.any(-1)
    lse = torch.logsumexp(logits.masked_fill(empty[..., None], 0), -1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    p = torch.exp(logits - total[..., None]).masked_fill(empty[..., None], 0)
    o = (p[..., None] * rows[..., :value_dim]).sum(-2)
    return o, torch.where(empty, torch.inf, lse)


def tolerance(dtype):
    return 1e-6 if dtype == torch.float64 else 5e-6


def indexer(s=6, keys=17, hi=3, di=8, h=4, d=32):
    iq = torch.randn(s, hi, di, requires_grad=True)
    ik = torch.randn(keys, di, requires_grad=True)
    iw = torch.randn(s, hi, requires_grad=True)
    return iq, ik, iw, torch.randn(s, h, d), torch.randn(keys, d)


def scores(iq, ik, iw, act="relu"):
    z = torch.einsum("shd,kd->shk", iq, ik)
    return ((z.relu() if act == "relu" else z) * iw[..., None]).sum(1)
