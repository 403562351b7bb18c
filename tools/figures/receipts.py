"""What: the value behind a figure: a committed receipt, a pointer into it, a unit.
Why: one meaning of "the receipt says so" for tables, prose and the tests of both.
Never: looks outside of receipts/; guesses which member of a list was meant.

A pointer is a JSON pointer whose list members are picked by a field, /bench/runs/name=cpu/ratio
(spaces as _); where members have no name or id, by position.
"""

import json
import re
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal, InvalidOperation

# Factor: what it multiplies by, the fields it may stand behind, the unit the text must show.
FACTORS = {
    "MiB": (Decimal(1) / 2**20, r"bytes", "MiB"),
    "GiB": (Decimal(1) / 2**30, r"bytes", "GiB"),
    "%": (Decimal(100), r"ratio|efficiency|share|accuracy", "%"),
    "s": (Decimal("0.001"), r"_ms$", "s"),
    "us": (Decimal(1000), r"_ms$", "us"),
    "ms": (Decimal(1000), r"_s$|seconds", "ms"),
}
# A figure may differ from the value by rounding, but not by so much that it says something else:
# two digits of an error, three of anything that is compared with 1.
COARSE, COARSE_SMALL = Decimal("0.0151"), Decimal("0.05")
NAMES = ("name", "id")


def tree_of(provenance):
    """What ran: the library's revision where a script names the one it loaded, and then its own."""
    script = (provenance.get("git_revision") or "no revision")[:7]
    library = ((provenance.get("library") or {}).get("git_revision") or script)[:7]
    return library if library == script else f"{library} (scripts of {script})"


class Wrong(Exception):
    """A citation that does not hold, with the words that say why."""


class Receipts:
    """Reads receipts below `root` once, and remembers which were used."""

    def __init__(self, root):
        self.root = root
        self.documents = {}

    def load(self, path):
        if not path.startswith("receipts/") or ".." in path.split("/"):
            raise Wrong(f"{path} is no path below receipts/")
        if path not in self.documents:
            file = self.root / path
            if not file.is_file():
                raise Wrong(f"cited receipt {path} is missing")
            self.documents[path] = json.loads(file.read_text(encoding="utf-8"))
        return self.documents[path]

    def value(self, reference):
        path, _, pointer = reference.partition("#")
        if not pointer.startswith("/"):
            raise Wrong(f"{reference} has no pointer behind #")
        try:
            return resolve(self.load(path), pointer)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise Wrong(f"{path} has no {pointer} ({error})") from error


def member(members, token):
    """The one member of a list that `token` picks."""
    if "=" in token:
        field, want = token.split("=", 1)
        found = [v for v in members if str(v.get(field)).replace(" ", "_") == want]
        if len(found) != 1:
            raise KeyError(f"{len(found)} members with {token}")
        return found[0]
    value = members[int(token)]
    if isinstance(value, dict) and any(name in value for name in NAMES):
        names = [[str(m.get(n)) for n in NAMES if n in m] for m in members if isinstance(m, dict)]
        if len({tuple(n) for n in names}) == len(members):
            raise Wrong(f"/{token} counts members that have names: pick one by name=")
    return value


def resolve(document, pointer):
    value = document
    for token in pointer.split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        value = member(value, token) if isinstance(value, list) else value[token]
    return value


def scaled(reference, value, factor):
    """The value in the unit that the text shows."""
    if not factor:
        return value
    if factor not in FACTORS:
        raise Wrong(f"factor {factor}: one of {', '.join(FACTORS)}")
    by, fields, _ = FACTORS[factor]
    if not any(re.search(fields, key) for key in reference.split("/")[-2:]):
        raise Wrong(f"factor {factor} does not belong to {reference.rsplit('/', 1)[-1]}")
    return Decimal(repr(value)) * by


def check_figure(shown, value):
    """Raises unless `shown` is the value, rounded to the digits that it shows, and not coarsely."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        if shown != str(value).replace(" ", "_"):
            raise Wrong(f"{shown} is cited, the receipt says {value}")
        return
    try:
        figure = Decimal(shown.replace(",", ""))
        exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    except InvalidOperation as error:
        raise Wrong(f"{shown} is cited, the receipt says {value}") from error
    step = Decimal(1).scaleb(figure.as_tuple().exponent)
    if figure not in {exact.quantize(step, rounding=r) for r in (ROUND_HALF_EVEN, ROUND_HALF_UP)}:
        raise Wrong(f"{shown} is cited, the receipt says {value}")
    allowed = (COARSE_SMALL if abs(exact) < Decimal("0.1") else COARSE) * abs(exact)
    if abs(figure - exact) > allowed:
        raise Wrong(f"{shown} is rounded too coarsely: the receipt says {value}")


# Words of a path or a name that decide which row was meant.
TELLING = r"\d+|bf16|fp16|fp32|avx2"


def row_words(reference, aliases):
    """Words that a text must hold to be about the row that the reference picks."""
    path, _, pointer = reference.partition("#")
    stem = path.rsplit("/", 1)[-1].removesuffix(".json")
    words = aliases.get(stem)
    if words is None:
        pieces = [re.sub(r"^[vn](?=\d)", "", p) for p in re.split(r"[_\-x]", stem)]
        words = " ".join(p for p in pieces if re.fullmatch(TELLING, p))
    picked = [t.split("=", 1)[1] for t in pointer.split("/") if "=" in t]
    for name in picked:
        name = name.replace("_", " ").replace("~1", "/")
        for whole, said in aliases.items():
            name = name.replace(whole, said)
        words += " " + name
    return tokens(words)


def tokens(text):
    # A point belongs to a number (0.8.5), a plus to a version of a package.
    return {t.lower() for t in re.findall(r"[A-Za-z0-9]+(?:[.+][A-Za-z0-9]+)*|%", text)}
