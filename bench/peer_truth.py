"""What: the truth that bench/peers.py measures errors against, on plain and on confident tokens.
Why: fp32 products of the 16-bit inputs, and fp64 where p is near 1, owe nothing to any contender.
Never: uses a contender's code.
"""

import torch
import torch.nn.functional as F


def relative_l2(a, truth):
    return float((a.float() - truth).norm() / truth.norm())


def reference(x, w, y, rows=512):
    """Loss and gradients from fp32 products, in chunks of rows."""
    wf, n = w.float(), x.shape[0]
    dx, dw, loss = torch.empty(x.shape, device=x.device), torch.zeros_like(wf), 0.0
    for i in range(0, n, rows):
        xf, t = x[i : i + rows].float(), y[i : i + rows]
        z = xf @ wf.T
        p = torch.softmax(z, -1)
        loss += F.cross_entropy(z, t, reduction="sum").double()
        p[torch.arange(len(t)), t] -= 1
        p /= n
        dx[i : i + rows] = p @ wf
        dw += p.T @ xf
    return float(loss) / n, dx, dw


def confident(w, y, n, seed):
    """Hidden rows whose target has a logit of 17 to 24 above a background of deviation 1."""
    generator = torch.Generator(device=w.device).manual_seed(seed)
    x = torch.randn(n, w.shape[1], device=w.device, generator=generator)
    wy = w[y].float()
    height = torch.linspace(17, 24, n, device=w.device)[:, None]
    return (x + height * wy / (wy * wy).sum(-1, keepdim=True)).bfloat16()


def confident_truth(x, w, y, rows):
    """dX of the first rows in fp64, p - 1 as minus the others' share; and which have p > 0.999."""
    w64 = w.double()
    z = x[:rows].double() @ w64.T
    e = torch.exp(z - z.max(-1, keepdim=True).values)
    index = torch.arange(rows, device=x.device)
    own = e[index, y[:rows]].clone()
    e[index, y[:rows]] = 0
    others = e.sum(-1)
    e /= (own + others)[:, None]
    e[index, y[:rows]] = -others / (own + others)
    return e @ w64 / x.shape[0], own / (own + others) > 0.999
