"""A rank that dies or stops: every other rank says which one it is, within the group's timeout and 2 s."""

import datetime
import os
import time

import pytest
import ranks
import talea
import torch
import torch.distributed as dist

_TIMEOUT = 2
_SIZE = 3


def _call(rank):
    x, w = torch.ones(6, 4), torch.full((10, 4), 0.1 * rank)
    return talea.linear_cross_entropy(
        x, w, torch.arange(6), vocab=10 * _SIZE, tp_group=dist.group.WORLD, vocab_begin=10 * rank
    )


def _one_is_missing(rank, missing, how):
    _call(rank)
    if rank == missing:
        if how == "stops":
            time.sleep(_TIMEOUT + 4)
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(talea.Error, match=f"^rank {missing} is missing"):
        _call(rank)
    assert time.monotonic() - begun < _TIMEOUT + 2
    os._exit(0)


@pytest.mark.parametrize(("how", "missing"), [("dies", 1), ("stops", 0)])
def test_the_missing_rank_is_named(tmp_path, how, missing):
    ranks.spawn(
        _one_is_missing, _SIZE, tmp_path, missing, how,
        timeout=datetime.timedelta(seconds=_TIMEOUT),
    )  # fmt: skip


def _keeper_is_missing(rank):
    """The store goes with the rank that keeps it."""
    if rank == 0:
        os._exit(0)
    with pytest.raises(talea.Error, match="^rank 0 is missing"):
        _call(rank)
    os._exit(0)


def test_the_rank_that_keeps_the_store_is_named(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks.spawn(_keeper_is_missing, _SIZE, tmp_path, init_method=f"tcp://127.0.0.1:{port}")


def _global_without_a_group(rank):
    x, w, y = torch.ones(3, 4), torch.ones(5, 4), torch.arange(3)
    with pytest.raises(talea.UsageError, match="denominator_scope = 'global': needs batch_group"):
        talea.linear_cross_entropy(x, w, y, denominator_scope="global")
    talea.linear_cross_entropy(  # no rank has tokens of its own
        x,
        w,
        y,
        denominator_scope="global",
        tp_group=dist.group.WORLD,
        vocab=10,
        vocab_begin=5 * rank,
    )


def test_a_global_denominator_needs_its_group(tmp_path):
    ranks.spawn(_global_without_a_group, 2, tmp_path)
    x, w, y = torch.ones(3, 4), torch.ones(5, 4), torch.arange(3)
    alone = talea.linear_cross_entropy(x, w, y, denominator_scope="global")
    assert torch.equal(alone, talea.linear_cross_entropy(x, w, y))
