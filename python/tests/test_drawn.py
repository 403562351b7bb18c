"""Drawn calls of linear_cross_entropy, every option beside every other, against autograd in fp64.

The suite in C++ draws calls of the library; here it is what Python makes of them: which outputs are
asked for, which of them a gradient flows through, targets of any kind and shape.
"""

import random

import pytest
import talea
import torch
from torch.nn.functional import one_hot

OUTPUTS = ("loss", "lse", "entropy", "target_logprob")


class Drawn:
    """One call: `tensors` (hidden, weight, bias or None), `target`, `options`, `outputs` or None."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = draw.choice([torch.float32] * 3 + [torch.bfloat16])
        self.lane = draw.choice(["auto", "cpu", "reference", "unfused"])
        self.shape = draw.choice([(7,), (3, 5), (2, 3, 2), (1,), (0,)])
        columns, self.words = draw.choice([1, 3, 8, 17]), draw.choice([1, 2, 5, 11, 37])
        stored = self.words + draw.choice([0, 0, 3])
        hidden = torch.randn(*self.shape, columns * 2).to(self.dtype)[..., :: draw.choice([1, 2])]
        weight = torch.randn(stored, hidden.shape[-1]).to(self.dtype)
        weight[self.words :] = float("nan")
        bias = torch.randn(stored).to(self.dtype) if self.often() else None
        self.tensors = [hidden, weight, bias]
        self.options = {"vocab": self.words} if stored > self.words else {}
        self.kind = draw.choice(["ids", "ids", "dense", "sparse", "none"])
        self.target = getattr(self, "_" + self.kind)()
        self._options()
        names = [n for n in OUTPUTS if self.kind == "ids" or n != "target_logprob"]
        if self.kind == "none":
            names.remove("loss")
        asked = self.kind == "none" or draw.random() < 0.6
        self.outputs = tuple(draw.sample(names, draw.randint(1, len(names)))) if asked else None

    def often(self) -> bool:
        return self.draw.random() < 0.35

    def _ids(self):
        ids = torch.randint(0, self.words, self.shape)
        ids[torch.rand(self.shape) < 0.3] = -100
        return ids.int() if self.often() else ids

    def _dense(self):
        return torch.rand(*self.shape, self.words).softmax(-1)

    def _sparse(self):
        self.options["soft_target_ids"] = torch.randint(0, self.words, (*self.shape, 2))
        return torch.rand(*self.shape, 2)

    def _none(self):
        return None

    def _options(self) -> None:
        drawn = {
            "weight": torch.rand(self.words), "token_weight": torch.randn(self.shape),
            "label_smoothing": 0.3, "z_loss": 0.05, "denominator": self.draw.choice([17.0, "weighted"]),
        }  # fmt: skip
        if self.kind != "none":
            self.options |= {n: v for n, v in drawn.items() if self.often()}
        if self.often():
            self.options["softcap"] = self.draw.choice([2.0, 30.0])
        if self.often():
            self.options["logit_scale"] = self.draw.choice(
                [0.5, -1.3, torch.rand(self.shape) + 0.5]
            )
        self.options["reduction"] = self.draw.choice(["mean", "sum", "none"])

    def truth(self, hidden, weight, bias) -> tuple[dict, torch.Tensor]:
        """By name, in fp64 and with the logits in memory; which tokens are not ignored."""
        o, words = self.options, self.words
        rows = hidden.reshape(-1, hidden.shape[-1])
        scale = o.get("logit_scale", 1.0)
        scale = scale.double().reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
        z = scale * (rows @ weight[:words].T) + (0 if bias is None else bias[:words])
        z = o["softcap"] * torch.tanh(z / o["softcap"]) if "softcap" in o else z
        lse = z.logsumexp(-1)
        logp = z - lse[:, None]
        found = {"lse": lse, "entropy": -(logp.exp() * logp).sum(-1)}
        valid = torch.ones(len(rows), dtype=torch.bool)
        if self.kind == "none":
            return found, valid
        c = o.get("weight", torch.ones(words)).double()
        if self.kind == "ids":
            ids = self.target.reshape(-1).long()
            valid = ids != -100
            q = one_hot(ids.clamp_min(0), words).double()
            found["target_logprob"] = (q * logp).sum(-1)
        elif self.kind == "dense":
            q = self.target.double().reshape(-1, words)
        else:
            ids = o["soft_target_ids"].reshape(-1, 2)
            q = torch.zeros(len(rows), words).double()
            q = q.scatter_add(1, ids, self.target.double().reshape(-1, 2))
        eps, counted = o.get("label_smoothing", 0.0), torch.ones(len(rows)).double()
        if self.kind == "ids":
            counted = q @ c
            ce = -(1 - eps) * counted * (q * logp).sum(-1) - eps / words * (c * logp).sum(-1)
        else:
            ce = -(c * ((1 - eps) * q + eps / words) * logp).sum(-1)
        token = o.get("token_weight", torch.ones(len(rows))).double().reshape(-1)
        loss = torch.where(valid, token * (ce + o.get("z_loss", 0.0) * lse**2), 0)
        if o["reduction"] != "none":
            by = o.get("denominator", "valid")
            weighed = counted * valid * (token if by == "weighted" else 1)
            mean = loss.sum() / (by if isinstance(by, float) else weighed.sum())
            loss = mean if o["reduction"] == "mean" else loss.sum()
        found["loss"] = loss
        return found, valid


def off(ours, theirs) -> float:
    """The distance beside the size; NaN beside NaN, as of a mean over nothing, is none."""
    ours, theirs = ours.detach().double().reshape(-1), theirs.detach().reshape(-1)
    both = ours.isnan() & theirs.isnan()
    ours, theirs = ours.masked_fill(both, 0), theirs.masked_fill(both, 0)
    return float((ours - theirs).norm() / (theirs.norm() + 0.1)) if ours.numel() else 0.0


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_drawn_calls(first):
    compared = 0
    for seed in range(first, first + 50):
        call = Drawn(seed)
        within = 3e-5 if call.dtype == torch.float32 else 4e-2
        ours = [t if t is None else t.detach().clone().requires_grad_() for t in call.tensors]
        theirs = [
            t if t is None else t.double().nan_to_num().requires_grad_() for t in call.tensors
        ]
        x, w, b = ours
        made = talea.linear_cross_entropy(
            x, w, call.target, linear_bias=b, outputs=call.outputs, lane=call.lane, **call.options
        )
        made = {n: getattr(made, n) for n in call.outputs} if call.outputs else {"loss": made}
        want, valid = call.truth(*theirs)
        flows = call.draw.sample(sorted(made), call.draw.randint(1, len(made)))
        total, other = 0, 0
        for name, value in made.items():
            truth, rows = want[name], value.reshape(-1)
            kept = valid if name != "loss" else torch.ones(rows.shape, dtype=torch.bool)
            assert off(rows[kept], truth.reshape(-1)[kept]) <= within, f"seed {seed}: {name}"
            if name in flows:
                up = torch.randn(rows.shape) * kept
                total = total + (rows * up.to(rows.dtype)).sum()
                other = other + (truth.reshape(-1) * up.double()).sum()
        total.backward()
        other.backward()
        for name, a, t in zip(("dx", "dw", "db"), ours, theirs, strict=True):
            if a is not None:
                truth = torch.zeros_like(t) if t.grad is None else t.grad.nan_to_num()
                assert off(a.grad, truth) <= within, f"seed {seed}: {name} through {flows}"
                compared += 1
    assert compared > 100
