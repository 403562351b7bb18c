"""One rank of two has a bad argument: both raise, at once and naming it, and may call again."""

import datetime
import math
import time

import ranks
import talea
import torch
import torch.distributed as dist
from talea import _abi, _ranks

TIMEOUT_S = 40


def both_raise(rank, what, call, good, bad):
    """call(**arguments): rank 1 with `bad` over `good`."""
    begin, said = time.monotonic(), None
    try:
        call(**{**good, **(bad if rank == 1 else {})})
    except Exception as error:
        said = error
    assert said is not None, f"{what}: rank {rank} raised nothing"
    assert time.monotonic() - begin < TIMEOUT_S / 2, f"{what}: rank {rank} waited"
    if rank == 0:
        assert isinstance(said, talea.Error), f"{what}: {said!r}"
        assert str(said).startswith("rank 1: "), f"{what}: {said}"
    else:
        assert not str(said).startswith("rank "), f"{what}: {said}"
    call(**good)


def _loss(rank, grad):
    torch.manual_seed(0)
    x, w = torch.randn(6, 16), torch.randn(25, 16)
    good = {
        "input": x, "linear_weight": w, "target": torch.randint(0, 50, (6,)), "vocab": 50,
        "vocab_begin": 25 * rank, "tp_group": dist.group.WORLD, "weight": torch.ones(50),
    }  # fmt: skip

    def call(input, linear_weight, target, **options):
        linear_weight = linear_weight.detach().requires_grad_(grad)
        found = talea.linear_cross_entropy(input, linear_weight, target, **options)
        if grad:
            found.backward()

    nan = torch.full((50,), math.nan)
    for what, bad in {
        "label_smoothing": {"label_smoothing": math.nan},
        "its type": {"label_smoothing": "a"},
        "softcap": {"softcap": -1.0},
        "reduction": {"reduction": "most"},
        "class weights": {"weight": nan},
        "a target": {"target": torch.full((6,), 99)},
        "their dtype": {"target": torch.zeros(6, dtype=torch.int8)},
        "input's dtype": {"input": x.double()},
        "input's shape": {"input": x[:, :5]},
        "no tensor": {"input": x.numpy()},
        "sparse": {"input": x.to_sparse()},
        "token_weight": {"token_weight": torch.ones(7)},
        "requires grad": {"weight": torch.ones(50, requires_grad=True)},
        "main_grad": {"main_grad": torch.zeros(25, 16, dtype=torch.float16)},
        "an unknown lane": {"lane": "nope"},
        "a lane that declines": {"lane": "cuda"},
        "the limit": {"workspace_limit": 1},
        "vocab": {"vocab": -3},
    }.items():
        if what != "main_grad" or grad:
            both_raise(rank, f"loss, {what}", call, good, bad)


def _mean_over_a_batch(rank):
    """Tokens of a number that changes on one rank alone; a bad one among them."""
    torch.manual_seed(rank)
    w = torch.randn(50, 16)
    for tokens in ((4, 2), (4, 3), (5, 3), (4, 2), (0, 1)):
        x = torch.randn(tokens[rank], 16)
        y = torch.randint(0, 50, (tokens[rank],))
        total = torch.tensor(float(tokens[rank]))
        dist.all_reduce(total)
        mine = w.clone().requires_grad_()
        loss = talea.linear_cross_entropy(
            x, mine, y, denominator_scope="global", batch_group=dist.group.WORLD
        )
        loss.backward()
        want = torch.nn.functional.cross_entropy(x @ w.T, y, reduction="sum") / total
        assert torch.allclose(loss.detach(), want, rtol=1e-5), tokens
    good = {"target": torch.zeros(3, dtype=torch.int64)}

    def call(target):
        talea.linear_cross_entropy(
            torch.randn(3, 16), w, target, denominator_scope="global", batch_group=dist.group.WORLD
        )

    both_raise(rank, "batch", call, good, {"target": torch.full((3,), 50)})


def _shards_that_lie_oddly(rank):
    """A shard whose address no lane keeps in mind is described at every step, on that rank alone."""
    torch.manual_seed(0)
    x, w, y = torch.randn(6, 10), torch.randn(50, 10), torch.randint(0, 50, (6,))
    begin, end = ((0, 23), (23, 50))[rank]
    assert w[23:].data_ptr() % 16
    for _ in range(3):
        mine = w[begin:end].detach().requires_grad_()
        talea.linear_cross_entropy(
            x.clone().requires_grad_(), mine, y, tp_group=dist.group.WORLD, vocab=50,
            vocab_begin=begin,
        ).backward()  # fmt: skip


