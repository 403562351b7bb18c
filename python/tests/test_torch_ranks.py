"""Two ranks through torch.distributed: shards of tokens and of the vocabulary, over gloo and NCCL."""

import pytest
import ranks
import talea
import torch
import torch.distributed as dist
from conftest import DEVICES, close, eager
from talea import _fast, _ranks


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.loss = talea.LinearCrossEntropy(16, 50)

    def forward(self, x, y):
        return self.loss(self.body(x).tanh(), y)


def _data_parallel(rank):
    torch.manual_seed(0)
    model = Tiny()
    x, y = torch.randn(8, 16), torch.randint(0, 50, (8,))
    eager(model.body(x).tanh(), model.loss.weight, y).backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    part = slice(rank * 4, rank * 4 + 4)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(x[part], y[part]).backward()
    for n, p in model.named_parameters():
        assert close(p.grad, want[n], 5e-6), f"DDP: {n}"
    del parallel
    model.zero_grad()
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))  # gloo moves host memory, whatever the machine has
    fully_shard(model.loss, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x[part], y[part]).backward()
    for n, p in model.named_parameters():
        assert close(p.grad.full_tensor(), want[n], 5e-6), f"FSDP2: {n}"
    with pytest.raises(talea.UsageError, match="sequence_parallel=False where every rank has"):
        talea.linear_cross_entropy(x, model.loss.weight, y)


def _vocabulary_parallel(rank):
    """Uneven shards; hidden replicated, then sequence-sharded; both devices of the machine."""
    for device in DEVICES:
        _shards(rank, device)
        _tokens_disagree(rank, device)


def _tokens_disagree(rank, device):
    """Every rank has as many targets as it believes there are tokens; only together it is wrong."""
    rows = 3 + rank
    x, w = torch.randn(rows, 16, device=device), torch.randn(25, 16, device=device)
    y = torch.randint(0, 50, (2 * rows,), device=device)
    with pytest.raises(talea.Error, match="tokens: the ranks disagree: 6 on rank 0, 8 on rank 1"):
        talea.linear_cross_entropy(
            x, w, y, tp_group=dist.group.WORLD, vocab=50, vocab_begin=25 * rank,
            sequence_parallel=True,
        )  # fmt: skip


def _shards(rank, device, group=None):
    torch.manual_seed(0)
    begin, end = (0, 23) if rank == 0 else (23, 50)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, y = torch.randn(8, 16).to(device, dtype), torch.randint(0, 50, (8,)).to(device)
        w = torch.randn(50, 16).to(device, dtype)
        y[3] = -100
        for reduction in ("mean", "none"):
            for sequence in (False, True):
                whole, full = x.clone().requires_grad_(), w.clone().requires_grad_()
                reference = eager(
                    whole.float(), full.float(), y, label_smoothing=0.1, reduction=reduction
                )
                up = torch.rand(reference.shape).to(device)
                reference.backward(up)
                part = slice(rank * 4, rank * 4 + 4) if sequence else slice(0, 8)
                hidden, shard = x[part].clone(), w[begin:end].clone()
                hidden.requires_grad_(), shard.requires_grad_()
                out = talea.linear_cross_entropy(
                    hidden, shard, y, tp_group=group or dist.group.WORLD, vocab=50,
                    vocab_begin=begin, sequence_parallel=sequence, label_smoothing=0.1,
                    reduction=reduction, outputs=("loss",),
                )  # fmt: skip
                out.loss.backward(up)
                where = f"{device} {dtype} {reduction} sequence_parallel={sequence}"
                assert out.receipt()["lane"] in talea.lanes(), where
                _agree(where + ": loss", out.loss, reference, tolerance)
                _agree(where + ": dX", hidden.grad.float(), whole.grad.float()[part], tolerance)
                _agree(where + ": dW", shard.grad.float(), full.grad.float()[begin:end], tolerance)


def _soft_targets_of_all_tokens(rank):
    """Each rank has its tokens, of [S, B]; what comes a token is of all of them, with ids, soft targets
    or none."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, 8), torch.randn(11, 8)
    ids, probs = torch.randint(0, 11, (4, 3, 2)), torch.rand(4, 3, 2)
    begin, end = ((0, 4), (4, 11))[rank]
    logits = torch.nn.functional.linear(x, w)
    logp = logits.log_softmax(-1)
    want = -(probs * logp.gather(-1, ids)).sum(-1)
    more = {"tp_group": dist.group.WORLD, "vocab": 11, "vocab_begin": begin}
    part = x[2 * rank : 2 * rank + 2]
    y = torch.randint(0, 11, (4, 3))
    theirs = -logp.gather(-1, y[..., None])[..., 0]
    for target, soft, loss in ((probs, ids, want), (None, None, None), (y, None, theirs)):
        outputs = ("loss", "lse") if loss is not None else ("lse",)
        made = talea.linear_cross_entropy(
            part, w[begin:end], target, soft_target_ids=soft, outputs=outputs, reduction="none",
            sequence_parallel=True, logit_scale=torch.tensor(1.0), **more,
        )  # fmt: skip
        _agree("lse", made.lse, logits.logsumexp(-1), 1e-5)
        if loss is not None:
            _agree("loss", made.loss, loss, 1e-5)


def _agree(where, ours, theirs, tolerance):
    assert close(ours, theirs, tolerance), f"{where}: {ours} where {theirs} was expected"


def _global_denominator(rank, device="cpu"):
    """Four tokens here, two there: the mean over both ranks' tokens, not the mean of means."""
    torch.manual_seed(0)
    x, w, y = torch.randn(6, 16), torch.randn(50, 16), torch.randint(0, 50, (6,))
    x, w, y = x.to(device), w.to(device), y.to(device)
    part = slice(0, 4) if rank == 0 else slice(4, 6)
    mine = w.clone().requires_grad_()
    talea.linear_cross_entropy(
        x[part], mine, y[part], denominator_scope="global", batch_group=dist.group.WORLD
    ).backward()
    dist.all_reduce(mine.grad)
    full = w.clone().requires_grad_()
    eager(x, full, y).backward()
    assert close(mine.grad, full.grad, 1e-5)


