"""Same results as torch.nn.functional.cross_entropy over its option matrix."""

import itertools

import pytest
import talea
import torch
from conftest import DEVICES, close, eager, gradients, problem

CASES = list(itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True), (False, True)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction,smoothing,weighted,bias", CASES)
def test_hard_targets(device, reduction, smoothing, weighted, bias):
    x, w, y, b = problem(device=device, bias=bias)
    y[::5] = -100
    weight = torch.rand(w.shape[0], device=device) + 0.1 if weighted else None
    options = dict(weight=weight, reduction=reduction, label_smoothing=smoothing)
    ours = talea.linear_cross_entropy(x, w, y, linear_bias=b, **options)
    theirs = eager(x, w, y, bias=b, **options)
    assert ours.shape == theirs.shape
    assert close(ours, theirs)
    up = torch.randn_like(theirs)
    for mine, other in zip(
        gradients(ours, x, w, b, upstream=up), gradients(theirs, x, w, b, upstream=up), strict=True
    ):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_probabilities(device, reduction):
    x, w, _, _ = problem(device=device)
    q = torch.softmax(torch.randn(x.shape[0], w.shape[0], device=device), -1)
    ours = talea.linear_cross_entropy(x, w, q, reduction=reduction, label_smoothing=0.1)
    theirs = eager(x, w, q, reduction=reduction, label_smoothing=0.1)
    assert close(ours, theirs)
    up = torch.randn_like(theirs)
    for mine, other in zip(
        gradients(ours, x, w, upstream=up), gradients(theirs, x, w, upstream=up), strict=True
    ):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_weighted_probabilities_with_bias(device, reduction):
    x, w, _, b = problem(device=device, bias=True)
    q = torch.softmax(torch.randn(x.shape[0], w.shape[0], device=device), -1)
    options = dict(weight=torch.rand(w.shape[0], device=device) + 0.1, reduction=reduction)
    ours = talea.linear_cross_entropy(x, w, q, linear_bias=b, **options)
    theirs = eager(x, w, q, bias=b, **options)
    assert close(ours, theirs)
    up = torch.randn_like(theirs)
    for mine, other in zip(
        gradients(ours, x, w, b, upstream=up), gradients(theirs, x, w, b, upstream=up), strict=True
    ):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_index", (-1, 3, 100, 12345))
def test_ignore_index_of_any_value(device, ignore_index):
    """Also inside the vocabulary, where a real word is then ignored."""
    x, w, y, _ = problem(device=device)
    y[1::4] = ignore_index
    ours = talea.linear_cross_entropy(x, w, y, ignore_index=ignore_index)
    theirs = eager(x, w, y, ignore_index=ignore_index)
    assert close(ours, theirs)
    for mine, other in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bits_against_eager_and_truth(device, dtype):
    """No farther from fp64 than eager arithmetic of the same dtype."""
    x, w, y, _ = problem(n=64, d=32, v=256, dtype=dtype, device=device)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = eager(*wide, y)
    wanted = torch.autograd.grad(truth, wide)
    loss, plain = talea.linear_cross_entropy(x, w, y), eager(x, w, y)
    assert loss.dtype == torch.float32
    assert abs(float(loss) - float(truth)) <= abs(float(plain) - float(truth)) + 1e-5
    for mine, other, want in zip(
        gradients(loss, x, w), gradients(plain, x, w), wanted, strict=True
    ):
        ours, theirs = (float((g.double() - want).norm()) for g in (mine, other))
        assert ours <= theirs, (ours, theirs)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_nothing_valid(reduction):
    x, w, y, _ = problem()
    y[:] = -100
    ours = talea.linear_cross_entropy(x, w, y, reduction=reduction)
    theirs = eager(x, w, y, reduction=reduction)
    assert close(ours, theirs)
    for g in gradients(ours, x, w, upstream=torch.ones_like(ours)):
        assert torch.count_nonzero(g) == 0


def test_no_tokens():
    x, w, y, _ = problem(n=0)
    for reduction in ("mean", "sum", "none"):
        assert close(
            talea.linear_cross_entropy(x, w, y, reduction=reduction),
            eager(x, w, y, reduction=reduction),
        )


def test_views():
    x, w, y, _ = problem(n=32)
    theirs = eager(x, w, y)
    wide = torch.empty(32, 48)
    wide[:, 3:27] = x.detach()
    assert close(talea.linear_cross_entropy(wide[:, 3:27], w, y), theirs)
    turned = x.detach().t().contiguous().t()
    assert close(talea.linear_cross_entropy(turned, w, y), theirs)
    turned = w.detach().t().contiguous().t()
    for weight in (w.detach(), turned, w.detach(), turned):  # known by its strides as well
        assert close(talea.linear_cross_entropy(x.detach(), weight, y), theirs)
    same = x.detach()[:1].expand(32, -1)
    assert close(talea.linear_cross_entropy(same, w, y), eager(same, w, y))


def test_expanded_upstream():
    x, w, y, _ = problem()
    ours = talea.linear_cross_entropy(x, w, y, reduction="none").sum()
    theirs = eager(x, w, y, reduction="none").sum()
    for mine, other in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(mine, other, 5e-6)


@pytest.mark.parametrize("scale", (1.0, 0.25, 1 / 3))
def test_second_backward_and_scale(scale):
    x, w, y, _ = problem()
    loss = talea.linear_cross_entropy(x, w, y)
    want = gradients(eager(x, w, y) * scale, x, w)
    for _ in range(3):
        for mine, other in zip(gradients(loss * scale, x, w), want, strict=True):
            assert close(mine, other, 5e-6)