def _scans_that_meet(rank, met):
    """By heads in no step but the first; by tokens, whose pieces may change elsewhere, in every call,
    with no other word of hosts where all ranks have made such a call before."""
    torch.manual_seed(0)
    exchanges, exchange = [], _ranks.Groups._exchange
    _ranks.Groups._exchange = lambda groups, e: exchanges.append(1) or exchange(groups, e)

    def step(group, tokens):
        met.clear(), exchanges.clear()
        q, v = torch.randn(1, tokens, 1, 8), torch.randn(1, tokens, 1, 4)
        rows = torch.rand(1, 1, tokens)
        v.requires_grad_()
        talea.mamba3(q, q, v, -rows, rows, rows, **{group: dist.group.WORLD}).sum().backward()
        return len(met), len(exchanges)

    try:
        met_first, first = step("heads_group", 4)
        assert met_first == 2
        assert step("heads_group", 4) == (0, first - 2)  # but for the handshakes of both passes
        assert step("heads_group", 3) == (2, first)
        met_first, first = step("sequence_group", 4)
        assert met_first == 2
        assert step("sequence_group", 4) == (2, first - 2)
        # Another piece on the last rank alone is another call on all of them.
        assert step("sequence_group", 4 - rank) == (2, first)
        assert step("sequence_group", 4 - rank) == (2, first - 2)
        assert step("sequence_group", 4) == (2, first - 2)
    finally:
        _ranks.Groups._exchange = exchange
    _scan(rank, ("sequence_group",))  # errors are told, though all of them have met


def _as_on_a_device(rank):
    """There a step waits for no host: its ranks have met before, whatever lies where on one of them."""
    always, _ranks.waits_for_no_host = _ranks.waits_for_no_host, lambda groups, device: True
    met, tell = [], _ranks.tell
    _ranks.tell = lambda *told, **error: met.append(1) or tell(*told, **error)
    try:
        for steps, most in ((_shards_that_lie_oddly, 2), (_mean_over_a_batch, 3)):
            steps(rank)
            assert 0 < len(met) <= most, f"{steps.__name__}: {len(met)} meetings"
            met.clear()
        fresh = dist.new_group([0, 1])  # that has an error before it has met
        good = {"value_dim": 8, "sequence_group": fresh}
        q, kv, indices = (
            torch.ones(1, 2, 1, 8),
            torch.ones(1, 3, 1, 8),
            torch.zeros(1, 2, 1, 1).int(),
        )

        def call(**options):
            talea.sparse_attention(q, kv, indices, **options)

        both_raise(rank, "a first call", call, good, {"value_dim": 9})
        call(**good)
        assert len(met) == 2, f"{len(met)} meetings"
        _scans_that_meet(rank, met)
    finally:
        _ranks.waits_for_no_host, _ranks.tell = always, tell


def _attention(rank):
    torch.manual_seed(0)
    q, kv = torch.randn(1, 4, 2, 32), torch.randn(1, 9, 1, 32)
    for group in ("heads_group", "sequence_group"):
        good = {
            "q": q, "kv": kv, "indices": torch.arange(12, dtype=torch.int32).view(1, 4, 1, 3) % 9,
            "value_dim": 16, group: dist.group.WORLD,
        }  # fmt: skip

        def call(q, kv, indices, **options):
            kv = kv.detach().requires_grad_(kv.is_floating_point())
            talea.sparse_attention(q, kv, indices, **options).sum().backward()

        for what, bad in {
            "scale": {"scale": math.nan},
            "its type": {"scale": "a"},
            "value_dim": {"value_dim": 33},
            "indices' dtype": {"indices": torch.zeros(1, 4, 1, 3)},
            "a foreign index": {"indices": torch.full((1, 4, 1, 3), 9), "index_check": "checked"},
            "kv's dtype": {"kv": kv.bfloat16()},
            "kv's shape": {"kv": kv[..., :31]},
            "q's dtype": {"q": q.to(torch.complex64)},
            "no tensor": {"q": q.numpy()},
            "sink": {"sink": torch.zeros(3)},
            "a lane that declines": {"lane": "sm90"},
            "the limit": {"workspace_limit": -1},
        }.items():
            both_raise(rank, f"attention, {group}, {what}", call, good, bad)


