"""What: training steps of the fused loss: Talea's lanes and the libraries people use today.
Why: ratios are worth something only from one process, one chip and interleaved samples.
Never: hides a missing or failing peer: its reason stands in the receipt.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python python3 bench/peers.py
       --receipt receipts/h200/peers.json
"""

import argparse
import contextlib
import importlib.metadata
import math
import os
import signal
import statistics
import sys
import time

import public
import torch
from peer_contenders import LANES, PEERS, SOURCES, TUNING_CALLS, Peer, Talea
from peer_truth import confident, confident_truth, reference, relative_l2
from samples import time_stats
from talea._receipt import device_name, now, write_receipt

MIB = 1 << 20
SAMPLING_SECONDS = 25  # of the whole run's time, kept for the samples


def timed(work):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def clocks():
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device_name())
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "power_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "throttle_reasons": hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
    }


def reason(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def assemble(x, w, y, missing, only):
    buffers = {
        True: torch.zeros(w.shape, device=w.device),
        False: torch.empty_like(w),
        "dx": torch.empty_like(x),
    }
    contenders = []
    for lane, limit, main in LANES:
        contenders.append(Talea(lane, limit, main, x, w, y, buffers))
    for name in PEERS:
        if not any(word in name for word in only):
            continue
        try:
            contenders.append(Peer(name, x, w, y))
        except Exception as error:  # a missing package is a row of the receipt
            missing[name] = reason(error)
    return contenders


@contextlib.contextmanager
def at_most(seconds):
    """A peer that compiles for longer is a row without figures, not the end of the run."""

    def late(*_):
        raise TimeoutError(f"the run's time ended ({max(seconds, 0):.0f} s were left for it)")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 0.5)  # again: a peer may swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def examine(who, plain, sure, truth):
    """Errors and memory of one contender, untimed; plain and sure: (hidden, targets)."""
    if isinstance(who, Talea):
        who.dw.zero_()
    loss, dx, dw = who.step()
    facts = {
        "version": who.version,
        "dx_relative_l2": relative_l2(dx, truth[1]),
        "dw_relative_l2": relative_l2(dw, truth[2]),
        "loss_error": abs(float(loss) - truth[0]),
        "dw": "fp32 main gradient" if getattr(who, "main", False) else "weight dtype",
    }
    del loss, dx, dw
    who.release()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    who.step()
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - base
    extra = max(0, above - who.returned_bytes())
    facts["extra_bytes"], facts["extra_mib"] = extra, extra / MIB
    facts["total_mib"] = (above + who.prepared_bytes()) / MIB  # above inputs, gradients included
    who.release()
    want, counted = truth[3]
    who.use(*sure)
    _, dx, _ = who.step()
    error = (dx[: len(want)].double() - want).norm(dim=-1) / want.norm(dim=-1)
    facts["confident_rows"] = int(counted.sum())
    facts["confident_dx_median"] = float(error[counted].median())
    facts["confident_dx_worst"] = float(error[counted].max())
    who.release()
    who.use(*plain)
    return facts


