"""A plain call found by its tensors: the same numbers, and never where anything else is different."""

import threading

import pytest
import talea
import torch
from conftest import DEVICES, close, eager, gradients, problem
from talea import _fast
from talea._linear_cross_entropy import _again, _tensors, functional


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(_again._calls, "by_settings", {})
    monkeypatch.setattr(_tensors._kept, "calls", {})


@pytest.fixture
def found(monkeypatch):
    """Of each call: whether it was found."""
    calls, find = [], _again.find

    def counting(*arguments):
        loss = find(*arguments)
        calls.append(loss is not None)
        return loss

    monkeypatch.setattr(functional._again, "find", counting)
    return calls


def step(x, w, y, **options):
    loss = talea.linear_cross_entropy(x, w, y, **options)
    return loss, *gradients(loss, x, w)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.skipif(
    _fast.tensor_guard(torch.empty(1)) is None, reason="this PyTorch has no such guard"
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_third_call_is_found_and_gives_the_same_bits(device, dtype, found):
    x, w, y, _ = problem(n=9, d=24, v=64, dtype=dtype, device=device)
    want = step(x, w, y)
    for _ in range(4):
        moved = x.detach().clone().requires_grad_()
        assert same(want, step(moved, w, y))
    assert found == [False, False, True, True, True]
    loss = talea.linear_cross_entropy(x.detach(), w.detach(), y)
    for _ in range(4):
        assert torch.equal(loss, talea.linear_cross_entropy(x.detach(), w.detach(), y))
    assert found[5:] == [False, False, True, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_and_a_second_backward(device):
    x, w, y, _ = problem(n=9, d=24, v=64, device=device)
    want = gradients(eager(x, w, y) / 3, x, w)
    for _ in range(4):
        loss = talea.linear_cross_entropy(x, w, y) / 3
        for _ in range(2):
            for got, true in zip(gradients(loss, x, w), want, strict=True):
                assert close(got, true, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_one_wanted_gradient(device, found):
    x, w, y, _ = problem(n=9, d=24, v=64, device=device)
    want = gradients(eager(x, w, y), x, w)
    for leaf, i in ((x, 0), (w, 1)):
        a, b = (t if t is leaf else t.detach() for t in (x, w))
        for _ in range(3):
            (got,) = gradients(talea.linear_cross_entropy(a, b, y), leaf)
            assert close(got, want[i], 5e-6)
    assert found == [False, False, True] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tokens_of_more_dimensions(device, reduction, found):
    x, w, y, _ = problem(n=12, d=24, v=64, device=device)
    flat = talea.linear_cross_entropy(x, w, y, reduction=reduction)
    up = torch.rand_like(flat)
    want = [flat, *gradients(flat, x, w, upstream=up)]
    for _ in range(4):
        cube = x.detach().view(3, 4, 24).requires_grad_()
        loss = talea.linear_cross_entropy(cube, w, y.view(3, 4), reduction=reduction)
        assert loss.shape == ((3, 4) if reduction == "none" else ())
        for _ in range(2):
            dx, dw = gradients(loss, cube, w, upstream=up.view(loss.shape))
            assert dx.shape == cube.shape and dx.is_contiguous()
            made = (loss.reshape(flat.shape), dx.view(x.shape), dw)
            assert all(close(a, b, 5e-6) for a, b in zip(made, want, strict=True))
        frozen = talea.linear_cross_entropy(cube, w.detach(), y.view(3, 4), reduction=reduction)
        (dx,) = gradients(frozen, cube, upstream=up.view(loss.shape))
        assert close(dx.view(x.shape), want[1], 5e-6)
    assert sum(found) >= 4
    other = x.detach().view(4, 3, 24).requires_grad_()
    with pytest.raises(talea.DataError, match="beside"):
        talea.linear_cross_entropy(other, w, y.view(3, 4), reduction=reduction)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_addresses_go_in_the_order_of_the_structs(device, dtype):
    """Beside a bias and a main gradient Python names the outputs in another order than C."""
    x, w, y, b = problem(n=256, d=64, v=4096, dtype=dtype, device=device, bias=True)
    want = gradients(eager(x.float(), w.float(), y, bias=b.float()), x, w, b)
    bound = 5e-6 if dtype == torch.float32 else 2e-2
    for _ in range(3):
        loss = talea.linear_cross_entropy(x, w, y, linear_bias=b)
        for got, true in zip(gradients(loss, x, w, b), want, strict=True):
            assert close(got.float(), true.float(), bound)
        main = torch.zeros(w.shape, device=device)
        loss = talea.linear_cross_entropy(x, w, y, linear_bias=b, main_grad=main, grad_scale=1.0)
        dx, db = gradients(loss, x, b)
        for got, true in zip((dx, main, db), want, strict=True):
            assert close(got.float(), true.float(), bound)


def test_what_differs_is_not_found(found):
    x, w, y, _ = problem(n=9, d=24, v=64)
    for _ in range(3):
        step(x, w, y)
    assert found.pop()
    found.clear()
    step(x, w, y, label_smoothing=0.1)
    step(x[:8], w, y[:8])
    step(x, w, y.int())
    step(x.double(), w.double(), y)
    with torch.no_grad():
        assert not talea.linear_cross_entropy(x, w, y).requires_grad
    with torch.inference_mode():
        talea.linear_cross_entropy(x, w, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = talea.linear_cross_entropy(x, w, y)
    assert close(loss, eager(x.bfloat16().float(), w.bfloat16().float(), y))
    negated = torch.imag(torch.conj(torch.complex(torch.zeros_like(w), -w.detach())))
    assert negated.is_neg()
    step(x, negated.requires_grad_(), y)
    with pytest.raises(talea.UsageError, match=r"torch\.func"):
        torch.func.grad(lambda x: talea.linear_cross_entropy(x, w.detach(), y))(x.detach())
    with pytest.raises(talea.DataError):
        talea.linear_cross_entropy(x.detach().numpy(), w, y)
    memory = torch.randn(x.numel() + 1)
    talea.linear_cross_entropy(memory[1:].view(x.shape).requires_grad_(), w, y)
    assert not any(found)


def test_modes_of_a_guard_are_seen_under_autocast_from_the_start(found):
    x, w, y, _ = problem(n=9, d=24, v=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            talea.linear_cross_entropy(x, w, y)
    assert not any(found)


def test_another_thread_has_descriptions_of_its_own():
    x, w, y, _ = problem(n=9, d=24, v=64)
    want, wrong = [step(x, w, y) for _ in range(3)][-1], []

    def work():
        wrong.extend(0 for _ in range(50) if not same(want, step(x, w, y)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_double_backward_is_refused():
    x, w, y, _ = problem(n=9, d=24, v=64)
    for _ in range(3):
        loss = talea.linear_cross_entropy(x, w, y)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            dx.sum().backward()


def test_many_shapes_keep_few():
    x, w, y, _ = problem(n=40, d=24, v=64)
    for n in (*range(1, 20), *range(1, 20), *range(1, 20)):
        assert close(talea.linear_cross_entropy(x[:n], w, y[:n]), eager(x[:n], w, y[:n]))
    assert all(len(e) <= _again._MOST_SHAPES for e in _again._calls.by_settings.values())
