"""What: a small Mamba-3 model trained four times: Talea's scan, torch eager, torch fp64, one ulp moved.
Why: gradients that are right in a test must also be right after 500 updates.
Never: a gate that is not written into the receipt; twice the noise of one ulp is the limit.

    python bench/mamba3_train.py --text README.md docs/*.md --receipt receipts/mamba3/train.json
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import talea
import torch
import torch.nn.functional as F
from talea._receipt import now, write_receipt
from talea.parity import distance, moved_by_one_ulp, sampled
from torch import nn

FORMS = {"siso": (1, 1), "mimo": (4, 2)}  # rank, groups


def eager_scan(q, k, v, adt, dt, trap, angles, *, q_bias, k_bias, d, z, mimo_v, mimo_z, mimo_out):
    """The quadratic form in whatever dtype comes in: what torch computes by itself."""
    heads, n = v.shape[2], q.shape[-1]
    of = torch.arange(heads) // (heads // q.shape[3])
    q, k = (x[:, :, :, of].transpose(2, 3) + b for x, b in ((q, q_bias), (k, k_bias)))
    theta = (math.pi * angles.tanh() * dt.mT[..., None]).cumsum(1)[:, :, :, None]
    a, cos, sin = angles.shape[-1], theta.cos(), theta.sin()

    def turn(x):
        u, w = x[..., :a], x[..., n // 2 : n // 2 + a]
        return torch.cat((u * cos - w * sin, x[..., a : n // 2], u * sin + w * cos,
                          x[..., n // 2 + a :]), -1)  # fmt: skip

    q, k = turn(q), turn(k)
    lam, length = trap.sigmoid(), adt.cumsum(2)
    later = F.pad(((1 - lam) * dt)[:, :, 1:], (0, 1))
    tri = torch.ones(adt.shape[2], adt.shape[2], dtype=v.dtype)
    weight = (lam * dt)[:, :, None] * tri.tril() + later[:, :, None] * tri.tril(-1)
    weight = weight * (length[..., None] - length[:, :, None]).tril().exp()
    vr = v[:, :, :, None] * mimo_v
    y = torch.einsum("bthrn,bjhsn,bhtj,bjhsp->bthrp", q, k, weight, vr)
    y = (y + d[:, None, None] * vr) * F.silu(z[:, :, :, None] * mimo_z)
    return (y * mimo_out).sum(3)


class Block(nn.Module):
    """One Mamba-3 layer: projections, steps and decays as the model makes them, the scan, a projection."""

    def __init__(self, width, heads, rank, groups, cols=8, pairs=2):
        super().__init__()
        self.sizes = [
            width,
            width,
            rank * groups * cols,
            rank * groups * cols,
            heads,
            heads,
            heads,
            pairs,
        ]
        self.shape = (heads, rank, groups, cols, width // heads)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.in_proj, self.out = (
            nn.Linear(width, sum(self.sizes), bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.q_bias, self.k_bias = (nn.Parameter(torch.ones(heads, rank, cols)) for _ in range(2))
        p = width // heads
        self.mimo_v, self.mimo_out = (
            nn.Parameter(torch.full((heads, rank, p), 1 / rank)) for _ in range(2)
        )
        self.mimo_z, self.d = (
            nn.Parameter(torch.ones(heads, rank, p)),
            nn.Parameter(torch.ones(heads)),
        )
        self.dt_bias = nn.Parameter(torch.linspace(-4.6, -2.2, heads))

    def tensors(self, x):
        heads, rank, groups, cols, p = self.shape
        z, v, k, q, dt, a, trap, angles = self.in_proj(self.norm(x)).split(self.sizes, -1)
        lead = x.shape[:-1]
        rows = [F.rms_norm(r.reshape(*lead, rank, groups, cols), (cols,), eps=1e-5) for r in (q, k)]
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        dt = F.softplus(dt.to(wide) + self.dt_bias)
        adt = -F.softplus(a.to(wide)).clamp_min(1e-4) * dt
        steps = [s.mT if x.dim() == 3 else s for s in (adt, dt, trap)]
        shared = angles.unsqueeze(-2)
        return (*rows, v.reshape(*lead, heads, p), *steps, shared), z.reshape(*lead, heads, p)

    def parameters_of_scan(self):
        return {
            n: getattr(self, n) for n in ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out")
        }

    def forward(self, x, scan):
        tensors, z = self.tensors(x)
        if scan is eager_scan:
            tensors = (*tensors[:-1], tensors[-1].expand(-1, -1, self.shape[0], -1))
        y = scan(*tensors, z=z, **self.parameters_of_scan())
        return x + self.out(y.reshape(x.shape))

    def step(self, x, state):
        tensors, z = self.tensors(x)
        y = talea.mamba3_step(state, *tensors, z=z, **self.parameters_of_scan())
        return x + self.out(y.reshape(x.shape))


class Model(nn.Module):
    def __init__(self, form, width=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, *FORMS[form]) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 256, bias=False)

    def forward(self, ids, scan):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scan)
        return self.head(self.norm(x))

    @torch.no_grad()
    def by_steps(self, ids):
        """Logits of every token, one token at a time."""
        states = []
        for b in self.blocks:
            heads, rank, _, cols, p = b.shape
            states.append(talea.Mamba3State.zeros(len(ids), heads, rank, cols, p, b.sizes[-1],
                                                  dtype=self.embed.weight.dtype))  # fmt: skip
        parts = []
        for t in range(ids.shape[1]):
            x = self.embed(ids[:, t])
            for block, state in zip(self.blocks, states, strict=True):
                x = block.step(x, state)
            parts.append(self.head(self.norm(x)))
        return torch.stack(parts, 1)


def train(name, form, scan, state, tokens, o, dtype=torch.float32):
    model = Model(form)
    model.load_state_dict(state)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    g, losses, begin = torch.Generator().manual_seed(o.seed), [], time.time()
    for step in range(o.steps):
        at = torch.randint(0, len(tokens) - o.length - 1, (o.rows,), generator=g)
        ids = torch.stack([tokens[i : i + o.length + 1] for i in at.tolist()])
        logits = model(ids[:, :-1], scan)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"{form} {name}: not finite at step {step}")
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    took = time.time() - begin
    print(
        f"{form} {name:8} loss {losses[0]:.4f} -> {losses[-1]:.4f}  {took:.0f} s", file=sys.stderr
    )
    return {"losses": losses, "weights": weights, "seconds": took, "model": model}


def generation(model, tokens):
    """Largest distance of logits by steps from those of one prefill, over their largest magnitude."""
    ids = tokens[None, :33]
    with torch.no_grad():
        whole = model(ids, talea.mamba3)
    steps = model.by_steps(ids)
    return float((steps - whole).abs().max() / whole.abs().max())


def gates_of(form, runs, step_gap):
    drift, band = distance(runs["talea"], runs["torch"]), distance(runs["one ulp"], runs["torch"])
    ours, theirs = distance(runs["talea"], runs["fp64"]), distance(runs["torch"], runs["fp64"])
    made = []
    for what in ("loss_rms", "weights"):
        made.append(
            (
                f"{form}: {what} beside torch within twice the one-ulp noise",
                drift[what],
                2 * band[what],
            )
        )
        limit = 2 * max(theirs[what], band[what])
        made.append(
            (f"{form}: {what} beside fp64 within twice torch's own distance", ours[what], limit)
        )
    made.append((f"{form}: generation by steps beside prefill", step_gap, 1e-5))
    fallen = runs["talea"]["losses"][-1] / runs["talea"]["losses"][0]
    made.append((f"{form}: final over first loss", fallen, 0.75))
    gates = [{"name": n, "value": v, "limit": m, "passed": v <= m} for n, v, m in made]
    return gates, {"drift": drift, "band": band, "to_fp64": ours, "torch_to_fp64": theirs}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--text", nargs="+", required=True)
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--rows", type=int, default=2)
    p.add_argument("--length", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--receipt")
    o = p.parse_args()
    start = now()
    text = b"".join(Path(f).read_bytes() for f in o.text)
    tokens, gates, curves, kept = torch.tensor(list(text)), [], [], {}
    for form in FORMS:
        torch.manual_seed(o.seed)
        state = Model(form).state_dict()
        runs = {
            "talea": train("talea", form, talea.mamba3, state, tokens, o),
            "torch": train("torch", form, eager_scan, state, tokens, o),
            "one ulp": train(
                "one ulp", form, eager_scan, moved_by_one_ulp(state, o.seed + 1), tokens, o
            ),
            "fp64": train("fp64", form, eager_scan, state, tokens, o, torch.float64),
        }
        found, facts = gates_of(form, runs, generation(runs["talea"]["model"], tokens))
        gates += found
        kept[form] = {n: {k: v for k, v in f.items() if k != "loss_gaps"} for n, f in facts.items()}
        curves += [{"name": f"{form} {n} loss", "y_label": "loss", **sampled(r["losses"])}
                   for n, r in runs.items()]  # fmt: skip
    passed = all(g["passed"] for g in gates)
    for g in gates:
        print(
            f"{'ok  ' if g['passed'] else 'FAIL'} {g['name']}: {g['value']:.3e} (limit {g['limit']:.3e})"
        )
    if o.receipt:
        settings = {k: getattr(o, k) for k in ("steps", "rows", "length", "lr", "seed")}
        train_section = {"curves": curves, "settings": settings | {"optimizer": "AdamW"},
                         "text_bytes": len(text), **kept}  # fmt: skip
        write_receipt(o.receipt, "train", "A small Mamba-3 model: Talea's scan beside torch and fp64",
                      passed, {"train": train_section, "gates": gates}, start,
                      ["python", "bench/mamba3_train.py", *sys.argv[1:]])  # fmt: skip
    print("pass" if passed else "fail")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
