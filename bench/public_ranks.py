"""What: the public Python call over the ranks of a process group, against what it would replace.
Why: vocabulary-parallel users type `tp_group=` and change nothing else; that line is timed here.
Never: lets ranks run different numbers of steps, or reports the fastest rank's time.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python torchrun --nproc-per-node 2
       bench/public_ranks.py --receipt receipts/h200/public_ranks_2_8192x4096x128256.json

The limit of a row is the same rank's share of the three plain products and the sum of dX in bf16;
"unfused" is cross-entropy over local logits with an exchange of the maxima, sums and targets; "the
shard alone" the same call on this rank's words as if there were no others. Each step of the bench has
--step-limit seconds: where one takes longer, every rank says where it stands and ends, and what was
measured is written. A run takes some 3 s a mode and round, and 20 s to start on a bare machine.
"""

import faulthandler
import os
import statistics
import sys
import threading
import time

import talea
import torch
import torch.distributed as dist
from peer_truth import relative_l2
from public import MIB, drawn, parser_of
from talea._receipt import now, write_receipt

# name -> options of the call, and whether an fp32 main gradient or a share of the tokens goes in
MODES = {
    "default": {},
    "2100 MiB": {"workspace_limit": 2100 * MIB},
    "700 MiB": {"workspace_limit": 700 * MIB},
    "default, group of 4 multiprocessors": {"most": 4},
    "default, group of 8 multiprocessors": {"most": 8},
    "default, dx_sum=bf16": {"dx_sum": "bf16"},
    "main_grad, 530 MiB": {"workspace_limit": 530 * MIB, "grad_scale": 1.0, "main": True},
    "main_grad, default": {"grad_scale": 1.0, "main": True},
    "sequence parallel": {"sequence_parallel": True},
    "uneven shards": {"uneven": True},
    "loss only": {"loss_only": True},
    "the shard alone": {"alone": True},
}


class Watch:
    """Ends a run in which a step takes too long, and says which step it was."""

    def __init__(self, limit, ended):
        self.limit, self.ended, self.begin = limit, ended, time.perf_counter()
        self.said, self.due = "start", time.perf_counter() + 3 * limit  # libraries are loaded, too
        threading.Thread(target=self.watch, daemon=True).start()

    def step(self, what):
        """Of every rank; rank 0 says so."""
        self.said, self.due = what, time.perf_counter() + self.limit
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - self.begin:6.1f} s  {what}", flush=True)

    def watch(self):
        while time.perf_counter() < self.due:
            time.sleep(0.2)
        rank = os.environ.get("RANK", "?")
        print(f"rank {rank}: {self.said}: did not end in time", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        self.ended(self.said)
        os._exit(4)


def group_of(most):
    """All ranks; the kernels of their exchanges take at most so many multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    options.config.cga_cluster_size = 2
    options.is_high_priority_stream = True
    return dist.new_group(backend="nccl", pg_options=options)


class LocalLogits(torch.autograd.Function):
    """Cross-entropy over this rank's columns: exchanges of row maxima, sums and target logits."""

    @staticmethod
    def forward(ctx, z, targets, begin):
        z = z.float()
        top = z.max(-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX)
        z -= top[:, None]
        own = targets - begin
        here = (own >= 0) & (own < z.shape[1])
        row = torch.arange(len(own), device=z.device)
        picked = torch.where(here, z[row, own.clamp(0, z.shape[1] - 1)], 0.0)
        torch.exp(z, out=z)
        sums = z.sum(-1)
        both = torch.stack((sums, picked))
        dist.all_reduce(both)
        z /= both[0][:, None]
        ctx.save_for_backward(z, row, own.clamp(0, z.shape[1] - 1), here)
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx, up):
        p, row, own, here = ctx.saved_tensors
        p[row, own] -= here.float()
        return (p * (up / len(own))).bfloat16(), None, None


