"""What: every way through autograd to the gradients, against fp64 truth and plain bf16 arithmetic.
Why: which gradients are formed when, how dW is summed and what a late factor meets depend on limits,
     reduction and what is frozen; each combination is a path of its own. On a GPU, where there is
     one, at sizes beyond the small-weight rule of its lanes; on the host always.
Never: compares a lane with itself.
"""

import math

import pytest
import talea
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
MIB = 1 << 20


def problem(device, dtype=None, n=1500, d=136, v=2003, seed=0):
    if device == "cpu":
        n, d, v = 96, 40, 203
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, d, generator=g)).to(device, dtype)
    w = (torch.randn(v, d, generator=g) * 2 / math.sqrt(d)).to(device, dtype)
    y = torch.randint(v, (n,), generator=g)
    y[::7] = -100
    return x.requires_grad_(), w.requires_grad_(), y.to(device)


def loss_of(x, w, y, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None):
    z = x @ w.T
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = y != -100
    rows = torch.nn.functional.cross_entropy(
        z, y, reduction="none", label_smoothing=label_smoothing
    )
    rows = rows + z_loss * torch.logsumexp(z, -1) ** 2 * valid
    if reduction == "none":
        return rows
    return rows.sum() / (valid.sum() if reduction == "mean" else 1)


def gradients(of, tensors, dtype, backward):
    x, w, y = tensors
    x, w = (t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, w))
    backward(of(x, w, y))
    return x.grad, w.grad


def check(found, tensors, backward, **options):
    """No worse than plain arithmetic in the inputs' dtype, by relative L2 (docs/contract.md, accuracy)."""
    truth = gradients(lambda *t: loss_of(*t, **options), tensors, torch.float64, backward)
    eager = gradients(lambda *t: loss_of(*t, **options), tensors, tensors[0].dtype, backward)
    for name, a, e, t in zip(("dx", "dw"), found, eager, truth, strict=True):
        if t is None:
            assert a is None, name
            continue
        error, bound = ((g.double() - t).norm() / t.norm() for g in (a, e))
        assert error <= bound * 1.05 + 1e-6, (name, float(error), float(bound))
        if name == "dx":
            ignored = tensors[2] == -100
            assert (a[ignored] == 0).all()


def step(x, w, y, backward, **options):
    found = talea.linear_cross_entropy(x, w, y, outputs=("loss",), **options)
    backward(found.loss)
    return found.receipt()


LIMITS = {"cpu": ["auto", 16 * MIB], "cuda": ["auto", 3 * MIB, 4 * MIB, 6 * MIB, 64 * MIB]}


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"softcap": 5.0},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 9.0},
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_scalar(device, options, factor):
    def backward(loss):
        (loss * factor).backward()

    for limit in LIMITS[device]:
        x, w, y = problem(device)
        receipt = step(x, w, y, backward, workspace_limit=limit, **options)
        assert round(receipt["products"], 2) == 3, (limit, receipt)
        check((x.grad, w.grad), (x, w, y), backward, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_is_applied_once_and_a_second_backward_is_a_first_one(device):
    x, w, y = problem(device)
    loss = talea.linear_cross_entropy(x, w, y)
    once = torch.autograd.grad(loss, (x, w), torch.tensor(0.3, device=device), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w), torch.tensor(0.3, device=device))
    for a, b in zip(once, again, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3])
@pytest.mark.parametrize("device", DEVICES)
def test_announced_upstream(device, scale):
    def backward(loss):
        (loss * torch.tensor(scale, device=device)).backward()

    x, w, y = problem(device)
    main = torch.zeros(w.shape, device=device)
    receipt = step(x, w, y, backward, main_grad=main, grad_scale=scale)
    assert round(receipt["products"], 2) == 3 and w.grad is None
    talea.require_clean()
    check((x.grad, main), (x, w, y), backward)


