"""What: tables as a sidecar or a program of tools/ spells them, rendered from receipts.
Why: a cell that is written by hand can be wrong; a rendered one is the receipt's or the check fails.
Never: leaves a comment in a cell.
"""

import importlib.machinery
import importlib.util
import re
import sys
from decimal import Decimal

from . import page as pages
from . import receipts as values

CELL = re.compile(r"\{([^{}]+)\}")


def cell(spec, sidecar, receipts):
    """(text, reference) of what stands in a pair of braces."""
    words = spec.split()
    reference = sidecar.expand(words[0])
    form = words[1] if len(words) > 1 else ""
    factor = words[2] if len(words) > 2 else ""
    value = receipts.value(reference)
    if form == "s" or not form and isinstance(value, str):
        return str(value), reference
    if value is None:
        raise values.Wrong(f"{reference} is null")
    value = values.scaled(reference, value, factor)
    # Of 28.95 the checker's two roundings are those of the decimal, not of its binary neighbour.
    exact = Decimal(repr(value)) if isinstance(value, float) else value
    shown = format(exact, ".0f" if form in ("", "d") else form)
    shown = re.sub(r"e([-+])0(?=\d)", r"e\1", shown).replace("e+", "e")
    values.check_figure(shown, value)
    return shown, reference


def columns(line):
    return re.split(r"(?<!\\)\|", line)


def row(line, header, sidecar, receipts):
    """A row rendered, with how many of its cells hold a receipt's figure."""
    parts = columns(line)
    labels = CELL.sub(" ", line)
    out, count = [], 0
    for index, part in enumerate(parts):
        specs = CELL.findall(part)
        texts = [cell(spec, sidecar, receipts) for spec in specs]
        left = iter(texts)
        out.append(CELL.sub(lambda _, left=left: next(left)[0], part))
        head = columns(header)[index] if index < len(columns(header)) else ""
        said = values.tokens(f"{labels} {head}")
        said |= values.tokens(" ".join(shown for shown, _ in texts))
        for spec, (_, reference) in zip(specs, texts, strict=True):
            check_words(spec, reference, said, sidecar)
        count += len(specs)
    # What a row says by itself must not look like a measurement.
    literal = pages.Page("", CELL.sub(" ", line))
    loose = [literal.text[b:e] for b, e in literal.decimals()]
    loose = [figure for figure in loose if figure not in sidecar.constants]
    if loose:
        raise values.Wrong(f"{loose[0]} stands in a row without a receipt")
    return "|".join(out), count


def check_words(spec, reference, said, sidecar):
    """The row and the column must name what the reference picks, and the unit."""
    missing = values.row_words(reference, sidecar.aliases) - said
    if missing:
        words = ", ".join(sorted(missing))
        raise values.Wrong(f"{reference}: row and column do not say {words}: another row?")
    factor = (spec.split() + ["", ""])[2]
    if factor and values.FACTORS[factor][2].lower() not in said:
        raise values.Wrong(f"{spec}: neither row nor column shows the unit {factor}")


def rendered(name, sidecar, receipts):
    """(text, cells) of a table of the sidecar."""
    _, lines = sidecar.tables[name]
    header, out, cells = lines[0] if lines else "", [], 0
    for line in lines:
        text, count = row(line, header, sidecar, receipts)
        out.append(text)
        cells += count
    return "\n".join(out), cells


def program_tables(root, program, receipts):
    """name -> text of the tables that a program of tools/ renders."""
    path = root / "tools" / program
    loader = importlib.machinery.SourceFileLoader(f"talea_figures_{program}", str(path))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(loader.name, loader, origin=str(path))
    )
    module.__file__ = str(path)
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keep
    return module.tables(receipts)


def measured(receipts):
    """One line: of which day, revision and device the page's receipts are."""
    groups = {}
    for path, document in sorted(receipts.documents.items()):
        at = document.get("provenance") or document
        device = at.get("device") or {}
        device = device if isinstance(device, str) else device.get("name")
        device = device or at.get("host", {}).get("cpu") or "a CPU"
        day = str(at.get("start_time") or at.get("start") or "")[:10] or "day unknown"
        tree = values.tree_of(at)
        tree += ", with local changes" if at.get("git_dirty") else ""
        groups.setdefault((day, tree, device), []).append(path.removeprefix("receipts/"))
    said = []
    for (day, tree, device), paths in groups.items():
        said.append(f"{day} at {tree} on {device}: {_names(paths)}")
    return "Receipts: " + "; ".join(said) + "."


def _names(paths):
    """Names of receipts, those of one folder together."""
    folders = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name.removesuffix(".json"))
    return ", ".join(
        f"`{folder}/{names[0]}`" if len(names) == 1 else f"`{folder}/{{{', '.join(names)}}}`"
        for folder, names in folders.items()
    )
