"""What: a page as a checker reads it: prose without code, comments and rendered tables.
Why: a figure must be found where a reader sees it, whatever the line breaks.
Never: changes a page, except `replaced`, which writes what stands between two marks.
"""

import re

MARK = re.compile(r"<!-- table: (\S+) (begin|end) -->")
UNIT = r"(?: |\n|&nbsp;)?(?:x\b|times\b|ms\b|us\b|s\b|microseconds\b|MiB\b|GiB\b|%|TFLOP)"
DECIMAL = re.compile(
    r"(?:(?<![\w.])|(?<=\bx)|(?<=\b_))\d+\.\d+(?:e[-+]?\d+)?(?!\.?\d)"
    rf"|(?<![\w.,])[.,·]\d+(?={UNIT})|(?<![\w.])\d+[,·]\d{{1,2}}(?={UNIT})"
    r"|(?<![\w.,-])\d[\d,]*(?=(?: |\n|&nbsp;)(?:ms|us|microseconds|TFLOP/s|GFLOP/s|[GT]B/s)\b)"
    r"|(?<![\w.,-])\d[\d,]*(?=(?: |\n|&nbsp;)?%)"
)
VERSIONED = "PyTorch|torch|Python|glibc|Debian|Ubuntu|CUDA|GCC|oneDNN|Highway|Apache|CMake|NumPy|Triton|capability"
VERSION = re.compile(rf"(?:{VERSIONED})[ -]$")


class Page:
    def __init__(self, name, text):
        self.name = name
        self.text = text
        self.problems = []
        self.tables = {}
        masked = self._without_code(text)
        masked = re.sub(r"`[^`\n]*<!--[^`\n]*`", _blank, masked)  # a mark in code is an example
        masked = self._without_tables(masked)
        masked = re.sub(r"<!--.*?-->", _blank, masked, flags=re.DOTALL)
        self.prose = re.sub(r"(?<=\])\([^)\s]*\)?", _blank, masked)  # where a link leads
        self.flat, self.offsets = _flat(self.prose)

    def line(self, offset):
        return self.text.count("\n", 0, offset) + 1

    def _without_code(self, text):
        """The text with fenced code blanked; a fence that does not end is a problem."""
        out, opened = [], None
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            fence = re.match(r"\s*(```+|~~~+)", line)
            if fence and opened is None:
                opened = (fence[1], number)
            elif fence and fence[1] == opened[0]:
                opened = None
                line = _blank_text(line)
            out.append(_blank_text(line) if opened else line)
        if opened:
            self.problems.append((opened[1], f"the fence {opened[0]} does not end"))
        return "".join(out)

    def _without_tables(self, text):
        """Takes rendered tables out; marks must come in pairs, each name once."""
        last, out, at = None, [], 0
        for match in MARK.finditer(text):
            name, which = match.groups()
            line = self.line(match.start())
            if which == "begin" and last is None and name not in self.tables:
                last = match
            elif which == "end" and last is not None and last[1] == name:
                self.tables[name] = self.text[last.end() : match.start()].strip("\n")
                out += [text[at : last.end()], _blank_text(text[last.end() : match.start()])]
                at, last = match.start(), None
            else:
                self.problems.append((line, f"table {name}: {which} without its other half"))
        if last is not None:
            self.problems.append((self.line(last.start()), f"table {last[1]}: no end"))
        return "".join([*out, text[at:]])

    def find(self, phrase):
        """(begin, end) in the text of the part of the phrase in brackets; it must occur once."""
        before, _, rest = phrase.partition("[")
        figure, _, after = rest.partition("]")
        whole = re.escape(_squeeze(before)) + "(" + re.escape(figure) + ")"
        whole = (r"(?<![\w.])" if not before else "") + whole + re.escape(_squeeze(after))
        if not after or after[0] not in ".0123456789":
            whole += r"(?!\w|\.\d)" if not after else ""
        found = list(re.finditer(whole, self.flat))
        if len(found) != 1:
            return len(found), None
        begin, end = found[0].span(1)
        return 1, (self.offsets[begin], self.offsets[end - 1] + 1)

    def around(self, offset):
        """The paragraph (in a table, the row and its header) the heading above it, the title."""
        begin = self.prose.rfind("\n\n", 0, offset) + 1
        end = self.prose.find("\n\n", offset)
        paragraph = self.prose[begin : end if end >= 0 else len(self.prose)]
        line_begin = self.prose.rfind("\n", 0, offset) + 1
        line_end = self.prose.find("\n", offset)
        line = self.prose[line_begin : line_end if line_end >= 0 else len(self.prose)]
        if line.startswith("|"):
            header = next((t for t in paragraph.splitlines() if t.startswith("|")), "")
            paragraph = header + "\n" + line
        headings = re.findall(r"^#+ .*$", self.prose[:begin], flags=re.MULTILINE)
        return "\n".join([paragraph, *headings[:1], *headings[-1:]])

    def decimals(self):
        """Spans of decimals that a reader takes for figures: no code, no version of a product."""
        # Code is an example, but a number in backticks is a number, alone or with its unit.
        text = re.sub(rf"`(?![\d.,]+{UNIT}`)[^`\n]*[^`\d.\n][^`\n]*`", _blank, self.prose)
        for match in DECIMAL.finditer(text):
            before = text[: match.start()].replace("\n", " ")[-20:]
            if not VERSION.search(before) or re.match(UNIT, text[match.end() :]):
                yield match.span()


def replaced(text, name, lines):
    """The text with what stands between the marks of `name` written anew."""
    begin, end = f"<!-- table: {name} begin -->", f"<!-- table: {name} end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{lines}\n{end}{rest.split(end, 1)[1]}"


def _blank_text(text):
    return re.sub(r"[^\n]", " ", text)


def _blank(match):
    return _blank_text(match[0])


def _squeeze(text):
    return re.sub(r"\s+", " ", text)


def _flat(text):
    """The text with runs of white space as one space, and where each character stood."""
    out, offsets = [], []
    for match in re.finditer(r"\s+|\S", text):
        out.append(" " if match[0].isspace() else match[0])
        offsets.append(match.start())
    return "".join(out), offsets
