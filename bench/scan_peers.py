"""What: the scan of Mamba-3 on a GPU beside the libraries people use there: mamba_ssm's SISO kernels in Triton
and, as a second mark, Mamba-2's SSD; forward, backward and both, in turn in one process, as a receipt.
Why: a time is worth something beside what else runs the same problem, on the same chip, sustained.
Never: hides a peer that refuses: its words are a row; takes a time without every output's error beside fp64.

usage: scan_peers.py RECEIPT [--source mamba_ssm-2.3.2.post1] [--rows S1,S2] [--seconds S] [--configs all|few] [--ssd]

--source: the unpacked source distribution; its package asks for a compiled extension at import, its kernels of
Mamba-3 do not. Each Triton kernel is tuned over its own list, compiled by many processes at once; `few` keeps
those configurations that leave the number of registers free, and the receipt says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import types

import public
import talea
import torch
from attention_peers import reason, stepping
from mamba3_device import PROBLEMS, STEP, draw, step_of, useful_flops
from mamba3_peers import eager
from peer_contenders import median_of_calls
from public import Meter, sustained
from talea import _receipt

ORDER = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "d", "z")
SMALL = (4, 1024, 64, 1, 1, 128, 64)  # compiles what the problems need: sizes divide alike
CHUNK = 64


def import_peer(source, configs, with_ssd, part=0, parts=1):
    """mamba_ssm without its __init__; of each kernel's configurations every parts-th, timed over few calls."""
    import triton

    package = types.ModuleType("mamba_ssm")
    package.__path__ = [os.path.join(source, "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    tuned, kept = triton.autotune, [0, 0]

    def autotune(configs=(), key=(), **more):
        wanted = [c for c in configs if mode == "all" or not getattr(c, "maxnreg", None)]
        kept[0], kept[1] = kept[0] + len(wanted), kept[1] + len(configs)
        mine = wanted[part::parts] or wanted[:1]
        more.pop("do_bench", None)
        return tuned(configs=mine, key=key, do_bench=median_of_calls, **more)

    mode, triton.autotune = configs, autotune
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    found = {"siso": mamba3_siso_combined}
    if not with_ssd:
        triton.autotune = tuned
        return found, kept
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        found["ssd"] = mamba_chunk_scan_combined
    except Exception as error:
        found["ssd_missing"] = reason(error)
    triton.autotune = tuned
    return found, kept


def siso(peer, t, heads):
    """Angles of all heads at once, as upstream's module gives them."""
    angles = t["angles"].expand(-1, -1, heads, -1)
    return peer(*(angles if n == "angles" else t[n] for n in ORDER), chunk_size=CHUNK)


def ssd(peer, t):
    """Another recurrence, without turns and trapezoids; x, dt, A, B, C of the same sizes."""
    a = -torch.ones(t["v"].shape[2], device="cuda")
    return peer(t["v"], t["dt"].mT.contiguous(), a, t["k"], t["q"], 256, D=t["d"], z=t["z"])


def ours(t):
    return talea.mamba3(**t)


def names_of(t):
    return tuple(n for n in (*ORDER, "mimo_v", "mimo_z", "mimo_out") if n in t)


def in_fp64(form, chunk):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with form["q"].device:
            return eager(form, chunk)
    finally:
        torch.set_default_dtype(before)


def truth(t):
    """out in fp64, by tensor operations of one sequence and one group, and what it is made of."""
    wide = {n: x.detach().double().requires_grad_() for n, x in t.items()}
    heads, head_dim = t["v"].shape[2:]
    if "mimo_z" in t:
        gate = torch.nn.functional.silu(wide["z"][:, :, :, None] * wide["mimo_z"])
        outs = (wide["mimo_out"] * gate).transpose(2, 3).transpose(0, 1)  # as eager takes it
        return in_fp64(
            wide | {"mimo_out": outs}, min(CHUNK // t["q"].shape[2], t["q"].shape[1])
        ), wide
    form = {n: wide[n] for n in ("v", "adt", "dt", "trap", "angles", "d")}
    # SISO turns neighbours; the eager form turns columns half a row apart: the same under one order of both.
    columns = t["q"].shape[-1]
    order = [*range(0, columns, 2), *range(1, columns, 2)]
    form |= {n: wide[n][..., order].unsqueeze(2) for n in ("q", "k")}
    form |= {n: wide[n][..., order].unsqueeze(1) for n in ("q_bias", "k_bias")}
    ones = torch.ones(heads, 1, head_dim, dtype=torch.float64, device=t["q"].device)
    out = in_fp64(form | {"mimo_v": ones, "mimo_out": ones}, CHUNK)
    return out * torch.nn.functional.silu(wide["z"]), wide


def relative(found, right):
    return float(((found.detach().double() - right).norm() / right.norm()).detach())


def errors_of(call, t, up, right):
    """Of each output beside fp64; t: one sequence."""
    leaves = {n: x.detach().requires_grad_() for n, x in t.items()}
    out, names = call(leaves), names_of(t)
    grads = torch.autograd.grad(out, [leaves[n] for n in names], up)
    named = {"out": out, **{f"d_{n}": g for n, g in zip(names, grads, strict=True)}}
    return {n: relative(x, right[n]) for n, x in named.items()}


def one_sequence(t):
    """The first of the batch, of few heads of one group: what fp64 can hold."""
    heads = slice(0, 8)
    cut = {n: t[n][:1, ..., :1, :] for n in ("q", "k")} | {"angles": t["angles"][:1]}
    cut |= {n: t[n][:1, :, heads] for n in ("v", "z")}
    cut |= {n: t[n][:1, heads] for n in ("adt", "dt", "trap")}
    return {n: x.detach().contiguous() for n, x in
            {**cut, **{n: t[n][heads] for n in names_of(t) if n not in cut}}.items()}  # fmt: skip


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
    leaves, kept = {n: x.detach().requires_grad_() for n, x in t.items()}, []

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

    return {"forward": forward, "backward": backward, "forward and backward": both}


PASSES = {"forward": 1, "backward": 3, "forward and backward": 4}  # useful products, in forwards


def row_runs(row, peers, meter, seconds, product, not_run):
    problem = PROBLEMS[row]
    if problem[4] != 1:
        not_run[f"{row}: mamba_ssm"] = "MIMO: its kernels are in TileLang, which is not here"
    t = draw(problem, torch.bfloat16)
    up = torch.randn_like(t["v"])
    calls = {"Talea": (ours, names_of(t)),
             "Talea, save_states": (lambda t: talea.mamba3(**t, save_states=True), names_of(t))}  # fmt: skip
    if problem[4] == 1:
        calls[f"{peers['version']}, SISO in Triton"] = (
            lambda t: siso(peers["siso"], t, problem[2]), ORDER)  # fmt: skip
    if "ssd" in peers and problem[4] == 1:
        calls["Mamba-2's SSD, another recurrence"] = (
            lambda t: ssd(peers["ssd"], t), ("q", "k", "v", "dt", "d", "z"))  # fmt: skip
    there, facts = {}, {}
    for name, (call, names) in calls.items():
        try:
            there[name] = passes_of(call, t, up, names)
            facts[name] = {p: {"extra_bytes": peak(run)} for p, run in there[name].items()}
            facts[name] = {
                p: {"extra_bytes": peak(run)} for p, run in there[name].items()
            }  # tuned now
        except Exception as error:
            there.pop(name, None)
            not_run[f"{row}: {name}"] = reason(error)
            print(f"{row} {name}: not run: {reason(error)}", flush=True)
    few = one_sequence(t)
    up_few = up[:1, :, :8].contiguous()
    out, wide = truth(few)
    right = dict(zip((f"d_{n}" for n in names_of(t)),
                     torch.autograd.grad(out, [wide[n] for n in names_of(t)], up_few.double()),
                     strict=True)) | {"out": out.detach()}  # fmt: skip
    for name, (call, _) in calls.items():
        if name not in there or "SSD" in name:
            continue
        of_few = (lambda t: siso(peers["siso"], t, 8)) if "SISO" in name else call
        errors = errors_of(of_few, few, up_few, right)
        for one in facts[name].values():
            one["errors"] = errors
            one["relative_l2"] = max(errors.values())
    del out, wide, right
    flops = useful_flops(problem)
    for which, times in PASSES.items():
        each = {name: [] for name in there}
        for order in (list(there), list(there)[::-1]):
            before = sustained(product, meter, seconds)
            for name in order:
                each[name].append(sustained(stepping(there[name][which]), meter, seconds))
            after = sustained(product, meter, seconds)
        rate = 2 * 8192**3 / ((before["ms"] + after["ms"]) / 2)
        for name, rounds in each.items():
            ms = sorted(r["ms"] for r in rounds)
            run = {"case": f"{row}, {which}", "name": name, "sustained_ms": [r["ms"] for r in rounds],
                   "joules": [r["joules"] for r in rounds], "sm_mhz": rounds[-1]["sm_mhz"],
                   "time": {"median_ms": sum(ms) / len(ms), "p20_ms": ms[0], "p80_ms": ms[-1],
                            "n": len(ms)}, **facts[name][which]}  # fmt: skip
            if "SSD" not in name:
                run["ratio"] = run["time"]["median_ms"] * rate / (flops * times)
            print(f"{run['case']:26} {name:44} {run['time']['median_ms']:8.3f} ms "
                  f"{run['extra_bytes'] / 2**20:8.0f} MiB {run.get('errors', '')}", flush=True)  # fmt: skip
            yield run


def step_runs(meter, seconds):
    """One token of every sequence beside a copy of the states, the least that it has to move twice."""
    t = draw(STEP, torch.bfloat16)
    one, state = step_of(t)
    few = one_sequence(t)
    right = truth(few)[0][0, 0]
    error = relative(talea.mamba3_step(state, **one)[0, :8], right)
    copy = torch.empty_like(state.ssm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        talea.mamba3_step(state, **one)
    calls = {"Talea": lambda: talea.mamba3_step(state, **one),
             "Talea, in a graph": graph.replay,
             "a copy of the states": lambda: copy.copy_(state.ssm)}  # fmt: skip
    each = {name: [] for name in calls}
    for order in (list(calls), list(calls)[::-1]):
        for name in order:
            each[name].append(sustained(calls[name], meter, seconds))
    for name, rounds in each.items():
        ms = sorted(r["ms"] for r in rounds)
        run = {"case": "D1, step", "name": name, "sustained_ms": [r["ms"] for r in rounds],
               "joules": [r["joules"] for r in rounds], "sm_mhz": rounds[-1]["sm_mhz"],
               "time": {"median_ms": sum(ms) / len(ms), "p20_ms": ms[0], "p80_ms": ms[-1], "n": len(ms)}}  # fmt: skip
        if name.startswith("Talea"):
            run |= {"errors": {"out": error}, "relative_l2": error}
        print(f"{run['case']:26} {name:44} {run['time']['median_ms']:8.3f} ms {run.get('errors', '')}",
              flush=True)  # fmt: skip
        yield run


def compile_part(args):
    """One of many processes: compiles its share of the configurations, which the cache keeps."""
    part = args.part
    peers, _ = import_peer(args.source, args.configs, args.ssd, part, args.processes)
    t = draw(SMALL, torch.bfloat16)
    up = torch.randn_like(t["v"])
    calls = [(lambda t: siso(peers["siso"], t, SMALL[2]), ORDER)]
    if "ssd" in peers:
        calls.append((lambda t: ssd(peers["ssd"], t), ("q", "k", "v", "dt", "d", "z")))
    for call, names in calls:
        try:
            for run in passes_of(call, t, up, names).values():
                run(0)
        except Exception as error:
            print(f"part {part}: {reason(error)}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--source", default="mamba_ssm-2.3.2.post1")
    parser.add_argument("--rows", default="S1")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--configs", choices=("all", "few"), default="all")
    parser.add_argument("--ssd", action="store_true", help="Mamba-2's SSD, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--part", type=int, help="one of the compiling processes")
    parser.add_argument("--only-compile", action="store_true", help="fills Triton's cache and ends")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    if args.part is not None:
        compile_part(args)
        return 0
    start, began, not_run, runs = _receipt.now(), time.monotonic(), {}, []
    words = [sys.executable, __file__, args.receipt, "--source", args.source, "--configs", args.configs,
             "--processes", str(args.processes), *(["--ssd"] if args.ssd else []), "--part"]  # fmt: skip
    if args.processes > 1:
        parts = [subprocess.Popen([*words, str(i)]) for i in range(args.processes)]
        for one in parts:
            one.wait()
        print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if args.only_compile:
        return 0
    meter, peers, tuned = Meter(), {}, [0, 0]
    public.WARM_SECONDS = args.seconds / 2
    try:
        peers, tuned = import_peer(args.source, args.configs, args.ssd)
    except Exception as error:
        not_run["mamba_ssm"] = reason(error)
        peers = {}
    if "ssd_missing" in peers:
        not_run["Mamba-2's SSD"] = peers["ssd_missing"]
    peers["version"] = os.path.basename(os.path.normpath(args.source)).replace("-", " ")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    for row in args.rows.split(","):
        try:
            if row == "D1":
                runs += step_runs(meter, args.seconds)
                continue
            runs += row_runs(
                row, peers, meter, args.seconds, lambda: torch.mm(a, b, out=c), not_run
            )
        except Exception as error:
            not_run[row] = reason(error)
            print(f"{row}: {reason(error)}", flush=True)
        torch.cuda.empty_cache()
    words = (f"useful products at the rate of a plain product of 8192 cubed in this process, sustained for "
             f"{args.seconds} s before and after each round")  # fmt: skip
    notes = ["two rounds, the second in reverse; errors of one sequence and eight heads beside fp64",
             f"peer's kernels tuned over {tuned[0]} of their {tuned[1]} configurations, few calls each"]  # fmt: skip
    _receipt.write_receipt(
        args.receipt, "bench", "the scan of Mamba-3 beside its peers on a GPU, bf16", None,
        {"bench": {"limit": words, "runs": runs, "not_run": not_run}, "notes": notes}, start,
        ["python", "bench/scan_peers.py", *sys.argv[1:]],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
