# What: `talea loss` on files made by PyTorch, against PyTorch's own loss and gradients.
# Why: the definition most users know; every reduction and option PyTorch has must agree.
# Never: imports the library; the command line and its files are the subject.
# usage: torch_parity.py [--tool build/bin/talea] [--receipt FILE] [--golden FILE], in an environment
#        with torch, numpy and safetensors. --golden writes small cases with PyTorch's results, which
#        tests/cli/test_loss.py repeats without PyTorch.
import argparse
import datetime
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file

N, D, V = 37, 19, 101
IGNORED_INSIDE = 7
WIDE = torch.float32


class Problem:
    """One case: tensors, and the options that PyTorch and Talea share."""

    def __init__(self, dtype, reduction, rows, bias, weight, smoothing, sizes=(N, D, V), seed=3):
        n, d, v = sizes
        torch.manual_seed(seed)
        self.name = f"{reduction}/{rows}/{str(dtype)[6:]}"
        self.name += "/bias" * bias + "/class-weight" * weight + f"/smoothing-{smoothing}"
        self.reduction, self.smoothing, self.dtype = reduction, smoothing, dtype
        self.x = torch.randn(n, d).to(dtype)
        self.w = (torch.randn(v, d) / d**0.5).to(dtype)
        self.y = torch.randint(0, v, (n,))
        self.ignore_index = IGNORED_INSIDE if rows == "ignored-inside" else -100
        if rows in ("some-ignored", "ignored-inside"):
            self.y[::3] = self.ignore_index
        elif rows == "all-ignored":
            self.y[:] = -100
        self.c = torch.rand(v) + 0.5 if weight else None
        self.b = torch.randn(v).to(dtype) if bias else None
        self.soft = torch.rand(n, v).softmax(1) if rows == "probabilities" else None
        self.upstream = torch.randn(n)

    def by_torch(self, dtype):
        """In fp64: what PyTorch's rule gives exactly. In the tensors' own dtype: the yardstick."""
        leaves = {"dx": self.x.to(dtype), "dw": self.w.to(dtype)}
        if self.b is not None:
            leaves["db"] = self.b.to(dtype)
        for leaf in leaves.values():
            leaf.requires_grad_()
        logits = torch.nn.functional.linear(leaves["dx"], leaves["dw"], leaves.get("db"))
        loss = torch.nn.functional.cross_entropy(
            logits,
            self.soft.to(dtype) if self.soft is not None else self.y,
            weight=None if self.c is None else self.c.to(dtype),
            reduction=self.reduction,
            label_smoothing=self.smoothing,
            ignore_index=self.ignore_index,
        )
        loss.backward(self.upstream.to(dtype) if self.reduction == "none" else None)
        found = {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
        return {k: v.double() for k, v in found.items()}, logits.detach().abs().max().item()

    def by_talea(self, tool, folder):
        tensors = {"x": self.x, "w": self.w} | ({"b": self.b} if self.b is not None else {})
        save_file(tensors, folder / "in.safetensors")
        line = [tool, "loss", "--hidden", "in.safetensors:x", "--weight", "in.safetensors:w"]
        line += ["--ignore-index", str(self.ignore_index), "--reduction", self.reduction]
        files = {"--targets": self.y if self.soft is None else None, "--class-weight": self.c}
        files |= {"--soft-target-probs": self.soft}
        files |= {"--upstream": self.upstream if self.reduction == "none" else None}
        for flag, tensor in files.items():
            if tensor is not None:
                np.save(folder / f"{flag[2:]}.npy", tensor.numpy())
                line += [flag, f"{flag[2:]}.npy"]
        outputs = "loss,dx,dw"
        if self.b is not None:
            line += ["--bias", "in.safetensors:b"]
            outputs += ",db"
        line += ["--label-smoothing", str(self.smoothing), "--outputs", outputs]
        line += ["--out", "out.safetensors", "--quiet"]
        subprocess.run(line, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return {k: v.double() for k, v in load_file(folder / "out.safetensors").items()}


def judge(problem, name, ours, truth, eager, largest_logit):
    """The contract's accuracy rule for one tensor: (error figure, error over its bound)."""
    narrow = problem.dtype != WIDE
    largest = max(truth.nan_to_num(0).abs().max().item(), largest_logit if name == "loss" else 0)
    error, yardstick = (ours - truth).abs(), (eager - truth).abs()
    bound = yardstick if not narrow or name == "loss" else 2 * yardstick.nan_to_num(0).max()
    bound = bound + (1e-4 if narrow else 1e-6) * largest
    both_nan = ours.isnan() & truth.isnan()
    ratio = torch.where(both_nan | (error == 0), torch.zeros_like(error), error / bound)
    worst = int(ratio.nan_to_num(float("inf")).flatten().argmax())
    at = torch.tensor(worst)
    norm = max(truth.nan_to_num(0).norm().item(), 1e-300)

    def l2(t):
        return (torch.where(both_nan, torch.zeros_like(t), t)).norm().item() / norm

    value = float(truth.flatten()[at])
    eps = torch.finfo(problem.dtype if name != "loss" else WIDE).eps
    abs_ = float(torch.where(both_nan, torch.zeros_like(error), error).flatten()[at])
    figure = {"tensor": name, "lane": "cpu", "abs": abs_, "rel": abs_ / max(largest, 1e-300)}
    figure |= {"rel_l2": l2(error), "ulp": abs_ / max(abs(value) * eps, 1e-300)}
    figure |= {"worst_index": [int(i) for i in np.unravel_index(worst, truth.shape)]}
    figure |= {"ours": float(ours.flatten()[at]), "truth": value}
    figure |= {"eager_abs": yardstick.nan_to_num(0).max().item(), "eager_rel_l2": l2(yardstick)}
    figure["tolerance"] = float(bound.expand(truth.shape).flatten()[at])
    share = float(ratio.flatten()[at])
    figure["passed"] = bool(share <= 1)
    return {k: str_of_odd(v) for k, v in figure.items()}, share


def str_of_odd(value):
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def check(problem, tool, folder):
    """The case of a receipt: passed, and the figure of the tensor nearest to its bound."""
    truth, largest_logit = problem.by_torch(torch.float64)
    eager, _ = problem.by_torch(problem.dtype)
    ours = problem.by_talea(tool, folder)
    # Where no row counts the mean is 0 / 0: the loss is NaN in both, and the contract asks for
    # gradients of exactly 0 where PyTorch has NaN.
    empty = problem.reduction == "mean" and bool(truth["loss"].isnan().all())
    figures = []
    for name, value in truth.items():
        if empty and name != "loss":
            value, eager[name] = torch.zeros_like(value), torch.zeros_like(value)
        figures.append(judge(problem, name, ours[name], value, eager[name], largest_logit))
    worst, share = max(figures, key=lambda f: f[1] if f[1] == f[1] else float("inf"))
    passed = all(f["passed"] for f, _ in figures)
    case = {"name": problem.name, "lane": "cpu", "passed": passed, "tensors": len(figures)}
    return case | {"errors": [worst]}, share


def problems():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rows = ("all-valid", "some-ignored", "ignored-inside", "all-ignored", "probabilities")
    options = ((False, True), (False, True), (0.0, 0.1))
    for values in itertools.product(dtypes, ("mean", "sum", "none"), rows, *options):
        yield Problem(*values)


def golden_cases():
    """A few small fp32 cases with PyTorch's results, as plain numbers."""
    rows = ("all-valid", "some-ignored", "all-ignored", "probabilities")
    plain, full = (False, False, 0.0), (True, True, 0.1)
    for reduction, kind, options in itertools.product(("mean", "sum", "none"), rows, (plain, full)):
        p = Problem(WIDE, reduction, kind, *options, sizes=(5, 3, 7))
        tensors = {"hidden": p.x, "weight": p.w, "bias": p.b, "class-weight": p.c}
        tensors |= {"targets": p.y if p.soft is None else None, "soft-target-probs": p.soft}
        tensors |= {"upstream": p.upstream if reduction == "none" else None}
        given = {
            k: [list(t.shape), t.flatten().tolist()] for k, t in tensors.items() if t is not None
        }
        results = {k: t.flatten().tolist() for k, t in p.by_torch(torch.float64)[0].items()}
        results = {k: [str_of_odd(v) for v in values] for k, values in results.items()}
        flags = {"--reduction": reduction, "--label-smoothing": str(p.smoothing)}
        yield {"name": p.name, "flags": flags, "inputs": given, "torch": results}


def write_receipt(a, cases, start):
    failed = sum(not c["passed"] for c in cases)
    section = {"preset": "PyTorch", "lanes": ["cpu"], "cases": cases}
    section |= {"passed": len(cases) - failed, "failed": failed}
    document = {"argv": ["python", *sys.argv], "start_time": start, "check": section}
    document["title"] = "talea loss against torch.nn.functional.cross_entropy"
    document["libraries"] = {"torch": torch.__version__, "numpy": np.__version__}
    document["notes"] = [
        "truth: PyTorch in fp64 on the same stored values; yardstick: PyTorch in their own dtype",
        "errors: of each case the tensor nearest to its bound, at its worst element",
        "mean of a batch without a valid row: PyTorch's gradients are NaN, the contract asks for 0",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(document, f)
        f.flush()
        line = [a.tool, "check", "--results-from", f.name, "--receipt", a.receipt, "--quiet"]
        return subprocess.run(line, stdout=subprocess.DEVNULL).returncode


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tool", default="build/bin/talea")
    p.add_argument("--receipt")
    p.add_argument("--golden")
    a = p.parse_args()
    start = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    if a.golden:
        document = {"torch": torch.__version__, "cases": list(golden_cases())}
        pathlib.Path(a.golden).write_text(json.dumps(document, indent=None) + "\n")
        return 0
    tool, cases, shares = str(pathlib.Path(a.tool).resolve()), [], []
    with tempfile.TemporaryDirectory() as folder:
        for problem in problems():
            case, share = check(problem, tool, pathlib.Path(folder))
            cases.append(case)
            shares.append(share)
            if not case["passed"]:
                print("differs:", case["name"], case["errors"][0])
    failed = sum(not c["passed"] for c in cases)
    tensors = sum(c["tensors"] for c in cases)
    print(
        f"{len(cases)} cases, {tensors} tensors against torch {torch.__version__}: "
        f"{len(cases) - failed} cases agree, {failed} differ; the largest error is "
        f"{max(shares):.2f} of its bound"
    )
    if a.receipt and write_receipt(a, cases, start) not in (0, 1):
        return 4
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
