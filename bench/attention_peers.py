"""What: sparse attention on a GPU beside the libraries people use there: forward, decode, backward, index scores and
selection, beside FlashMLA, the cuDNN frontend, TileLang's examples, Megatron-core and PyTorch, as a receipt.
Why: a time is worth something beside what else runs the same problem, on the same chip, in turn.
Never: hides a peer that refuses, is not there or does not return: its words are a row; tunes one side; takes a time
without an error beside fp64.

usage: attention_peers.py RECEIPT [--rows f1,f3,...] [--seconds S] [--lane sm90] [--limit S] [--budget S] [--small]

Each contender runs back to back for S seconds after S / 2 of the same, in two rounds, the second in reverse. What
nvcc or Triton compiles is tried first in a process of its own, all at once: one that does not end within --limit is
a row in words, and the others find their code compiled. --small: small sizes and no times, to see what starts.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import subprocess
import sys
import tempfile
import time

import public
import torch
from attention_problems import ALL, BACKWARD, BF16, CUDNN, PROFILED, problem_of, slow
from public import Meter, sustained, timed
from sparse_serve_h200 import kernel_ms, peak_extra
from talea import _receipt

BEGAN = time.monotonic()
WARMED = ("b1", "b1h", "i1", "i1_fp8", "i2")  # what the cuDNN frontend compiles, each once


def reason(error):
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


@contextlib.contextmanager
def at_most(seconds):
    """Ends Python code, compilers included, that takes longer; not a wait for the device."""

    def ended(*_):
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(max(1, math.ceil(seconds)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(row, name, lane, small):
    """A child: compiles what the call needs and sees it return."""
    with contextlib.nullcontext() if row in BACKWARD else torch.no_grad():
        problem_of(row, lane, small).ways[name]()(0)
    torch.cuda.synchronize()
    return 0


class Tries:
    """Children for all that is slow to start, at once; what() says of each why it is not to be run here."""

    def __init__(self, rows, args):
        self.children, self.until = {}, time.monotonic() + args.limit
        self.limit, self.log = args.limit, tempfile.TemporaryFile()
        for row in rows:
            for name in filter(slow, names_of(row, args)):
                words = [sys.executable, __file__, "-", "--try", row, name, "--lane", args.lane]
                words += ["--small"] if args.small else []
                self.children[row, name] = subprocess.Popen(words, stdout=self.log, stderr=self.log)

    def settled(self):
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, self.until - time.monotonic()))
        self.late = {key for key, child in self.children.items() if child.poll() is None}
        for key in self.late:
            self.children[key].kill()
            self.children[key].wait()

    def why(self, row, name):
        if (row, name) in self.late:
            return (
                f"TimeoutExpired: did not return within {self.limit:.0f} s in a process of its own"
            )
        ended = self.children[row, name].returncode if (row, name) in self.children else 0
        return f"its process ended by signal {-ended}" if ended < 0 else None


def names_of(row, args):
    """Of a small instance: the names do not depend on the size."""
    return list(problem_of(row, args.lane, True).ways)


def warmed(rows, args):
    """The cuDNN frontend's compiled code does not depend on the number of queries; of its selection it does."""
    for row in (r for r in WARMED if r in rows):
        problem = problem_of(row, args.lane, args.small or row != "i2")
        for name, make in problem.ways.items():
            if name.startswith(CUDNN):
                with contextlib.suppress(Exception), at_most(args.limit):  # its row will say it
                    make()(0)
        torch.cuda.empty_cache()


