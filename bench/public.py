"""What: the public Python call with its autograd, every mode a page names, against plain products.
Why: a figure is what a user gets by the line they type, sustained: the chip's clock follows what
     ran in the last tenths of a second, and under its power limit joules decide milliseconds.
Never: times a call with prepared buffers, or a mode without measuring its memory and its error.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python python3 bench/public.py
       --receipt receipts/h200/public_8192x4096x128256.json
"""

import argparse
import gc
import statistics
import sys
import time

import talea
import torch
from energy import Power
from peer_truth import reference, relative_l2
from talea._receipt import device_name, now, write_receipt

MIB = 1 << 20
WARM_SECONDS, REST_SECONDS, REST_STEPS = 0.6, 0.25, 3


def plain(limit=None, **options):
    if limit:
        options["workspace_limit"] = limit * MIB
    return {"options": options}


OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
# name -> how the call is made; "late": what backward brings, "main": an fp32 main gradient
MODES = {
    "default": plain(),
    "2100 MiB": plain(2100),
    "700 MiB": plain(700),
    "265 MiB": plain(265),
    "135 MiB": plain(135),
    "265 MiB, dw_sum=weight": plain(265, dw_sum="weight"),
    "135 MiB, dw_sum=weight": plain(135, dw_sum="weight"),
    "main_grad, 1050 MiB": {**plain(1050, grad_scale=1.0), "main": True},
    "main_grad, 530 MiB": {**plain(530, grad_scale=1.0), "main": True},
    "main_grad, 265 MiB": {**plain(265, grad_scale=1.0), "main": True},
    "main_grad, 135 MiB": {**plain(135, grad_scale=1.0), "main": True},
    "main_grad, default": {**plain(grad_scale=1.0), "main": True},
    "loss / 3": {**plain(), "late": "scalar"},
    "late vector, 256 MiB": {**plain(256, reduction="none"), "late": "vector"},
    "frozen head, 256 MiB": {**plain(256), "frozen": True},
    "frozen head, late vector": {**plain(256, reduction="none"), "late": "vector", "frozen": True},
    "smoothing, z-loss, softcap": plain(**OPTIONS),
    "loss only": {**plain(), "loss_only": True},
    "cuda, default": plain(lane="cuda"),
    "cuda, 530 MiB, dw_sum=weight": plain(530, lane="cuda", dw_sum="weight"),
    "cuda, main_grad, 530 MiB": {**plain(530, lane="cuda", grad_scale=1.0), "main": True},
}


class Mode:
    def __init__(self, name, x, w, y, buffers):
        how = MODES[name]
        self.name, self.options = name, dict(how["options"])
        self.late, self.loss_only = how.get("late"), how.get("loss_only", False)
        self.x = x.detach().requires_grad_(not self.loss_only)
        self.w = w.detach().requires_grad_(not (self.loss_only or how.get("frozen", False)))
        self.y, self.main = y, None
        if how.get("main"):
            if "main" not in buffers:
                buffers["main"] = torch.zeros(w.shape, device=w.device)
            self.main = self.options["main_grad"] = buffers["main"]
        if self.late == "vector":
            if "vector" not in buffers:
                buffers["vector"] = torch.rand(y.shape, device=y.device) / y.numel()
            self.vector = buffers["vector"]
        self.limit_products = 1 if self.loss_only else 3

    def step(self, **more):
        self.x.grad = self.w.grad = None
        found = talea.linear_cross_entropy(self.x, self.w, self.y, **self.options, **more)
        loss = found.loss if more else found
        if self.loss_only:
            return found
        if self.late == "vector":
            loss.backward(self.vector)
        elif self.late == "scalar":
            (loss / 3).backward()
        else:
            loss.backward()
        return found

    def examine(self, truth):
        """Peak above inputs and returned gradients, products, errors."""
        gc.collect()  # what an earlier step left in cycles would be counted as freed by this one
        torch.cuda.synchronize()
        self.x.grad = self.w.grad = None
        if self.main is not None:
            self.main.zero_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        talea.require_clean()
        returned = sum(t.grad.numel() * t.grad.element_size()
                       for t in (self.x, self.w) if t.grad is not None)  # fmt: skip
        facts = {"extra_mib": (torch.cuda.max_memory_allocated() - before - returned) / MIB,
                 "total_mib": (torch.cuda.max_memory_allocated() - before) / MIB}  # fmt: skip
        scale = 3.0 if self.late == "scalar" else 1.0
        same = not set(self.options) & set(OPTIONS) and self.late != "vector"
        if same and self.x.grad is not None:
            facts["dx_relative_l2"] = relative_l2(self.x.grad.float() * scale, truth[1])
        dw = self.main if self.main is not None else self.w.grad
        if same and dw is not None:
            facts["dw_relative_l2"] = relative_l2(dw.float() * scale, truth[2])
        receipt = self.step(outputs=("loss",)).receipt()
        facts["products"] = round(receipt["products"], 2)
        facts["lane"] = receipt["lane"]
        facts["plan"] = {k: receipt[k] for k in ("chunk_rows", "chunks", "workspace_bytes")}
        facts["plan"]["accumulator_dw"] = receipt["accumulators"]["dw"]
        self.x.grad = self.w.grad = None
        return facts


