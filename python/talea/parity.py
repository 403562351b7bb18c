"""python -m talea.parity: a small GPT trained twice, once with torch's loss and once with Talea's.

Three runs share data, initial weights and optimizer: `torch` (logits in memory), `talea`, and
`band`, the torch run again with initial weights moved by one unit in the last place. The band is
the noise that any change of rounding makes; Talea passes when it stays inside it.

Training amplifies noise: where the band's weights end farther apart than 1e-3 the comparison of whole
runs is void, and the receipt says so. What can fail in every run is the comparison from the same state:
every few steps, at the weights of the `torch` run, both losses' gradients of the same hidden states
beside fp64; Talea's may be no farther off than torch's.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ._page import chart, page
from ._receipt import now, write, write_receipt
from .functional import linear_cross_entropy

VOID = 1e-3  # of the weights: a wider band says nothing of a run inside it
LONGEST = 8  # bytes of a word
# Of the seconds that may be used: the first run's, which has the judging besides; and its least steps.
SHARE, MEASURED = 0.35, 3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    @staticmethod
    def rope(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def torch_loss(model: GPT, x: torch.Tensor, y: torch.Tensor, valid: int) -> torch.Tensor:
    logits = model.head(x).float().flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="sum") / valid


def talea_loss(model: GPT, x: torch.Tensor, y: torch.Tensor, valid: int) -> torch.Tensor:
    return linear_cross_entropy(x, model.head.weight, y, denominator=float(valid))


def words(text: bytes, vocabulary: int) -> tuple[list[int], int]:
    """The text as numbers below `vocabulary`, and how many words there are: the 256 bytes, then its
    most frequent runs of 2 to 8 bytes, longest match first, as a tokenizer's vocabulary grows."""
    if vocabulary < 256:
        raise SystemExit(f"--vocabulary: {vocabulary}; the 256 bytes are the least")
    ids = {bytes([i]): i for i in range(256)}
    seen: Counter = Counter()
    for n in range(2, LONGEST + 1) if vocabulary > 256 else ():
        seen.update(text[i : i + n] for i in range(len(text) - n + 1))
    for word, _ in seen.most_common(vocabulary - 256):  # equally frequent: as they first occur
        ids[word] = len(ids)
    longest = LONGEST if len(ids) > 256 else 1
    found, at = [], 0
    while at < len(text):
        n = next(n for n in range(longest, 0, -1) if text[at : at + n] in ids)
        found.append(ids[text[at : at + n]])
        at += n
    return found, len(ids)


def batches(tokens: torch.Tensor, steps: int, micro: int, rows: int, length: int, seed: int):
    """Per step: `micro` batches of (inputs, labels), a fifth of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        window = []
        for _ in range(micro):
            at = torch.randint(0, len(tokens) - length - 1, (rows,), generator=generator)
            ids = torch.stack([tokens[i : i + length + 1] for i in at.tolist()])
            labels = ids[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
            window.append((ids[:, :-1], labels))
        yield window


def head_gradients(loss_of, model: GPT, hidden: torch.Tensor, y: torch.Tensor, valid: int, o):
    """Gradients of the loss with respect to hidden states and the head's weight."""
    hidden = hidden.detach().requires_grad_()
    with torch.autocast(o.device, torch.bfloat16, enabled=o.bf16):
        loss = loss_of(model, hidden, y, valid)
    return torch.autograd.grad(loss, (hidden, model.head.weight))


def beside_fp64(model: GPT, x: torch.Tensor, y: torch.Tensor, valid: int, o) -> dict:
    """Relative errors of both losses' gradients at one state; the operands are those that autocast made."""
    with torch.no_grad(), torch.autocast(o.device, torch.bfloat16, enabled=o.bf16):
        hidden = model.hidden(x)
    exact, kind = copy.deepcopy(model), torch.bfloat16 if o.bf16 else torch.float32
    exact.head.weight.data = model.head.weight.detach().to(kind).double()
    rows = hidden.to(kind).double().requires_grad_()
    logits = exact.head(rows).flatten(0, 1)
    loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / valid
    truth = torch.autograd.grad(loss, (rows, exact.head.weight))
    errors = {}
    for name, loss_of in (("torch", torch_loss), ("talea", talea_loss)):
        found = head_gradients(loss_of, model, hidden, y, valid, o)
        for what, mine, right in zip(("dX", "dW"), found, truth, strict=True):
            errors[f"{name} {what}"] = float((mine.double() - right).norm() / right.norm())
    return errors


