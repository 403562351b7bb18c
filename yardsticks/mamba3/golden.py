#!/usr/bin/env python3
"""Writes golden.inc: projections of what definition.py computes, for the oracle in C++ to match.

Inputs come from a counter-based generator that both languages have, so that only the answers are
stored: of each output three sums of its elements times numbers of the same generator.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import definition as d  # noqa: E402

MASK = (1 << 64) - 1


def mixed(x):  # splitmix64
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def numbers(seed, count):  # in [-1, 1)
    return np.array([(mixed(mixed(seed) ^ i) >> 11) * 2.0**-52 - 1 for i in range(count)])


NAMES = list(d.SHAPES)
CASES = [  # absent tensors; B S H G R N P A n; what else
    (("mimo_v", "mimo_z", "mimo_out"), (2, 7, 4, 1, 1, 8, 3, 2, 2), {}),
    ((), (1, 7, 6, 3, 2, 8, 3, 4, 1), {"pairs": "halves", "norm": True}),
    ((), (1, 9, 4, 2, 4, 8, 2, 2, 4), {"cu_seqlens": [0, 1, 1, 6, 9]}),
    (("d", "z", "mimo_z", "mimo_out"), (2, 5, 4, 4, 2, 6, 3, 3, 2), {}),
]


def example(number):
    without, sizes, options = CASES[number]
    size = dict(zip("BSHGRNPAn", sizes, strict=False))
    x = {}
    for i, name in enumerate(NAMES):
        if name in without:
            continue
        shape = [size[a] for a in d.SHAPES[name]]
        x[name] = numbers(1000 * number + i, int(np.prod(shape))).reshape(shape)
    return {**x, "adt": -abs(x["adt"]) / 2, "dt": abs(x["dt"]) / 2, **options}


def main():
    lines = []
    for number in range(len(CASES)):
        x = example(number)
        out, final, saved = d.forward(x)
        final["angle"] = final["angle"] % (2 * np.pi)  # an empty sequence hands it on reduced
        up = numbers(1000 * number + 100, out.size).reshape(out.shape)
        up_final = {
            c: numbers(1000 * number + 101 + i, final[c].size).reshape(final[c].shape)
            for i, c in enumerate(d.STATES)
        }
        g = d.backward(saved, up, up_final)
        answers = {"out": out, **{"final_" + c: final[c] for c in d.STATES}}
        answers.update({"d_" + c: g[c] for c in g if c in x})
        for name, value in answers.items():
            sums = [(value.ravel() * numbers(7 + i, value.size)).sum() for i in range(3)]
            lines.append(f'{{{number}, "{name}", {{{", ".join(f"{s:.17g}" for s in sums)}}}}},')
    path = pathlib.Path(__file__).parents[2] / "tests/ops/mamba3/golden.inc"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
