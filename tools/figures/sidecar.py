"""What: docs/figures/*.figures: what backs each figure of a page, apart from the page.
Why: a page is for its reader; who doubts a figure finds its receipt here.
Never: holds a figure twice: a table's cells are rendered, a phrase is looked up in the page.

A sidecar names one page and lists, one a line:

    page docs/cpu.md
    counts cited 3, stated 1, cells 12            what the page must come to
    name torch eager = eager                      words by which the page knows a receipt's row
    cite takes [1.05] times | receipts/cpu/a.json#/bench/runs/name=cpu/ratio
    cite uses [62] MiB | receipts/cpu/a.json#/bench/runs/name=cpu/extra_bytes | MiB
    stated must be at most [1.15] | goal           a decimal that is no measurement, and why
    table threads                                 rendered between the marks of the page, to `end`
    | threads | x products |
    |---|---|
    | 2 | {receipts/cpu/a.json#/bench/runs/name=cpu/ratio .2f} |
    end

The figure of a phrase stands in brackets; the phrase must occur once in the page. A cell's braces
hold a reference, a format (.2f, .1e, d, s) and a factor; `let A = receipts/...` above shortens it.
`constant 0.999` allows a decimal in the texts of tables.
`program NAME` leaves the other tables of the page to tools/NAME.
"""

import re

KINDS = {
    "constant": None,  # of mathematics, of a format, of the code
    "version": None,
    "example": None,
    "goal": r"goal|at most|at least|must|asks|limit|bound|allow|tolerance",
    "no receipt": r"no receipt",
}
COUNTS = re.compile(r"cited (\d+), stated (\d+), cells (\d+)")


class Sidecar:
    def __init__(self, name):
        self.name = name
        self.page = None
        self.counts = None
        self.aliases = {}
        self.cites = []  # (line, phrase, reference, factor)
        self.stated = []  # (line, phrase, kind)
        self.tables = {}  # name: (line, rows)
        self.programs = []
        self.lets = {}
        self.constants = set()  # decimals of table texts that are no measurement
        self.problems = []

    def expand(self, reference):
        for name, value in self.lets.items():
            if reference == name or reference.startswith((name + "/", name + "#")):
                return value + reference[len(name) :]
        return reference


def parse(name, text):
    sidecar, table = Sidecar(name), None
    for number, line in enumerate(text.splitlines(), 1):
        if table is not None:
            if line == "end":
                table = None
            else:
                table.append(line)
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "table":
            if rest in sidecar.tables:
                sidecar.problems.append((number, f"table {rest} stands here twice"))
            table = []
            sidecar.tables[rest] = (number, table)
        elif word and not word.startswith("#"):
            _statement(sidecar, number, word, rest)
    if table is not None:
        sidecar.problems.append((number, "the last table has no end"))
    return sidecar


def _statement(sidecar, number, word, rest):
    parts = [p.strip() for p in re.split(r"(?<!\\)\|", rest)]
    parts[0] = parts[0].replace("\\|", "|")
    if word == "page":
        sidecar.page = rest
    elif word == "counts" and COUNTS.fullmatch(rest):
        sidecar.counts = tuple(int(n) for n in COUNTS.fullmatch(rest).groups())
    elif word in ("name", "let") and " =" in rest:
        left, _, right = rest.partition(" =")
        (sidecar.aliases if word == "name" else sidecar.lets)[left.strip()] = right.strip()
    elif word == "cite" and len(parts) in (2, 3) and _one_figure(parts[0]):
        factor = parts[2] if len(parts) == 3 else ""
        sidecar.cites.append((number, parts[0], sidecar.expand(parts[1]), factor))
    elif word == "stated" and len(parts) in (2, 3) and _one_figure(parts[0]):
        sidecar.stated.append((number, parts[0], parts[1]))
    elif word == "constant" and rest:
        sidecar.constants.add(rest)
    elif word == "program":
        sidecar.programs.append(rest)
    else:
        sidecar.problems.append((number, f"cannot read: {word} {rest}"))


def _one_figure(phrase):
    return len(re.findall(r"\[[^\[\]]+\]", phrase)) == 1
