"""What: the bugs of repro/, asked of one released package and of Talea on the same tensors.
Why: a claim about a library is worth what was run against its release.
Never: judges a package by another version, or calls a bug reproduced that was not measured.

usage: python cases.py PACKAGE    (a child of upstream.py; prints one JSON object a line)
"""

import json
import sys

import torch
import torch.nn.functional as F

DEVICE = "cuda"


def liger(x, w, y, reduction="mean"):
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    return LigerFusedLinearCrossEntropyLoss(reduction=reduction)(w, x, y)


def cce(x, w, y, reduction="mean"):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, w, y, reduction=reduction)


def fla(x, w, y, reduction="mean"):
    from fla.modules import FusedLinearCrossEntropyLoss

    return FusedLinearCrossEntropyLoss(reduction=reduction)(x, y, w)


def eager(x, w, y, reduction="mean"):
    return F.cross_entropy(F.linear(x, w), y, reduction=reduction)


def talea(x, w, y, reduction="mean"):
    from talea import linear_cross_entropy

    return linear_cross_entropy(x, w, y, reduction=reduction)


LOSSES = {"liger-kernel": liger, "cut-cross-entropy": cce, "flash-linear-attention": fla,
          "torch": eager}  # fmt: skip


def problem(n, d, v, dtype=torch.bfloat16, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(n, d, device=DEVICE).to(dtype).requires_grad_()
    w = (torch.randn(v, d, device=DEVICE) / d**0.5).to(dtype).requires_grad_()
    return x, w, torch.randint(v, (n,), device=DEVICE)


def gradients(loss_of, x, w, y, upstream=None, reduction="mean"):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = loss_of(x, w, y, reduction)
    loss.backward(upstream)
    return loss.detach(), x.grad, w.grad


def truth(x, w, y, upstream=None, reduction="mean"):
    return gradients(eager, x.double(), w.double(), y, upstream, reduction)


def far(a, b):
    """Relative L2 distance; NaN where anything is NaN, Infinity where there is no gradient."""
    return float("inf") if a is None else float((a.double() - b).norm() / b.norm())


def none_backward(loss_of):
    """dW of (loss * weights).sum() with weights of every size, the first token masked."""
    x, w, y = problem(512, 256, 4096)
    upstream = torch.rand(512, device=DEVICE)
    upstream[0] = 0
    want = truth(x, w, y, upstream.double(), "none")
    loss, _, dw = gradients(loss_of, x, w, y, upstream, "none")
    return {"what": "dW under a token mask, relative L2", "measured": far(dw, want[2]),
            "bound": 0.1, "loss_error": far(loss, want[0])}  # fmt: skip


def confident_tokens(loss_of):
    """Median error of dX rows whose own token has p about 0.9995."""
    x, w, y = problem(512, 256, 4096)
    with torch.no_grad():
        z = x.float() @ w.float().T
        z.scatter_(1, y[:, None], float("-inf"))
        gap = torch.logsumexp(z, -1) + 7.6  # the logit that gives p = 0.9995
        own = w.float()[y]
        now = (x.float() * own).sum(-1)
        x += ((gap - now) / own.square().sum(-1))[:, None] * own
    want = truth(x, w, y, reduction="sum")
    p = torch.softmax(x.double() @ w.double().T, -1).gather(1, y[:, None])[:, 0]
    rows = p > 0.999
    _, dx, _ = gradients(loss_of, x, w, y, reduction="sum")
    error = (dx.double() - want[1]).norm(dim=-1) / want[1].norm(dim=-1)
    return {"what": f"dX of {int(rows.sum())} rows with p > 0.999, median relative error",
            "measured": float(error[rows].median()), "bound": 0.02,
            "worst_row": float(error[rows].max())}  # fmt: skip


def dw_16bit_accumulator(loss_of):
    """dW of one frequent word over many chunks of tokens."""
    x, w, y = problem(8192, 64, 32768)
    with torch.no_grad():
        x += 1.0
    y[:] = 7
    want = truth(x, w, y)
    _, _, dw = gradients(loss_of, x, w, y)
    return {"what": "dW of the frequent word, relative L2", "bound": 0.01,
            "measured": far(dw[7] if dw is not None else None, want[2][7])}  # fmt: skip


def second_backward(loss_of):
    """Two backwards of one forward with upstream 3: the second must give what the first gave."""
    x, w, y = problem(256, 128, 2048)
    loss = loss_of(x, w, y)
    three = torch.tensor(3.0, device=DEVICE, dtype=loss.dtype)
    found = []
    for _ in range(2):
        x.grad = w.grad = None
        loss.backward(three, retain_graph=True)
        found.append(w.grad.double().clone())
    return {"what": "dW of the second backward over the first, minus 1", "bound": 0.01,
            "measured": abs(float(found[1].norm() / found[0].norm()) - 1)}  # fmt: skip


def all_ignored(loss_of):
    """Every target ignored under mean. PyTorch: loss NaN, gradients exactly 0."""
    x, w, y = problem(256, 128, 2048)
    y[:] = -100
    loss, dx, dw = gradients(loss_of, x, w, y)
    wrong = sum(int(torch.count_nonzero(g)) if g is not None else g is None for g in (dx, dw))
    return {"what": "gradient elements that are not 0 with nothing to learn from",
            "measured": float(wrong), "bound": 0.0, "loss": float(loss)}  # fmt: skip


def frozen_hidden(loss_of):
    """dW where the hidden states need no gradient (a frozen body, a trained head)."""
    x, w, y = problem(256, 128, 2048)
    want = truth(x, w, y)
    head = w.detach().requires_grad_()
    loss_of(x.detach(), head, y).backward()
    return {"what": "dW with frozen hidden states, relative L2", "bound": 0.1,
            "measured": far(head.grad, want[2])}  # fmt: skip


def repeatable(loss_of):
    """Two runs of one program, bit for bit."""
    x, w, y = problem(4096, 256, 16384)
    first = gradients(loss_of, x, w, y)
    differs = 0
    for _ in range(4):
        again = gradients(loss_of, x, w, y)
        differs += sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
    return {"what": "elements of loss, dX and dW that differ in 4 repeats",
            "measured": float(differs), "bound": 0.0}  # fmt: skip


def sentinel_target(loss_of):
    """Ignored targets at vocabularies that do not fill the last tile: the loss must be finite."""
    worst = 0.0
    for v in (1000, 2047, 2049, 4000, 5003):
        x, w, y = problem(256, 128, v)
        y[::3] = -100
        got = float(loss_of(x, w, y))
        want = float(eager(x.double(), w.double(), y))
        worst = max(worst, abs(got - want) / want) if got == got else float("nan")
    return {"what": "loss with ignored targets, ragged vocabularies, worst relative error",
            "measured": worst, "bound": 0.01}  # fmt: skip


def small_gradients(loss_of):
    """dX and dW where most probabilities are small: a filtered gradient loses their sum."""
    x, w, y = problem(2048, 256, 32768)
    want = truth(x, w, y)
    _, dx, dw = gradients(loss_of, x, w, y)
    _, _, plain = gradients(eager, x, w, y)
    return {"what": "dW over eager's error of the same dtype", "bound": 2.0,
            "measured": far(dw, want[2]) / far(plain, want[2]), "dx": far(dx, want[1])}  # fmt: skip


def loss_in_16_bits(loss_of):
    """The loss of bf16 inputs: rounded to 16 bits, or not."""
    x, w, y = problem(512, 256, 4096)
    loss = loss_of(x, w, y)
    want = float(eager(x.double(), w.double(), y))
    return {"what": f"relative error of the loss ({loss.dtype})", "bound": 1e-4,
            "measured": abs(float(loss) - want) / want}  # fmt: skip


def more_than_2_31_elements(loss_of):
    """Row losses of logits with more than 2^31 elements against the same rows in parts."""
    n, v = 70000, 32768
    x, w, y = problem(n, 64, v)
    with torch.no_grad():
        whole = loss_of(x, w, y, "none").float()
        parts = torch.cat([eager(x[i : i + 4096], w, y[i : i + 4096], "none").float()
                           for i in range(0, n, 4096)])  # fmt: skip
    return {"what": f"row losses of {n * v / 2**31:.2f} * 2^31 logits, worst difference",
            "measured": float((whole - parts).abs().max()), "bound": 0.1}  # fmt: skip


CASES = {
    "none_backward": ("B1", none_backward, ("liger-kernel",)),
    "confident_tokens": ("B5", confident_tokens, tuple(LOSSES)),
    "dw_16bit_accumulator": ("B6", dw_16bit_accumulator,
                             ("liger-kernel", "flash-linear-attention", "torch")),
    "sentinel_target": ("B8", sentinel_target, ("cut-cross-entropy",)),
    "more_than_2_31_elements": ("B10", more_than_2_31_elements, ("torch",)),
    "all_ignored": ("B16", all_ignored, tuple(LOSSES)),
    "unordered_sum": ("B17", repeatable, tuple(LOSSES)),
    "second_backward": ("B18", second_backward, ("liger-kernel", "flash-linear-attention")),
    "frozen_hidden": ("B19", frozen_hidden,
                      ("liger-kernel", "flash-linear-attention", "cut-cross-entropy")),
    "gradient_filter": ("-", small_gradients, ("cut-cross-entropy",)),
    "loss_in_16_bits": ("-", loss_in_16_bits, tuple(LOSSES)),
}  # fmt: skip


def main(package):
    ours = package == "talea"
    for name, (museum, case, packages) in CASES.items():
        if not ours and package not in packages:
            continue
        row = {"id": name, "museum": museum, "text": case.__doc__.strip()}
        try:
            row |= case(talea if ours else LOSSES[package])
        except Exception as error:  # a package that refuses is an answer too
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
