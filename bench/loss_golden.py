"""Writes tests/train/loss_golden.inc: torch's cross-entropy of a projection, on inputs that C++ draws.

Why: the semantics of F.cross_entropy (what is ignored, what divides, what is NaN) are tested where
there is no torch: loss and gradients of every combination, in fp64.
Run: python bench/loss_golden.py tests/train/loss_golden.inc   (torch 2.13, CPU)
"""

import struct
import sys

import torch
import torch.nn.functional as F
from counter import key_of, mix

TOKENS, HIDDEN, VOCAB = 6, 4, 9
UPSTREAM = 0.75
# name, reduction, smoothing, class weights, probability targets, ignored rows, ignore_index
CASES = []
for reduction in ("mean", "sum", "none"):
    for smoothing in (0.0, 0.125):
        for weights in (False, True):
            head = (reduction, smoothing, weights)
            CASES.append((*head, False, "some", -100))
            CASES.append((*head, True, "no", -100))
    CASES.append((reduction, 0.0, False, False, "no", -100))
    CASES.append((reduction, 0.0, False, False, "some", 3))
    CASES.append((reduction, 0.0, False, False, "all", -100))
    CASES.append((reduction, 0.125, True, False, "all", -100))


def draw(seed, counter):
    return mix(key_of(seed) ^ mix(counter))


def values(seed, count):
    """In [-2, 2), 20 bits: exact in fp32."""
    return torch.tensor(
        [((draw(seed, i) >> 44) - 524288) * 2.0**-18 for i in range(count)], dtype=torch.float64
    )


def inputs(ignored, ignore_index):
    x, w = values(101, TOKENS * HIDDEN), values(102, VOCAB * HIDDEN)
    targets = [draw(103, i) % VOCAB for i in range(TOKENS)]
    targets[2] = 3
    for i in range(TOKENS):
        if ignored == "all" or (ignored == "some" and i in (1, 4)):
            targets[i] = ignore_index
    probs = torch.zeros(TOKENS, VOCAB, dtype=torch.float64)
    for i in range(TOKENS):
        for j in range(16):
            probs[i, draw(104, 16 * i + j) % VOCAB] += 1 / 16
    weights = (values(105, VOCAB) + 2.25) / 4
    upstream = values(106, TOKENS)
    return x.view(TOKENS, HIDDEN), w.view(VOCAB, HIDDEN), targets, probs, weights, upstream


def run(case):
    reduction, smoothing, weighted, soft, ignored, ignore_index = case
    x, w, targets, probs, weights, upstream = inputs(ignored, ignore_index)
    x.requires_grad_()
    w.requires_grad_()
    loss = F.cross_entropy(
        F.linear(x, w),
        probs if soft else torch.tensor(targets),
        weight=weights if weighted else None,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    (loss * upstream if reduction == "none" else loss * UPSTREAM).sum().backward()
    return torch.cat((loss.detach().reshape(-1), x.grad.reshape(-1), w.grad.reshape(-1)))


def main(path):
    lines = [
        f"// Written by bench/loss_golden.py with torch {torch.__version__}; do not edit.",
        "// What: loss, dx and dw of F.cross_entropy(F.linear(x, w), ...), fp64 bits, case by case.",
        "// Why: torch's semantics are tested where torch is not. Never: included elsewhere.",
        f"constexpr int64_t golden_tokens = {TOKENS}, golden_hidden = {HIDDEN};",
        f"constexpr int64_t golden_vocab = {VOCAB};",
        f"constexpr double golden_upstream = {UPSTREAM};",
        "constexpr GoldenCase golden_cases[] = {",
    ]
    words = []
    for case in CASES:
        reduction, smoothing, weighted, soft, ignored, ignore_index = case
        flags = f"{str(weighted).lower()}, {str(soft).lower()}"
        lines.append(
            f'    {{Reduction::{reduction}, {smoothing}, {flags}, "{ignored}", {ignore_index}}},'
        )
        words += [struct.unpack("<Q", struct.pack("<d", v))[0] for v in run(case).tolist()]
    lines += ["};", "constexpr uint64_t golden_values[] = {"]
    for i in range(0, len(words), 4):
        lines.append("    " + " ".join(f"0x{v:016x}," for v in words[i : i + 4]))
    with open(path, "w", encoding="utf-8") as out:
        out.write("\n".join([*lines, "};"]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
