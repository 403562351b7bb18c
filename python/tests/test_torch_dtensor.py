"""An output layer held as a DTensor: tensor parallel and FSDP2, against the whole layer."""

import pytest
import ranks
import talea
import torch
import torch.distributed as dist
from conftest import close, eager
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

BATCH, TOKENS, WIDTH = 3, 5, 16
OPTIONS = {"label_smoothing": 0.1}


def _case(words, device):
    torch.manual_seed(0)
    x, w = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(words, WIDTH)
    b, y = torch.randn(words), torch.randint(0, words, (BATCH, TOKENS))
    y[1, 2] = -100
    return x.to(device), w.to(device), b.to(device), y.to(device)


def _whole(x, w, b, y, scale):
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    each = eager(x.flatten(0, 1), w, y.flatten(), bias=b, reduction="none", **OPTIONS)
    loss = (each * scale.flatten()).sum() / (y != -100).sum()
    loss.backward()
    lse = torch.logsumexp(torch.nn.functional.linear(x, w, b), -1).detach()
    return (loss.detach(), x.grad, w.grad, b.grad), lse.masked_fill(y == -100, 0)  # as documented


def _by_rank(t, placement, size):
    """Values a token in the order of ranks, each rank's tokens as it has them."""
    parts = [t] if placement.is_replicate() else t.chunk(size, dim=placement.dim)
    return torch.cat([p.flatten() for p in parts])


def _agree(where, ours, theirs):
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    assert close(ours, theirs, 1e-5), f"{where}: {ours} where {theirs} was expected"


def _heads(mesh, w, b):
    return (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (w, b))


def _placements_of_gradient(x, mesh, placement):
    """As torch itself leaves them: 2.11 replicates the gradient of an uneven Shard(1)."""
    hidden = distribute_tensor(x, mesh, [placement]).requires_grad_()
    (hidden.to_local() * 2).sum().backward()
    return hidden.grad.placements


def tensor_parallel(mesh):
    """Hidden whole, or cut by either dimension of tokens; targets whole, or cut the same way.

    51 words: no even cut. 11 words are fewer than the 15 tokens: there the weight is gathered.
    """
    for words in (51, 11, 1):
        x, w, b, y = _case(words, mesh.device_type)
        scale = torch.linspace(0.5, 2, BATCH * TOKENS, device=x.device).reshape(BATCH, TOKENS)
        want, lse = _whole(x, w, b, y, scale)
        for placement in (Replicate(), Shard(0), Shard(1)):
            placements = _placements_of_gradient(x, mesh, placement)
            for cut_targets in (False, True):
                for outputs in (None, ("loss",), ("loss", "lse")):
                    head, bias = _heads(mesh, w, b)
                    hidden = distribute_tensor(x, mesh, [placement]).requires_grad_()
                    targets = distribute_tensor(y, mesh, [placement]) if cut_targets else y
                    found = talea.linear_cross_entropy(
                        hidden, head, targets, linear_bias=bias, token_weight=scale,
                        outputs=outputs, **OPTIONS,
                    )  # fmt: skip
                    loss = found if outputs is None else found.loss
                    loss.backward()
                    where = f"{words} words, {placement}, {outputs}"
                    for name, ours, theirs in zip(
                        ("loss", "dX", "dW", "db"), (loss, hidden.grad, head.grad, bias.grad), want
                    , strict=True):  # fmt: skip
                        _agree(f"{where}: {name}", ours, theirs)
                    assert hidden.grad.placements == placements, where
                    if outputs is not None and "lse" in outputs:
                        ours = found.lse.flatten()
                        _agree(f"{where}: lse", ours, _by_rank(lse, placement, mesh.size()))
                    if outputs is not None and not placement.is_replicate():
                        few = words < BATCH * TOKENS and outputs == ("loss",)
                        gathered = "weight" if few else "hidden"
                        assert found.receipt()["gathered"] == gathered, where


