"""Ranks of the scan on device lanes: heads and tokens cut, beside one rank, over gloo and NCCL.

Over gloo the ranks have one device, and what they exchange goes through the host; over NCCL a device each.
"""

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from mamba3_forms import STATES, draw, gradients_of, relative_l2, scan, upstreams

TOKENS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}
HEADS = {
    "v": 2, "z": 2, "angles": 2, "adt": 1, "dt": 1, "trap": 1, "q_bias": 0, "k_bias": 0, "d": 0,
    "mimo_v": 0, "mimo_z": 0, "mimo_out": 0, "initial_angle": 1, "initial_ssm": 1, "initial_k": 2,
    "initial_v": 1,
}  # fmt: skip
SIZES = {"cols": 128, "head_dim": 64, "pairs": 32}
PARAMETERS = ("q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out")
SUMMED = ("q", "k", "angles")
S, ENDS = 150, [3, 20, 20, 97, 145]  # tokens; of packed sequences, between padding


def problem(device, dtype, rank, packed, *, heads=6, groups=3, shared=False):
    n = len(ENDS) - 1 if packed else 2
    t = draw(
        1 if packed else 2, S, heads, groups, rank, n=n, without=("norm_weight",), dtype=dtype, shared=shared,
        axis=rank > 1, grad=False, seed=3, **SIZES,
    )  # fmt: skip
    t |= {x: t[x] * 0.3 for x in ("q", "k")} | {x: t[x] * 0.2 for x in ("adt", "dt")}
    t |= {x: t[x].float() for x in PARAMETERS}
    t = {name: x.to(device) for name, x in t.items()}
    if packed:
        t["cu_seqlens"] = torch.tensor(ENDS, dtype=torch.int32, device=device)
    return t


def leaves(t):
    return {
        n: x.detach().clone().requires_grad_() if x.is_floating_point() else x for n, x in t.items()
    }


def everything(t, ups=None, **how):
    """out, the final states and every gradient, by name; and the gradients of the first."""
    mine = leaves(t)
    made = scan(mine, return_final=True, **how)
    found = {"out": made.out, **{"final_" + s: getattr(made.final, s) for s in STATES}}
    made = list(found.values())
    ups = ups or [u.to(x) for u, x in zip(upstreams(made[0], made[1:]), made, strict=True)]
    grads = gradients_of(mine, made[0], made[1:], ups)
    return {n: x.detach() for n, x in found.items()} | {"d_" + n: g for n, g in grads.items()}, ups


def outputs(t, **how):
    with torch.no_grad():
        made = scan(t, return_final=True, **how)
    return {"out": made.out, **{"final_" + s: getattr(made.final, s) for s in STATES}}