def test_one_of_the_gradients():
    x, w, y, _ = problem()
    want = gradients(eager(x, w, y), x, w)
    loss = talea.linear_cross_entropy(x, w.detach(), y)
    assert close(gradients(loss, x)[0], want[0], 5e-6)
    loss = talea.linear_cross_entropy(x.detach(), w, y)
    assert close(gradients(loss, w)[0], want[1], 5e-6)


@pytest.mark.parametrize("main", (False, True))
@pytest.mark.parametrize("smoothing,z_loss", ((0.0, 0.0), (0.1, 0.05)))
def test_outputs_are_differentiable(smoothing, z_loss, main):
    """Loss has its options, the log-probability none of them; bias and a main gradient get all."""
    x, w, y, b = problem(bias=True)
    added = torch.ones(w.shape) if main else None
    out = talea.linear_cross_entropy(
        x, w, y, linear_bias=b, label_smoothing=smoothing, z_loss=z_loss, main_grad=added,
        outputs=("loss", "lse", "target_logprob", "entropy", "argmax"), top_k=5,
    )  # fmt: skip
    z = torch.nn.functional.linear(x, w, b)
    logp = z.log_softmax(-1)
    ce = torch.nn.functional.cross_entropy(z, y, label_smoothing=smoothing)
    want = {
        "loss": ce + z_loss * z.logsumexp(-1).square().mean(),
        "lse": z.logsumexp(-1),
        "target_logprob": logp.gather(1, y[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
    }
    ours, theirs = 0, 0
    for i, (name, value) in enumerate(want.items()):
        assert close(getattr(out, name), value, 5e-6), name
        up = torch.randn_like(value) * (i + 1)
        ours = ours + (getattr(out, name) * up).sum()
        theirs = theirs + (value * up).sum()
    dx, dw, db = gradients(theirs, x, w, b)
    ours.backward()
    assert close(x.grad, dx, 1e-5) and close(b.grad, db, 1e-5)
    assert close(added - 1 if main else w.grad, dw, 1e-5) and (not main or w.grad is None)
    top = z.topk(5)
    assert torch.equal(out.topk_ids, top.indices)
    assert torch.equal(out.argmax, z.argmax(-1))
    assert out.receipt()["lane"] in talea.lanes()


def test_main_grad():
    x, w, y, b = problem(bias=True)
    main = torch.ones(w.shape)
    loss = talea.linear_cross_entropy(x, w, y, linear_bias=b, main_grad=main)
    want = gradients(eager(x, w, y, bias=b), x, w, b)
    (loss * 0.5).backward()
    assert w.grad is None and close(b.grad, want[2] * 0.5, 5e-6)
    assert close(main - 1, want[1] * 0.5, 1e-5)
    assert close(x.grad, want[0] * 0.5, 5e-6)


def test_gradcheck():
    x, w, y, b = problem(n=5, d=4, v=7, dtype=torch.float64, bias=True)
    y[2] = -100

    def loss(x, w, b, reduction):
        return talea.linear_cross_entropy(
            x,
            w,
            y,
            linear_bias=b,
            reduction=reduction,
            label_smoothing=0.1,
            z_loss=0.01,
            softcap=5.0,
        )

    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(lambda *a, r=reduction: loss(*a, r), (x, w, b))


def test_leading_dimensions():
    x, w, y, _ = problem(n=24)
    got = talea.linear_cross_entropy(
        x.reshape(4, 6, -1), w, y.reshape(4, 6), reduction="none", outputs=("loss", "entropy")
    )
    assert got.loss.shape == (4, 6) and got.entropy.shape == (4, 6)


def test_errors_name_the_value():
    x, w, y, _ = problem()
    y[3] = 101
    with pytest.raises(talea.DataError, match=r"target\[3\] = 101"):
        talea.linear_cross_entropy(x, w, y)
    y[3] = 0
    with pytest.raises(talea.UsageError, match="label_smoothing = 1.5"):
        talea.linear_cross_entropy(x, w, y, label_smoothing=1.5)
    with pytest.raises(talea.UsageError, match="reduction = 'max'"):
        talea.linear_cross_entropy(x, w, y, reduction="max")
    for outputs in (("logits",), "lse"):  # a string is a tuple of letters
        with pytest.raises(talea.UsageError, match="outputs = "):
            talea.linear_cross_entropy(x, w, y, outputs=outputs)
    with pytest.raises(talea.UsageError, match="top_k = -1"):
        talea.linear_cross_entropy(x, w, y, top_k=-1)
    with pytest.raises(talea.UsageError, match="vocab_begin = 3"):
        talea.linear_cross_entropy(x, w, y, vocab_begin=3)
    with pytest.raises(talea.UsageError, match="no such lane"):
        talea.linear_cross_entropy(x, w, y, lane="fast")
    with pytest.raises(talea.DataError, match="float16|fp16|dtype"):
        talea.linear_cross_entropy(x, w.half(), y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_vector_upstream_after_an_expanded_one(device):
    """The same shapes, other strides: what an earlier backward prepared is not this one's."""
    x, w, y, _ = problem(device=device)
    for up in (torch.ones((), device=device).expand(len(y)), torch.randn(len(y), device=device)):
        ours = gradients(talea.linear_cross_entropy(x, w, y, reduction="none"), x, w, upstream=up)
        theirs = gradients(eager(x, w, y, reduction="none"), x, w, upstream=up)
        for mine, other in zip(ours, theirs, strict=True):
            assert close(mine, other, 5e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_receipt_counts_the_products_of_backward(device):
    x, w, y, _ = problem(device=device)
    made = talea.linear_cross_entropy(x, w, y, outputs=("loss",), reduction="none")
    before = made.receipt()["products"]
    made.loss.backward(torch.rand(len(y), device=device))
    receipt = made.receipt()
    later = sum(r["products"] for r in receipt["backward"])
    assert later > 0 and receipt["products"] == before + later