@pytest.mark.parametrize("device", DEVICES)
def test_another_upstream_than_announced_is_told(device):
    x, w, y = problem(device)
    main = torch.zeros(w.shape, device=device)
    loss = talea.linear_cross_entropy(x, w, y, main_grad=main, grad_scale=0.5)
    (loss * 0.25).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    assert x.grad.isnan().all()
    with pytest.raises(talea.DataError, match=r"grad_scale = 0\.5: .* brought 0\.25"):
        talea.linear_cross_entropy(x, w, y)
    talea.require_clean()  # said once


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_frozen_head(device, reduction):
    x, w, y = problem(device)
    w.requires_grad_(False)
    vector = torch.rand(y.shape, device=device)

    def backward(loss):
        (loss * 0.3).backward() if loss.dim() == 0 else loss.backward(vector.to(loss.dtype))

    receipt = step(x, w, y, backward, reduction=reduction)
    assert round(receipt["products"], 2) == 2
    check((x.grad, None), (x, w, y), backward, reduction=reduction)


@pytest.mark.parametrize("options", ({}, {"z_loss": 0.05}, {"label_smoothing": 0.1}))
@pytest.mark.parametrize("device", DEVICES)
def test_frozen_head_of_log_probabilities(device, options):
    """Options are the loss's: the log-probability has none of them, early or late."""
    x, w, y = problem(device)
    w.requires_grad_(False)
    vector = torch.rand(y.shape, device=device)
    found = talea.linear_cross_entropy(
        x, w, y, reduction="none", outputs=("target_logprob",), **options
    )
    found.target_logprob.backward(vector)
    assert options or round(found.receipt()["products"], 2) == 2

    def backward(loss):
        loss.backward(-vector.to(loss.dtype))

    check((x.grad, None), (x, w, y), backward, reduction="none")


@pytest.mark.parametrize("device", DEVICES)
def test_late_vector(device):
    x, w, y = problem(device)
    vector = torch.rand(y.shape, device=device)

    def backward(loss):
        loss.backward(vector.to(loss.dtype))

    for limit in LIMITS[device][:1] + LIMITS[device][-1:]:
        x.grad = w.grad = None
        receipt = step(x, w, y, backward, reduction="none", workspace_limit=limit)
        assert round(receipt["products"], 2) == 4
        check((x.grad, w.grad), (x, w, y), backward, reduction="none")


@pytest.mark.parametrize("device", DEVICES)
def test_the_limit_is_kept_or_refused(device):
    x, w, y = problem(device)
    with pytest.raises(talea.UsageError, match=r"workspace_limit = 1000 bytes: .* needs at least"):
        talea.linear_cross_entropy(x, w, y, workspace_limit=1000).backward()
    if device == "cpu":
        return
    for limit in LIMITS[device][1:]:
        x.grad = w.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        talea.linear_cross_entropy(x, w, y, workspace_limit=limit).backward()
        returned = 2 * (x.numel() + w.numel())
        extra = torch.cuda.max_memory_allocated() - before - returned
        assert extra <= limit + 4096, limit  # the allocator's rounding of small tensors


def test_dw_sum_is_one_of_two_words_and_the_host_sums_in_fp32_either_way():
    tensors = problem("cpu", torch.bfloat16)
    found = []
    for word in ("fp32", "weight"):
        x, w, y = (t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
        talea.linear_cross_entropy(x, w, y, workspace_limit=MIB, dw_sum=word).backward()
        found.append(w.grad)
        check((x.grad, w.grad), (x, w, y), lambda loss: loss.backward())
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="dw_sum = 'bf16': one of fp32, weight"):
        talea.linear_cross_entropy(*tensors, dw_sum="bf16")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="dw_sum changes the device lanes alone")
def test_dw_summed_in_the_dtype_of_the_weight():
    x, w, y = problem("cuda")
    talea.linear_cross_entropy(x, w, y, workspace_limit=3 * MIB, dw_sum="weight").backward()
    truth = gradients(loss_of, (x, w, y), torch.float64, lambda loss: loss.backward())
    eager = gradients(loss_of, (x, w, y), torch.bfloat16, lambda loss: loss.backward())
    error, bound = ((g.double() - truth[1]).norm() for g in (w.grad, eager[1]))
    assert error <= 1.25 * bound