def same(a, b):
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (a, b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def entered(row, problem, tries, not_run, args):
    """Contenders that run and are right, with their errors and memory; the others by their words."""
    there = {}
    for name, make in problem.ways.items():
        began = time.monotonic()
        try:
            left = args.budget - (began - BEGAN)
            if left <= 0:
                raise TimeoutError(f"not begun after {args.budget:.0f} s")
            why = tries.why(row, name)
            if why:
                raise RuntimeError(why)
            with at_most(min(args.limit, left)):
                run = make()
                facts = problem.judged(run)
                if not facts["relative_l2"] < 1e-2:
                    raise ValueError(f"off by {facts['relative_l2']:.3g} beside fp64")
                facts["extra_bytes"] = peak_extra(run, problem.kept)
                facts["repeats_bit_for_bit"] = same(run(0), run(0))
                there[name] = (problem.wrap(run), facts)
        except Exception as error:  # a peer that refuses is a row of the receipt
            not_run[f"{row}: {name}"] = reason(error)
            print(f"{row:6} {name:42} not run: {reason(error)}", flush=True)
        said = f"{row:6} {name}: ready or refused after {time.monotonic() - began:.1f} s"
        print(said, file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    return there


def stepping(run):
    """A call without arguments that takes the lists in turn."""
    count = [0]

    def step():
        count[0] += 1
        run(count[0])

    return step


def back_to_back(work, meter, seconds):
    """As sustained(); of a call that takes long, as many as fill the time, without joules."""
    each = timed(work, 1)
    if each < seconds * 100:
        return sustained(work, meter, seconds)
    return {"ms": timed(work, max(1, math.ceil(seconds * 1e3 / each))), "sm_mhz": meter.clock()}


def measured(row, there, product, meter, seconds, flops, _):
    """Two rounds, the second in reverse; limits are products of the same round, before and after."""
    each = {name: [] for name in there}
    for order in (list(there), list(there)[::-1]):
        before = sustained(product, meter, seconds)
        round_of = {name: back_to_back(stepping(there[name][0]), meter, seconds) for name in order}
        after = sustained(product, meter, seconds)
        rate = 2 * 8192**3 / ((before["ms"] + after["ms"]) / 2)
        for name, found in round_of.items():
            found["ratio"] = found["ms"] * rate / flops
            each[name].append(found)
    for name, rounds in each.items():
        ms = sorted(r["ms"] for r in rounds)
        run = {"case": row, "name": name, "sustained_ms": [r["ms"] for r in rounds],
               "sm_mhz": rounds[-1]["sm_mhz"], "ratio": sum(r["ratio"] for r in rounds) / 2,
               "time": {"median_ms": sum(ms) / len(ms), "p20_ms": ms[0], "p80_ms": ms[-1],
                        "n": len(ms)}, **there[name][1]}  # fmt: skip
        if all("joules" in r for r in rounds):
            run["joules"] = [r["joules"] for r in rounds]
        yield run


def profiled(row, there, product, meter, seconds, flops, not_run):
    """Kernels' own time, as the profiler sees five calls after as many seconds of them: of ours, scores and
    selection run in one call, and one kernel of it is what the row asks for."""
    rate = 2 * 8192**3 / sustained(product, meter, seconds)["ms"]
    for name, (call, facts) in there.items():
        back_to_back(stepping(call), meter, seconds)
        part = PROFILED[row] if name.startswith("Talea") else ""
        try:
            ms = kernel_ms(call, part)
        except SystemExit as error:
            not_run[f"{row}: {name}"] = str(error)
            continue
        run = {"case": row, "name": name, "kernels": part or "all of its call",
               "time": {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "n": 1}, **facts}  # fmt: skip
        if flops:
            run["ratio"] = ms * rate / flops
        if part:
            del run["extra_bytes"]  # of the whole call
        yield run


def show(run):
    ratio = f"{run['ratio']:5.2f} x" if "ratio" in run else "       "
    errors = {k: f"{v:.2e}" for k, v in run.items() if k.endswith("l2") or k == "recall"}
    mib = f"{run['extra_bytes'] / 2**20:9.1f} MiB" if "extra_bytes" in run else ""
    print(f"{run['case']:6} {run['name']:52} {run['time']['median_ms']:9.3f} ms {ratio} {mib} {errors} "
          f"{'repeats' if run['repeats_bit_for_bit'] else 'differs'}", flush=True)  # fmt: skip


def runs_of(row, there, flops, products, not_run, args):
    if args.small:
        for name, (_, facts) in there.items():
            print(f"{row:6} {name:52} starts: {facts}", flush=True)
        return
    grads = contextlib.nullcontext() if row in BACKWARD else torch.no_grad()
    how = profiled if row in PROFILED else measured
    with grads:
        for run in how(row, there, *products, args.seconds, flops, not_run):
            if run["name"].startswith("Talea"):
                run["lane"] = run["name"].split()[1].rstrip(",")
            show(run)
            yield run


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--rows", default=",".join(ALL))
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--lane", default="sm90")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a call is ready")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, then no more calls")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--try", nargs=2, dest="tried", metavar=("ROW", "NAME"))
    return parser.parse_args()


def main():
    args = parsed()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    if args.tried:
        return tried(*args.tried, args.lane, args.small)
    start, meter, runs, not_run = _receipt.now(), Meter(), [], {}
    public.WARM_SECONDS = args.seconds / 2
    rows = args.rows.split(",")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    c = torch.empty_like(a)
    products = (lambda: torch.mm(a, b, out=c), meter)

    def write():
        if args.small or not runs:
            return
        words = (f"its products at the rate of a plain product of 8192 cubed in this process, sustained for "
                 f"{args.seconds} s before and after each round")  # fmt: skip
        _receipt.write_receipt(
            args.receipt, "bench", "sparse attention beside its peers on a GPU, bf16", None,
            {"bench": {"limit": words, "runs": runs, "not_run": not_run},
             "notes": ["two rounds, the second in reverse order; errors beside fp64 on a sample of rows",
                       "backward: q, kv, o and lse given, but for Megatron's tilelang backend, which forms o "
                       "and lse again; TileLang's sparse attention without the causal rule of its examples",
                       "d2: replays of a CUDA graph; i3: scores and selection, the cuDNN frontend's in parts "
                       "of 4096 queries; i1, i1_fp8, i2: kernels alone, by the profiler, and of i1 the scores "
                       "are extra memory"]},
            start, ["python", "bench/attention_peers.py", *sys.argv[1:]],
        )  # fmt: skip

    tries = Tries(rows, args)
    warmed(rows, args)
    tries.settled()
    print(f"tried all after {time.monotonic() - BEGAN:.0f} s", file=sys.stderr, flush=True)
    for row in rows:
        try:
            problem = problem_of(row, args.lane, args.small)
            grads = contextlib.nullcontext() if row in BACKWARD else torch.no_grad()
            with grads:
                there = entered(row, problem, tries, not_run, args)
            for run in runs_of(row, there, problem.flops, products, not_run, args):
                runs.append(run)
            del problem, there
        except Exception as error:  # one row that breaks does not lose the others
            not_run[row] = reason(error)
            print(f"{row}: {reason(error)}", flush=True)
        torch.cuda.empty_cache()
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