def _index(rank):
    torch.manual_seed(0)
    iq, ik, iw = torch.randn(1, 4, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 4, 2)
    good = {"index_q": iq, "index_k": ik, "index_weights": iw, "sequence_group": dist.group.WORLD}

    def select(index_q, index_k, index_weights, **options):
        talea.sparse_select(index_q, index_k, index_weights, **options)

    for what, bad in {
        "top_k": {"top_k": -1},
        "act": {"act": "gelu"},
        "shape": {"index_k": ik[..., :3]},
        "dtype": {"index_weights": iw.double()},
    }.items():
        both_raise(rank, f"select, {what}", select, {**good, "top_k": 3}, bad)

    def loss(index_q, index_k, index_weights, **options):
        q, kv = torch.ones(1, 4, 2, 32), torch.ones(1, 9, 1, 32)
        talea.sparse_index_loss(
            index_q.requires_grad_(), index_k, index_weights, q, kv, value_dim=16, **options
        ).backward()

    for name in ("heads_group", "sequence_group", "batch_group"):
        options = {k: v for k, v in good.items() if k != "sequence_group"}
        options |= {name: dist.group.WORLD, "denominator_scope": "global"}
        for what, bad in {
            "coeff": {"coeff": math.nan},
            "row_weight": {"row_weight": torch.ones(1, 3)},
            "dtype": {"index_k": ik.double()},
        }.items():
            both_raise(rank, f"index loss, {name}, {what}", loss, options, bad)


def _scan(rank, groups=("heads_group", "sequence_group")):
    torch.manual_seed(0)
    q, v = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 4)
    rows = torch.rand(1, 1, 4)
    for group in groups:
        good = {
            "q": q, "k": q.clone(), "v": v, "adt": -rows, "dt": rows, "trap": rows,
            group: dist.group.WORLD,
        }  # fmt: skip

        def call(q, k, v, adt, dt, trap, **options):
            v = v.detach().requires_grad_()
            talea.mamba3(q, k, v, adt, dt, trap, **options).sum().backward()

        for what, bad in {
            "norm_eps": {"norm_eps": math.nan, "head_norm": True},
            "its type": {"norm_eps": "a"},
            "chunk": {"chunk": -1},
            "16 bits": {"adt": -rows.bfloat16()},
            "v's shape": {"v": v[:, :3]},
            "no tensor": {"dt": rows.numpy()},
            "mimo_z": {"mimo_z": torch.ones(1, 1, 4)},
            "a state": {"initial": torch.zeros(3)},
            "a lane that declines": {"lane": "cuda"},
            "saved": {"lane": "nope", "save_states": True},
        }.items():
            both_raise(rank, f"scan, {group}, {what}", call, good, bad)


def _words_are_said_once(rank):
    """What hosts tell each other inside a call on a device: asked in the first of a kind alone."""
    asked = []

    class Two(_ranks.Groups):
        def _exchange(self, e):
            asked.append(1)
            super()._exchange(e)

    def call(*words):
        asked.clear()
        with _ranks.Meeting([dist.group.WORLD], torch.device("cuda"), ("words",)) as meeting:
            groups = Two({0: dist.group.WORLD}, meeting.device)
            groups.meeting = meeting
            meeting.meet([])
            found = []
            for word in words:
                own, all_ = torch.tensor([word, rank]), torch.zeros(4, dtype=torch.long)
                groups._do(_abi.Exchange(
                    kind=_abi.EXCHANGE_ALL_GATHER, group=0, device=_abi.CPU, send=own.data_ptr(),
                    recv=all_.data_ptr(), bytes=16,
                ))  # fmt: skip
                found.append(all_.tolist())
        return found, len(asked)

    told = [[5, 0, 5, 1], [6, 0, 6, 1], [5, 0, 5, 1]]
    assert call(5, 6, 5) == (told, 3)
    assert call(5, 6, 5) == (told, 0)
    try:
        call(5, 7)
    except talea.Error as error:
        assert "did not say when they met" in str(error)
    else:
        raise AssertionError("an answer to what was never asked")


def _world(rank):
    _words_are_said_once(rank)
    _mean_over_a_batch(rank)
    _shards_that_lie_oddly(rank)
    _as_on_a_device(rank)
    for grad in (False, True):
        _loss(rank, grad)
    _attention(rank)
    _index(rank)
    _scan(rank)


def test_what_one_rank_refuses_both_raise(tmp_path):
    ranks.spawn(_world, 2, tmp_path, timeout=datetime.timedelta(seconds=TIMEOUT_S))
