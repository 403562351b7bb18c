# What: `talea loss` on files made by PyTorch, against PyTorch's own loss and gradients.
# Why: the definition most users know; every reduction and option PyTorch has must agree.
# Never: imports the library; the command line and its files are the subject.
# usage: torch_parity.py [TALEA_BINARY], in an environment with torch, numpy and safetensors
import itertools
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TALEA = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/bin/talea").resolve())
N, D, V = 37, 19, 101


def problem(dtype, ignored):
    torch.manual_seed(3)
    x = torch.randn(N, D).to(dtype)
    w = (torch.randn(V, D) / D**0.5).to(dtype)
    y = torch.randint(0, V, (N,))
    if ignored == "some":
        y[::3] = -100
    elif ignored == "all":
        y[:] = -100
    return x, w, y, torch.rand(V) + 0.5


def by_torch(x, w, y, soft, bias, c, reduction, smoothing, upstream):
    """In fp64 from the same stored values: what an exact implementation of PyTorch's rule gives."""
    leaves = [t.double().requires_grad_() for t in (x, w)]
    b = bias.double().requires_grad_() if bias is not None else None
    loss = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(*leaves, b),
        soft.double() if soft is not None else y,
        weight=None if c is None else c.double(),
        reduction=reduction,
        label_smoothing=smoothing,
    )
    loss.backward(upstream.double() if reduction == "none" else None)
    grads = {"dx": leaves[0].grad, "dw": leaves[1].grad}
    if b is not None:
        grads["db"] = b.grad
    return {"loss": loss.detach(), **grads}


def by_talea(folder, x, w, y, soft, bias, c, reduction, smoothing, upstream):
    tensors = {"x": x, "w": w} | ({"b": bias} if bias is not None else {})
    save_file(tensors, folder / "in.safetensors")
    line = [TALEA, "loss", "--hidden", "in.safetensors:x", "--weight", "in.safetensors:w"]
    extra = {"--targets": y if soft is None else None, "--class-weight": c}
    extra |= {"--soft-target-probs": soft, "--upstream": upstream if reduction == "none" else None}
    for flag, tensor in extra.items():
        if tensor is not None:
            np.save(folder / f"{flag[2:]}.npy", tensor.numpy())
            line += [flag, f"{flag[2:]}.npy"]
    outputs = "loss,dx,dw"
    if bias is not None:
        line += ["--bias", "in.safetensors:b"]
        outputs += ",db"
    line += ["--reduction", reduction, "--label-smoothing", str(smoothing), "--outputs", outputs]
    subprocess.run(
        [*line, "--out", "out.safetensors", "--quiet"], cwd=folder, check=True, stdout=-3
    )
    return load_file(folder / "out.safetensors")


def worst(ours, truth, tolerance):
    """The largest error over the tolerance; NaN where the two disagree about NaN."""
    ours, truth = ours.double(), truth.double()
    if not torch.equal(ours.isnan(), truth.isnan()):
        return float("nan")
    ours, truth = ours.nan_to_num(0), truth.nan_to_num(0)
    scale = max(truth.abs().max().item(), 1e-3)
    return ((ours - truth).abs().max().item() / scale) / tolerance


def main():
    cases = itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        ("mean", "sum", "none"),
        ("no", "some", "all", "probabilities"),
        (False, True),
        (False, True),
        (0.0, 0.1),
    )
    count, failed, largest = 0, [], 0.0
    with tempfile.TemporaryDirectory() as name:
        for dtype, reduction, rows, has_bias, has_weight, smoothing in cases:
            x, w, y, c = problem(dtype, rows)
            soft = torch.rand(N, V).softmax(1) if rows == "probabilities" else None
            bias = torch.randn(V).to(dtype) if has_bias else None
            arguments = (x, w, y, soft, bias, c if has_weight else None, reduction, smoothing)
            upstream = torch.randn(N)
            ours = by_talea(pathlib.Path(name), *arguments, upstream)
            truth = by_torch(*arguments, upstream)
            # Where no row counts the mean is 0 / 0: the loss is NaN in both, and the contract asks
            # for gradients of exactly 0.
            empty = rows == "all" and reduction == "mean"
            for tensor, value in truth.items():
                count += 1
                if empty and tensor != "loss":
                    error = 0.0 if not ours[tensor].any() else float("nan")
                else:
                    narrow = tensor != "loss" and dtype != torch.float32
                    error = worst(ours[tensor], value, 8e-3 if narrow else 4e-6)
                largest = max(largest, error)
                if not error <= 1:
                    failed.append(
                        (
                            str(dtype),
                            reduction,
                            rows,
                            has_bias,
                            has_weight,
                            smoothing,
                            tensor,
                            error,
                        )
                    )
    for failure in failed:
        print("differs:", *failure)
    print(
        f"{count} tensors of torch {torch.__version__}: {count - len(failed)} agree, "
        f"{len(failed)} differ; the largest error is {largest:.2f} of its tolerance"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