@pytest.mark.skipif(not torch.cuda.is_available(), reason="dw_sum changes the device lanes alone")
@pytest.mark.parametrize(("lane", "mib"), [("sm90", 40), ("cuda", 72)])
def test_dw_of_several_chunks_in_the_dtype_of_the_weight(lane, mib):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(2048, 512, generator=g).to("cuda", torch.bfloat16).requires_grad_()
    w = (torch.randn(16000, 512, generator=g) / 16).to("cuda", torch.bfloat16).requires_grad_()
    y = torch.randint(16000, (2048,), generator=g).cuda()
    receipt = step(x, w, y, lambda loss: loss.backward(), workspace_limit=mib * MIB, lane=lane,
                   dw_sum="weight")  # fmt: skip
    assert receipt["lane"] == lane and receipt["chunks"] > 1
    assert receipt["accumulators"]["dw"] == "bf16, rounded by each chunk (dw_sum)"
    truth = gradients(loss_of, (x, w, y), torch.float64, lambda loss: loss.backward())
    eager = gradients(loss_of, (x, w, y), torch.bfloat16, lambda loss: loss.backward())
    error, bound = ((g.double() - truth[1]).norm() for g in (w.grad, eager[1]))
    assert error <= 1.25 * bound


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a way of lane sm90")
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
def test_dw_of_several_chunks_in_codes(factor):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2048, 512, generator=g)
    x[:, ::100] *= 30
    x = x.to("cuda", torch.bfloat16).requires_grad_()
    w = (torch.randn(16000, 512, generator=g) / 60).to("cuda", torch.bfloat16).requires_grad_()
    y = torch.randint(16000, (2048,), generator=g).cuda()

    def backward(loss):
        (loss * factor).backward()

    receipt = step(x, w, y, backward, workspace_limit=20 * MIB, lane="sm90")
    assert receipt["accumulators"]["dw"].startswith("16 bits and an exponent"), receipt
    assert receipt["chunks"] > 2 and round(receipt["products"], 2) == 3
    check((x.grad, w.grad), (x, w, y), backward)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="blocks of a device, many tiles each")
@pytest.mark.parametrize("limit", [48, 64, 100, 160, 400])
def test_many_tiles_a_block(limit):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4096, 1024, generator=g).to("cuda", torch.bfloat16).requires_grad_()
    w = (torch.randn(20000, 1024, generator=g) / 16).to("cuda", torch.bfloat16).requires_grad_()
    y = torch.randint(20000, (4096,), generator=g).cuda()
    y[::5] = -100

    def backward(loss):
        (loss / 3).backward()

    receipt = step(x, w, y, backward, workspace_limit=limit * MIB)
    assert round(receipt["products"], 2) == 3
    check((x.grad, w.grad), (x, w, y), backward)


@pytest.mark.parametrize(
    ("rows", "words", "waits"), [(64, 1 << 20, 0), (300, 1 << 20, 1), (64, 99, 1)]
)
def test_few_rows_of_a_large_weight_keep_no_fp32_sums(rows, words, waits):
    """Under a named limit, on a device: sums would take more of its memory's time than a product."""
    from types import SimpleNamespace

    from talea._linear_cross_entropy._late import _ways_to_wait

    def tensor(n, d):
        return SimpleNamespace(
            shape=(n, d), dtype=torch.float16, is_cuda=True, numel=lambda: n * d,
            element_size=lambda: 2,
        )  # fmt: skip

    config = SimpleNamespace(workspace_limit_bytes=4 << 30, dw_sum="fp32")
    ways = list(_ways_to_wait(config, (tensor(rows, 64), tensor(words, 64)), (True, True, False)))
    assert len(ways) == waits