class Meter:
    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(device_name())

    def joules(self):
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000

    def clock(self):
        return self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)


def timed(work, steps):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def sustained(work, meter, seconds):
    """ms and joules a step, and the clock at the end, back to back after WARM_SECONDS of the same."""
    work()
    each = timed(work, 3)
    timed(work, max(3, int(WARM_SECONDS * 1000 / each)))
    steps = max(5, int(seconds * 1000 / each))
    clocks = []
    ms = 0.0
    with Power(meter.joules) as power:
        for part in range(4):  # the clock is read while work is queued
            n = steps * (part + 1) // 4 - steps * part // 4
            ms += timed(work, n) * n
            clocks.append(meter.clock())
    ms /= steps
    return {"ms": ms, "joules": power.watts() * ms / 1000, "sm_mhz": statistics.median(clocks)}


def rested(work):
    times = []
    for _ in range(REST_STEPS):
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        times.append(timed(work, 1))
    return statistics.median(times)


def products_of(x, w):
    z = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def all_three():
        torch.mm(x, w.T, out=z)
        torch.mm(z, w, out=dx)
        torch.mm(z.T, x, out=dw)

    return {3: all_three, 1: lambda: torch.mm(x, w.T, out=z)}


def measure(modes, limits, meter, seconds):
    """Two rounds, the second in reverse; each mode's ratio is to the products before and after."""
    rounds = []
    for order in (modes, modes[::-1]):
        base = {k: sustained(work, meter, seconds) for k, work in limits.items()}
        found = {}
        for mode in order:
            found[mode.name] = sustained(mode.step, meter, seconds)
        again = {k: sustained(work, meter, seconds) for k, work in limits.items()}
        mean = {k: {f: (base[k][f] + again[k][f]) / 2 for f in ("ms", "joules", "sm_mhz")}
                for k in base}  # fmt: skip
        rounds.append((mean, found))
    return rounds


def runs_of(modes, rounds, rests, rest_limits, facts, case):
    runs = []
    for k, name in ((3, "three plain products"), (1, "logits product")):
        if k in rounds[0][0]:
            means = [r[0][k] for r in rounds]
            runs.append({"name": name, "case": case, "sustained_ms": [m["ms"] for m in means],
                         "joules": [m["joules"] for m in means], "rest_ms": rest_limits[k],
                         "sm_mhz": means[-1]["sm_mhz"]})  # fmt: skip
    for mode in modes:
        k = mode.limit_products
        ratios = [r[1][mode.name]["ms"] / r[0][k]["ms"] for r in rounds]
        joules = [r[1][mode.name]["joules"] / r[0][k]["joules"] for r in rounds]
        runs.append({
            "name": mode.name, "case": case,
            "sustained_ratio": statistics.mean(ratios), "sustained_ratios": ratios,
            "sustained_ms": [r[1][mode.name]["ms"] for r in rounds],
            "joules_ratio": statistics.mean(joules),
            "rest_ratio": rests[mode.name] / rest_limits[k],
            "sm_mhz": rounds[-1][1][mode.name]["sm_mhz"], **facts[mode.name],
        })  # fmt: skip
    return runs