def examine_all(contenders, plain, sure, truth, results, end):
    """Fills results: facts and reasons by name. Who is not ready in time leaves the contenders."""
    facts, missing = results
    for who in list(contenders):
        began = time.monotonic()
        try:
            # A backward in this thread can be stopped, too.
            with at_most(end - began), torch.autograd.set_multithreading_enabled(False):
                facts[who.name] = examine(who, plain, sure, truth)
        except Exception as error:
            missing[who.name] = reason(error)
            contenders.remove(who)
            who.release()
        print(f"{who.name}: ready in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()


def rotated(contenders, sample):
    """Each sample begins with another one, every second in reverse: nobody always follows the same one."""
    at = sample % max(len(contenders), 1)
    order = contenders[at:] + contenders[:at]
    return order if sample % 2 == 0 else order[::-1]


def sustain(contenders, products, seconds, missing):
    """Back to back, each by itself: ms, joules and ratio to products so timed, in two rounds, the second in
    reverse."""
    meter, found = public.Meter(), {}
    for order in (list(contenders), list(contenders)[::-1]):
        before, round_of = public.sustained(products, meter, seconds), {}
        for who in order:
            try:
                round_of[who.name] = public.sustained(who.step, meter, seconds)
            except Exception as error:
                missing[f"{who.name}, sustained"] = reason(error)
            who.release()
        after = public.sustained(products, meter, seconds)
        for name, one in round_of.items():
            for what in ("ms", "joules"):
                ratio = 2 * one[what] / (before[what] + after[what])
                found.setdefault(name, {}).setdefault(what, []).append(ratio)
    return {
        name: {"sustained_ratio": statistics.mean(each["ms"]), "sustained_ratios": each["ms"],
               "joules_ratio": statistics.mean(each["joules"])}
        for name, each in found.items()
    }  # fmt: skip


def measure(contenders, products, samples, missing, end, keep):
    """keep: called after each round with what was measured so far."""
    limits, times, ratios, seen = [], {}, {}, []
    for sample in range(samples + 1):
        if sample > 3 and time.monotonic() > end:
            break
        before = timed(products)
        for who in rotated(contenders, sample):
            try:
                ms = timed(who.step)
            except Exception as error:
                missing[who.name] = reason(error)
                contenders.remove(who)
                continue
            who.release()
            after = timed(products)
            if sample:  # the first round warms up
                times.setdefault(who.name, []).append(ms)
                ratios.setdefault(who.name, []).append(2 * ms / (before + after))
                limits.append(after)
                seen.append(clocks())
            before = after
        if sample:
            keep(limits, times, ratios, seen)


def device_facts(seen):
    sm, watts = [c["sm_mhz"] for c in seen], [c["power_watts"] for c in seen]
    return {
        "name": torch.cuda.get_device_name(0),
        "driver": seen[-1]["driver"],
        "runtime": f"CUDA {torch.version.cuda}",
        "sm_mhz": {"least": min(sm), "median": statistics.median(sm), "most": max(sm)},
        "power_watts": {"median": statistics.median(watts), "most": max(watts)},
        "throttle_reasons": sorted({c["throttle_reasons"] for c in seen}),
    }


def runs_of(args, limits, times, ratios, facts):
    shape = f"{args.tokens}x{args.hidden}x{args.vocab}"
    first = {"name": "three plain products", "case": shape, "time": time_stats(limits)}
    runs = [first | {"ratio": 1.0}]
    for name, ms in times.items():
        row = {"name": name, "case": shape, "time": time_stats(ms)}
        if name.startswith(("Talea sm90", "Talea cuda")):
            row["lane"] = name.split()[1].rstrip(",")
        runs.append(row | {"ratio": statistics.median(ratios[name])} | facts[name])
    return runs


def show(runs, missing):
    for row in runs:
        if "extra_mib" not in row:
            print(f"{row['name']:32s} {row['time']['median_ms']:8.2f} ms")
            continue
        print(
            f"{row['name']:32s} {row['time']['median_ms']:8.2f} ms {row['ratio']:.3f} x "
            f"sustained {row.get('sustained_ratio', math.nan):.3f} x "
            f"{row['extra_mib']:8.1f} of {row['total_mib']:8.1f} MiB  dX {row['dx_relative_l2']:.2e} "
            f"dW {row['dw_relative_l2']:.2e}  p > 0.999: {row['confident_dx_median']:.1e} / "
            f"{row['confident_dx_worst']:.1e}"
        )
    for name, why in missing.items():
        print(f"{name:32s} not run: {why}")


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def write_peers(args, measured, start):
    limit = (
        "three plain products (torch.mm, bf16) of the same process, before and after each sample"
    )
    title = f"Training step beside its peers: {args.tokens} tokens, hidden {args.hidden}, "
    title += f"vocabulary {args.vocab}, bf16"
    libraries = {name: version_of(name) for name in ("triton", "nvidia-cutlass-dsl")}
    argv = ["python3", "bench/peers.py", *sys.argv[1:]]
    notes = [
        "truth: fp32 products of the bf16 inputs; confident rows in fp64",
        "single samples: each begins with another contender, every second in reverse; sustained: back to "
        "back, two rounds, the second in reverse, beside products measured so",
        "Talea sm90, Talea cuda: the C interface with prepared buffers; Talea public: the Python call",
        f"quack, tuned, chose among its 44 variants of each product, timed over {TUNING_CALLS} calls",
    ]
    sections = {"bench": {"limit": limit, **measured}, "notes": notes}
    write_receipt(args.receipt, "bench", title, None, sections, start, argv, libraries)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600, help="what is not ready is left out")
    parser.add_argument(
        "--sustained", type=float, default=1.5, help="seconds a contender and round; 0: none"
    )
    parser.add_argument("--only", default="", help="peers whose names hold one of these, A,B")
    parser.add_argument("--receipt", help="where to write it, .json; anew after each round")
    about = "apple=FOLDER or axolotl=FOLDER: what holds their cut_cross_entropy and a file REVISION"
    parser.add_argument("--source", action="append", default=[], help=about)
    args = parser.parse_args()
    SOURCES.update(pair.split("=", 1) for pair in args.source)
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, end = now(), time.monotonic() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    x = torch.randn(args.tokens, args.hidden, device=device).bfloat16()
    w = (torch.randn(args.vocab, args.hidden, device=device) / args.hidden**0.5).bfloat16()
    y = torch.randint(args.vocab, (args.tokens,), device=device)
    order = torch.arange(args.tokens, device=device).view(-1, 32).T.reshape(-1)
    sure = confident(w, y, args.tokens, 2)[order], y[order]  # rows of every height come first
    truth = (*reference(x, w, y), confident_truth(sure[0], w, sure[1], 256))
    missing, facts = {}, {}
    contenders = assemble(x, w, y, missing, args.only.split(","))
    torch.cuda.empty_cache()
    examine_all(contenders, (x, y), sure, truth, (facts, missing), end - SAMPLING_SECONDS)
    del truth, sure
    z = torch.empty(args.tokens, args.vocab, device=device, dtype=torch.bfloat16)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def products():
        torch.mm(x, w.T, out=z)
        torch.mm(z, w, out=dx)
        torch.mm(z.T, x, out=dw)

    written = {}

    def keep(limits, times, ratios, seen):
        runs = runs_of(args, limits, times, ratios, facts)
        written["runs"], written["measured"] = runs, (limits, times, ratios, seen)
        if args.receipt:
            facts_of = {"device": device_facts(seen), "runs": runs, "not_run": missing}
            write_peers(args, facts_of, start)

    measure(contenders, products, args.samples, missing, end, keep)
    if args.sustained:
        public.WARM_SECONDS = args.sustained / 3
        for name, more in sustain(contenders, products, args.sustained, missing).items():
            facts[name] |= more
        keep(*written["measured"])
    show(written["runs"], missing)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a peer's compilers may still run: nobody waits for them
