"""What: the scan of Mamba-3 on a GPU beside the libraries people use there: mamba_ssm's SISO kernels in Triton
and, as a second mark, Mamba-2's SSD; forward, backward and both, packed, steps, first calls; as a receipt.
Why: a time is worth something beside what else runs the same problem, on the same chip, sustained.
Never: hides a peer that refuses: its words are a row; takes a time without every output's error beside fp64.

usage: scan_peers.py RECEIPT [--source mamba_ssm-2.3.2.post1] [--rows S1,M3,V,D1,T] [--brief M3,V]
       [--seconds S] [--configs all|few] [--ssd S1]

--source: the unpacked source distribution; its package asks for a compiled extension at import, its kernels of
Mamba-3 do not. Each Triton kernel is tuned over its own list, compiled by many processes at once; `few` keeps
those configurations that leave the number of registers free, and the receipt says so. M3 and M4 stand for all
their sizes, V for M2's and S1's tokens as packed sequences, T for first calls of lengths not seen before.
--brief: of these rows the default call and the peer's alone, forward and backward without both in one.
The receipt is written anew behind each row: a run that is cut has those before.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import public
import scan_contenders as who
import torch
from attention_peers import reason, stepping
from mamba3_device import PROBLEMS, STEP, draw, step_of, useful_bytes, useful_flops
from public import Meter, sustained
from scan_truth import errors_of, few_of, kept_of, names_of, relative, ssd_truth, step_truth, truth
from talea import _receipt, mamba3_step

SEQUENCES, SIDE = 64, 8192
PACKED = {"V M2": "M2", "V S1": "S1"}
STEPS = {"D1": STEP, "D1 SISO": (*STEP[:4], 1, *STEP[5:])}
FIRST = ("T ours", "T peer")
LENGTHS = (3003, 3001)  # of row T: no length that another row has
SSD = "Mamba-2's SSD, another recurrence"
MIMO_MISSING = "MIMO: its kernels are in TileLang, which is not here"
PASSES = ("forward", "backward", "forward and backward")


def names_in(word):
    """M3 stands for M3, M3 half and M3 quarter, and so on."""
    known = (*PROBLEMS, *PACKED, *STEPS, *FIRST)
    return [n for n in known if n == word or n.startswith(word + " ")] or [word]


def peak(call):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call(0)
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - before
    return max(above - sum(x.numel() * x.element_size() for x in kept), 0)


def passes_of(call, t, up, names):
    """forward, backward of a kept forward, and both: as a training step makes them."""
    leaves, kept = {n: x.detach() for n, x in t.items()}, []
    for n in names:
        leaves[n].requires_grad_()

    def forward(_):
        with torch.no_grad():
            return (call(leaves),)

    def both(_):
        out = call(leaves)
        return (out.detach(), *torch.autograd.grad(out, [leaves[n] for n in names], up))

    def backward(_):
        if not kept:
            kept.append(call(leaves))
        return torch.autograd.grad(kept[0], [leaves[n] for n in names], up, retain_graph=True)

    return dict(zip(PASSES, (forward, backward, both), strict=True))


class Limit:
    """A plain product and a plain copy of this process: what the chip takes for the useful work."""

    def __init__(self, meter, seconds):
        a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
        c, wide = torch.empty_like(a), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        source = torch.empty_like(wide)
        self.product = lambda: torch.mm(a, b, out=c)
        copied = sustained(lambda: wide.copy_(source), meter, seconds)
        self.copy_rate = 2 * wide.numel() / copied["ms"]

    def ms(self, flops, size, product_ms):
        return max(flops * product_ms / (2 * SIDE**3), size / self.copy_rate)


def described(case, name, rounds, facts):
    ms = sorted(r["ms"] for r in rounds)
    return {"case": case, "name": name, "sustained_ms": [r["ms"] for r in rounds],
            "joules": [r["joules"] for r in rounds], "sm_mhz": rounds[-1]["sm_mhz"],
            "time": {"median_ms": sum(ms) / len(ms), "p20_ms": ms[0], "p80_ms": ms[-1],
                     "n": len(ms)}, **facts}  # fmt: skip


def shown(run):
    errors = {n: float(f"{e:.1e}") for n, e in run.get("errors", {}).items()}
    worst = max(errors, key=errors.get) if errors else ""
    print(f"{run['case']:28} {run['name']:36} {run['time']['median_ms']:9.4f} ms "
          f"{run.get('ratio', 0):6.2f} x {sum(run['joules']) / 2:7.4f} J "
          f"{run.get('extra_bytes', 0) / 2**20:6.0f} MiB  out {errors.get('out', '')} "
          f"{worst} {errors.get(worst, '')}", flush=True)  # fmt: skip
    return run


def contenders(row, peers, brief, with_ssd, rank):
    calls = {"Talea": (who.ours, names_of)}
    if not brief:
        calls["Talea, save_states"] = (who.ours_with_states, names_of)
    if rank == 1 and "siso" in peers:
        siso = lambda t: who.siso(peers["siso"], t)  # noqa: E731
        calls[f"{peers['version']}, SISO in Triton"] = (siso, names_of)
    if with_ssd and "ssd" in peers:
        second = lambda t: who.ssd(peers["ssd"], t)  # noqa: E731
        calls[SSD] = (second, lambda _: who.SSD_NAMES)
    return calls


def drawn(row):
    """Of a packed row all tokens are one pack."""
    dense = PROBLEMS[PACKED.get(row, row)]
    if row not in PACKED:
        return draw(dense, torch.bfloat16)
    tokens = dense[0] * dense[1]
    t = draw((1, tokens, *dense[2:]), torch.bfloat16)
    return t | {"cu_seqlens": who.packed_ends(SEQUENCES, tokens, "cuda")}


def row_runs(row, peers, o, limit, not_run):
    problem = PROBLEMS[PACKED.get(row, row)]
    brief, packed = row in o.brief or row in PACKED, row in PACKED
    wanted = PASSES[:2] if brief else PASSES
    if problem[4] != 1:
        not_run[f"{row}: mamba_ssm"] = MIMO_MISSING
    if packed:
        not_run[f"{row}: mamba_ssm"] = "packed sequences: not asked of it"
    t = drawn(row)
    up = torch.randn_like(t["v"])
    with_peers = {} if packed else peers
    calls = contenders(row, with_peers, brief, row in o.ssd, problem[4])
    right, lane = truth(t, up), who.lane_of(few_of(t, kept_of(t)))
    of_ssd = ssd_truth(t, up) if SSD in calls else None
    there, facts = {}, {}

    def enter(name, call, names, t, up, right):
        try:
            passes = passes_of(call, t, up, names(t))
            for _ in range(2):  # tuned by the second
                taken = {p: {"extra_bytes": peak(run)} for p, run in passes.items()}
            taken[PASSES[1]]["extra_bytes_of_both"] = taken[PASSES[2]]["extra_bytes"]
            if name.startswith("Talea"):
                for one in taken.values():
                    one["lane"] = lane
            if right:
                errors = errors_of(call, t, up, right, names(t))
                for one in taken.values():
                    one |= {"errors": errors, "relative_l2": max(errors.values())}
            there[name], facts[name] = passes, taken
        except Exception as error:
            not_run[f"{row}: {name}"] = reason(error)
            print(f"{row} {name}: not run: {reason(error)}", flush=True)

    for name, (call, names) in calls.items():
        enter(name, call, names, t, up, of_ssd if name == SSD else right)
    if packed:  # beside it the same tokens, dense
        dense = draw(problem, torch.bfloat16)
        enter("Talea, dense", who.ours, names_of, dense, torch.randn_like(dense["v"]), None)
    yield from timed_rounds(row, problem, there, facts, wanted, o, limit)


def timed_rounds(row, problem, there, facts, wanted, o, limit):
    """Two rounds, the second in reverse; the plain product before and after each."""
    each = {(p, name): [] for p in wanted for name in there}
    plain = []
    for order in (list(each), list(each)[::-1]):
        plain.append(sustained(limit.product, o.meter, o.seconds))
        for which, name in order:
            run = stepping(there[name][which])
            each[which, name].append(sustained(run, o.meter, o.seconds))
        plain.append(sustained(limit.product, o.meter, o.seconds))
    product_ms = sum(r["ms"] for r in plain) / len(plain)
    least = [limit.ms(f, b, product_ms) for f, b in
             zip(useful_flops(problem), useful_bytes(problem), strict=True)]  # fmt: skip
    least = dict(zip(PASSES, (*least, sum(least)), strict=True))
    yield described(f"{row}, limit", f"a plain product of {SIDE} cubed", plain, {})
    for (which, name), rounds in each.items():
        run = described(f"{row}, {which}", name, rounds, facts[name][which])
        if name != SSD:
            run |= {"limit_ms": least[which], "ratio": run["time"]["median_ms"] / least[which]}
        yield shown(run)


def step_runs(row, peers, o, not_run):
    """One token of every sequence beside a copy of the states, the least that it has to move twice."""
    one, state = step_of(draw(STEPS[row], torch.bfloat16))
    for tensor in (state.angle, state.ssm, state.k, state.v):
        tensor.normal_()
    siso = STEPS[row][4] == 1
    right, errors = step_truth(one, state), {}
    name = f"{peers.get('version')}, step in Triton"
    if siso and "step" in peers:
        try:
            step = who.siso_step(peers["step"], one, state)
            out, (_, ssm, k, _) = step()
            found = {"out": out, "ssm": ssm, "k": k[:, None]}
            errors[name] = {n: relative(x, right[n]) for n, x in found.items()}
        except Exception as error:
            not_run[f"{row}: mamba_ssm"] = reason(error)
    else:
        not_run[f"{row}: mamba_ssm"] = peers.get(
            "step_missing", "its step of MIMO is CuTe's, which is not here"
        )
    copy, graph = torch.empty_like(state.ssm), torch.cuda.CUDAGraph()
    found = {"out": mamba3_step(state, **one), "ssm": state.ssm, "k": state.k}
    errors["Talea"] = {n: relative(x, right[n]) for n, x in found.items()}
    with torch.cuda.graph(graph):
        found["out"] = mamba3_step(state, **one)
    right = step_truth(one, state)
    graph.replay()
    errors["Talea, in a graph"] = {n: relative(x, right[n]) for n, x in found.items()}
    calls = {"Talea": lambda: mamba3_step(state, **one), "Talea, in a graph": graph.replay,
             "a copy of the states": lambda: copy.copy_(state.ssm)}  # fmt: skip
    if name in errors:
        calls[name] = step
    each = {name: [] for name in calls}
    for order in (list(calls), list(calls)[::-1]):
        for name in order:
            each[name].append(sustained(calls[name], o.meter, o.seconds))
    copied = sum(r["ms"] for r in each["a copy of the states"]) / 2
    for name, rounds in each.items():
        of = errors.get(name)
        facts = {"errors": of, "relative_l2": max(of.values())} if of else {}
        run = described(f"{row}, step", name, rounds, facts)
        if of:
            run |= {"limit_ms": copied, "ratio": run["time"]["median_ms"] / copied}
        yield shown(run)


def first_calls(row, peers, not_run):
    """Forward and backward of a length that this process has not seen, and the same once more."""
    for of in ("M1", "S1"):
        problem = PROBLEMS[of]
        for name, (call, names) in contenders(of, peers, True, False, problem[4]).items():
            for tokens in LENGTHS if name.startswith("Talea") == (row == FIRST[0]) else ():
                t = draw((problem[0], tokens, *problem[2:]), torch.bfloat16)
                run = passes_of(call, t, torch.randn_like(t["v"]), names(t))[PASSES[2]]
                times = []
                try:
                    for _ in range(2):
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                        run(0)
                        torch.cuda.synchronize()
                        times.append((time.perf_counter() - began) * 1e3)
                except Exception as error:
                    not_run[f"T {of}, {tokens}: {name}"] = reason(error)
                    continue
                took = {"median_ms": times[0], "p20_ms": times[0], "p80_ms": times[0], "n": 1}
                print(f"T, {of}, S {tokens:5} {name:36} first {times[0]:.1f} ms, again {times[1]:.1f}",
                      flush=True)  # fmt: skip
                yield {"case": f"T, first call, {of} with S {tokens}", "name": name, "time": took,
                       "again_ms": times[1]}  # fmt: skip


def compile_part(o):
    """One of many processes: compiles its share of the configurations, which the cache keeps."""
    os.nice(19)
    tuning = who.Tuning(o.configs, o.part, o.processes)
    peers = who.import_peers(o.source, tuning, bool(o.ssd))
    rows = [r for r in o.rows if r in PROBLEMS and PROBLEMS[r][4] == 1]
    step = step_of(draw(STEPS["D1 SISO"], torch.bfloat16)) if "D1 SISO" in o.rows else None
    who.compile_for([(PROBLEMS[r], r in o.ssd) for r in rows], peers, draw, step)


def compiled_beside(o):
    """Processes that fill Triton's cache while rows without a peer are measured."""
    words = [sys.executable, __file__, o.receipt, "--source", o.source, "--configs", o.configs,
             "--rows", ",".join(o.rows), "--processes", str(o.processes),
             *(["--ssd", ",".join(o.ssd)] if o.ssd else []), "--part"]  # fmt: skip
    return [subprocess.Popen([*words, str(i)]) for i in range(o.processes)]


