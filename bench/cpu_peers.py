# What: PyTorch eager, every mode of torch's linear_cross_entropy, and Talea, interleaved in one
#       process, forward and backward, with medians and extra memory.
# Why: times of different processes do not compare; ratios of one interleaved run do.
# Never: tunes one side; all see the same tensors and the same number of threads.
# usage: TALEA_LIBRARY=build/lib/libtalea.so PYTHONPATH=python python bench/cpu_peers.py
#        [--tokens 1024 --hidden 768 --vocab 32000 --dtype float32 --repeats 5 --json FILE]
import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import threading
import time

import talea.functional
import torch
import torch.nn.functional as F


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident size while open, above that at entry; sampled every millisecond."""

    def __enter__(self):
        gc.collect()
        self.before = self.peak = resident_bytes()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.stop.wait(0.001):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_):
        self.peak = max(self.peak, resident_bytes())
        self.stop.set()
        self.thread.join()
        self.bytes = self.peak - self.before


def subjects():
    found = {
        "torch eager": lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        "talea cpu": lambda x, w, y: talea.functional.linear_cross_entropy(x, w, y, lane="cpu"),
    }
    found["F.linear_cross_entropy options=None"] = F.linear_cross_entropy
    modes = [{}] + [{"acc_policy": policy} for policy in ("accurate", "balanced", "compact")]
    modes += [{"batch_chunk_size": rows} for rows in (256, 512, 1024)]
    for mode in modes:
        said = ", ".join(f"{k}={v}" for k, v in mode.items()) or "auto"
        options = torch.nn.LinearCrossEntropyOptions(**mode)
        found[f"F.linear_cross_entropy {said}"] = lambda x, w, y, options=options: (
            F.linear_cross_entropy(x, w, y, options=options)
        )
    return found


def step(call, x, w, y):
    x.grad = w.grad = None
    begin = time.perf_counter()
    call(x, w, y).backward()
    return 1e3 * (time.perf_counter() - begin)


def products(x, w):
    begin = time.perf_counter()
    z = x @ w.T
    z @ w
    z.T @ x
    return 1e3 * (time.perf_counter() - begin)


def write(path, document):
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path) or ".", delete=False) as f:
        json.dump(document, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f.name, path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--hidden", type=int, default=768)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--json")
    a = p.parse_args()
    torch.manual_seed(1)
    dtype = getattr(torch, a.dtype)
    x = torch.randn(a.tokens, a.hidden).to(dtype).requires_grad_()
    w = (torch.randn(a.vocab, a.hidden) / a.hidden**0.5).to(dtype).requires_grad_()
    y = torch.randint(0, a.vocab, (a.tokens,))
    plain = x.detach().float(), w.detach().float()
    calls, times, ratios, peaks, failed = subjects(), {}, {}, {}, {}
    for name, call in list(calls.items()):
        try:
            step(call, x, w, y)
            with Peak() as peak:
                step(call, x, w, y)
            peaks[name] = peak.bytes
        except (RuntimeError, TypeError, ValueError) as error:
            failed[name] = str(error).splitlines()[0]
            del calls[name]
    products(*plain)
    limits = []
    for _ in range(a.repeats):
        before = products(*plain)
        for name, call in calls.items():
            spent = step(call, x, w, y)
            after = products(*plain)
            times.setdefault(name, []).append(spent)
            ratios.setdefault(name, []).append(2 * spent / (before + after))
            limits.append(after)
            before = after
    print(f"{a.tokens} x {a.hidden} x {a.vocab} {a.dtype}, {torch.get_num_threads()} threads")
    print(f"  {'three plain products, fp32':44} {statistics.median(limits):9.1f} ms")
    runs = []
    for name in sorted(ratios, key=lambda n: statistics.median(ratios[n])):
        ms, ratio = statistics.median(times[name]), statistics.median(ratios[name])
        runs.append({"name": name, "median_ms": ms, "ratio": ratio, "peak_bytes": peaks[name]})
        print(f"  {name:44} {ms:9.1f} ms  {ratio:6.2f} x  {peaks[name] / 2**20:8.0f} MiB")
    for name, why in failed.items():
        print(f"  {name:44} refused: {why}")
    if a.json:
        problem = {k: getattr(a, k) for k in ("tokens", "hidden", "vocab", "dtype", "repeats")}
        host = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
        limit = {"three_plain_products_ms": statistics.median(limits)}
        host["threads"] = torch.get_num_threads()
        write(a.json, {"problem": problem, "host": host, **limit, "runs": runs, "refused": failed})


if __name__ == "__main__":
    main()