def train(name: str, loss_of, state: dict, tokens: torch.Tensor, o) -> dict:
    """One run of `o.steps`; the first, `torch`, ends earlier where its share of `o.seconds` is spent."""
    model = GPT(o.vocabulary, o.width, o.layers, o.heads)
    model.load_state_dict(state)
    model.to(o.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    losses, norms, errors, begin = [], [], {}, time.time()
    last = o.steps - 1
    work = batches(tokens, o.steps, o.micro, o.rows, o.length, o.seed)
    autocast = torch.autocast(o.device, torch.bfloat16, enabled=o.bf16)
    for step, window in enumerate(work):
        if name == "torch" and step >= MEASURED and time.time() - begin > o.seconds * SHARE:
            last = step
        valid = sum(int((y != -100).sum()) for _, y in window)
        total = 0.0
        if name == "torch" and (step % o.judge == 0 or step == last):
            x, y = (t.to(o.device) for t in window[0])
            errors[step] = beside_fp64(model, x, y, valid, o)
        for x, y in window:
            with autocast:
                loss = loss_of(model, model.hidden(x.to(o.device)), y.to(o.device), valid)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if not math.isfinite(total) or not math.isfinite(norms[-1]):
            raise SystemExit(f"{name}: not finite at step {step}: {total}, {norms[-1]}")
        if not o.quiet and (step % 50 == 0 or step == last):
            rate = (step + 1) / (time.time() - begin)
            print(f"{name:6} step {step:5} loss {total:.5f} {rate:.1f} steps/s", file=sys.stderr)
        if step == last:
            break
    weights = torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])
    seconds = time.time() - begin
    with torch.no_grad(), autocast:  # of the last micro-batch
        said = linear_cross_entropy(
            model.hidden(x.to(o.device)), model.head.weight, y.to(o.device), outputs=("loss",)
        )
    return {"losses": losses, "norms": norms, "weights": weights, "errors": errors,
            "lane": said.receipt()["lane"], "seconds": seconds}  # fmt: skip


def moved_by_one_ulp(state: dict, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    away = torch.tensor([-math.inf, math.inf])
    return {
        k: torch.nextafter(v, away[torch.randint(0, 2, v.shape, generator=generator)])
        for k, v in state.items()
    }


def distance(a: dict, b: dict) -> dict:
    gaps = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]
    weights = (a["weights"] - b["weights"]).norm() / b["weights"].norm()
    return {"loss_gaps": gaps, "loss_rms": math.sqrt(sum(g * g for g in gaps) / len(gaps)),
            "loss_max": max(gaps), "first_step": gaps[0], "weights": float(weights)}  # fmt: skip


