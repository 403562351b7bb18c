"""What: how the peers of the scan get their kernels: Triton's, tuned over their own lists, and TileLang's, which
mamba_ssm compiles anew for every size; both by many processes ahead of what is timed.
Why: a compile in a timed process would be waited for by the GPU, one after another.
Never: times anything; changes a kernel of a peer; needs a device to say which kernels of TileLang a call takes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time

import scan_contenders as who
import torch
from attention_peers import reason
from mamba3_device import draw
from peer_contenders import median_of_calls
from scan_truth import BY_TOKEN, names_of

SHORT, SEQUENCES = 1024, 64
FORWARD, BACKWARD = 1, 2  # kernels of TileLang in each pass


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


class Enough(Exception):
    """All kernels of a pass were asked for."""


class Asked(list):
    """Which kernels of TileLang are asked for, and how, while a peer's code runs: none is compiled or launched.
    Behind `most` of them that code ends."""

    def __init__(self, most=None):
        from tilelang.jit import JITImpl

        super().__init__()
        self.most = most
        modules = [m for n, m in sys.modules.items() if n.startswith("mamba_ssm.ops.tilelang.")]
        self.there = [(m, n, x) for m in modules for n, x in vars(m).items() if isinstance(x, JITImpl)]  # fmt: skip

    def __enter__(self):
        for module, name, kernel in self.there:
            setattr(module, name, functools.partial(self.note, kernel))
        return self

    def note(self, kernel, *args, **more):
        self.append((kernel, args, more))
        if len(self) == self.most:
            raise Enough
        return lambda *_: None

    def __exit__(self, kind, *_):
        for module, name, kernel in self.there:
            setattr(module, name, kernel)
        return kind is Enough


def shortened(problem):
    """Compiles what the problem needs: what sizes divide by stays."""
    batch, tokens, *others = problem
    return (min(batch, 2), min(tokens, SHORT), *others)


def packed(problem, device):
    """All tokens of the problem as one pack: its tensors' problem, and where its sequences end."""
    tokens = problem[0] * problem[1]
    return (1, tokens, *problem[2:]), who.packed_ends(SEQUENCES, tokens, device)


def blank(problem):
    """Tensors of these sizes without memory."""
    batch, tokens = problem[:2]
    made = {}
    for n, x in draw((1, 1, *problem[2:]), torch.bfloat16, "cpu").items():
        sizes = list(x.shape)
        if n in BY_TOKEN:
            sizes[:2] = batch, tokens
        elif n in ("adt", "dt", "trap"):
            sizes[::2] = batch, tokens
        made[n] = x.new_empty(sizes, device="meta")
    return made


def tilelang_kernels(problem, as_pack):
    """(kernel, arguments, named ones) of forward and backward, in the order of their calls: as upstream's wrappers
    ask for them."""
    ends, behind = None, ""
    if as_pack:
        (problem, ends), behind = packed(problem, "meta"), "_varlen"
    folder = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_"
    forward, backward = (sys.modules[f"{folder}{p}{behind}"] for p in ("fwd", "bwd"))
    t = blank(problem)
    given = {n: t[n] for n in ("q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_z", "z", "dt", "trap")}  # fmt: skip
    given |= {
        "mimo_o": t["mimo_out"],
        "D": t["d"],
        "angles": who.of_heads(t),
        **who.mimo_options(t),
    }
    given |= dict.fromkeys(("dA_cs", "dA_cs_rev", "segsum"), t["adt"])
    given |= {"cu_seqlens": ends} if as_pack else {}
    with Asked(FORWARD) as first:
        getattr(forward, f"mamba_mimo_forward{behind}")(**given)
    with Asked(BACKWARD) as then:
        getattr(backward, f"mamba_mimo_bwd_combined{behind}")(t["v"], **given)
    return [*first, *then]


