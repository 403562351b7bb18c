#!/usr/bin/env python3
"""What: wrong pages, planted one by one; tools/check_figures must refuse each, in words that fit.
Why: a checker that nobody attacked once passed a wrong figure of each of these kinds.
Never: touches the tree; every attack works on a copy.

usage: tests/figures/attack.py   (make figures-attack)
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
sys.dont_write_bytecode = True

from figures import check  # noqa: E402

RUNS = [
    {"name": "three plain products", "ratio": 1.0},
    {
        "name": "ours",
        "ratio": 1.0464,
        "extra_bytes": 65011712,
        "time": {"median_ms": 181.37},
        "error": 0.0166,
    },
    {"name": "theirs", "ratio": 1.5513, "extra_bytes": 130023424, "time": {"median_ms": 268.9}},
]
PAGE = """# A page

Ours takes 1.05 times the products; and once more, ours takes 1.05 times. It needs 62.0 MiB, 181.4 ms,
where theirs takes 1.55 times.

Theirs needs 124 MiB.

The goal is 1.15.

<!-- table: who begin -->
| who | x products | MiB |
|---|---|---|
| ours | 1.05 | 62.0 |
| theirs | 1.55 | 124.0 |
<!-- table: who end -->

```
a fence, 9.99
```

<!-- table: receipts begin -->
Receipts: 2026-11-21 at abcdef0 on a chip: `cpu/a`.
<!-- table: receipts end -->
"""
SIDECAR = """page docs/page.md
counts cited 6, stated 1, cells 4
let a = receipts/cpu/a.json#/bench/runs

cite Ours takes [1.05] times the products | a/name=ours/ratio
cite once more, ours takes [1.05] times. | a/name=ours/ratio
cite needs [62.0] MiB, | a/name=ours/extra_bytes | MiB
cite [181.4] ms | a/name=ours/time/median_ms
cite theirs takes [1.55] times | a/name=theirs/ratio
cite Theirs needs [124] MiB | a/name=theirs/extra_bytes | MiB
stated The goal is [1.15] | goal

