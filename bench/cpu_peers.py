# What: PyTorch eager, every mode of torch's linear_cross_entropy, and Talea's cpu lane, interleaved
#       in one process, forward and backward, with medians and peak memory.
# Why: times of different processes do not compare; ratios of one interleaved run do.
# Never: tunes one side; all see the same tensors and the same number of threads.
# usage: TALEA_LIBRARY=build/lib/libtalea.so PYTHONPATH=python python bench/cpu_peers.py
#        [--tokens 1024 --hidden 768 --vocab 32000 --dtype float32 --repeats 3]
#        [--receipt FILE --tool build/bin/talea]
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import talea.functional
import torch
import torch.nn.functional as F
from samples import Peak, time_stats


def torch_modes():
    """Options of F.linear_cross_entropy: None is its reference, {} what it chooses by itself."""
    yield "options None", None
    yield "auto", {}
    for policy in ("accurate", "balanced", "compact"):
        yield policy, {"acc_policy": policy}
    for rows in (256, 512):
        yield f"chunk {rows}", {"batch_chunk_size": rows}


def subjects():
    found = {
        "talea cpu": lambda x, w, y: talea.functional.linear_cross_entropy(x, w, y, lane="cpu"),
        "talea cpu, workspace 64 MiB": lambda x, w, y: talea.functional.linear_cross_entropy(
            x, w, y, lane="cpu", workspace_limit=64 << 20
        ),
        "torch eager": lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
    }
    for name, mode in torch_modes():
        options = None if mode is None else torch.nn.LinearCrossEntropyOptions(**mode)
        found[f"torch linear_cross_entropy {name}"] = lambda x, w, y, options=options: (
            F.linear_cross_entropy(x, w, y, options=options)
        )
    return found


def step(call, x, w, y):
    x.grad = w.grad = None
    begin = time.perf_counter()
    loss = call(x, w, y)
    loss.backward()
    return 1e3 * (time.perf_counter() - begin), loss.item()


def products(x, w):
    begin = time.perf_counter()
    z = x @ w.T
    z @ w
    z.T @ x
    return 1e3 * (time.perf_counter() - begin)


def first_calls(calls, x, w, y):
    """Warms up; loss and peak memory of a second step; what refuses or falls back is left out."""
    peaks, losses, refused = {}, {}, {}
    for name, call in list(calls.items()):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                losses[name] = step(call, x, w, y)[1]
                # A gradient kept from the last step would count as memory that was there before.
                x.grad = w.grad = None
                with Peak() as peak:
                    step(call, x, w, y)
                peaks[name] = peak.bytes
                why = "; ".join(str(m.message) for m in said if "fall" in str(m.message))
            except (RuntimeError, TypeError, ValueError) as error:
                why = str(error)
        if why:
            refused[name] = why.splitlines()[0]
            del calls[name]
    return peaks, losses, refused


def measure(calls, x, w, y, repeats):
    plain = x.detach().float(), w.detach().float()
    products(*plain)
    times, ratios, to_talea, limits = {}, {}, {}, []
    for turn in range(repeats):
        spent, names = {}, list(calls)
        limits.append(products(*plain))
        # Another one is the first each time: whoever follows the products finds their memory cold.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent[name] = step(calls[name], x, w, y)[0]
        limits.append(products(*plain))
        for name, ms in spent.items():
            times.setdefault(name, []).append(ms)
            ratios.setdefault(name, []).append(2 * ms / sum(limits[-2:]))
            to_talea.setdefault(name, []).append(ms / spent["talea cpu"])
    return times, ratios, to_talea, limits


def runs_of(a, figures, peaks, losses, refused):
    times, ratios, to_talea, limits = figures
    case = f"{a.tokens}x{a.hidden}x{a.vocab} {a.dtype}"
    runs = [
        {"name": "three plain products", "case": case, "time": time_stats(limits), "ratio": 1.0}
    ]
    for name in times:
        run = {"name": name, "case": case, "time": time_stats(times[name])}
        run |= {"ratio": statistics.median(ratios[name]), "extra_bytes": max(0, peaks[name])}
        run |= {"ratio_to_first": statistics.median(to_talea[name]), "loss": losses[name]}
        runs.append(run)
    limit = "the three plain products of the same process in fp32 (torch matmul), before and after "
    limit += f"each round; {torch.get_num_threads()} threads"
    notes = [f"{name}: left out, {why}" for name, why in refused.items()]
    notes.append("extra memory: peak resident set of a step, gradients included, above that before")
    return {"limit": limit, "first": "talea cpu", "runs": runs}, notes


def write_receipt(a, bench, notes, start):
    """Through the tool: one program writes receipts and checks them against the schema."""
    document = {
        "argv": ["python", *sys.argv],
        "start_time": start,
        "title": f"Talea and PyTorch on a CPU: {bench['runs'][0]['case']}",
        "libraries": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "notes": notes,
        "bench": bench,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(document, f)
        f.flush()
        subprocess.run(
            [a.tool, "bench", "--runs-from", f.name, "--receipt", a.receipt, "--quiet"],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--hidden", type=int, default=768)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--receipt")
    p.add_argument("--tool", default=os.path.join("build", "bin", "talea"))
    a = p.parse_args()
    start = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    torch.manual_seed(1)
    dtype = getattr(torch, a.dtype)
    x = torch.randn(a.tokens, a.hidden).to(dtype).requires_grad_()
    w = (torch.randn(a.vocab, a.hidden) / a.hidden**0.5).to(dtype).requires_grad_()
    y = torch.randint(0, a.vocab, (a.tokens,))
    calls = subjects()
    peaks, losses, refused = first_calls(calls, x, w, y)
    bench, notes = runs_of(a, measure(calls, x, w, y, a.repeats), peaks, losses, refused)
    for run in sorted(bench["runs"], key=lambda r: r["ratio"]):
        extra = f"{run['extra_bytes'] / 2**20:8.0f} MiB" if "extra_bytes" in run else ""
        print(
            f"  {run['name']:56} {run['time']['median_ms']:9.1f} ms {run['ratio']:6.2f} x {extra}"
        )
    print(*notes, sep="\n")
    if a.receipt:
        write_receipt(a, bench, notes, start)


if __name__ == "__main__":
    main()
