"""What: one model of Mamba-3 layers, sparse attention and the fused loss, beside the same in torch, fp32 and fp64.
Why: operators that are right alone must be right behind one another, for hundreds of updates.
Never: a gate that is not in the receipt; the limit is twice the noise of one ulp.

    python bench/hybrid_train.py --text README.md docs/*.md --receipt receipts/mamba3/hybrid.json
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
from mamba3_train import Block, eager_scan
from talea._receipt import now, write_receipt
from talea.parity import distance, moved_by_one_ulp, sampled
from torch import nn

SLOTS, WINDOW = 8, 4  # keys a query sees: the last WINDOW, and every fourth before them


def slots_of(length: int) -> torch.Tensor:
    """[S, K] rows, -1 where there is none: what a trained indexer would choose."""
    rows = torch.full((length, SLOTS), -1, dtype=torch.int32)
    for t in range(length):
        near = list(range(max(0, t - WINDOW + 1), t + 1))
        far = list(range(0, max(0, t - WINDOW + 1), 4))[-(SLOTS - len(near)) :]
        chosen = sorted(far + near)
        rows[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return rows


class Attention(nn.Module):
    def __init__(self, width, heads, dim=8):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.q, self.kv = (
            nn.Linear(width, heads * dim, bias=False),
            nn.Linear(width, dim, bias=False),
        )
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x, slots, ours):
        y = self.norm(x)
        b, s, _ = x.shape
        q, kv = self.q(y).reshape(b, s, self.heads, self.dim), self.kv(y)
        if ours:
            lists = slots.expand(b, s, SLOTS).unsqueeze(2).contiguous()
            o = talea.sparse_attention(q, kv.unsqueeze(2), lists, value_dim=self.dim)
        else:
            scores = torch.einsum("bshd,btd->bhst", q, kv) / math.sqrt(self.dim)
            seen = torch.zeros(s, s, dtype=torch.bool)
            rows, places = (slots >= 0).nonzero(as_tuple=True)
            seen[rows, slots[rows, places].long()] = True
            o = torch.einsum("bhst,btd->bshd", scores.masked_fill(~seen, -math.inf).softmax(-1), kv)
        return x + self.out(o.reshape(b, s, -1))


class Hybrid(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.first, self.second = Block(width, heads, 4, 2), Block(width, heads, 1, 1)
        self.attention = Attention(width, heads)
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 256, bias=False)

    def loss(self, ids, labels, slots, ours):
        scan = talea.mamba3 if ours else eager_scan
        x = self.first(self.embed(ids), scan)
        x = self.second(self.attention(x, slots, ours), scan)
        x = self.norm(x)
        if ours:
            return talea.linear_cross_entropy(x, self.head.weight, labels)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(name, ours, state, tokens, o, dtype=torch.float32):
    model = Hybrid()
    model.load_state_dict(state)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    g, losses, begin = torch.Generator().manual_seed(o.seed), [], time.time()
    slots = slots_of(o.length)
    for _ in range(o.steps):
        at = torch.randint(0, len(tokens) - o.length - 1, (o.rows,), generator=g)
        ids = torch.stack([tokens[i : i + o.length + 1] for i in at.tolist()])
        loss = model.loss(ids[:, :-1], ids[:, 1:].contiguous(), slots, ours)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    took = time.time() - begin
    print(f"{name:8} loss {losses[0]:.4f} -> {losses[-1]:.4f}  {took:.0f} s", file=sys.stderr)
    return {"losses": losses, "weights": weights, "seconds": took}


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
    tokens = torch.tensor(list(text))
    torch.manual_seed(o.seed)
    state = Hybrid().state_dict()
    runs = {
        "talea": train("talea", True, state, tokens, o),
        "torch": train("torch", False, state, tokens, o),
        "one ulp": train("one ulp", False, moved_by_one_ulp(state, o.seed + 1), tokens, o),
        "fp64": train("fp64", False, state, tokens, o, torch.float64),
    }
    drift, band = distance(runs["talea"], runs["torch"]), distance(runs["one ulp"], runs["torch"])
    ours, theirs = distance(runs["talea"], runs["fp64"]), distance(runs["torch"], runs["fp64"])
    gates = [
        {"name": f"{w} beside torch within twice the one-ulp noise", "value": drift[w],
         "limit": 2 * band[w], "passed": drift[w] <= 2 * band[w]}
        for w in ("loss_rms", "weights")
    ] + [
        {"name": f"{w} beside fp64 within twice torch's own distance", "value": ours[w],
         "limit": 2 * max(theirs[w], band[w]), "passed": ours[w] <= 2 * max(theirs[w], band[w])}
        for w in ("loss_rms", "weights")
    ]  # fmt: skip
    fallen = runs["talea"]["losses"][-1] / runs["talea"]["losses"][0]
    gates.append({"name": "final over first loss", "value": fallen, "limit": 0.75,
                  "passed": fallen <= 0.75})  # fmt: skip
    passed = all(g["passed"] for g in gates)
    for g in gates:
        print(
            f"{'ok  ' if g['passed'] else 'FAIL'} {g['name']}: {g['value']:.3e} (limit {g['limit']:.3e})"
        )
    if o.receipt:
        curves = [
            {"name": f"{n} loss", "y_label": "loss", **sampled(r["losses"])}
            for n, r in runs.items()
        ]
        settings = {k: getattr(o, k) for k in ("steps", "rows", "length", "lr", "seed")}
        facts = {n: {k: v for k, v in f.items() if k != "loss_gaps"}
                 for n, f in (("drift", drift), ("band", band), ("to_fp64", ours), ("torch_to_fp64", theirs))}  # fmt: skip
        section = {"curves": curves, "settings": settings | {"optimizer": "AdamW"},
                   "layers": ["mamba3 MIMO R 4, 1 < G < H", "sparse attention", "mamba3 SISO",
                              "fused linear cross-entropy"], "text_bytes": len(text), **facts}  # fmt: skip
        write_receipt(o.receipt, "train", "Mamba-3, sparse attention and the fused loss in one model",
                      passed, {"train": section, "gates": gates}, start,
                      ["python", "bench/hybrid_train.py", *sys.argv[1:]])  # fmt: skip
    print("pass" if passed else "fail")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
