"""What: the check of every page against its sidecar, and of every sidecar against the receipts.
Why: a page passes only if each figure in it is one receipt's, and nothing looks like one that is not.
Never: writes, unless asked to render.
"""

import re

from . import page as pages
from . import receipts as values
from . import sidecar as sidecars
from . import tables

MEASURED = "receipts"  # the table of each page that says of which day its receipts are


def page_files(root):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def load_sidecars(root):
    files = sorted((root / "docs/figures").glob("*.figures"))
    parsed = [sidecars.parse(str(f.relative_to(root)), f.read_text("utf-8")) for f in files]
    return parsed


class PageCheck:
    """One page with its sidecar (or none)."""

    def __init__(self, root, name, sidecar):
        self.root = root
        self.page = pages.Page(name, (root / name).read_text(encoding="utf-8"))
        self.sidecar = sidecar or sidecars.Sidecar(name)
        self.receipts = values.Receipts(root)
        self.problems = [f"{name}:{line}: {why}" for line, why in self.page.problems]
        self.taken = []  # (begin, end, phrase)
        self.cells = 0
        self.wanted = {}

    def problem(self, line, why):
        self.problems.append(f"{self.sidecar.name}:{line}: {why}")

    def take(self, line, phrase):
        """The span of a phrase's figure, unless it is missing, ambiguous or taken."""
        count, span = self.page.find(phrase)
        if span is None:
            where = "is not in" if not count else f"stands {count} times in"
            self.problem(line, f"the phrase '{phrase}' {where} {self.page.name}")
            return None
        for begin, end, other in self.taken:
            if begin < span[1] and span[0] < end:
                self.problem(line, f"'{phrase}' backs the figure that '{other}' backs")
                return None
        self.taken.append((*span, phrase))
        return span

    def cite(self, line, phrase, reference, factor):
        span = self.take(line, phrase)
        shown = re.search(r"\[([^\]]+)\]", phrase)[1]
        try:
            value = values.scaled(reference, self.receipts.value(reference), factor)
            values.check_figure(shown, value)
        except values.Wrong as wrong:
            self.problem(line, str(wrong))
            return
        if span is None:
            return
        around = self.page.around(span[0])
        said = values.tokens(around)
        missing = values.row_words(reference, self.sidecar.aliases) - said
        if missing:
            self.problem(
                line,
                f"{reference}: the text does not say {', '.join(sorted(missing))}: another row?",
            )
        if factor and values.FACTORS[factor][2].lower() not in said:
            self.problem(line, f"the text does not show the unit {factor}")

    def state(self, line, phrase, kind):
        if kind not in sidecars.KINDS:
            self.problem(line, f"'{kind}': one of {', '.join(sidecars.KINDS)}")
            return
        span = self.take(line, phrase)
        words = sidecars.KINDS[kind]
        if span and words and not re.search(words, self.page.around(span[0]), re.IGNORECASE):
            self.problem(line, f"'{phrase}' is said to be a {kind}: the text does not say so")

    def render(self):
        """What must stand between the marks of the page."""
        for name, (line, _) in self.sidecar.tables.items():
            try:
                self.wanted[name], cells = tables.rendered(name, self.sidecar, self.receipts)
                self.cells += cells
            except values.Wrong as wrong:
                self.problem(line, f"table {name}: {wrong}")
        for program in self.sidecar.programs:
            self.wanted.update(tables.program_tables(self.root, program, self.receipts))

    def check_tables(self):
        if self.receipts.documents:
            self.wanted[MEASURED] = tables.measured(self.receipts)
        name = self.page.name
        for table in self.wanted.keys() - self.page.tables.keys():
            self.problems.append(f"{name}: no place for table {table}: its two marks are missing")
        for table, text in self.page.tables.items():
            if table not in self.wanted:
                if not any(f"table {table}:" in p for p in self.problems):
                    self.problems.append(f"{name}: table {table} is rendered from nothing")
            elif text != self.wanted[table]:
                self.problems.append(
                    f"{name}: table {table} is not what its receipts say: tools/check_figures --write"
                )

    def check_decimals(self):
        for begin, end in self.page.decimals():
            if not any(b <= begin and end <= e for b, e, _ in self.taken):
                figure = self.page.text[begin:end]
                line = self.page.line(begin)
                self.problems.append(f"{self.page.name}:{line}: {figure} cites no receipt")

    def counts(self):
        return len(self.sidecar.cites), len(self.sidecar.stated), self.cells

    def run(self):
        for line, why in self.sidecar.problems:
            self.problem(line, why)
        self.render()
        for entry in self.sidecar.cites:
            self.cite(*entry)
        for entry in self.sidecar.stated:
            self.state(*entry)
        self.check_tables()
        self.check_decimals()
        counts, has = self.counts(), self.sidecar.counts
        if self.sidecar.page and counts != has:
            said = "none" if has is None else "cited {}, stated {}, cells {}".format(*has)
            self.problem(
                1,
                "counts {}: the page comes to cited {}, stated {}, cells {}".format(said, *counts),
            )
        return self


def check_all(root, names=None):
    """Every page checked, and sidecars without a page; (checks, problems)."""
    problems, by_page = [], {}
    for sidecar in load_sidecars(root):
        if not sidecar.page or not (root / sidecar.page).is_file():
            problems.append(f"{sidecar.name}: page {sidecar.page} does not exist")
        elif sidecar.page in by_page:
            problems.append(f"{sidecar.name}: {sidecar.page} has another sidecar")
        else:
            by_page[sidecar.page] = sidecar
    checks = []
    for file in page_files(root):
        name = str(file.relative_to(root))
        if file.is_file() and (not names or name in names):
            checks.append(PageCheck(root, name, by_page.get(name)).run())
    for check in checks:
        problems += check.problems
    return checks, problems


def write(root, names=None):
    """Renders tables into the pages and counts into the sidecars."""
    for sidecar in load_sidecars(root):
        if not sidecar.page or names and sidecar.page not in names:
            continue
        check = PageCheck(root, sidecar.page, sidecar).run()
        text = check.page.text
        for name, lines in check.wanted.items():
            if name in check.page.tables:
                text = pages.replaced(text, name, lines)
        (root / sidecar.page).write_text(text, encoding="utf-8")
        file = root / sidecar.name
        counts = "counts cited {}, stated {}, cells {}".format(*check.counts())
        old = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"^counts .*$", counts, old, flags=re.MULTILINE), encoding="utf-8")
