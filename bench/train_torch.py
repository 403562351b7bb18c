"""The model of `talea train` in PyTorch, from the same weights, data and rules, step by step.

Why: the whole stack (model, loss, clipping, AdamW) must train as torch does, and as fast.
Run: python bench/train_torch.py --talea build/bin/talea --text README.md src/train/*.cpp \\
         --steps 850 --json-out out/train_torch.json   (torch 2.13, CPU, safetensors)
Exit: 0 inside the band, 1 outside.
"""

import argparse
import hashlib
import json
import math
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

MASK = (1 << 64) - 1
HIDDEN, HEADS, LAYERS, SEQ, ACCUM = 64, 4, 2, 8, 8
EPOCH_TOKENS = 131072


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def windows(text, seed, epoch):
    """Offsets of the text's windows in the order in which an epoch draws them."""
    count = (len(text) - 1) // SEQ
    key = mix(mix(seed) ^ (((10 + 100 * epoch) * 0xD1342543DE82EF95) & MASK))
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = int((mix(key ^ mix(i)) >> 11) * 2.0**-53 * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


def micro_steps(text, seed, steps):
    per_epoch = EPOCH_TOKENS // SEQ
    order, epoch = None, -1
    for cursor in range(steps * ACCUM):
        if cursor // per_epoch != epoch:
            epoch = cursor // per_epoch
            order = windows(text, seed, epoch)
        at = order[cursor % per_epoch % len(order)] * SEQ
        piece = torch.tensor(list(text[at : at + SEQ + 1]))
        yield piece[:-1], piece[1:]


def rms_norm(x, gain):
    return gain.reshape(-1) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Model:
    def __init__(self, params, dtype):
        self.p = {k: torch.nn.Parameter(v.to(dtype, copy=True)) for k, v in params.items()}
        half = HIDDEN // HEADS // 2
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(SEQ, dtype=torch.float64)[:, None] * inverse
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def rotate(self, x):  # [heads, tokens, size]
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def attention(self, x, name):
        def heads(w):
            return F.linear(x, self.p[f"{name}.{w}"]).view(SEQ, HEADS, -1).transpose(0, 1)

        q, k, v = self.rotate(heads("wq")), self.rotate(heads("wk")), heads("wv")
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return F.linear(y.transpose(0, 1).reshape(SEQ, HIDDEN), self.p[f"{name}.wo"])

    def loss(self, ids, targets):
        p = self.p
        x = p["embedding"][ids]
        for i in range(LAYERS):
            b = f"block{i}"
            x = x + self.attention(rms_norm(x, p[f"{b}.norm1"]), f"{b}.mixer")
            n = rms_norm(x, p[f"{b}.norm2"])
            act = F.silu(F.linear(n, p[f"{b}.gate"])) * F.linear(n, p[f"{b}.up"])
            x = x + F.linear(act, p[f"{b}.down"])
        return F.cross_entropy(F.linear(rms_norm(x, p["final_norm"]), p["head"]), targets)


def train(params, text, seed, steps, dtype):
    model = Model(params, dtype)
    optimizer = torch.optim.AdamW(model.p.values(), lr=1e-3, weight_decay=0.01)
    losses, seconds = [], []
    data = list(micro_steps(text, seed, steps))
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for ids, targets in data[step * ACCUM : (step + 1) * ACCUM]:
            loss = model.loss(ids, targets) / ACCUM
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.p.values(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(total)
    return losses, seconds, model.p


def talea(args, folder, steps, twins):
    out = folder / "run.json"
    command = [args.talea, "train", "--text", *args.text, "--max-steps", str(steps)]
    command += ["--seed", str(args.seed), "--json-out", str(out), "--threads", str(args.threads)]
    command += ["--initial-parameters-out", str(folder / "initial.safetensors")]
    command += [
        "--checkpoint",
        str(folder / f"state{steps}{twins}"),
        "--checkpoint-every",
        "100000",
    ]
    command += ["--twins", str(twins), "--progress", "none", "--quiet"]
    if twins == 0:
        command.append("--no-same-state")
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"talea train ended with {done.returncode}")
    run = json.loads(out.read_text())
    state = load_file(folder / f"state{steps}{twins}" / "checkpoint.safetensors")
    for file in (folder / f"state{steps}{twins}").iterdir():
        file.unlink()
    return run, state


def curve(run, name):
    return next(c["values"] for c in run["train"]["curves"] if c["name"] == name)


def distance(params, state, who):
    """Relative L2 between torch's parameters and those of a run in the checkpoint."""
    difference = norm = 0.0
    for name, value in params.items():
        ours = state[f"{who}/params/{name}"].double()
        difference += (value.detach().double() - ours).pow(2).sum().item()
        norm += ours.pow(2).sum().item()
    return math.sqrt(difference / norm)


def interleaved(args, folder, params, text, steps, rounds):
    ours, theirs = [], []
    for _ in range(rounds):
        run, _ = talea(args, folder, steps, 0)
        ours.append(run["train"]["seconds_per_update"]["median_ms"])
        _, seconds, _ = train(params, text, args.seed, steps, torch.float32)
        theirs.append(statistics.median(seconds) * 1e3)
    return ours, theirs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--talea", default="build/bin/talea")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json-out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = b"".join(pathlib.Path(f).read_bytes() for f in args.text)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run, state = talea(args, folder, args.steps, 2)
        params = load_file(folder / "initial.safetensors")
        fp32, _, trained32 = train(params, text, args.seed, args.steps, torch.float32)
        fp64, _, trained64 = train(params, text, args.seed, args.steps, torch.float64)
        ours, theirs = interleaved(args, folder, params, text, min(args.steps, 100), args.rounds)
    band = max(curve(run, "loss noise band"))
    result = {
        "steps": args.steps,
        "seed": args.seed,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "loss_lane": run["train"]["loss_lane_that_ran"],
        "largest_loss_noise_band": band,
        "largest_loss_difference_from_torch_fp32": max(
            abs(a - b) for a, b in zip(curve(run, "loss"), fp32, strict=False)
        ),
        "largest_loss_difference_from_torch_fp64": max(
            abs(a - b) for a, b in zip(curve(run, "loss"), fp64, strict=False)
        ),
        "largest_loss_difference_of_torch_fp32_from_fp64": max(
            abs(a - b) for a, b in zip(fp32, fp64, strict=False)
        ),
        "largest_difference_of_the_fp64_stacks": max(
            abs(a - b) for a, b in zip(curve(run, "reference loss"), fp64, strict=False)
        ),
        "parameters_from_torch_fp32": distance(trained32, state, "candidate"),
        "parameters_from_torch_fp64": distance(trained64, state, "candidate"),
        "torch_fp32_parameters_from_fp64": distance(trained32, state, "reference"),
        "fp64_parameters_from_torch_fp64": distance(trained64, state, "reference"),
        "twin_parameters_from_fp64": max(curve(run, "parameter noise band")),
        "final_loss": {"ours": curve(run, "loss")[-1], "torch": fp32[-1]},
        "ms_per_update": {"ours": ours, "torch": theirs},
        "time_ratio_ours_over_torch": statistics.median(ours) / statistics.median(theirs),
        "threads": args.threads,
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "talea": run["provenance"]["build"] if "build" in run["provenance"] else run["provenance"],
    }
    # Against torch in fp64: at most four times the noise of a run moved by one ulp. Against torch in
    # fp32: the same, and what torch's own fp32 arithmetic costs it.
    noise, moved = 4 * band, 4 * result["twin_parameters_from_fp64"]
    result["passed"] = (
        result["largest_loss_difference_from_torch_fp64"] <= noise
        and result["largest_loss_difference_from_torch_fp32"]
        <= noise + result["largest_loss_difference_of_torch_fp32_from_fp64"]
        and result["parameters_from_torch_fp64"] <= moved
        and result["parameters_from_torch_fp32"]
        <= moved + result["torch_fp32_parameters_from_fp64"]
        and result["largest_difference_of_the_fp64_stacks"] <= 1e-9
    )
    print(json.dumps(result, indent=2))
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
