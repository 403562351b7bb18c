"""What: the public call of the scan on a GPU: time of forward, backward and step, useful TFLOP/s, memory.
Why: each size of docs/mamba3.md's table is one line that anyone with a GPU can repeat.
Never: a time of a call that was not warmed up, or of one that the profiler watched.

    python bench/mamba3_device.py [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics

import talea
import torch
from mamba3_peers import eager

# batch, tokens, heads, groups, rank, N, P
PROBLEMS = {
    "M1": (2, 4096, 112, 8, 4, 128, 64), "M2": (8, 2048, 32, 1, 4, 128, 64),
    "M3": (1, 65536, 64, 1, 4, 128, 64), "M3 half": (1, 32768, 64, 1, 4, 128, 64),
    "M3 quarter": (1, 16384, 64, 1, 4, 128, 64), "M4 R8": (2, 4096, 64, 8, 8, 128, 64),
    "M4 R2": (2, 4096, 64, 8, 2, 128, 64), "M4 N256": (2, 4096, 64, 1, 4, 256, 64),
    "M4 P128": (2, 4096, 64, 1, 4, 128, 128), "S1": (4, 4096, 64, 1, 1, 128, 64),
    "S2": (1, 4096, 32, 1, 1, 128, 64), "S3": (8, 4096, 128, 8, 1, 128, 64),
    "L R4": (8, 4096, 128, 8, 4, 128, 64),
}  # fmt: skip


def draw(problem, dtype, device="cuda"):
    batch, tokens, heads, groups, rank, cols, head_dim = problem
    g = torch.Generator(device=device).manual_seed(7)

    def normal(*shape, scale=1.0, of=dtype):
        return (torch.randn(shape, generator=g, device=device) * scale).to(of)

    wide = torch.float32
    dt = torch.nn.functional.softplus(normal(batch, heads, tokens, of=wide) - 3)
    ranks = (rank,) if rank > 1 else ()
    t = {
        "q": normal(batch, tokens, *ranks, groups, cols, scale=cols**-0.25),
        "k": normal(batch, tokens, *ranks, groups, cols, scale=cols**-0.25),
        "v": normal(batch, tokens, heads, head_dim), "adt": -dt * 1.5, "dt": dt,
        "trap": normal(batch, heads, tokens), "angles": normal(batch, tokens, 1, cols // 4, of=wide),
        "q_bias": normal(heads, *ranks, cols, scale=0.3, of=wide),
        "k_bias": normal(heads, *ranks, cols, scale=0.3, of=wide),
        "d": normal(heads, of=wide), "z": normal(batch, tokens, heads, head_dim),
    }  # fmt: skip
    if rank > 1:
        for name in ("mimo_v", "mimo_z", "mimo_out"):
            t[name] = 1 / rank + normal(heads, rank, head_dim, scale=0.3, of=wide)
    return t


def useful_flops(problem):
    """Of forward and of backward, whose states and outputs are formed again."""
    batch, tokens, heads, _, rank, cols, head_dim = problem
    one = batch * tokens * heads * (128 * rank * (cols + head_dim) + 4 * rank * cols * head_dim)
    return one, 3 * one


def useful_bytes(problem):
    """Of forward and of backward, in bf16 with fp32 steps and shared angles of a quarter of the columns."""
    batch, tokens, heads, groups, rank, cols, head_dim = problem
    row, value = rank * groups * cols, heads * head_dim
    forward = 4 * row + 6 * value + 10 * heads + cols
    return batch * tokens * forward, batch * tokens * (8 * row + 10 * value + 20 * heads + 2 * cols)


def ms_of(call, repeats):
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def extra_bytes(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    returned = sum(x.numel() * x.element_size() for x in kept)
    return peak - returned


def of_problem(problem, dtype, repeats, lane="auto"):
    t = {n: x.requires_grad_() for n, x in draw(problem, dtype).items()}
    up = torch.randn_like(t["v"])

    def forward():
        with torch.no_grad():
            return (talea.mamba3(**t, lane=lane),)

    out = talea.mamba3(**t, lane=lane)

    def backward():
        return torch.autograd.grad(out, list(t.values()), up, retain_graph=True)

    made = {"forward": ms_of(forward, repeats), "backward": ms_of(backward, repeats)}
    flops = useful_flops(problem)
    print(f"{made['forward']:.3f} ms, {flops[0] / made['forward'] / 1e9:.0f} TFLOP/s; backward "
          f"{made['backward']:.3f} ms, {flops[1] / made['backward'] / 1e9:.0f} TFLOP/s; beside them "
          f"{extra_bytes(forward) / 2**20:.0f} and {extra_bytes(backward) / 2**20:.0f} MiB")  # fmt: skip


STEP = (128, 1, 64, 1, 4, 128, 64)  # row D1


def step_of(t):
    """The only token of every sequence, and states of zeros."""
    batch, _, heads, head_dim = t["v"].shape
    rank, cols = t["q"].shape[2], t["q"].shape[-1]
    one = {n: x[:, 0] for n, x in t.items() if n in ("q", "k", "v", "z", "angles")}
    one |= {n: t[n][:, :, 0] for n in ("adt", "dt", "trap")}
    one |= {n: x for n, x in t.items() if n not in one}
    return one, talea.Mamba3State.zeros(batch, heads, rank, cols, head_dim, cols // 4,
                                        device=t["v"].device)  # fmt: skip


def of_step(repeats):
    one, state = step_of(draw(STEP, torch.bfloat16))
    ms = ms_of(lambda: talea.mamba3_step(state, **one), repeats)
    copy = torch.empty_like(state.ssm)
    print(
        f"{ms:.3f} ms; a copy of the state {ms_of(lambda: copy.copy_(state.ssm), repeats):.3f} ms"
    )


def beside_eager(repeats):
    """One sequence, one group, fp32: what the eager chunk form of mamba3_peers.py takes."""
    torch.set_default_device("cuda")
    for name, problem, chunk in (("SISO", (1, 2048, 32, 1, 1, 128, 64), 64),
                                 ("MIMO R 4", (1, 2048, 32, 1, 4, 128, 64), 16)):  # fmt: skip
        t = draw(problem, torch.float32)
        del t["z"]
        t.pop("mimo_z", None)
        if "mimo_v" not in t:
            for n in ("mimo_v", "mimo_out"):
                t[n] = torch.ones(32, 1, 64)
            for n in ("q", "k"):
                t[n] = t[n].unsqueeze(2)
            for n in ("q_bias", "k_bias"):
                t[n] = t[n].unsqueeze(1)
        t = {n: x.requires_grad_() for n, x in t.items()}
        up = torch.randn_like(t["v"])
        forms = {
            "talea": lambda t=t: talea.mamba3(**t),
            "torch eager": lambda t=t, c=chunk: eager(t, c),
        }
        for form, call in forms.items():

            def both(call=call, t=t, up=up):
                return torch.autograd.grad(call(), list(t.values()), up)

            print(f"{name} fp32, {form}: forward and backward {ms_of(both, repeats):.2f} ms, "
                  f"{extra_bytes(both) / 2**20:.0f} MiB")  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", default=[*PROBLEMS, "D1", "eager"])
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--lane", default="auto")
    o = p.parse_args()
    print(f"{torch.cuda.get_device_name()}, {o.dtype}, talea {talea.__version__}")
    for name in o.names:
        if name == "eager":
            beside_eager(o.repeats)
            continue
        print(f"{name}: ", end="", flush=True)
        if name == "D1":
            of_step(o.repeats)
        else:
            of_problem(PROBLEMS[name], getattr(torch, o.dtype), o.repeats, o.lane)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
