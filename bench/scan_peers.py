"""What: the scan of Mamba-3 on a GPU beside the libraries people use there: mamba_ssm's kernels, of SISO in Triton,
of MIMO in TileLang, of a step of MIMO in CuTe, and, as a second mark, Mamba-2's SSD; forward, backward and both,
packed, steps, first calls; as a receipt.
Why: a time is worth something beside what else runs the same problem, on the same chip, sustained.
Never: hides a peer that refuses: its words are a row; takes a time without every output's error beside fp64.

usage: scan_peers.py RECEIPT [--source mamba_ssm-2.3.2.post1] [--rows S1,M3,V,D1,T] [--brief M3,V]
       [--seconds S] [--configs all|few] [--ssd S1] [--limit S]

--source: the unpacked source distribution, or the package of a checkout beside a file REVISION; the package asks for
a compiled extension at import, its kernels of Mamba-3 do not. Those of MIMO want tilelang, the step of MIMO
nvidia-cutlass-dsl and quack-kernels. Many processes compile at once, before the first row: each kernel of TileLang
for each size, each of Triton under its own list, over which it is tuned; `few` keeps those configurations that leave
the number of registers free, and the receipt says so. M3 and M4 stand for all their sizes, V for M2's and S1's tokens
as packed sequences, T for first calls of lengths not seen before.
--brief: of these rows the default call and the peer's alone, forward and backward without both in one.
The receipt is written anew behind each row: a run that is cut has those before.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time

import public
import scan_compile
import scan_contenders as who
import torch
from attention_peers import reason, stepping
from mamba3_device import PROBLEMS, STEP, draw, step_of, useful_bytes, useful_flops
from public import Meter, sustained
from scan_truth import errors_of, few_of, kept_of, names_of, relative, ssd_truth, step_truth, truth
from talea import _receipt, mamba3_step

SIDE = 8192
PACKED = {"V M2": "M2", "V S1": "S1"}
STEPS = {"D1": STEP, "D1 SISO": (*STEP[:4], 1, *STEP[5:])}
FIRST = ("T ours", "T peer")
LENGTHS = (3003, 3001)  # of row T: no length that another row has
WHOLE_CHUNKS = (3008,)  # what backward in TileLang needs
SSD = "Mamba-2's SSD, another recurrence"
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


def contenders(peers, brief, with_ssd, rank):
    calls = {"Talea": (who.ours, names_of)}
    if not brief:
        calls["Talea, save_states"] = (who.ours_with_states, names_of)
    kind, words = ("siso", "SISO in Triton") if rank == 1 else ("mimo", "MIMO in TileLang")
    if kind in peers:
        call = functools.partial(getattr(who, kind), peers[kind])
        calls[f"{peers['version']}, {words}"] = (call, names_of)
    if with_ssd and "ssd" in peers:
        second = functools.partial(who.ssd, peers["ssd"])
        calls[SSD] = (second, lambda _: who.SSD_NAMES)
    return calls


def drawn(row):
    """Of a packed row all tokens are one pack."""
    dense = PROBLEMS[PACKED.get(row, row)]
    if row not in PACKED:
        return draw(dense, torch.bfloat16)
    problem, ends = scan_compile.packed(dense, "cuda")
    return draw(problem, torch.bfloat16) | {"cu_seqlens": ends}


def row_runs(row, peers, o, limit, not_run):
    problem = PROBLEMS[PACKED.get(row, row)]
    brief, packed = row in o.brief or row in PACKED, row in PACKED
    wanted = PASSES[:2] if brief else PASSES
    if problem[4] != 1 and "mimo_missing" in peers:
        not_run[f"{row}: mamba_ssm"] = peers["mimo_missing"]
    t = drawn(row)
    up = torch.randn_like(t["v"])
    calls = contenders(peers, brief, row in o.ssd and not packed, problem[4])
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


def peers_step(row, peers, one, state):
    """(name, call, what it leaves behind) of mamba_ssm's; raises what it says where it does not run."""
    if STEPS[row][4] == 1:
        kind, words = "step", "step in Triton"
    else:
        kind, words = "mimo_step", "step in CuTe"
    if kind not in peers:
        raise ImportError(peers.get(f"{kind}_missing", "no mamba_ssm"))
    if kind == "step":
        step = who.siso_step(peers["step"], one, state)
        out, (_, ssm, k, _) = step()
        behind = {"ssm": ssm, "k": k[:, None]}
    else:
        step, behind = who.mimo_step(peers["rotate"], peers["mimo_step"], one, state)
        out = step()
    return f"{peers['version']}, {words}", step, {"out": out} | behind


