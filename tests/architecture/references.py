#!/usr/bin/env python3
"""What: every reference in prose and comments leads somewhere: links, anchors, sections, paths, names.
Why: a page that names what is gone sends its reader in circles.
Never: follows a link out of the repository.
"""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTION = re.compile(
    r"(?i)\bsections? (\d+)(?:\.\d+)? of the contract|\bcontract(?:'s|,)? section (\d+)"
)
PATH = re.compile(
    r"`((?:src|include|tests|apps|docs|bench|receipts)/(?:[\w.-]+/)*(?:[\w-]+\.[a-z]+)?)`"
)
NAME = re.compile(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?:\(\))?`")
# A page about names that are gone.
OF_THE_PAST = "CHANGELOG.md"
# Words of other tools and projects.
FOREIGN = {"long_scoreboard", "epilogue_twice"}
# Made when something runs, or a page of the site.
MADE = ("docs/reference/", "reference/", "docs/figures/PAGE")


def anchors_of(text: str) -> set[str]:
    """As GitHub forms them: lower case, no punctuation, spaces as dashes."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def check_links(root: Path, path: str, text: str) -> list[str]:
    found = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target) or target.startswith(MADE):
            continue
        name, _, anchor = target.partition("#")
        file = (root / path).parent / name if name else root / path
        if not file.exists():
            found.append(f"{path}: links to {target}: no such file")
        elif anchor and anchor not in anchors_of(file.read_text(encoding="utf-8")):
            found.append(f"{path}: links to {target}: no such heading")
    return found


def check_paths(root: Path, path: str, text: str) -> list[str]:
    return [
        f"{path}: names `{name}`: no such file"
        for name in PATH.findall(prose(text))
        if not (root / name).exists() and not name.startswith(MADE)
    ]


def names_of_code(root: Path, listed: list[str]) -> set[str]:
    """Every word of what is no page: code, tests, tools, receipts' schema."""
    words: set[str] = set()
    for path in listed:
        if not path.endswith(".md") and not path.startswith(("docs/", "receipts/h200")):
            try:
                words.update(re.findall(r"\w+", (root / path).read_text(encoding="utf-8")))
            except (UnicodeDecodeError, FileNotFoundError):
                continue
    return words


def check_names(path: str, text: str, known: set[str]) -> list[str]:
    """Names in backticks that look like code's: several_words_in_small_letters."""
    return [
        f"{path}: names `{name}`: nothing in the code is called so"
        for name in NAME.findall(prose(text))
        if name not in known | FOREIGN
    ]


def check_sections(path: str, text: str, sections: set[str]) -> list[str]:
    return [
        f"{path}: names section {number} of the contract: it has {', '.join(sorted(sections))}"
        for pair in SECTION.findall(text)
        for number in pair
        if number and number not in sections
    ]


def check_text(root: Path, path: str, text: str, sections: set[str]) -> list[str]:
    found = check_sections(path, text, sections)
    if path.endswith(".md"):
        found += check_links(root, path, text) + check_paths(root, path, text)
    return found


def self_test(root: Path) -> list[str]:
    broken = [
        "see [x](docs/nowhere.md)",
        "see [x](docs/contract.md#7-accuracy)",
        "see `src/core/nowhere.hpp`",
        "as section 7 of the contract says",
        "bounded (contract, section 7)",
    ]
    good = "[x](docs/contract.md#4-accuracy), `src/core/fail.hpp`, section 4 of the contract"
    sections = {"1", "4"}
    failed = [
        f"self-test: accepted: {t}" for t in broken if not check_text(root, "a.md", t, sections)
    ]
    if not check_names("a.md", "`dx_first_rows`", {"dx"}) or check_names(
        "a.md", "`f_x()`", {"f_x"}
    ):
        failed.append("self-test: a name that is gone was accepted, or one that is not was refused")
    return failed + [f"self-test: {c}" for c in check_text(root, "a.md", good, sections)]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    contract = (root / "docs/contract.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\d+)\.", contract, re.MULTILINE))
    every = subprocess.run(
        ["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split()
    listed = [p for p in every if p.endswith((".md", ".cpp", ".hpp", ".cu", ".cuh", ".h", ".py"))]
    known = names_of_code(root, every)
    others = ("mamba3", "sparse_attention")  # their pages have contracts of their own
    found = self_test(root)
    for path in listed:
        text = (root / path).read_text(encoding="utf-8")
        if path == "tests/architecture/references.py":
            continue
        if path.endswith(".md") and path != OF_THE_PAST:
            found += check_names(path, text, known)
        found += check_text(
            root, path, text, sections | set("6789") if any(o in path for o in others) else sections
        )
    print("\n".join(found) or "every reference resolves")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
