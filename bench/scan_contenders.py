"""What: the ways to run the scan that are timed beside each other: ours, mamba_ssm's kernels in Triton for SISO
and its step, Mamba-2's SSD; and the compiling of the peers' kernels by many processes.
Why: a peer is called as its page says, with the kernels that its own tuning picks.
Never: times anything; changes a kernel of a peer.
"""

from __future__ import annotations

import itertools
import os
import sys
import types

import talea
import torch
from attention_peers import reason
from peer_contenders import median_of_calls
from scan_truth import ORDER, names_of

CHUNK, SHORT, SSD_CONFIGS = 64, 1024, 4
SSD_NAMES = ("q", "k", "v", "dt", "d", "z")


def ours(t):
    return talea.mamba3(**t)


def ours_with_states(t):
    return talea.mamba3(**t, save_states=True)


def lane_of(t):
    """Which lane the default takes: the other one of a GPU where `sm90` declines."""
    try:
        with torch.no_grad():
            talea.mamba3(**t, lane="sm90")
    except talea.Error:
        return "cuda"
    return "sm90"


def siso(peer, t):
    """Angles of all heads at once, as upstream's module gives them."""
    angles = t["angles"].expand(-1, -1, t["v"].shape[2], -1)
    packed = {"cu_seqlens": t["cu_seqlens"]} if "cu_seqlens" in t else {}
    given = (angles if n == "angles" else t[n] for n in ORDER)
    return peer(*given, chunk_size=CHUNK, **packed)


def siso_step(peer, one, state):
    """A call without arguments. States are new tensors there, not those of before."""
    given = {**one, "angles": one["angles"].expand(-1, one["v"].shape[1], -1).contiguous()}
    rows, states = [given[n] for n in ORDER], (state.angle, state.ssm, state.k[:, 0], state.v)
    return lambda: peer(*rows, Input_States=states)


def ssd(peer, t):
    """Another recurrence, without turns and trapezoids; x, dt, A, B, C of the same sizes."""
    a = -torch.ones(t["v"].shape[2], device="cuda")
    return peer(t["v"], t["dt"].mT.contiguous(), a, t["k"], t["q"], 256, D=t["d"], z=t["z"])


class Tuning:
    """triton.autotune while a peer is imported: over its own configurations, or `few` of them: those that
    leave the number of registers free; of SSD, whose lists are longer, the first. Of `parts` processes each
    only compiles its share, and launches nothing that is tuned."""

    def __init__(self, mode, part=None, parts=1):
        self.mode, self.part, self.parts = mode, part, parts
        self.wanted = self.listed = self.number = 0
        self.most = None

    def __call__(self, configs=(), key=(), **more):
        kept = [c for c in configs if self.mode == "all" or not getattr(c, "maxnreg", None)]
        if self.mode == "few" and self.most:
            kept = kept[: self.most]
        self.wanted, self.listed = self.wanted + len(kept), self.listed + len(configs)
        more.pop("do_bench", None)
        if self.part is None:
            return self.tuned(configs=kept, key=key, do_bench=median_of_calls, **more)
        first, self.number = self.number, self.number + len(kept)
        mine = [c for i, c in enumerate(kept, first) if i % self.parts == self.part]
        return lambda kernel: CompiledOnly(kernel, kept, mine)

    def __enter__(self):
        import triton

        self.tuned, triton.autotune = triton.autotune, self
        return self

    def __exit__(self, *_):
        import triton

        triton.autotune = self.tuned


class CompiledOnly:
    """A kernel whose launch compiles it under some of its configurations, which the cache keeps."""

    def __init__(self, kernel, configs, mine):
        self.kernel, self.configs, self.mine = kernel, configs, mine
        self.best_config = configs[0]  # what sizes of scratch are taken from

    def __getitem__(self, grid):
        return lambda *args, **more: self.compile(*args, **more)

    def compile(self, *args, **more):
        for config in self.mine:
            try:
                self.kernel.warmup(*args, grid=(1,), **{**more, **config.all_kwargs()})
            except Exception as error:
                print(f"{self.kernel}: {config}: {reason(error)}", file=sys.stderr)


def import_peers(source, tuning, with_ssd):
    """mamba_ssm without its __init__, whose compiled extension its kernels of Mamba-3 do not need."""
    package = types.ModuleType("mamba_ssm")
    package.__path__ = [os.path.join(source, "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    found = {"version": os.path.basename(os.path.normpath(source)).replace("-", " ")}
    init = os.path.join(source, "mamba_ssm", "__init__.py")
    if os.path.exists(init):
        with open(init) as f:
            words = [line.split('"')[1] for line in f if line.startswith("__version__")]
        found["version"] = f"mamba_ssm {words[0]}" if words else found["version"]
    with tuning:
        from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

        found["siso"] = mamba3_siso_combined
        try:
            from mamba_ssm.ops.triton.mamba3.mamba3_siso_step import mamba3_siso_step

            found["step"] = mamba3_siso_step
        except Exception as error:
            found["step_missing"] = reason(error)
        if not with_ssd:
            return found
        try:
            tuning.most = SSD_CONFIGS
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            found["ssd"] = mamba_chunk_scan_combined
        except Exception as error:
            found["ssd_missing"] = reason(error)
        tuning.most = None
    return found


def shortened(problem):
    """Compiles what the problem needs: what sizes divide by stays."""
    batch, tokens, *others = problem
    return (min(batch, 2), min(tokens, SHORT), *others)


def compile_for(problems, peers, draw, step):
    """problems: of SISO, and whether SSD runs them; step: (token, state) or None."""
    jobs = []
    for problem, with_ssd in problems:
        jobs.append((problem, lambda t: siso(peers["siso"], t), names_of))
        if with_ssd and "ssd" in peers:
            jobs.append((problem, lambda t: ssd(peers["ssd"], t), lambda _: SSD_NAMES))
    for problem, call, names in jobs:
        t = draw(shortened(problem), torch.bfloat16)
        try:
            with torch.no_grad():
                call(t)
            leaves = {n: x.detach().requires_grad_() for n, x in t.items()}
            wanted = [leaves[n] for n in names(t)]
            out = call(leaves)
            torch.autograd.grad(out, wanted, torch.randn_like(out))
        except Exception as error:
            print(f"{problem}: {reason(error)}", file=sys.stderr)
    if step and "step" in peers:
        siso_step(peers["step"], *step)()


def packed_ends(sequences, tokens, device):
    """Lengths of one token to twice the mean, in a drawn order; their sum is `tokens`."""
    g = torch.Generator().manual_seed(3)
    mean = tokens / sequences
    lengths = torch.linspace(1, 2 * mean - 1, sequences).round().long()
    lengths[sequences // 2] += tokens - int(lengths.sum())
    lengths = lengths[torch.randperm(sequences, generator=g)].tolist()
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=device)
