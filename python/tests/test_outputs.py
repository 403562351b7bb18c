"""Outputs beside the loss, each differentiable by itself."""

import pytest
import talea
import torch
from conftest import close, gradients, problem


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("name", ("lse", "entropy"))
def test_a_loss_that_was_not_asked_for_brings_nothing(name, sparse, reduction, compiled):
    """Of soft targets, too: their gradients once came with those of the other outputs."""
    if compiled and (sparse or reduction == "none"):
        pytest.skip("one compiled case is enough")
    x, w, _, _ = problem(n=5, v=11)
    target = torch.rand(5, 3 if sparse else 11)
    ids = torch.randint(0, 11, (5, 3)) if sparse else None

    def ours(x, w):
        made = talea.linear_cross_entropy(
            x, w, target, soft_target_ids=ids, outputs=(name,), reduction=reduction,
            label_smoothing=0.1,
        )  # fmt: skip
        return getattr(made, name)

    logp = torch.nn.functional.linear(x.double(), w.double()).log_softmax(-1)
    logits = torch.nn.functional.linear(x.double(), w.double())
    theirs = logits.logsumexp(-1) if name == "lse" else -(logp.exp() * logp).sum(-1)
    up = torch.rand(5)
    found = (torch.compile(ours) if compiled else ours)(x, w)
    assert close(found, theirs)
    want = gradients(theirs, x, w, upstream=up.double())
    for a, b in zip(gradients(found, x, w, upstream=up), want, strict=True):
        assert close(a, b, 5e-6)
