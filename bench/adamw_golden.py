"""Writes src/train/adamw_golden.inc: torch.optim.AdamW on gradients that C++ can draw again.

Why: the optimizer_parity gate needs torch's numbers where there is no torch.
Run: python bench/adamw_golden.py src/train/adamw_golden.inc   (torch 2.13, CPU)
"""

import struct
import sys

import torch
from counter import key_of, mix

SIZES = [1, 7, 129]
STEPS = [1, 100, 1000]
LR, DECAY = 1e-3, 0.01


def gradients(size, step):
    key = key_of(size)
    values = []
    for i in range(size):
        steps = (mix(key ^ mix(step * size + i)) >> 44) - 524288
        values.append(steps * 2.0 ** (-20 - (i % 7) * 3))
    return torch.tensor(values, dtype=torch.float32)


def bits(tensor):
    code = ("<I", "<f") if tensor.dtype == torch.float32 else ("<Q", "<d")
    return [struct.unpack(code[0], struct.pack(code[1], x))[0] for x in tensor.tolist()]


def run(size, dtype):
    words = []
    p = torch.nn.Parameter(gradients(size, 0).to(dtype))
    optimizer = torch.optim.AdamW([p], lr=LR, weight_decay=DECAY, foreach=False, fused=False)
    for step in range(1, STEPS[-1] + 1):
        p.grad = gradients(size, step).to(dtype)
        optimizer.step()
        if step in STEPS:
            state = optimizer.state[p]
            for tensor in (p.detach(), state["exp_avg"], state["exp_avg_sq"]):
                words += bits(tensor)
    return words


def array(kind, name, words, digits, per_line):
    lines = [f"constexpr {kind} {name}[] = {{"]
    for i in range(0, len(words), per_line):
        lines.append("    " + " ".join(f"0x{w:0{digits}x}," for w in words[i : i + per_line]))
    return lines + ["};"]


def main(path):
    fp32, fp64 = [], []
    for size in SIZES:
        fp32 += run(size, torch.float32)
        fp64 += run(size, torch.float64)
    lines = [
        f"// Written by bench/adamw_golden.py with torch {torch.__version__}; do not edit.",
        "// What: torch.optim.AdamW's parameters and moments, fp32 and fp64 bits, size by size,",
        "//       step by step. Why: optimizer_parity runs where torch is not. Never: included elsewhere.",
        f"constexpr int64_t golden_sizes[] = {{{', '.join(map(str, SIZES))}}};",
        f"constexpr int64_t golden_steps[] = {{{', '.join(map(str, STEPS))}}};",
        f"constexpr int64_t golden_count = {len(STEPS)};",
        f"constexpr double golden_lr = {LR}, golden_decay = {DECAY};",
    ]
    lines += array("uint32_t", "golden_fp32", fp32, 8, 8)
    lines += array("uint64_t", "golden_fp64", fp64, 16, 4)
    with open(path, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
