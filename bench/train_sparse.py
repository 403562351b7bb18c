"""What: 500 updates of a small model with absorbed latent attention and a trained indexer, by
talea.sparse_attention beside PyTorch and fp64.
Why: a gradient that is right once must stay right while the index lists move under it.
Never: has a tolerance of its own: bounds are what one ulp in the weights, and fp32, do to PyTorch.

usage: train_sparse.py RECEIPT [UPDATES]

The gates are those of `talea train` (docs/train.md): the same state, free-running drift, the same bits twice,
and mistakes planted in the candidate, each of which the first gate must fail. Why this is a script and no
model of the tool: docs/decisions/0021-sparse-training-is-a-script.md.
"""

from __future__ import annotations

import sys
from collections import deque

import talea
import torch
import torch.nn.functional as F
from talea import _receipt

VOCAB, WIDTH, SEQ, HEADS, DIM, VALUE, TOP_K, INDEX_HEADS, INDEX_DIM = (
    48,
    32,
    48,
    4,
    24,
    16,
    12,
    2,
    8,
)


def weights(dtype):
    torch.manual_seed(5)
    shapes = {
        "embed": (VOCAB, WIDTH),
        "place": (SEQ, WIDTH),
        "q": (WIDTH, HEADS * DIM),
        "kv": (WIDTH, DIM),
        "index_q": (WIDTH, INDEX_HEADS * INDEX_DIM),
        "index_k": (WIDTH, INDEX_DIM),
        "index_w": (WIDTH, INDEX_HEADS),
        "out": (HEADS * VALUE, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    # Rows of size 1, so that attention is not flat and there is something for the indexer to learn.
    made = {n: torch.randn(s) * (1 if n in ("embed", "place") else s[0] ** -0.5)
            for n, s in shapes.items()}  # fmt: skip
    return {n: w.to(dtype).requires_grad_() for n, w in made.items()}


def batches(updates):
    """Sequences in which a token names how far back the next one is to be copied from."""
    draw = torch.Generator().manual_seed(9)
    for _ in range(updates):
        x = torch.randint(8, VOCAB, (SEQ + 1,), generator=draw)
        for t in range(8, SEQ + 1, 2):
            x[t] = x[t - 1 - int(x[t - 1]) % 7]
        yield x


def by_torch(q, kv, iq, ik, iw, lists=None):
    """Gather, softmax, autograd; the teacher's mean distribution and the indexer's KL."""
    s = q.shape[0]
    scores = (torch.einsum("shd,kd->shk", iq, ik).relu() * iw[..., None]).sum(1)
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    if lists is None:
        # Many scores are 0 behind the ReLU: ties to the lower index, as the contract says.
        order = (
            scores.detach()
            .masked_fill(~mask, -torch.inf)
            .sort(dim=-1, descending=True, stable=True)
        )
        chosen = order.indices[:, :TOP_K].sort(-1).values
        valid = mask.gather(1, chosen)
    else:
        chosen, valid = lists.long().clamp(min=0), lists >= 0
    logits = torch.einsum("shd,skd->shk", q, kv[chosen]) * DIM**-0.5
    p = logits.masked_fill(~valid[:, None], -torch.inf).softmax(-1)
    o = torch.einsum("shk,skv->shv", p, kv[chosen][..., :VALUE])
    teacher = p.detach().mean(1)
    picked = scores.gather(1, chosen).masked_fill(~valid, -torch.inf).log_softmax(-1)
    terms = torch.where(teacher > 0, teacher * (teacher.log() - picked), torch.zeros_like(picked))
    return o, terms.nan_to_num(0.0).sum(-1).mean()


def lists_of(w, x):
    still = (w["embed"][x[:-1]] + w["place"]).detach()
    iq = (still @ w["index_q"]).view(SEQ, INDEX_HEADS, INDEX_DIM).detach()
    return talea.sparse_select(
        iq,
        (still @ w["index_k"]).detach(),
        (still @ w["index_w"]).detach(),
        top_k=TOP_K,
        causal=True,
    )[0]


def by_talea(q, kv, iq, ik, iw):
    indices, length = talea.sparse_select(iq, ik, iw, top_k=TOP_K, causal=True)
    done = talea.sparse_attention(
        q, kv, indices, value_dim=VALUE, topk_length=length, outputs=("lse",)
    )
    loss = talea.sparse_index_loss(
        iq, ik, iw, q, kv, value_dim=VALUE, indices=indices, topk_length=length, lse=done.lse
    )
    return done.o, loss


def step(w, x, attend):
    h = w["embed"][x[:-1]] + w["place"]
    still = h.detach()  # the indexer learns from its own loss alone
    o, index_loss = attend(
        (h @ w["q"]).view(SEQ, HEADS, DIM),
        h @ w["kv"],
        (still @ w["index_q"]).view(SEQ, INDEX_HEADS, INDEX_DIM),
        still @ w["index_k"],
        still @ w["index_w"],
    )
    logits = (h + o.reshape(SEQ, -1) @ w["out"]) @ w["head"]
    return F.cross_entropy(logits, x[1:]), index_loss


def train(dtype, attend, updates, ulp=False):
    w = weights(dtype)
    if ulp:
        with torch.no_grad():
            for t in w.values():
                t.copy_(torch.nextafter(t, torch.full_like(t, torch.inf)))
    optimizer = torch.optim.AdamW(w.values(), lr=3e-3)
    losses = []
    for x in batches(updates):
        loss, index_loss = step(w, x, attend)
        optimizer.zero_grad()
        (loss + index_loss).backward()
        optimizer.step()
        losses.append((loss.item(), index_loss.item()))
    return torch.tensor(losses, dtype=torch.float64)


def gradients(w, x, attend):
    loss = step(w, x, attend)
    found = torch.autograd.grad(sum(loss), list(w.values()), materialize_grads=True)
    return loss, dict(zip(w, found, strict=True))


def same_state(updates, attend=by_talea):
    """Every update from the candidate's own weights and lists, once more in fp64 and in PyTorch's fp32: the
    candidate's worst share of what it may be off, four times the worst that fp32 was in the last 16."""
    w, worst = weights(torch.float32), {}
    optimizer = torch.optim.AdamW(w.values(), lr=3e-3)
    plain = {n: deque(maxlen=16) for n in w}
    for x in batches(updates):
        lists = lists_of(w, x)
        given = lambda *a, lists=lists: by_torch(*a, lists=lists)  # noqa: E731
        _, truth = gradients(
            {n: t.detach().double().requires_grad_() for n, t in w.items()}, x, given
        )
        _, theirs = gradients(w, x, given)
        _, ours = gradients(w, x, attend)
        for n, t in truth.items():
            plain[n].append(float((theirs[n] - t).norm() / t.norm()))
            share = float((ours[n] - t).norm() / t.norm()) / (4 * max(plain[n]))
            worst[n] = max(worst.get(n, 0.0), share) if share == share else torch.inf
            w[n].grad = ours[n]
        optimizer.step()
    return worst


# Mistakes of the field in a layer that calls the operator (docs/sparse_attention.md).
def one_list_late(q, kv, iq, ik, iw):
    indices, length = talea.sparse_select(iq, ik, iw, top_k=TOP_K, causal=True)
    o = talea.sparse_attention(q, kv, indices.roll(1, 0), value_dim=VALUE)
    return o, talea.sparse_index_loss(
        iq, ik, iw, q, kv, value_dim=VALUE, indices=indices, topk_length=length
    )


def kv_without_gradient(q, kv, iq, ik, iw):
    return by_talea(q, kv.detach(), iq, ik, iw)


def loss_not_divided(q, kv, iq, ik, iw):
    o, loss = by_talea(q, kv, iq, ik, iw)
    return o, loss * SEQ


def sixteen_bit_kv(q, kv, iq, ik, iw):
    return by_talea(q, kv.bfloat16().float(), iq, ik, iw)


PLANTED = (one_list_late, kv_without_gradient, loss_not_divided, sixteen_bit_kv)


def gate_cases(updates):
    shares = same_state(updates)
    cases = [{"name": "each step beside fp64 from the same state", "lane": "auto",
              "passed": all(s <= 1 for s in shares.values()), "worst_share_of_allowed": shares}]  # fmt: skip
    runs = [train(torch.float32, by_talea, updates) for _ in range(2)]
    cases.append({"name": "the same bits twice", "lane": "auto",
                  "passed": torch.equal(runs[0], runs[1])})  # fmt: skip
    for mistake in PLANTED:
        shares = same_state(min(updates, 20), mistake)
        cases.append({"name": f"planted: {mistake.__name__}", "lane": "auto",
                      "passed": any(not s <= 1 for s in shares.values()),
                      "failed_by": sorted(n for n, s in shares.items() if not s <= 1)})  # fmt: skip
    return cases, runs[0]


def main():
    receipt, updates = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500
    torch.set_num_threads(1)
    start = _receipt.now()
    truth = train(torch.float64, by_torch, updates)
    theirs = train(torch.float32, by_torch, updates)
    noisy = train(torch.float32, by_torch, updates, ulp=True)
    gates, ours = gate_cases(updates)

    def gap(run):
        return (run - truth).abs().mean(0)

    noise = torch.maximum(gap(theirs), gap(noisy))
    head, tail = ours[:50].mean(0), ours[-50:].mean(0)
    cases = [
        *gates,
        {"name": "loss within twice the one-ulp noise", "lane": "auto",
         "passed": bool(gap(ours)[0] <= 2 * noise[0]),
         "ours": float(gap(ours)[0]), "noise": float(noise[0])},
        {"name": "index loss within twice the one-ulp noise", "lane": "auto",
         "passed": bool(gap(ours)[1] <= 2 * noise[1]),
         "ours": float(gap(ours)[1]), "noise": float(noise[1])},
        {"name": "the loss falls", "lane": "auto", "passed": bool(tail[0] < head[0]),
         "first_50": float(head[0]), "last_50": float(tail[0])},
        {"name": "the index loss falls", "lane": "auto", "passed": bool(tail[1] < head[1]),
         "first_50": float(head[1]), "last_50": float(tail[1])},
    ]  # fmt: skip
    passed = sum(c["passed"] for c in cases)
    section = {"preset": f"{updates} updates", "lanes": ["auto"], "passed": passed,
               "failed": len(cases) - passed, "cases": cases}  # fmt: skip
    _receipt.write_receipt(
        receipt, "check", "Training with sparse attention beside PyTorch and fp64",
        passed == len(cases), {"check": section}, start,
        ["python", "bench/train_sparse.py", receipt, str(updates)],
    )  # fmt: skip
    for c in cases:
        print(c)
    return 0 if passed == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
