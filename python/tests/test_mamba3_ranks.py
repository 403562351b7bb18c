"""talea.mamba3 over torch.distributed: heads and tokens shared by two processes."""

import pytest
import ranks
import talea
import torch
import torch.distributed as dist
from mamba3_forms import INITIAL, STATES, draw, gradients_of, relative_l2, scan, upstreams
from talea import _abi, _ranks

TOKENS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}
HEADS = {
    "v": 2, "z": 2, "angles": 2, "adt": 1, "dt": 1, "trap": 1, "q_bias": 0, "k_bias": 0, "d": 0,
    "mimo_v": 0, "mimo_z": 0, "mimo_out": 0, "norm_weight": 0, "initial_angle": 1, "initial_ssm": 1,
    "initial_k": 2, "initial_v": 1,
}  # fmt: skip


def cut(t, axes, lo, hi):
    return {
        n: x.detach().narrow(axes[n], lo, hi - lo).clone().requires_grad_() if n in axes
        else x.detach().clone().requires_grad_()
        for n, x in t.items()
    }  # fmt: skip


def whole_problem():
    t = draw(2, 11, heads=4, groups=2, dtype=torch.float32)
    made = scan(t, head_norm=True, return_final=True)
    final = [getattr(made.final, s) for s in STATES]
    ups = upstreams(made.out, final)
    return t, made.out, final, ups, gradients_of(t, made.out, final, ups)


def tokens_over_ranks(rank, group, save):
    t, out, final, ups, grads = whole_problem()
    lo, hi = ((0, 8), (8, 11))[rank]
    mine = cut(t, TOKENS, lo, hi)
    made = scan(mine, head_norm=True, return_final=True, sequence_group=group, save_states=save)
    ours = [getattr(made.final, s) for s in STATES]
    assert relative_l2(made.out, out[:, lo:hi]) <= 1e-6
    for a, b in zip(ours, final, strict=True):
        assert relative_l2(a, b) <= 1e-6
    got = gradients_of(mine, made.out, ours, [ups[0][:, lo:hi], *ups[1:]])
    for name, g in got.items():
        if name in TOKENS:
            wanted = grads[name].narrow(TOKENS[name], lo, hi - lo)
        elif name in INITIAL:
            wanted = grads[name]
        else:  # a rank's own share: the caller sums parameters
            dist.all_reduce(g, group=group)
            wanted = grads[name]
        assert relative_l2(g, wanted) <= 1e-5, name


def heads_over_ranks(rank, group, shared):
    """Two heads a rank, each with its own group, or all of them with both groups."""
    t, out, final, ups, grads = whole_problem()
    lo, hi = 2 * rank, 2 * rank + 2
    axes = dict(HEADS) if shared else {**HEADS, "q": 3, "k": 3}
    mine = {}
    for name, x in t.items():
        a, b = (rank, rank + 1) if name in ("q", "k") else (lo, hi)
        mine[name] = (
            x.detach().narrow(axes[name], a, b - a).clone().requires_grad_() if name in axes
            else x.detach().clone().requires_grad_()
        )  # fmt: skip
    made = scan(mine, head_norm=True, return_final=True, heads_group=group,
                total_groups=2 if shared else 0)  # fmt: skip
    assert torch.equal(made.out, out[:, :, lo:hi])
    ours = [getattr(made.final, s) for s in STATES]
    share = [ups[0][:, :, lo:hi]]
    share += [u.narrow(HEADS["initial_" + s], lo, 2) for u, s in zip(ups[1:], STATES, strict=True)]
    got = gradients_of(mine, made.out, ours, share)
    for name, g in got.items():
        if name in ("q", "k"):
            wanted = grads[name] if shared else grads[name].narrow(3, rank, 1)
        else:
            wanted = grads[name].narrow(HEADS[name], lo, 2)
        assert relative_l2(g, wanted) <= 1e-6, name


def _world(rank):
    group = dist.group.WORLD
    tokens_over_ranks(rank, group, save=False)
    tokens_over_ranks(rank, group, save=True)
    tokens_over_ranks(rank, group, save=rank == 0)
    heads_over_ranks(rank, group, shared=False)
    heads_over_ranks(rank, group, shared=True)


def test_two_processes(tmp_path):
    ranks.spawn(_world, 2, tmp_path)


def _steps_as_on_a_device(rank):
    """There what hosts tell each other is said once, and every later step knows it."""
    _ranks.waits_for_no_host = lambda groups, device: True
    asked, exchange = [], _ranks.Groups._exchange

    def do(self, e):
        if e.kind != _abi.EXCHANGE_ALL_GATHER or e.bytes > 64:  # not of hosts, on a device
            return exchange(self, e)
        self.meeting.word(e, 2, lambda e: asked.append(e.bytes) or exchange(self, e))

    _ranks.Groups._do = do
    t = draw(2, 11, heads=4, groups=2, dtype=torch.float32)
    for way, axes in (("heads_group", {**HEADS, "q": 3, "k": 3}), ("sequence_group", TOKENS)):
        # Eleven tokens in six and five; heads and groups in halves.
        cuts = {n: (t[n].shape[a] + 1) // 2 for n, a in axes.items() if n in t}
        mine = {
            n: (x.detach().narrow(axes[n], *((0, cuts[n]), (cuts[n], x.shape[axes[n]] - cuts[n]))[rank])
                if n in axes else x.detach()).clone().requires_grad_()
            for n, x in t.items()
        }  # fmt: skip
        steps = []
        for step in range(3):
            asked.clear()
            made = scan(mine, **{way: dist.group.WORLD})
            up = torch.ones_like(made)
            steps.append(
                [made, *torch.autograd.grad(made, list(mine.values()), up, allow_unused=True)]
            )
            assert bool(asked) == (step == 0), f"{way}, step {step}: {asked}"
        for later in steps[1:]:
            for a, b in zip(steps[0], later, strict=True):
                assert (a is None and b is None) or torch.equal(a, b), way


def test_later_steps_know_what_the_first_was_told(tmp_path):
    ranks.spawn(_steps_as_on_a_device, 2, tmp_path)


@pytest.mark.parametrize("order", ["rgn", "grn"])
def test_rows_of_groups_over_ranks(order):
    """A projection cut by rows gives each rank the columns of its groups, in the order it reads."""
    rank, groups, cols = 3, 4, 5
    x, w = torch.randn(2, 7, 6), torch.randn(rank * groups * cols, 6)

    def rows(weight, held):
        y = x @ weight.T
        if order == "rgn":
            return y.reshape(2, 7, rank, held, cols)
        return y.reshape(2, 7, held, rank, cols).transpose(2, 3)

    whole = rows(w, groups)
    for index in range(2):
        mine = w[talea.mamba3_group_rows(order, rank, groups, cols, 2, index)]
        wanted = whole[:, :, :, 2 * index : 2 * index + 2]
        assert torch.allclose(rows(mine, 2), wanted, atol=1e-6)
    as_one_piece = w[: w.shape[0] // 2]  # what a cut by rows alone does
    assert torch.allclose(rows(as_one_piece, 2), whole[:, :, :, :2], atol=1e-6) == (order == "grn")
    with pytest.raises(talea.UsageError, match="groups"):
        talea.mamba3_group_rows(order, rank, groups, cols, 3, 0)
