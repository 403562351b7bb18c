"""What: the ways to run the scan and its step that are timed beside each other: ours, mamba_ssm's kernels in Triton
for SISO, in TileLang for MIMO and in CuTe for a step of MIMO, Mamba-2's SSD.
Why: a peer is called as its page and its module say, with the kernels that its own tuning picks.
Never: times anything; changes a kernel of a peer.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import types

import talea
import torch
from attention_peers import reason
from scan_truth import ORDER

CHUNK, SSD_CONFIGS = 64, 4
TESTED = 128 * 64  # N times P of which upstream's tests take the whole chunk
MIMO_ORDER = (*ORDER[:8], "mimo_v", "mimo_z", "mimo_out", *ORDER[8:])
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


def of_heads(t):
    """Angles of all heads, as upstream's module gives them."""
    return t["angles"].expand(-1, -1, t["v"].shape[2], -1)


def ends_of(t):
    return {"cu_seqlens": t["cu_seqlens"]} if "cu_seqlens" in t else {}


def siso(peer, t):
    given = (of_heads(t) if n == "angles" else t[n] for n in ORDER)
    return peer(*given, chunk_size=CHUNK, **ends_of(t))


def mimo_options(t):
    """A chunk of 64 rows, as upstream's page says; of larger heads half of it, as its tests have them."""
    rank, cols = t["q"].shape[2], t["q"].shape[-1]
    chunk = CHUNK // rank // (2 if cols * t["v"].shape[-1] > TESTED else 1)
    return {"chunk_size": chunk, "rotary_dim_divisor": cols // t["angles"].shape[-1], "dtype": t["q"].dtype}  # fmt: skip


def mimo(peer, t):
    given = (of_heads(t) if n == "angles" else t[n] for n in MIMO_ORDER)
    return peer(*given, **mimo_options(t), **ends_of(t))


def siso_step(peer, one, state):
    """A call without arguments. States are new tensors there, not those of before."""
    given = {**one, "angles": one["angles"].expand(-1, one["v"].shape[1], -1).contiguous()}
    rows, states = [given[n] for n in ORDER], (state.angle, state.ssm, state.k[:, 0], state.v)
    return lambda: peer(*rows, Input_States=states)


def mimo_step(rotate, peer, one, state):
    """The calls of upstream's module for a token, its states of before written over; made ready ahead: what does not
    change from token to token. Returns that call and the states, whose keys have the token's type."""
    heads = one["v"].shape[1]
    wide = [one[n].expand(-1, -1, heads, -1) for n in ("q", "k")]
    q_bias, k_bias, into, gate, onto = (
        one[n].transpose(0, 1).contiguous()
        for n in ("q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out")
    )
    angles = one["angles"].expand(-1, heads, -1)
    a = one["adt"] / one["dt"]
    angle, ssm, k, v = (x.clone() for x in (state.angle, state.ssm, state.k, state.v))
    k, v = k.to(one["k"].dtype), v.to(one["v"].dtype)
    out = torch.empty_like(one["v"])

    def step():
        q_now, k_now, turned = rotate(
            q=wide[0], k=wide[1], angle_state=angle, angle_proj=angles, dt=one["dt"], bias_q=q_bias, bias_k=k_bias,
            conjugate=False, inplace=False, rotate_pairwise=False,
        )  # fmt: skip
        peer(ssm, k, v, a, k_now, q_now, one["d"], one["v"], one["dt"], one["trap"].sigmoid(), into, outproj=onto,
             state_out=None, out=out, z=one["z"], zproj=gate, tile_D=64, num_warps=4)  # fmt: skip
        for held, new in ((angle, turned), (k, k_now), (v, one["v"])):
            held.copy_(new)
        return out

    return step, {"ssm": ssm, "k": k}


def ssd(peer, t):
    """Another recurrence, without turns and trapezoids; x, dt, A, B, C of the same sizes."""
    a = -torch.ones(t["v"].shape[2], device="cuda")
    return peer(t["v"], t["dt"].mT.contiguous(), a, t["k"], t["q"], 256, D=t["d"], z=t["z"])


def import_peers(source, tuning, wanted):
    """mamba_ssm without its __init__, whose compiled extension its kernels of Mamba-3 do not need. wanted: of mimo,
    mimo_step, ssd. What does not import leaves its words behind as NAME_missing."""
    package = types.ModuleType("mamba_ssm")
    package.__path__ = [os.path.join(source, "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    found, ops = {"version": version_of(source)}, "mamba_ssm.ops"
    with tuning:
        found["siso"] = member(f"{ops}.triton.mamba3.mamba3_siso_combined")

        def take(name, *path):
            try:
                found[name] = member(*path)
            except Exception as error:
                found[f"{name}_missing"] = reason(error)

        take("step", f"{ops}.triton.mamba3.mamba3_siso_step")
        if "mimo" in wanted:
            take("mimo", f"{ops}.tilelang.mamba3.mamba3_mimo")
        if "mimo_step" in wanted:
            rotary = f"{ops}.triton.mamba3.mamba3_mimo_rotary_step"
            take("rotate", rotary, "apply_rotary_qk_inference_fwd")
            take("mimo_step", f"{ops}.cute.mamba3.mamba3_step_fn")
        if "ssd" in wanted:
            tuning.most = SSD_CONFIGS
            take("ssd", f"{ops}.triton.ssd_combined", "mamba_chunk_scan_combined")
        tuning.most = None
    return found


def member(module, name=None):
    """Of a module; without a name the function that it is called after."""
    return getattr(importlib.import_module(module), name or module.rpartition(".")[2])


def version_of(source):
    """Of main by its revision, which a file of that name holds: its version is the last release's."""
    revision = os.path.join(source, "REVISION")
    if os.path.exists(revision):
        with open(revision) as f:
            return f"mamba_ssm at {f.read().strip()[:8]}"
    init = os.path.join(source, "mamba_ssm", "__init__.py")
    if os.path.exists(init):
        with open(init) as f:
            words = [line.split('"')[1] for line in f if line.startswith("__version__")]
        if words:
            return f"mamba_ssm {words[0]}"
    return os.path.basename(os.path.normpath(source)).replace("-", " ")


def packed_ends(sequences, tokens, device):
    """Lengths of one token to twice the mean, in a drawn order; their sum is `tokens`."""
    g = torch.Generator().manual_seed(3)
    mean = tokens / sequences
    lengths = torch.linspace(1, 2 * mean - 1, sequences).round().long()
    lengths[sequences // 2] += tokens - int(lengths.sum())
    lengths = lengths[torch.randperm(sequences, generator=g)].tolist()
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=device)