def share(jobs, part, parts):
    """There and back again over the parts: the first jobs take longest."""
    return [job for i, job in enumerate(jobs) if i % (2 * parts) in (part, 2 * parts - 1 - part)]


def compile_tilelang(problems, part, parts):
    """problems: of MIMO, and whether as a pack. Kernels of backward's end take longest, those of forward least."""
    found = []
    for problem, as_pack in problems:
        try:
            found.append(tilelang_kernels(problem, as_pack))
        except Exception as error:
            print(f"{problem}: {reason(error)}", file=sys.stderr)
    jobs = [kernels[i] for i in reversed(range(FORWARD + BACKWARD)) for kernels in found if i < len(kernels)]  # fmt: skip
    for kernel, args, more in share(jobs, part, parts):
        try:
            kernel(*args, **more)
        except Exception as error:
            print(f"{args}, {more}: {reason(error)}", file=sys.stderr)


def triton_jobs(problems, peers):
    """Calls whose launches compile what is tuned: of SISO, of MIMO (without TileLang's part), of SSD."""
    for problem, as_pack, with_ssd in problems:
        small, more = shortened(problem), {}
        if as_pack:
            small, more["cu_seqlens"] = packed(small, "cuda")
        name = "siso" if problem[4] == 1 else "mimo"
        call = getattr(who, name)
        if name in peers:
            yield small, more, functools.partial(call, peers[name]), names_of
        if with_ssd and "ssd" in peers:
            yield small, more, functools.partial(who.ssd, peers["ssd"]), lambda _: who.SSD_NAMES


def compile_triton(problems, peers, step):
    """problems: sizes, whether as a pack, whether SSD runs them; step: (token, state) or None."""
    for problem, more, call, names in triton_jobs(problems, peers):
        t = draw(problem, torch.bfloat16) | more
        try:
            with torch.no_grad():
                call(t)
            leaves = {n: x.detach() for n, x in t.items()}
            wanted = [leaves[n].requires_grad_() for n in names(t)]
            out = call(leaves)
            torch.autograd.grad(out, wanted, torch.randn_like(out))
        except Exception as error:
            print(f"{problem}: {reason(error)}", file=sys.stderr)
    if step and "step" in peers:
        who.siso_step(peers["step"], *step)()


def compile_part(problems, o, step):
    """One of many processes, behind those that are measured: compiles its share, which the caches keep."""
    os.nice(19)
    peers = who.import_peers(o.source, Tuning(o.configs, o.part, o.processes), wanted_of(problems))
    many = [x for x in problems if x[0][4] > 1]
    if "mimo" in peers:
        compile_tilelang([x[:2] for x in many], o.part, o.processes)
        with Asked():
            compile_triton(many, peers, None)
    compile_triton([x for x in problems if x[0][4] == 1], peers, step)


def wanted_of(problems):
    """Which of the peers' modules the rows need besides those of SISO."""
    found = {"mimo" for problem, *_ in problems if problem[4] > 1}
    return found | {"ssd" for *_, with_ssd in problems if with_ssd}


def started(script, o):
    """Processes that fill the caches of Triton and TileLang."""
    words = [sys.executable, script, o.receipt, "--source", o.source, "--configs", o.configs,
             "--rows", ",".join(o.rows), "--processes", str(o.processes),
             *(["--ssd", ",".join(o.ssd)] if o.ssd else []), "--part"]  # fmt: skip
    return [subprocess.Popen([*words, str(i)]) for i in range(o.processes)]


def waited(parts, limit):
    """The worst exit status; behind the limit those that still compile are ended: a row does it itself."""
    until = time.monotonic() + limit
    for part in parts:
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.wait(max(until - time.monotonic(), 0.0))
    late = [part for part in parts if part.poll() is None]
    for part in late:
        part.kill()
    if late:
        print(
            f"{len(late)} of {len(parts)} processes still compiled after {limit:.0f} s", flush=True
        )
    return max((abs(part.wait()) for part in parts), default=0)