table who
| who | x products | MiB |
|---|---|---|
| ours | {a/name=ours/ratio .2f} | {a/name=ours/extra_bytes .1f MiB} |
| theirs | {a/name=theirs/ratio .2f} | {a/name=theirs/extra_bytes .1f MiB} |
end
"""
P, S = "docs/page.md", "docs/figures/page.figures"

# What is planted: (file, old, new) ..., and a word of the refusal. The first eight are the pages
# that an earlier form of the checker passed.
ATTACKS = {
    "1 one of two equal figures changed": (
        [(P, "once more, ours takes 1.05", "once more, ours takes 1.02")],
        "is not in",
    ),
    "2 a figure that cites nothing changed": (
        [(P, "The goal is 1.15.", "The goal is 1.15. Both were run 2.75 times.")],
        "cites no receipt",
    ),
    "3 a factor of somebody's own": (
        [
            (P, "needs 62.0 MiB", "needs 55.8 MiB"),
            (
                S,
                "[62.0] MiB, | a/name=ours/extra_bytes | MiB",
                "[55.8] MiB, | a/name=ours/extra_bytes | *8.58e-7",
            ),
        ],
        "factor",
    ),
    "4 a pointer to another row": (
        [
            (P, "Ours takes 1.05 times the products", "Ours takes 1.00 times the products"),
            (
                S,
                "Ours takes [1.05] times the products | a/name=ours",
                "Ours takes [1.00] times the products | a/name=three_plain_products",
            ),
        ],
        "another row",
    ),
    "5 a stray fence": ([(P, "# A page\n", "# A page\n```\n")], "fence"),
    "6 a citation deleted and its figure changed": (
        [
            (P, "Theirs needs 124 MiB", "Theirs needs 224 MiB"),
            (S, "cite Theirs needs [124] MiB | a/name=theirs/extra_bytes | MiB\n", ""),
        ],
        "counts",
    ),
    "7 a coarse rounding": (
        [
            (P, "where theirs takes 1.55 times", "where theirs takes 2 times"),
            (S, "theirs takes [1.55] times", "theirs takes [2] times"),
        ],
        "coarsely",
    ),
    "8 a table of figures without a receipt": (
        [(P, "The goal is 1.15.", "The goal is 1.15.\n\n| stages | ms |\n|---|---|\n| 5 | 2.79 |")],
        "cites no receipt",
    ),
    "a fence around the citations": (
        [(P, "\nOurs takes", "\n```\nOurs takes"), (P, "1.55 times.\n", "1.55 times.\n```\n")],
        "is not in",
    ),
    "a figure in backticks": ([(P, "The goal is 1.15.", "The goal is 1.15. `2.75`")], "cites no"),
    **{
        f"a figure written as {text}": (
            [(P, "The goal is 1.15.", f"The goal is 1.15. It took {text}.")],
            "cites no",
        )
        for text in (
            "`2.75 ms`",
            "as torch 1.05 times",
            "as on CUDA 2.75 x that",
            "275 ms",
            "27 %",
            "27%",
            "275 GB/s",
            "523 GFLOP/s",
            "1,275 us",
            "x2.75",
            "_2.75_",
            ".95 ms",
            "2,75 ms",
            "2·75 MiB",
            '[this](b.md "2.75 in all")',
            "![2.75 in all](a.svg)",
        )
    },
    "a rendered cell changed": ([(P, "| ours | 1.05 |", "| ours | 1.02 |")], "is not what"),
    "a rendered row left out": ([(P, "| theirs | 1.55 | 124.0 |\n", "")], "is not what"),
    "a table without its marks": (
        [(P, "<!-- table: who begin -->\n", ""), (P, "<!-- table: who end -->\n", "")],
        "marks are missing",
    ),
    "a cell of another row": (
        [
            (P, "| ours | 1.05 |", "| ours | 1.55 |"),
            (S, "| ours | {a/name=ours/ratio", "| ours | {a/name=theirs/ratio"),
        ],
        "another row",
    ),
    "a cell typed into the table": (
        [(P, "| ours | 1.05 |", "| ours | 0.95 |"), (S, "{a/name=ours/ratio .2f}", "0.95")],
        "without a receipt",
    ),
    "a row picked by counting": (
        [
            (
                S,
                "once more, ours takes [1.05] times. | a/name=ours",
                "once more, ours takes [1.05] times. | a/1",
            )
        ],
        "pick one by",
    ),
    "a receipt that is gone": ([(S, "receipts/cpu/a.json", "receipts/cpu/b.json")], "missing"),
    "a receipt outside of receipts": (
        [(S, "receipts/cpu/a.json", "receipts/../a.json")],
        "no path",
    ),
    "two citations of one figure": (
        [(S, "cite once more, ours takes [1.05] times. |", "cite [1.05] times the products |")],
        "backs the figure that",
    ),
    "a measurement called a goal": (
        [(P, "The goal is 1.15.", "It takes 1.15."), (S, "The goal is [1.15]", "It takes [1.15]")],
        "does not say so",
    ),
    "a citation in a comment": (
        [
            (
                P,
                "The goal is 1.15.",
                "The goal is 1.15. Took 3.5 <!-- receipt: receipts/cpu/a.json#/x 3.5 --> s.",
            )
        ],
        "cites no receipt",
    ),
    "the day left out": ([(P, "2026-11-21 at abcdef0 on a chip", "at abcdef0")], "is not what"),
    "a phrase that stands twice": (
        [(P, "The goal is 1.15.", "The goal is 1.15. Theirs needs 124 MiB.")],
        "stands 2 times",
    ),
    "a coarse rounding of a small figure": (
        [(P, "The goal is 1.15.", "The goal is 1.15. Ours is off by 0.02.")]
        + [
            (
                S,
                "stated The goal",
                "cite Ours is off by [0.02] | a/name=ours/error\nstated The goal",
            )
        ],
        "coarsely",
    ),
    "a figure between fences that another kind seems to close": (
        [
            (
                P,
                "The goal is 1.15.",
                "The goal is 1.15.\n```\n~~~\n```\nIt took 2.75 s.\n```\n~~~\n```",
            )
        ],
        "cites no receipt",
    ),
    "bytes called something else": (
        [(P, "Theirs needs 124 MiB", "Theirs needs 124 of them")]
        + [(S, "cite Theirs needs [124] MiB |", "cite Theirs needs [124] of |")],
        "unit",
    ),
}


def plant(folder, edits):
    for name, old, new in edits:
        file = folder / name
        text = file.read_text(encoding="utf-8")
        assert old in text, (name, old)
        file.write_text(text.replace(old, new, 1), encoding="utf-8")


def small_tree(folder):
    for name in ("docs/figures", "receipts/cpu"):
        (folder / name).mkdir(parents=True)
    (folder / P).write_text(PAGE, encoding="utf-8")
    (folder / S).write_text(SIDECAR, encoding="utf-8")
    receipt = {
        "provenance": {
            "start_time": "2026-11-21T09:00:00Z",
            "git_revision": "abcdef0123",
            "device": {"name": "a chip"},
        },
        "bench": {"runs": RUNS},
    }
    (folder / "receipts/cpu/a.json").write_text(json.dumps(receipt), encoding="utf-8")


def attack_small():
    """(refused, all) of the attacks on a small tree, after it passed as it is."""
    refused = 0
    for name, (edits, word) in {"nothing": ([], None), **ATTACKS}.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            small_tree(folder)
            plant(folder, edits)
            _, problems = check.check_all(folder)
        if word is None:
            assert not problems, problems
        elif any(word in p for p in problems):
            refused += 1
        else:
            print(f"PASSED: {name}: {problems}", file=sys.stderr)
    return refused, len(ATTACKS)


def other_digit(figure):
    """The figure with its last digit (before an exponent) moved by one."""
    at = max(m.start() for m in re.finditer(r"\d", figure.split("e")[0]))
    return figure[:at] + str((int(figure[at]) + 1) % 10) + figure[at + 1 :]


def attack_pages():
    """(refused, all): each cited figure of the real pages, one digit changed in the page alone."""
    refused = planted = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("docs", "receipts", "tools"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "README.md", folder / "README.md")
        sidecars = {s.page: s for s in check.load_sidecars(folder)}
        for name, sidecar in sidecars.items():
            file = folder / name
            text = file.read_text(encoding="utf-8")
            whole = check.PageCheck(folder, name, sidecar).run()
            for begin, end, phrase in whole.taken:
                if not re.search(r"\d", text[begin:end]):
                    continue
                planted += 1
                file.write_text(text[:begin] + other_digit(text[begin:end]) + text[end:], "utf-8")
                wrong = check.PageCheck(folder, name, sidecar).run()
                if len(wrong.problems) > len(whole.problems):
                    refused += 1
                else:
                    print(f"PASSED: {name}: {phrase}", file=sys.stderr)
            file.write_text(text, "utf-8")
    return refused, planted


def main():
    first, of = attack_small()
    second, cited = attack_pages()
    print(f"figures-attack: {first} of {of} wrong pages refused (eight of them passed once)")
    print(
        f"figures-attack: {second} of {cited} figures of the real pages refused with a digit changed"
    )
    return 0 if (first, second) == (of, cited) and cited else 1


if __name__ == "__main__":
    sys.exit(main())
