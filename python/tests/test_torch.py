"""What PyTorch does around an operator: compile, autocast, checkpoint, DDP, functional_call."""

import pytest
import talea
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DEVICES, close, eager, gradients, problem
from talea import _operator
from talea._call import Config
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_compile(device, reduction):
    x, w, y, _ = problem(device=device)

    @torch.compile(fullgraph=True)
    def loss(x, w, y):
        return talea.linear_cross_entropy(
            x * 2, w, y, reduction=reduction, label_smoothing=0.1
        ).sum()

    theirs = eager(x * 2, w, y, reduction=reduction, label_smoothing=0.1).sum()
    ours = loss(x, w, y)
    assert close(ours, theirs)
    for mine, other in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(mine, other, 5e-6)


def test_opcheck():
    x, w, y, _ = problem(n=6, d=8, v=11)
    nothing = (None,) * 5
    for reduction, early in (("mean", True), ("none", False)):
        config = Config(reduction=reduction, outputs=("loss", "lse")).text()
        if early:
            config = Config(reduction=reduction, outputs=("loss",)).text()
        torch.library.opcheck(
            torch.ops.talea.linear_cross_entropy,
            (x, w, None, y, *nothing, config, early, early, False),
        )


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    x, w, y, _ = problem(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = talea.linear_cross_entropy(x, w, y)
    dx, dw = gradients(loss, x, w)
    assert dx.dtype == dw.dtype == torch.float32
    want = gradients(eager(x, w, y), x, w)
    assert close(dx, want[0], 2e-2) and close(dw, want[1], 2e-2)


def test_checkpoint():
    x, w, y, _ = problem()
    loss = checkpoint(lambda a: talea.linear_cross_entropy(a, w, y), x, use_reentrant=False)
    for mine, other in zip(gradients(loss, x, w), gradients(eager(x, w, y), x, w), strict=True):
        assert close(mine, other, 5e-6)


def test_functional_call():
    layer = talea.LinearCrossEntropy(24, 101, label_smoothing=0.1)
    x, w, y, _ = problem()
    loss = torch.func.functional_call(layer, {"weight": w}, (x, y))
    assert close(loss, eager(x, w, y, label_smoothing=0.1))


def test_double_backward_is_refused():
    x, w, y, _ = problem()
    loss = talea.linear_cross_entropy(x, w, y)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice|once_differentiable|does not require grad"):
        dx.sum().backward()


def test_early_gradient_is_one_pass():
    assert _operator.forms_gradient_early(Config(outputs=("loss",)), None)
    assert not _operator.forms_gradient_early(Config(outputs=("loss", "lse")), None)
    assert not _operator.forms_gradient_early(Config(reduction="none", outputs=("loss",)), None)


def _ddp(rank, world, port, results):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    torch.manual_seed(0)
    layer = talea.LinearCrossEntropy(16, 50)
    ddp = torch.nn.parallel.DistributedDataParallel(layer)
    x, y = torch.randn(8, 16), torch.randint(0, 50, (8,))
    part = slice(rank * 4, rank * 4 + 4)
    ddp(x[part], y[part]).backward()
    want = torch.autograd.grad(eager(x, layer.weight, y), layer.weight)[0]
    # Vocabulary parallel over the same ranks: uneven shards, replicated hidden.
    w = layer.weight.detach()
    begin, end = (0, 23) if rank == 0 else (23, 50)
    shard = w[begin:end].clone().requires_grad_()
    hidden = x.clone().requires_grad_()
    loss = talea.linear_cross_entropy(
        hidden, shard, y, tp_group=dist.group.WORLD, vocab=50, vocab_begin=begin,
        label_smoothing=0.1,
    )  # fmt: skip
    loss.backward()
    whole, full = x.clone().requires_grad_(), w.clone().requires_grad_()
    reference = eager(whole, full, y, label_smoothing=0.1)
    reference.backward()
    results[rank] = (
        close(layer.weight.grad, want, 5e-6)
        and close(loss, reference)
        and close(hidden.grad, whole.grad, 1e-5)
        and close(shard.grad, full.grad[begin:end], 1e-5)
    )
    dist.destroy_process_group()


def test_ddp_and_vocabulary_parallel():
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_ddp, args=(2, 29577, results), nprocs=2)
        assert dict(results) == {0: True, 1: True}