def own_tokens(mesh):
    """Plain tensors of this rank, as a data-parallel rank has them; a weight a token."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for words in (51, 5):
        _, w, b, _ = _case(words, mesh.device_type)
        x, y = torch.randn(size, 4, WIDTH), torch.randint(0, words, (size, 4))
        scale = torch.linspace(0.5, 2, 4 * size).reshape(size, 4)
        x, y, scale = (t.to(mesh.device_type) for t in (x, y, scale))
        whole = [t.clone().requires_grad_() for t in (x, w, b)]
        flat = whole[0].flatten(0, 1)
        each = eager(flat, whole[1], y.flatten(), bias=whole[2], reduction="none")
        want = (each * scale.flatten()).sum() / each.numel()
        want.backward()
        head, bias = _heads(mesh, w, b)
        mine = x[rank].clone().requires_grad_()
        loss = talea.linear_cross_entropy(
            mine, head, y[rank], linear_bias=bias, token_weight=scale[rank], sequence_parallel=True
        )
        loss.backward()
        _agree("loss", loss, want)
        _agree("dX", mine.grad, whole[0].grad[rank])
        _agree("dW", head.grad, whole[1].grad)
        _agree("db", bias.grad, whole[2].grad)


def fsdp(mesh):
    """FSDP2 averages the body's gradients: with a factor of 1 one loss of all tokens is one loss."""
    from torch.distributed.fsdp import fully_shard

    rank, size = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    body, head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 50, bias=False)
    x, y = torch.randn(size * 4, WIDTH), torch.randint(0, 50, (size * 4,))
    body, head, x, y = (t.to(mesh.device_type) for t in (body, head, x, y))
    eager(body(x).tanh(), head.weight, y).backward()
    want = [body.weight.grad.clone(), head.weight.grad.clone()]
    body.zero_grad(), head.zero_grad()
    fully_shard(body, mesh=mesh), fully_shard(head, mesh=mesh)
    body.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    body.set_gradient_divide_factor(1.0)
    part = slice(rank * 4, rank * 4 + 4)
    hidden = body(x[part]).tanh()
    loss = talea.linear_cross_entropy(hidden, head.weight, y[part], sequence_parallel=True)
    loss.backward()
    _agree("body", body.weight.grad, want[0])
    _agree("head", head.weight.grad, want[1])


def refusals(mesh):
    """Each says what is wrong, on every rank, before anything is exchanged."""
    x, w, b, y = _case(51, mesh.device_type)
    head, bias = _heads(mesh, w, b)
    rank = mesh.get_local_rank()

    def refused(match, input=x, weight=head, **options):
        with pytest.raises(talea.UsageError, match=match):
            talea.linear_cross_entropy(input, weight, y, **options)

    refused("sequence_parallel=False where every rank")
    refused("vocab_begin", vocab_begin=3, sequence_parallel=False)
    refused("tp_group", tp_group=dist.group.WORLD, sequence_parallel=False)
    refused("linear_bias: must be a DTensor", linear_bias=b, sequence_parallel=False)
    refused("Shard.0. is needed", weight=distribute_tensor(w, mesh, [Shard(1)]))
    refused("nothing cuts", weight=distribute_tensor(w, mesh, [Replicate()]))
    refused("Shard of a dimension of tokens", input=distribute_tensor(x, mesh, [Shard(2)]))
    whole = distribute_tensor(x, mesh, [Replicate()])
    refused("the placement of input", input=whole, sequence_parallel=True)
    uneven = torch.randn(9 + rank, WIDTH, device=mesh.device_type)
    refused("tokens on the ranks", input=uneven, sequence_parallel=True)


def _world(_, size, device):
    mesh = dist.init_device_mesh(device, (size,))
    for test in (tensor_parallel, own_tokens, fsdp, refusals):
        test(mesh)


@pytest.mark.parametrize("size", [2, 3])
def test_dtensor(tmp_path, size):
    """Both kinds of parallelism over gloo; a failing rank fails the test. Of 3 ranks some are empty."""
    ranks.spawn(_world, size, tmp_path, size, "cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device a rank")
def test_dtensor_nccl(tmp_path):
    ranks.spawn(_world, 2, tmp_path, 2, "cuda", backend="nccl")