def _ranks_disagree(rank, device="cpu"):
    """An error on every rank that names the field, not a hang."""
    x, w = torch.randn(6, 16, device=device), torch.randn(25, 16, device=device)
    y = torch.randint(0, 50, (6,), device=device)
    with pytest.raises(talea.Error, match="label_smoothing"):
        talea.linear_cross_entropy(
            x, w, y, tp_group=dist.group.WORLD, vocab=50, vocab_begin=25 * rank,
            label_smoothing=0.1 * rank,
        )  # fmt: skip


def _one_way(rank, device="cpu"):
    """Shards of which one alone has room for early gradients: both ranks form them late."""
    torch.manual_seed(0)
    begin, end = (0, 20000) if rank == 0 else (20000, 32000)
    x, w = torch.randn(64, 1024).bfloat16(), (torch.randn(32000, 1024) / 32).bfloat16()
    y = torch.randint(0, 32000, (64,))
    x, w, y = (t.to(device) for t in (x, w, y))
    whole, full = x.clone().requires_grad_(), w.clone().requires_grad_()
    eager(whole.float(), full.float(), y).backward()
    for _ in range(2):
        hidden, shard = x.clone().requires_grad_(), w[begin:end].clone().requires_grad_()
        talea.linear_cross_entropy(
            hidden, shard, y, tp_group=dist.group.WORLD, vocab=32000, vocab_begin=begin
        ).backward()
        _agree("one way: dX", hidden.grad.float(), whole.grad.float(), 1e-2)
        _agree("one way: dW", shard.grad.float(), full.grad.float()[begin:end], 1e-2)


def _exchanges_of_a_group(rank, device="cpu"):
    """Its own methods and torch.distributed's functions: the same of both, begun or waited for."""
    group = dist.group.WORLD
    assert type(_fast.exchanges_of(group)) is _fast._Exchanges
    for ways in (_fast._Exchanges(group), _fast._PublicExchanges(group)):
        for begins in (False, True):
            mine = torch.arange(6.0, device=device) + 10 * rank
            gathered, summed, part = mine.new_zeros(12), mine.clone(), mine.new_zeros(3)
            works = (
                ways.all_gather(gathered, mine, begins),
                ways.all_reduce(summed, begins),
                ways.reduce_scatter(part, mine, begins),
            )
            for work in works if begins else ():
                work.wait()
            both = torch.arange(6.0, device=device)
            assert torch.equal(gathered, torch.cat([both, both + 10]))
            assert torch.equal(summed, 2 * both + 10)
            assert torch.equal(part, (2 * both + 10)[3 * rank : 3 * rank + 3])


TWO_RANKS = (
    _data_parallel, _vocabulary_parallel, _global_denominator, _ranks_disagree, _one_way,
    _soft_targets_of_all_tokens, _exchanges_of_a_group,
)  # fmt: skip


def _world(rank):
    for test in TWO_RANKS:
        test(rank)


def test_two_ranks(tmp_path):
    """DDP, FSDP2, vocabulary and sequence parallelism over gloo; a failing rank fails the test."""
    ranks.spawn(_world, 2, tmp_path)


def _begun_sums(rank, device):
    """A group that says how many multiprocessors it takes sums dX beside dW: the same bits.

    Of two ranks a sum has one order. What was begun is waited for: calls follow each other at once.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    options.is_high_priority_stream = True
    limited = dist.new_group(backend="nccl", pg_options=options)
    assert _ranks.multiprocessors_of(limited, torch.device(device)) == 4
    assert _ranks.multiprocessors_of(dist.group.WORLD, torch.device(device)) == 0
    _shards(rank, device, limited)
    torch.manual_seed(0)
    x = torch.randn(2048, 512, device=device).bfloat16()
    w = (torch.randn(8192, 512, device=device) / 16).bfloat16()[4096 * rank : 4096 * (rank + 1)]
    y = torch.randint(0, 8192, (2048,), device=device)
    for more in (
        {},
        {"dx_sum": "bf16"},
        {"workspace_limit": 24 << 20},
        {"sequence_parallel": True},
    ):
        found = {}
        part = slice(1024 * rank, 1024 * (rank + 1)) if "sequence_parallel" in more else slice(None)
        for name, group in (("plain", dist.group.WORLD), ("begun", limited)):
            made = []
            for _ in range(4):
                hidden, shard = x[part].clone().requires_grad_(), w.clone().requires_grad_()
                talea.linear_cross_entropy(
                    hidden, shard, y, tp_group=group, vocab=8192, vocab_begin=4096 * rank, **more
                ).backward()
                made += [hidden.grad, shard.grad]
            found[name] = made
        for a, b in zip(found["plain"], found["begun"], strict=True):
            assert torch.equal(a, b), f"{more}: {(a != b).sum()} elements differ"


def _nccl_world(rank):
    for test in (
        _shards, _global_denominator, _ranks_disagree, _begun_sums, _one_way, _exchanges_of_a_group,
    ):  # fmt: skip
        test(rank, f"cuda:{rank}")
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device a rank")
def test_two_ranks_nccl(tmp_path):
    """Vocabulary and sequence parallelism, the global denominator and a disagreement over NCCL."""
    ranks.spawn(_nccl_world, 2, tmp_path, backend="nccl")
