"""Views that PyTorch negates on reading: their storage holds the other sign."""

import pytest
import talea
import torch


def negated(t: torch.Tensor) -> torch.Tensor:
    """-t as a view: what z.conj().imag is."""
    view = torch.complex(torch.zeros_like(t), t).conj().imag
    assert view.is_neg()
    return view


def scan(v):
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 5, 1, 8, generator=g) for _ in range(2))
    adt, dt, trap = (-torch.rand(1, 2, 5, generator=g) for _ in range(3))
    return talea.mamba3(q, k, v, adt, -dt, trap)


def attend(kv):
    g = torch.Generator().manual_seed(1)
    q, indices = torch.randn(1, 3, 2, 8, generator=g), torch.arange(6).reshape(1, 3, 1, 2)
    return talea.sparse_attention(q, kv, indices, value_dim=4)


def loss(hidden):
    g = torch.Generator().manual_seed(1)
    w, y = torch.randn(7, 8, generator=g), torch.tensor([3, 1, 6])
    return talea.linear_cross_entropy(hidden, w, y)


@pytest.mark.parametrize(
    ("call", "shape"), ((scan, (1, 5, 2, 4)), (attend, (1, 6, 1, 8)), (loss, (3, 8)))
)
def test_inputs_and_upstream(call, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    assert torch.equal(call(negated(x)), call(-x))
    found = []
    for turn in (negated, torch.neg):
        a, b = (x.clone().requires_grad_() for _ in range(2))
        out = call(turn(a))
        out.backward(turn(torch.ones_like(out)))
        call(b).backward(turn(torch.ones_like(out)))
        found.append((a.grad, b.grad))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_weights_of_tokens_and_one_upstream_each():
    x, y = torch.randn(3, 8).requires_grad_(), torch.tensor([3, 1, 6])
    w, row, up = torch.randn(7, 8), torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, 3.0, 0.25])

    def gradient(row, up):
        made = talea.linear_cross_entropy(x, w, y, token_weight=row, reduction="none")
        return torch.autograd.grad(made, x, up)[0]

    assert torch.equal(gradient(negated(-row), negated(-up)), gradient(row, up))


def test_what_is_written_is_refused():
    x, w, y = torch.randn(3, 8), torch.randn(7, 8).requires_grad_(), torch.tensor([3, 1, 6])
    with pytest.raises(talea.DataError, match="main_grad"):
        talea.linear_cross_entropy(x, w, y, main_grad=negated(torch.zeros(7, 8)))
    with pytest.raises(talea.DataError, match="mask"):
        talea.index_mask(negated(torch.zeros(1, 2, 3)), torch.zeros(1, 2, 1, dtype=torch.int32))