def show(runs):
    for r in runs:
        if "sustained_ratio" not in r:
            print(f"{r['name']:32s} {r['sustained_ms'][0]:8.2f} ms {r['joules'][0]:6.2f} J")
            continue
        errors = [f"{k[:2]} {r[k]:.2e}" for k in ("dx_relative_l2", "dw_relative_l2") if k in r]
        print(f"{r['name']:32s} {r['sustained_ratio']:.3f} ({r['sustained_ratios'][0]:.3f} "
              f"{r['sustained_ratios'][1]:.3f}) J {r['joules_ratio']:.3f} rest {r['rest_ratio']:.3f} "
              f"{r['extra_mib']:7.1f} MiB, {r['products']} products {' '.join(errors)} "
              f"{r['sm_mhz']} MHz {r['plan']}")  # fmt: skip


def parser_of(about, seconds):
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each sustained run")
    parser.add_argument("--modes", help="names, parted by ';' (default: all)")
    parser.add_argument("--receipt", help="where to write it, .json")
    return parser


def drawn(args, device):
    """Hidden states, weight and targets, the same for the same sizes; and their truth."""
    torch.manual_seed(1)
    x = torch.randn(args.tokens, args.hidden, device=device).bfloat16()
    w = (torch.randn(args.vocab, args.hidden, device=device) / args.hidden**0.5).bfloat16()
    y = torch.randint(args.vocab, (args.tokens,), device=device)
    truth = reference(x, w, y)
    torch.cuda.empty_cache()
    return x, w, y, truth


def main():
    args = parser_of(__doc__, seconds=2.0).parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, device = now(), torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    x, w, y, truth = drawn(args, device)
    wanted = args.modes.split(";") if args.modes else list(MODES)
    buffers, facts, modes, not_run = {}, {}, [], {}
    for name in wanted:
        mode = Mode(name, x, w, y, buffers)
        try:
            mode.step()
            facts[name] = mode.examine(truth)
            modes.append(mode)
        except talea.Error as error:
            not_run[name] = str(error).splitlines()[0]
            print(f"{name}: {not_run[name]}", flush=True)
    del truth
    meter, limits = Meter(), products_of(x, w)
    if not any(m.loss_only for m in modes):
        del limits[1]
    rounds = measure(modes, limits, meter, args.seconds)
    rests = {m.name: rested(m.step) for m in modes}
    rest_limits = {k: rested(work) for k, work in limits.items()}
    case = f"{args.tokens}x{args.hidden}x{args.vocab}"
    runs = runs_of(modes, rounds, rests, rest_limits, facts, case)
    show(runs)
    talea.require_clean()
    if args.receipt:
        title = f"The public Python call, {args.tokens} tokens, hidden {args.hidden}, vocabulary "
        limit = ("three plain products (torch.mm, bf16), sustained: back to back for the same time "
                 "after 0.6 s of the same, before and after each round")  # fmt: skip
        sections = {"bench": {"limit": limit, "runs": runs, "not_run": not_run},
                    "notes": ["two rounds, the second in reverse order; ratios are their mean",
                              "truth: fp32 products of the bf16 inputs"]}  # fmt: skip
        for r in sections["bench"]["runs"]:  # what every run of a receipt has: of the two rounds
            rounds = sorted(r["sustained_ms"])
            r["time"] = {"median_ms": sum(rounds) / len(rounds), "p20_ms": rounds[0],
                         "p80_ms": rounds[-1], "n": len(rounds)}  # fmt: skip
        argv = ["python3", "bench/public.py", *sys.argv[1:]]
        write_receipt(args.receipt, "bench", f"{title}{args.vocab}, bf16", None, sections, start,
                      argv)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