def sampled(curve: list[float], most: int = 200) -> dict:
    """At most about `most` of the steps, first and last among them."""
    stride = max(1, -(-len(curve) // most))
    steps = sorted({*range(0, len(curve), stride), len(curve) - 1})
    return {"steps": steps, "values": [curve[i] for i in steps]}


def same_state_gates(errors: dict) -> list[dict]:
    """Talea's worst error over torch's of the same step, of dX and of dW. In fp32 both are a few roundings:
    torch's is taken as at least four of them."""
    least = 4 * torch.finfo(torch.float32).eps
    gates = []
    for what in ("dX", "dW"):
        worst = max(e[f"talea {what}"] / max(e[f"torch {what}"], least) for e in errors.values())
        gates.append({"name": f"same state: error of {what} over torch's", "value": worst,
                      "limit": 1.0, "passed": worst <= 1.0})  # fmt: skip
    return gates


def run(o) -> dict:
    text = b"".join(Path(p).read_bytes() for p in o.text)
    ids, o.words = words(text, o.vocabulary)
    tokens = torch.tensor(ids, dtype=torch.long)
    if len(tokens) < o.length + 2:
        raise SystemExit(f"--text: {len(tokens)} words; more than {o.length + 1} are needed")
    torch.manual_seed(o.seed)
    state = GPT(o.vocabulary, o.width, o.layers, o.heads).state_dict()
    plain = train("torch", torch_loss, state, tokens, o)
    o.steps = len(plain["losses"])
    ours = train("talea", talea_loss, state, tokens, o)
    moved = train("band", torch_loss, moved_by_one_ulp(state, o.seed + 1), tokens, o)
    drift, band = distance(ours, plain), distance(moved, plain)
    gates = same_state_gates(plain["errors"])
    void = not band["weights"] <= VOID
    # One-ulp twins are one sample of the noise; twice its size is the usual spread between samples.
    gates += [
        {"name": f"{what}: drift within twice the one-ulp band", "value": drift[what],
         "limit": 2 * band[what], "passed": drift[what] <= 2 * band[what]}
        for what in ("loss_rms", "weights") if not void
    ]  # fmt: skip
    fallen = ours["losses"][-1] / ours["losses"][0]
    gates.append({"name": "final over first loss", "value": fallen, "limit": 0.75,
                  "passed": fallen < 0.75})  # fmt: skip
    return {"runs": {"torch": plain, "talea": ours, "one ulp": moved}, "drift": drift,
            "band": band, "void": void, "gates": gates, "bytes": len(text)}  # fmt: skip


def sections(found: dict, o) -> dict:
    """The receipt's part; curves thinned, scalars over every step."""
    curves = [
        {"name": f"{name} loss", "y_label": "loss", **sampled(r["losses"])}
        for name, r in found["runs"].items()
    ]
    for name in ("drift", "band"):
        gaps = sampled(found[name]["loss_gaps"])
        curves.append({"name": f"{name} of the loss", "y_label": "absolute difference", **gaps})
    errors = found["runs"]["torch"]["errors"]
    for name in sorted({n for e in errors.values() for n in e}):
        curves.append({"name": f"same state, {name}", "y_label": "relative error beside fp64",
                       "steps": list(errors), "values": [e[name] for e in errors.values()]})  # fmt: skip
    kept = ("steps", "micro", "rows", "length", "width", "layers", "heads", "lr", "seed", "device",
            "vocabulary", "words", "judge")  # fmt: skip
    scalars = {
        name: {k: v for k, v in found[name].items() if k != "loss_gaps"}
        for name in ("drift", "band")
    }
    train = {
        "curves": curves,
        "settings": {k: getattr(o, k) for k in kept} | {"bf16": o.bf16, "optimizer": "AdamW"},
        "lane": found["runs"]["talea"]["lane"],
        "text_bytes": found["bytes"],
        "final_loss": {name: r["losses"][-1] for name, r in found["runs"].items()},
        "seconds": {name: r["seconds"] for name, r in found["runs"].items()},
        **scalars,
    }
    said = {"train": train, "gates": found["gates"]}
    if found["void"]:
        said["notes"] = [
            f"void as a comparison of whole runs: one-ulp twins end {found['band']['weights']:.1e} apart, "
            f"more than {VOID:.0e}; the gates from the same state decide"
        ]
    return said


def html_page(found: dict, o, passed: bool) -> str:
    rows = [("steps", o.steps), ("micro-batches a step", o.micro), ("device", o.device),
            ("autocast", "bf16" if o.bf16 else "off")]  # fmt: skip
    rows += [("words", f"{o.words} of {o.vocabulary}"),
             ("whole runs", "void: the band is wider than 1e-3" if found["void"] else "compared")]  # fmt: skip
    rows += [(f"final loss, {n}", f"{r['losses'][-1]:.6f}") for n, r in found["runs"].items()]
    rows += [(g["name"], f"{g['value']:.3e} (limit {g['limit']:.3e})") for g in found["gates"]]
    losses = {name: r["losses"] for name, r in found["runs"].items()}
    gaps = {"talea to torch": found["drift"]["loss_gaps"], "one ulp": found["band"]["loss_gaps"]}
    charts = [chart("Loss", losses, False), chart("Distance of the loss", gaps, True)]
    return page("Training parity: torch's loss and Talea's", passed, rows, charts)


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m talea.parity", description=__doc__.split("\n")[0])
    p.add_argument("--text", nargs="+", required=True)
    p.add_argument("--steps", type=int, default=850)
    p.add_argument("--seconds", type=float, default=math.inf,
                   help="fewer steps than --steps where the three runs would take longer")  # fmt: skip
    p.add_argument("--micro", type=int, default=2, help="micro-batches of an optimizer step")
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument(
        "--vocabulary", type=int, default=256, help="bytes, and runs of bytes up to this many"
    )
    p.add_argument(
        "--judge", type=int, default=50, help="steps between two comparisons from the same state"
    )
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--device", default="cpu")
    p.add_argument("--bf16", action="store_true", help="autocast to bf16")
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--json-out", help="the receipt")
    p.add_argument("--report", help="an HTML page")
    o = p.parse_args()
    start = now()
    found = run(o)
    passed = all(g["passed"] for g in found["gates"])
    if o.json_out:
        argv = ["python", "-m", "talea.parity", *sys.argv[1:]]
        title = "Training parity: torch's loss and Talea's"
        write_receipt(o.json_out, "train", title, passed, sections(found, o), start, argv)
    if o.report:
        write(o.report, html_page(found, o, passed))
    d, b = found["drift"], found["band"]
    finals = "  ".join(f"{n} {r['losses'][-1]:.6f}" for n, r in found["runs"].items())
    print(f"steps {o.steps}  final loss  {finals}")
    print(f"loss rms  drift {d['loss_rms']:.3e}  one-ulp band {b['loss_rms']:.3e}")
    print(f"weights   drift {d['weights']:.3e}  one-ulp band {b['weights']:.3e}")
    for g in found["gates"]:
        print(f"{g['name']}  {g['value']:.3e}  limit {g['limit']:.3e}")
    if found["void"]:
        print("whole runs: void, the band is wider than 1e-3")
    print("pass" if passed else "fail")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