def captured(call):
    """A graph of the call, which is warm, and what it returns there."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


def step_runs(row, peers, o, not_run):
    """One token of every sequence beside a copy of the states, the least that it has to move twice."""
    one, state = step_of(draw(STEPS[row], torch.bfloat16))
    for tensor in (state.angle, state.ssm, state.k, state.v):
        tensor.normal_()
    for tensor in (state.k, state.v):  # which mamba_ssm keeps in bf16
        tensor.copy_(tensor.bfloat16())
    right, errors, calls = step_truth(one, state), {}, {}
    try:
        name, step, found = peers_step(row, peers, one, state)
        errors[name] = {n: relative(x, right[n]) for n, x in found.items()}
        calls[name] = step
        step_in_graph, _ = captured(step)
        calls[f"{name}, in a graph"] = step_in_graph.replay
    except Exception as error:
        not_run[f"{row}: mamba_ssm{', in a graph' if calls else ''}"] = reason(error)
        print(f"{row}: mamba_ssm: {reason(error)}", flush=True)
    copy = torch.empty_like(state.ssm)
    found = {"out": mamba3_step(state, **one), "ssm": state.ssm, "k": state.k}
    errors["Talea"] = {n: relative(x, right[n]) for n, x in found.items()}
    graph, found["out"] = captured(lambda: mamba3_step(state, **one))
    right = step_truth(one, state)
    graph.replay()
    errors["Talea, in a graph"] = {n: relative(x, right[n]) for n, x in found.items()}
    calls = {"Talea": lambda: mamba3_step(state, **one), "Talea, in a graph": graph.replay,
             "a copy of the states": lambda: copy.copy_(state.ssm), **calls}  # fmt: skip
    each = {name: [] for name in calls}
    for order in (list(calls), list(calls)[::-1]):
        for name in order:
            each[name].append(sustained(calls[name], o.meter, o.seconds))
    copied = sum(r["ms"] for r in each["a copy of the states"]) / 2
    for name, rounds in each.items():
        of = errors.get(name)
        facts = {"errors": of, "relative_l2": max(of.values())} if of else {}
        run = described(f"{row}, step", name, rounds, facts)
        if name != "a copy of the states":
            run |= {"limit_ms": copied, "ratio": run["time"]["median_ms"] / copied}
        yield shown(run)


def first_calls(row, peers, not_run):
    """Forward and backward of a length that this process has not seen, and the same once more."""
    for of in ("M1", "S1"):
        problem = PROBLEMS[of]
        for name, (call, names) in contenders(peers, True, False, problem[4]).items():
            if name.startswith("Talea") != (row == FIRST[0]):
                continue
            for tokens in WHOLE_CHUNKS if "TileLang" in name else LENGTHS:
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


def problems_of(rows, with_ssd):
    """Sizes, whether as a pack, whether SSD runs them."""
    found = [r for r in rows if PACKED.get(r, r) in PROBLEMS]
    return [(PROBLEMS[PACKED.get(r, r)], r in PACKED, r in with_ssd) for r in found]


def compile_part(o):
    step = step_of(draw(STEPS["D1 SISO"], torch.bfloat16)) if "D1 SISO" in o.rows else None
    scan_compile.compile_part(problems_of(o.rows, o.ssd), o, step)


def wanted_of(o):
    found = scan_compile.wanted_of(problems_of(o.rows, o.ssd))
    found |= {"mimo"} if FIRST[1] in o.rows else set()
    return found | ({"mimo_step"} if "D1" in o.rows else set())


def parsed():
    many = lambda words: list(dict.fromkeys(n for w in words.split(",") if w for n in names_in(w)))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--source", default="mamba_ssm-2.3.2.post1")
    parser.add_argument("--rows", default="S1", type=many)
    parser.add_argument("--brief", default="", type=many)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--configs", choices=("all", "few"), default="all")
    parser.add_argument("--ssd", default="", type=many, help="rows that Mamba-2's SSD runs, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=300, help="s, of the compiling processes")
    parser.add_argument("--part", type=int, help="one of the compiling processes")
    parser.add_argument("--only-compile", action="store_true", help="fills the caches and ends")
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
    parts = scan_compile.started(__file__, o) if o.processes > 1 else []
    ended = scan_compile.waited(parts, o.limit)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if o.only_compile:
        return ended
    public.WARM_SECONDS, o.meter = o.seconds / 2, Meter()
    tuning, peers = scan_compile.Tuning(o.configs), {}
    try:
        peers = who.import_peers(o.source, tuning, wanted_of(o))
    except Exception as error:
        not_run["mamba_ssm"] = reason(error)
    if "ssd_missing" in peers:
        not_run["Mamba-2's SSD"] = peers["ssd_missing"]
    limit = Limit(o.meter, o.seconds)
    words = (f"useful products at the rate of a plain product of {SIDE} cubed, sustained for {o.seconds} s before "
             "and after each round, or useful bytes at that of a plain copy, whichever is more")  # fmt: skip
    notes = ["two rounds, the second in reverse; errors of the full call, of one sequence or pack and some heads, beside fp64",
             f"peers' kernels tuned over {tuning.wanted} of their {tuning.listed} configurations, few calls each", *o.note]  # fmt: skip
    for row in o.rows:
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
