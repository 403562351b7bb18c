"""What: the scan of Mamba-3 over the ranks of a process group, by heads and by tokens, beside one rank alone.
Why: what ranks cost is their exchanges and, by tokens, a second pass over a piece; a user sees both in a step.
Never: lets ranks run different numbers of steps, or reports the fastest rank's time.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python torchrun --nproc-per-node 2
       bench/scan_ranks.py [--rows M1,S1] [--receipt receipts/h200/scan_ranks_2.json]

A step is forward and backward of the public call, in bf16. The efficiency is the time of the whole problem on
one rank, over the ranks times theirs; while one is measured alone, all run the same, each on its own device.
"""

import argparse
import os
import statistics
import sys

import talea
import torch
import torch.distributed as dist
from mamba3_device import PROBLEMS, draw
from public_ranks import Watch, sustained
from scan_truth import relative
from talea._receipt import now, write_receipt

HEADS = {"v": 2, "z": 2, "adt": 1, "dt": 1, "trap": 1, "q_bias": 0, "k_bias": 0, "d": 0,
         "mimo_v": 0, "mimo_z": 0, "mimo_out": 0}  # fmt: skip
TOKENS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}
WAYS = ("one rank", "heads", "tokens", "tokens, save_states")


class Way:
    def __init__(self, way, t, up):
        rank, size = dist.get_rank(), dist.get_world_size()
        self.way, self.how, axes = way, {}, {}

        def share(x, axis):
            n = x.shape[axis]
            begin = n * rank // size
            return x.narrow(axis, begin, n * (rank + 1) // size - begin)

        if way == "heads":
            groups, heads = t["q"].shape[-2], t["v"].shape[2]
            axes, self.how = dict(HEADS), {"heads_group": dist.group.WORLD}
            if groups % size == 0 and heads % size == 0:  # whole groups; else every rank holds all
                axes |= {"q": t["q"].dim() - 2, "k": t["k"].dim() - 2}
            else:
                self.how["total_groups"] = groups
        elif way.startswith("tokens"):
            axes = TOKENS
            self.how = {"sequence_group": dist.group.WORLD, "workspace_limit": 512 << 20}
            self.how["save_states"] = way != "tokens"
        self.axes, self.share = axes, share
        self.t = {n: (share(x, axes[n]) if n in axes else x).detach().requires_grad_()
                  for n, x in t.items()}  # fmt: skip
        self.up = share(up, 2 if way == "heads" else 1) if axes else up

    def mine(self, x, axis):
        return (x if axis is None else self.share(x, axis)).double()

    def step(self):
        out = talea.mamba3(**self.t, **self.how)
        return out, torch.autograd.grad(out, list(self.t.values()), self.up)

    def far(self, whole):
        """The largest relative L2 between what this rank holds and the same of one rank."""
        out, grads = self.step()
        if self.axes is TOKENS:  # of parameters each rank has its tokens' share
            for name, g in zip(self.t, grads, strict=True):
                if name not in self.axes:
                    dist.all_reduce(g)
        found = {"out": out, **{f"d_{n}": g for n, g in zip(self.t, grads, strict=True)}}
        axes = {"out": self.axes.get("v")} | {f"d_{n}": a for n, a in self.axes.items()}
        gaps = {n: relative(x, self.mine(whole[n], axes.get(n))) for n, x in found.items()}
        if not all(gap <= 2e-2 for gap in gaps.values()):
            raise SystemExit(f"{self.way}: far from one rank: {gaps}")
        return max(gaps.values())


def row_runs(row, o, watch):
    t = draw(PROBLEMS[row], torch.bfloat16)
    up = torch.randn_like(t["v"], memory_format=torch.contiguous_format)
    dist.broadcast(up, 0)  # the others are drawn alike on every rank
    ways = [Way(way, t, up) for way in WAYS]
    out, grads = ways[0].step()
    whole = {"out": out.detach(), **{f"d_{n}": g for n, g in zip(t, grads, strict=True)}}
    facts = {}
    for way in ways:
        watch.step(f"{row}, {way.way}: first calls")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = way.step()
        torch.cuda.synchronize()
        returned = sum(x.numel() * x.element_size() for x in (kept[0], *kept[1]))
        peak = torch.cuda.max_memory_allocated() - before - returned
        del kept
        facts[way.way] = {"extra_mib": peak / 2**20, "relative_l2": way.far(whole)}
    rounds = []
    for order in (ways, ways[::-1]):
        rounds.append({})
        for way in order:
            watch.step(f"{row}, {way.way}")
            rounds[-1][way.way] = sustained(way.step, o)
    size, runs = dist.get_world_size(), []
    for way in WAYS:
        ms = sorted(r[way] for r in rounds)
        ranks = 1 if way == "one rank" else size
        runs.append({
            "name": f"{row}, {way}", "case": row, "ranks": ranks, **facts[way],
            "efficiency": statistics.mean(r["one rank"] / (ranks * r[way]) for r in rounds),
            "time": {"median_ms": statistics.mean(ms), "p20_ms": ms[0], "p80_ms": ms[-1], "n": len(ms)},
        })  # fmt: skip
        if dist.get_rank() == 0:
            r = runs[-1]
            print(f"{r['name']:16s} {r['time']['median_ms']:8.3f} ms, efficiency {r['efficiency']:.3f}, "
                  f"{r['extra_mib']:.0f} MiB, {r['relative_l2']:.1e} from one rank", flush=True)  # fmt: skip
    return runs


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", default="M1,S1")
    p.add_argument("--seconds", type=float, default=0.5, help="of each sustained run")
    p.add_argument("--warm", type=float, default=0.3, help="seconds before each sustained run")
    p.add_argument("--receipt", help="where to write it, .json")
    o = p.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, watch = now(), Watch(60, lambda said: None)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    runs = []
    for row in o.rows.split(","):
        runs += row_runs(row, o, watch)
        torch.cuda.empty_cache()
    watch.step("end")
    if o.receipt and dist.get_rank() == 0:
        size = dist.get_world_size()
        words = "the whole problem on one rank, over the ranks times theirs; of the slowest rank"
        argv = ["torchrun", "--nproc-per-node", str(size), "bench/scan_ranks.py", *sys.argv[1:]]
        write_receipt(
            o.receipt, "bench", f"the scan of Mamba-3 over {size} ranks, forward and backward, bf16", None,
            {"bench": {"limit": words, "runs": runs},
             "notes": ["two rounds, the second in reverse order; relative_l2: of what rank 0 holds"]},
            start, argv,
        )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
