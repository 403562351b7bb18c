"""The model of `talea train` in PyTorch, from the same weights, data and rules, step by step.

Why: the whole stack (model, loss, clipping, AdamW) must train as torch does, and as fast.
Run, from the repository root (torch 2.13, CPU, safetensors):
    python bench/train_torch.py --text README.md src/train/*.cpp --json-out out/train_torch.json
Writes a receipt of kind "train". Exit: 0 every gate passed, 1 not. docs/train.md derives the gates.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from counter import key_of, mix
from safetensors.torch import load_file

HIDDEN, HEADS, LAYERS, ACCUM = 64, 4, 2, 8
EPOCH_TOKENS = 131072
ULP32 = 6e-8  # as in src/train/step_checks.cpp: a drift below it is no drift
BANDS = 4  # as there: candidate and twins are single draws of one noise
TO_FP64 = 2.0**-29  # 2^-53 / 2^-24: the same noise in fp64


def windows(count, seed, epoch):
    """The text's windows in the order in which an epoch draws them."""
    key = key_of(seed, 10 + 100 * epoch)
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = int((mix(key ^ mix(i)) >> 11) * 2.0**-53 * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


class Data:
    """Micro-steps [batch, seq_len] of inputs and next bytes, as the stream `text` draws them."""

    def __init__(self, text, args):
        self.text, self.batch, self.seq, self.seed = text, args.batch, args.seq_len, args.seed
        self.count = (len(text) - 1) // self.seq
        self.per_epoch = EPOCH_TOKENS // (self.seq * self.batch)
        self.epoch, self.order = -1, None

    def micro(self, cursor):
        if cursor // self.per_epoch != self.epoch:
            self.epoch = cursor // self.per_epoch
            self.order = windows(self.count, self.seed, self.epoch)
        first = cursor % self.per_epoch * self.batch
        rows = []
        for q in range(self.batch):
            at = self.order[(first + q) % self.count] * self.seq
            rows.append(list(self.text[at : at + self.seq + 1]))
        piece = torch.tensor(rows)
        return piece[:, :-1], piece[:, 1:]


def rms_norm(x, gain):
    return gain.reshape(-1) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Run:
    """One training run. `moved`: seed of a move of every weight by one fp32 ulp, up or down."""

    def __init__(self, params, dtype, seq, moved=None):
        self.p = {}
        for k, v in params.items():
            if moved is not None:
                up = torch.rand(v.shape, generator=moved) < 0.5
                v = torch.nextafter(v, torch.where(up, math.inf, -math.inf))
            self.p[k] = torch.nn.Parameter(v.to(dtype, copy=True))
        self.seq = seq
        half = HIDDEN // HEADS // 2
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(seq, dtype=torch.float64)[:, None] * inverse
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.optimizer = torch.optim.AdamW(self.p.values(), lr=1e-3, weight_decay=0.01)

    def rotate(self, x):  # [batch, heads, tokens, size]
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def attention(self, x, name):
        def heads(w):
            return F.linear(x, self.p[f"{name}.{w}"]).view(-1, self.seq, HEADS, HIDDEN // HEADS)

        q, k, v = (heads(w).transpose(1, 2) for w in ("wq", "wk", "wv"))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(x.shape), self.p[f"{name}.wo"])

    def loss(self, ids, targets):
        p = self.p
        x = p["embedding"][ids]
        for i in range(LAYERS):
            b = f"block{i}"
            x = x + self.attention(rms_norm(x, p[f"{b}.norm1"]), f"{b}.mixer")
            n = rms_norm(x, p[f"{b}.norm2"])
            act = F.silu(F.linear(n, p[f"{b}.gate"])) * F.linear(n, p[f"{b}.up"])
            x = x + F.linear(act, p[f"{b}.down"])
        logits = F.linear(rms_norm(x, p["final_norm"]), p["head"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self, micros):
        """One update; the window's loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for ids, targets in micros:
            loss = self.loss(ids, targets) / ACCUM
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.p.values(), 1.0)
        self.optimizer.step()
        return total


def distance(params, other):
    """Relative L2 of all parameters together, in fp64."""
    difference = norm = 0.0
    for name, value in params.items():
        theirs = other[name].detach().double()
        difference += (value.detach().double() - theirs).pow(2).sum().item()
        norm += theirs.pow(2).sum().item()
    return math.sqrt(difference / norm)


def talea(args, folder, steps, twins, threads):
    out, state = folder / "run.json", folder / "state"
    command = [args.talea, "train", "--text", *args.text, "--max-steps", str(steps)]
    command += ["--seed", str(args.seed), "--seq-len", str(args.seq_len)]
    command += ["--batch", str(args.batch), "--loss-lane", args.loss_lane]
    command += ["--json-out", str(out), "--threads", str(threads), "--twins", str(twins)]
    command += ["--initial-parameters-out", str(folder / "initial.safetensors")]
    command += ["--checkpoint", str(state), "--checkpoint-every", "1000000", "--quiet"]
    if twins == 0:
        command.append("--no-same-state")
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"talea train ended with {done.returncode}")
    trained = load_file(state / "checkpoint.safetensors")
    for file in state.iterdir():
        file.unlink()
    return json.loads(out.read_text()), trained


def of(trained, who):
    head = f"{who}/params/"
    return {k[len(head) :]: v for k, v in trained.items() if k.startswith(head)}


def curve(run, name):
    return next(c["values"] for c in run["train"]["curves"] if c["name"] == name)


def train_all(args, data, params, steps):
    """torch in fp64, in fp32, and in fp32 from weights moved by one ulp: losses of every step."""
    runs = [Run(params, torch.float64, args.seq_len), Run(params, torch.float32, args.seq_len)]
    for i in range(args.twins):
        generator = torch.Generator().manual_seed(args.seed + 1000 + i)
        runs.append(Run(params, torch.float32, args.seq_len, generator))
    losses = [[] for _ in runs]
    for step in range(steps):
        micros = [data.micro(step * ACCUM + i) for i in range(ACCUM)]
        for run, seen in zip(runs, losses, strict=True):
            seen.append(run.step(micros))
    return [run.p for run in runs], losses


def apart(a, b):
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def largest(curves):
    return [max(values) for values in zip(*curves, strict=True)]


def worst_ratio(differences, bands, losses, ulp):
    """The largest so far over the band's largest so far, its worst over all steps. NaN stays."""
    worst = difference = band = 0.0
    for d, b, loss in zip(differences, bands, losses, strict=True):
        difference = d if not d <= difference else difference
        band = b if not b <= band else band
        ratio = difference / (band + ulp * max(1.0, abs(loss)))
        worst = ratio if not ratio <= worst else worst
    return worst


def gate(name, text, value, limit):
    return {"name": name, "text": text, "value": value, "limit": limit, "passed": value <= limit}


def parity(args, folder, text):
    ours, trained = talea(args, folder, args.steps, 8, 1)
    params = load_file(folder / "initial.safetensors")
    theirs, losses = train_all(args, Data(text, args), params, args.steps)
    fp64, fp32, moved = losses[0], losses[1], losses[2:]
    mine, reference = curve(ours, "loss"), curve(ours, "reference loss")
    our_band = curve(ours, "loss noise band")
    torch_band = largest([apart(m, fp64) for m in moved])
    both = [a + b for a, b in zip(our_band, torch_band, strict=True)]

    def loss_gate(name, text, a, b, bands, scale=1.0):
        ratio = worst_ratio(apart(a, b), [x * scale for x in bands], fp64, ULP32 * scale)
        return gate(f"loss: {name}", text, ratio, BANDS)

    def params_gate(name, text, a, b, band):
        return gate(f"parameters: {name}", text, distance(a, b) / band, BANDS)

    candidate, our64 = of(trained, "candidate"), of(trained, "reference")
    our_params = max(distance(of(trained, f"other{i}"), our64) for i in range(1, 9))
    torch_params = max(distance(p, theirs[0]) for p in theirs[2:])
    texts = [
        ("our fp64 to torch fp64", "in fp64's share, 2^-29, of our one-ulp band"),
        ("candidate to torch fp64", "in our one-ulp band"),
        ("candidate to torch fp64, torch's band", "in torch's own one-ulp band"),
        ("torch fp32 to torch fp64", "torch itself in torch's one-ulp band: the yardstick holds"),
        ("candidate to torch fp32", "in the sum of both bands, by the triangle inequality"),
    ]
    gates = [
        loss_gate(*texts[0], reference, fp64, our_band, TO_FP64),
        loss_gate(*texts[1], mine, fp64, our_band),
        loss_gate(*texts[2], mine, fp64, torch_band),
        loss_gate(*texts[3], fp32, fp64, torch_band),
        loss_gate(*texts[4], mine, fp32, both),
        params_gate(*texts[0], our64, theirs[0], our_params * TO_FP64),
        params_gate(*texts[1], candidate, theirs[0], our_params),
        params_gate(*texts[2], candidate, theirs[0], torch_params),
        params_gate(*texts[3], theirs[1], theirs[0], torch_params),
        params_gate(*texts[4], candidate, theirs[1], our_params + torch_params),
    ]
    curves = {
        "loss": mine,
        "torch fp32 loss": fp32,
        "candidate from torch fp64": apart(mine, fp64),
        "torch fp32 from torch fp64": apart(fp32, fp64),
        "candidate from torch fp32": apart(mine, fp32),
        "our fp64 from torch fp64": apart(reference, fp64),
        "our noise band": our_band,
        "torch's noise band": torch_band,
    }
    facts = {
        "final_loss": {"candidate": mine[-1], "torch fp32": fp32[-1], "torch fp64": fp64[-1]},
        "largest_loss_difference": {k: max(v) for k, v in curves.items() if "loss" not in k},
        "parameters": {
            "candidate_from_torch_fp64": distance(candidate, theirs[0]),
            "torch_fp32_from_torch_fp64": distance(theirs[1], theirs[0]),
            "candidate_from_torch_fp32": distance(candidate, theirs[1]),
            "our_fp64_from_torch_fp64": distance(our64, theirs[0]),
            "our_band": our_params,
            "torch_band": torch_params,
        },
    }
    return ours, params, gates, curves, facts


def timed(args, folder, params, text):
    """Median ms an update, ours and torch's in turn, each with one thread and with two."""
    found = {f"{who}, {t} threads": [] for t in args.threads for who in ("ours", "torch")}
    data = Data(text, args)
    micros = [data.micro(i) for i in range(args.timed_steps * ACCUM)]
    for _ in range(args.rounds):
        for threads in args.threads:
            run, _ = talea(args, folder, args.timed_steps, 0, threads)
            found[f"ours, {threads} threads"].append(
                run["train"]["seconds_per_update"]["median_ms"]
            )
            torch.set_num_threads(threads)
            theirs, seconds = Run(params, torch.float32, args.seq_len), []
            for step in range(args.timed_steps):
                start = time.perf_counter()
                theirs.step(micros[step * ACCUM : (step + 1) * ACCUM])
                seconds.append(time.perf_counter() - start)
            found[f"torch, {threads} threads"].append(statistics.median(seconds) * 1e3)
    medians = {k: statistics.median(v) for k, v in found.items()}
    best = {w: min(v for k, v in medians.items() if k.startswith(w)) for w in ("ours", "torch")}
    facts = {"rounds_ms": found, "median_ms": medians, "updates_a_round": args.timed_steps}
    facts["ratio_ours_over_torch"] = best["ours"] / best["torch"]
    text = "best thread count of ours over the best of torch, interleaved on the same cores"
    return facts, gate("time an update", text, facts["ratio_ours_over_torch"], 1.0)


def thinned(name, values, points):
    stride = max(1, -(-len(values) // points))
    at = [i for i in range(len(values)) if i in (0, len(values) - 1) or (i + 1) % stride == 0]
    kept = [values[i] if math.isfinite(values[i]) else str(values[i]) for i in at]
    return {"name": name, "y_label": "nats", "steps": [i + 1 for i in at], "values": kept}


def receipt(args, ours, gates, curves, facts):
    document = {k: ours[k] for k in ("schema_version", "kind", "provenance")}
    document["title"] = "talea train against PyTorch"
    document["verdict"] = "passed" if all(g["passed"] for g in gates) else "failed"
    document["provenance"]["argv"] = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
    document["provenance"]["libraries"]["torch"] = torch.__version__
    document["provenance"]["end_time"] = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    run = ours["train"]
    document["train"] = {k: run[k] for k in ("config", "loss_lane_that_ran", "parameters")}
    document["train"] |= facts
    document["train"] |= {"updates": args.steps, "torch_twins": args.twins, "our_twins": 8}
    document["train"]["curves"] = [thinned(k, v, args.curve_points) for k, v in curves.items()]
    document["train"]["charts"] = [
        {"title": "Loss", "text": "Candidate and torch.", "log_y": False,
         "curves": ["loss", "torch fp32 loss"]},
        {"title": "Loss difference", "text": "And the one-ulp bands of both stacks.",
         "log_y": True, "curves": [k for k in curves if "loss" not in k]},
    ]  # fmt: skip
    document["gates"] = gates
    return document


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--talea", default="build/bin/talea")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--seq-len", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--loss-lane", default="cpu")
    parser.add_argument("--twins", type=int, default=4, help="of torch, moved by one ulp")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timed-steps", type=int, default=50)
    parser.add_argument("--curve-points", type=int, default=85)
    parser.add_argument("--json-out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = b"".join(pathlib.Path(f).read_bytes() for f in args.text)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ours, params, gates, curves, facts = parity(args, folder, text)
        facts["text_sha256"] = hashlib.sha256(text).hexdigest()
        facts["time"], faster = timed(args, folder, params, text)
    gates.append(faster)
    document = receipt(args, ours, gates, curves, facts)
    out = pathlib.Path(args.json_out)
    beside = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    beside.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    beside.rename(out)
    for g in gates:
        print(
            f"{'passed' if g['passed'] else 'FAILED'}  {g['value']:9.3g} of {g['limit']:g}  {g['name']}"
        )
    return 0 if document["verdict"] == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