def held(cut, total, heads, groups):
    """This rank's heads [lo, hi), and the groups that it holds."""
    lo, hi = ((0, cut), (cut, heads))[dist.get_rank()]
    if not total:
        return lo, hi, slice(lo * groups // heads, hi * groups // heads)
    if total == "all":
        return lo, hi, slice(0, groups)
    each = heads // groups
    return lo, hi, slice(lo // each, (hi - 1) // each + 1)


def heads_over_ranks(device, lane, dtype, rank, packed, cut, total, shared):
    """All but the sums over ranks is that of one rank bit for bit."""
    t = problem(device, dtype, rank, packed, shared=shared)
    want, ups = everything(t, lane=lane)
    groups = t["q"].shape[-2]
    lo, hi, mine = held(cut, total, 6, groups)
    axes = {n: a for n, a in HEADS.items() if not (n == "angles" and shared)}
    if rank == 1:
        axes["initial_k"] = 1

    def share(name, x):
        if name in ("q", "k"):
            return x[..., mine, :]
        return x.narrow(axes[name], lo, hi - lo) if name in axes else x

    of_ups = [2, *(axes["initial_" + s] for s in STATES)]
    step = lambda: everything(  # noqa: E731
        {n: share(n, x) for n, x in t.items()},
        [u.narrow(a, lo, hi - lo) for u, a in zip(ups, of_ups, strict=True)],
        lane=lane, heads_group=dist.group.WORLD, total_groups=groups if total else 0,
    )[0]  # fmt: skip
    found = step()
    for name, x in step().items():  # which knows what the first was told
        assert torch.equal(x, found[name]), f"second step: {name}"
    where = f"{lane} {dtype} R {rank} packed={packed} {cut} {total} shared={shared}: "
    sums = [n for n in SUMMED if (n != "angles" and total) or (n == "angles" and shared)]
    for name, x in found.items():
        of = name.removeprefix("d_")
        if name == "out":
            wanted = want[name].narrow(2, lo, hi - lo)
        elif name.startswith("final_"):
            wanted = want[name].narrow(axes["initial_" + name[6:]], lo, hi - lo)
        else:
            wanted = share(of, want[name])
        if of not in sums:
            assert torch.equal(x, wanted), where + name
        elif x.numel():
            gap = relative_l2(x, wanted)
            assert gap <= (3e-6 if x.dtype == torch.float32 else 5e-4), f"{where}{name} {gap}"


def judged(found, want, truth, of, where):
    """No farther from fp64 than one rank is, where the sums of both round; exact what is exact."""
    for name, x in found.items():
        wanted, right = of(name, want[name]), of(name, truth[name].to(x.device))
        if name in ("final_angle", "final_k", "final_v"):
            assert torch.equal(x, wanted), where + name
            continue
        ours, theirs = relative_l2(x, right), relative_l2(wanted, right)
        assert ours <= 1.5 * theirs + 2e-6, f"{where}{name}: {ours}, one rank {theirs}"


@functools.cache
def one_rank(device, lane, dtype, rank, packed):
    """What one rank has of the problem, and what it has in fp64."""
    t = problem(device, dtype, rank, packed)
    wide = {n: x.cpu().double() if x.is_floating_point() else x.cpu() for n, x in t.items()}
    want, ups = everything(t, lane=lane)
    return want, everything(wide, [u.cpu().double() for u in ups], lane="reference")[0], ups


def tokens_over_ranks(device, lane, dtype, rank, packed, cut):
    want, truth, ups = one_rank(device, lane, dtype, rank, packed)
    lo, hi = ((0, cut), (cut, S))[dist.get_rank()]
    t = problem(device, dtype, rank, packed)
    mine = {n: x.narrow(TOKENS[n], lo, hi - lo) if n in TOKENS else x for n, x in t.items()}
    how = {"lane": lane, "sequence_group": dist.group.WORLD}
    ups = [ups[0][:, lo:hi], *ups[1:]]
    found, _ = everything(mine, ups, **how)
    for name, x in everything(mine, ups, **how, save_states=True)[0].items():
        assert torch.equal(x, found[name]), f"save_states: {name}"
    for name in found:
        if name.startswith("d_") and name[2:] in PARAMETERS:
            share = found[name].double().cpu()  # a rank's own: the caller sums them
            dist.all_reduce(share, group=ranks_on_host())
            found[name] = share.to(found[name].device)

    def of(name, x):
        axis = 1 if name == "out" else TOKENS.get(name.removeprefix("d_"))
        return x if axis is None else x.narrow(axis, lo, hi - lo)

    judged(found, want, truth, of, f"{lane} {dtype} R {rank} packed={packed} cut {cut}: ")


_host = {}


def ranks_on_host():
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return _host["group"]


def clamped_entries(device):
    """Entries beyond all ranks' tokens are clamped; where they are to be checked, an error of all."""
    t = problem(device, torch.float32, 2, True)
    t["cu_seqlens"][-1] = S + 9
    lo, hi = ((0, 80), (80, S))[dist.get_rank()]
    mine = {n: x.narrow(TOKENS[n], lo, hi - lo) if n in TOKENS else x for n, x in t.items()}
    found = outputs(mine, lane="cuda", sequence_group=dist.group.WORLD)
    t["cu_seqlens"][-1] = S
    assert relative_l2(found["out"], outputs(t, lane="cuda")["out"][:, lo:hi]) <= 5e-6


def lanes_of(device):
    if device.type == "cpu":  # to try the test itself
        return ("cpu",)
    return ("sm90", "cuda") if torch.cuda.get_device_capability(device) == (9, 0) else ("cuda",)


def _lane(rank, device, lane):
    device = torch.device(device or f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.get_backend() == "nccl":
        _host["group"] = dist.new_group(backend="gloo")
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, r in [(bf16, 4), (bf16, 1)] + [(fp32, 4)] * (lane != "sm90"):
        for packed, cut, total, shared in (
            (False, 2, None, False), (True, 3, "own", True), (False, 1, "own", True),
            (True, 5, "all", True), (False, 6, "all", False),
        ):  # fmt: skip
            heads_over_ranks(device, lane, dtype, r, packed, cut, total, shared)
        for packed, cut in ((False, 47), (True, 47), (True, 20), (False, S), (False, 0)):
            tokens_over_ranks(device, lane, dtype, r, packed, cut)
    if device.type == "cpu":
        return
    if lane == "sm90":
        tokens_over_ranks(device, "auto", bf16, 4, True, 64)
    else:
        clamped_entries(device)
    torch.cuda.synchronize()


def skip_without(lane):
    if lane not in lanes_of(torch.device("cuda:0")):
        pytest.skip("a lane of Hopper GPUs")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device lanes need a CUDA device")
@pytest.mark.parametrize("lane", ["sm90", "cuda"])
def test_two_ranks_of_one_device(tmp_path, lane):
    skip_without(lane)
    ranks.spawn(_lane, 2, tmp_path, "cuda:0", lane)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device a rank")
@pytest.mark.parametrize("lane", ["sm90", "cuda"])
def test_two_ranks_nccl(tmp_path, lane):
    skip_without(lane)
    ranks.spawn(_lane, 2, tmp_path, None, lane, backend="nccl")