class SumOfShares(torch.autograd.Function):
    """Hidden as every rank's product takes it: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


def cut(words, rank, size, uneven):
    """Columns of a rank; uneven: the first has a quarter more than its share, the last as much less."""
    ends = [words * r // size for r in range(size + 1)]
    extra = words // size // 4 if uneven and size > 1 else 0
    return ends[rank] + (extra if rank > 0 else 0), ends[rank + 1] + (
        extra if rank + 1 < size else 0
    )


class Mode:
    def __init__(self, name, x, w, y):
        how = dict(MODES[name])
        rank, size = dist.get_rank(), dist.get_world_size()
        self.name, self.loss_only = name, how.pop("loss_only", False)
        self.begin, self.end = cut(w.shape[0], rank, size, how.pop("uneven", False))
        self.rows = slice(0, x.shape[0])
        if how.get("sequence_parallel"):
            each = x.shape[0] // size
            self.rows = slice(rank * each, (rank + 1) * each)
        self.x = x[self.rows].detach().requires_grad_(not self.loss_only)
        self.w = w[self.begin : self.end].detach().requires_grad_(not self.loss_only)
        self.y = y
        self.main = torch.zeros(self.w.shape, device=w.device) if how.pop("main", False) else None
        self.alone = how.pop("alone", False)
        if self.alone:
            self.y = y % self.w.shape[0]
            self.options = how
            return
        group = group_of(how.pop("most")) if "most" in how else dist.group.WORLD
        self.options = {**how, "tp_group": group, "vocab": w.shape[0], "vocab_begin": self.begin}
        if self.main is not None:
            self.options["main_grad"] = self.main

    def step(self, **more):
        self.x.grad = self.w.grad = None
        found = talea.linear_cross_entropy(self.x, self.w, self.y, **self.options, **more)
        loss = found.loss if more else found
        if not self.loss_only:
            loss.backward()
        return found

    def examine(self, truth):
        torch.cuda.synchronize()
        if self.main is not None:
            self.main.zero_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = self.step()
        torch.cuda.synchronize()
        returned = sum(t.grad.numel() * t.grad.element_size()
                       for t in (self.x, self.w) if t.grad is not None)  # fmt: skip
        facts = {"extra_mib": (torch.cuda.max_memory_allocated() - before - returned) / MIB,
                 "loss_error": abs(float(loss.detach()) - truth[0])}  # fmt: skip
        if not (self.loss_only or self.alone):
            facts["dx_relative_l2"] = relative_l2(self.x.grad, truth[1][self.rows])
            dw = self.w.grad if self.main is None else self.main
            facts["dw_relative_l2"] = relative_l2(dw, truth[2][self.begin : self.end])
        receipt = self.step(outputs=("loss",)).receipt()
        facts["products"], facts["lane"] = round(receipt["products"], 2), receipt["lane"]
        facts["plan"] = {k: receipt[k] for k in ("chunk_rows", "chunks", "workspace_bytes")}
        self.x.grad = self.w.grad = None
        return facts


def slowest(value):
    t = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def timed(work, steps):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        work()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / steps)


def sustained(work, args):
    """ms a step of the slowest rank, back to back after args.warm seconds of the same."""
    work()
    each = timed(work, 3)
    timed(work, max(3, int(args.warm * 1000 / each)))
    return timed(work, max(5, int(args.seconds * 1000 / each)))


def plain_steps(x, w, y, rank, size):
    begin, end = cut(w.shape[0], rank, size, False)
    w = w[begin:end]
    z = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    xg, wg = x.detach().requires_grad_(), w.detach().requires_grad_()

    def products():
        torch.mm(x, w.T, out=z)
        torch.mm(z, w, out=dx)
        summed = dist.all_reduce(dx, async_op=True)
        torch.mm(z.T, x, out=dw)
        summed.wait()

    def unfused():
        xg.grad = wg.grad = None
        LocalLogits.apply(
            torch.nn.functional.linear(SumOfShares.apply(xg), wg), y, begin
        ).backward()

    return {"local products and sum of dX": products, "unfused local logits": unfused}


def runs_of(rounds, facts, case, size, limit):
    """Of every name that each round has."""
    runs = []
    for name in (n for n in rounds[0] if all(n in r for r in rounds)):
        times = sorted(r[name] for r in rounds)
        runs.append({
            "name": name, "case": case, "ranks": size, **facts.get(name, {}),
            "sustained_ratio": statistics.mean(r[name] / r[limit] for r in rounds),
            "time": {"median_ms": statistics.mean(times), "p20_ms": times[0], "p80_ms": times[-1],
                     "n": len(times)},
        })  # fmt: skip
    return runs


def show(runs, not_run):
    for r in runs:
        more = {k: r[k] for k in ("extra_mib", "products", "dx_relative_l2", "dw_relative_l2",
                                  "lane", "plan") if k in r}  # fmt: skip
        print(f"{r['name']:36s} {r['time']['median_ms']:8.2f} ms {r['sustained_ratio']:.3f} {more}")
    for name, why in not_run.items():
        print(f"{name}: {why}")


class Bench:
    """What was measured so far, and how it is written."""

    def __init__(self, args):
        self.args, self.start = args, now()
        self.facts, self.not_run, self.rounds, self.limit = {}, {}, [], None

    def write(self, unfinished=None):
        if os.environ.get("RANK", "0") != "0" or not (self.rounds and self.limit):
            return
        whole = [r for r in self.rounds if self.limit in r and self.facts.keys() <= r.keys()]
        rounds = whole or [r for r in self.rounds[:1] if self.limit in r]
        if not rounds:
            return
        args, size = self.args, int(os.environ.get("WORLD_SIZE", "1"))
        if unfinished:
            self.not_run[unfinished] = (
                f"did not end within {args.step_limit:g} s: the run was ended"
            )
        case = f"{args.tokens}x{args.hidden}x{args.vocab}, {size} ranks"
        runs = runs_of(rounds, self.facts, case, size, self.limit)
        show(runs, self.not_run)
        if not args.receipt:
            return
        sections = {
            "bench": {"limit": f"{self.limit}, sustained, of the slowest rank", "runs": runs,
                      "not_run": self.not_run},
            "notes": [f"{len(rounds)} rounds, every second one in reverse order; ratios are their mean",
                      "truth: fp32 products of the bf16 inputs"],
        }  # fmt: skip
        argv = ["torchrun", "--nproc-per-node", str(size), "bench/public_ranks.py", *sys.argv[1:]]
        title = f"The public Python call over {size} ranks, {case}, bf16"
        write_receipt(args.receipt, "bench", title, None, sections, self.start, argv)


def arguments():
    parser = parser_of(__doc__, seconds=1.0)
    parser.add_argument("--warm", type=float, default=0.6, help="seconds before each sustained run")
    parser.add_argument("--step-limit", type=float, default=60, help="seconds a step may take")
    return parser.parse_args()


def main():
    args = arguments()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    bench = Bench(args)
    watch = Watch(args.step_limit, bench.write)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    watch.step("inputs and truth")
    x, w, y, truth = drawn(args, device)
    modes = []
    for name in args.modes.split(";") if args.modes else list(MODES):
        watch.step(f"{name}: first call")
        mode = Mode(name, x, w, y)
        try:
            mode.step()
            bench.facts[name] = mode.examine(truth)
            modes.append(mode)
            if rank == 0:
                print(f"{name}: {bench.facts[name]}", flush=True)
        except talea.Error as error:  # on every rank alike, or the next exchange names the absent
            bench.not_run[name] = str(error).splitlines()[0]
    del truth
    plain = plain_steps(x, w, y, rank, size)
    bench.limit = next(iter(plain))
    for order in (modes, modes[::-1]):
        found = {}
        bench.rounds.append(found)
        for name, work in plain.items():
            watch.step(name)
            found[name] = sustained(work, args)
        for mode in order:
            watch.step(mode.name)
            found[mode.name] = sustained(mode.step, args)
            if rank == 0:
                print(f"{mode.name}: {found[mode.name]:.2f} ms", flush=True)
        for name, work in plain.items():
            watch.step(name)
            found[name] = (found[name] + sustained(work, args)) / 2
    watch.step("end")
    talea.require_clean()
    bench.write()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