def parsed():
    many = lambda words: [n for w in words.split(",") if w for n in names_in(w)]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--source", default="mamba_ssm-2.3.2.post1")
    parser.add_argument("--rows", default="S1", type=many)
    parser.add_argument("--brief", default="", type=many)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--configs", choices=("all", "few"), default="all")
    parser.add_argument("--ssd", default="", type=many, help="rows that Mamba-2's SSD runs, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--part", type=int, help="one of the compiling processes")
    parser.add_argument("--only-compile", action="store_true", help="fills Triton's cache and ends")
    parser.add_argument(
        "--note", action="append", default=[], help="what else the receipt must say"
    )
    return parser.parse_args()


def main():
    o = parsed()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    if o.part is not None:
        compile_part(o)
        return 0
    start, began, not_run, runs = _receipt.now(), time.monotonic(), {}, []
    parts = compiled_beside(o) if o.processes > 1 else []
    if o.only_compile:
        return max([p.wait() for p in parts], default=0)
    public.WARM_SECONDS, o.meter = o.seconds / 2, Meter()
    tuning, peers = who.Tuning(o.configs), {}
    try:
        peers = who.import_peers(o.source, tuning, bool(o.ssd))
    except Exception as error:
        not_run["mamba_ssm"] = reason(error)
    if "ssd_missing" in peers:
        not_run["Mamba-2's SSD"] = peers["ssd_missing"]
    limit = Limit(o.meter, o.seconds)
    words = (f"useful products at the rate of a plain product of {SIDE} cubed, sustained for {o.seconds} s before "
             "and after each round, or useful bytes at that of a plain copy, whichever is more")  # fmt: skip
    notes = ["two rounds, the second in reverse; errors of the full call, of one sequence or pack and some heads, beside fp64",
             f"peers' kernels tuned over {tuning.wanted} of their {tuning.listed} configurations, few calls each", *o.note]  # fmt: skip
    if parts:
        notes.append(
            "rows of MIMO before the first SISO row: beside processes that compile on the CPU"
        )
    for row in o.rows:
        if parts and (row not in PROBLEMS or PROBLEMS[row][4] == 1):
            for one in parts:
                one.wait()
            print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
            parts = []
        try:
            if row in STEPS:
                found = step_runs(row, peers, o, not_run)
            elif row in FIRST:
                found = first_calls(row, peers, not_run)
            else:
                found = row_runs(row, peers, o, limit, not_run)
            runs += found
        except Exception as error:
            not_run[row] = reason(error)
            print(f"{row}: {reason(error)}", flush=True)
        torch.cuda.empty_cache()
        _receipt.write_receipt(
            o.receipt, "bench", "the scan of Mamba-3 beside its peers on a GPU, bf16", None,
            {"bench": {"limit": words, "runs": runs, "not_run": not_run}, "notes": notes}, start,
            ["python", "bench/scan_peers.py", *sys.argv[1:]],
        )  # fmt: skip
        print(f"-- {row}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
