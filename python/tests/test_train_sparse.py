"""What: the gates of bench/train_sparse.py over a few updates.
Why: a run that takes minutes is made for a receipt; its gates must hold on every change.
Never: judges whether a loss falls: a few updates do not say."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "train_sparse.py"
if not SCRIPT.exists():
    pytest.skip("the tree's bench/ is not here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("train_sparse", SCRIPT)
train_sparse = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_sparse)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_gates_hold_and_planted_mistakes_fail():
    cases, losses = train_sparse.gate_cases(8)
    assert [c for c in cases if not c["passed"]] == []
    assert sum(c["name"].startswith("planted") for c in cases) == len(train_sparse.PLANTED)
    assert losses.shape == (8, 2)
    assert bool(losses.isfinite().all())
