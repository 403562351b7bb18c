#!/usr/bin/env python3
"""What: the numbers of contract, C ABI and receipt schema are the same wherever they stand.
Why: a caller compares one place with another; a number that rose in one of them only is a lie.
Never: part of the build; Python's standard library only.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# (number, file, what it looks like there); the first group is the number.
PLACES = [
    ("contract", "include/talea/talea.h", r"^#define TALEA_CONTRACT_VERSION (\d+)$"),
    ("contract", "python/talea/_abi.py", r"^CONTRACT_VERSION = (\d+)\b"),
    ("contract", "docs/compatibility.md", r"^\| contract, now (\d+) \|"),
    ("contract", "CHANGELOG.md", r"^Contract (\d+), C ABI"),
    ("ABI", "include/talea/talea.h", r"^#define TALEA_ABI_VERSION (\d+)$"),
    ("ABI", "include/talea/talea.h", r"libtalea\.so\.(\d+)\)"),
    ("ABI", "python/talea/_abi.py", r"^ABI_VERSION = (\d+)$"),
    ("ABI", "docs/compatibility.md", r"^\| C ABI, now (\d+) \|"),
    ("ABI", "CHANGELOG.md", r"^Contract \d+, C ABI (\d+),"),
    ("schema", "receipts/schema/receipt.schema.json", r'"schema_version": \{"const": (\d+)\}'),
    ("schema", "docs/compatibility.md", r"^\| receipt schema, now (\d+) \|"),
    ("schema", "CHANGELOG.md", r"receipts schema (\d+)\.$"),
]


def faults(read) -> list[str]:
    """What does not agree; `read` gives a file's text by its path."""
    found: dict[str, dict[str, set]] = {}
    missing = []
    for number, path, pattern in PLACES:
        match = re.search(pattern, read(path), re.MULTILINE)  # the change log's newest is its first
        if match:
            found.setdefault(number, {}).setdefault(match[1], set()).add(path)
        else:
            missing.append(f"{path}: does not say the number of the {number}: {pattern}")
    split = [f"{number}: {sorted((v, sorted(p)) for v, p in values.items())}"
             for number, values in found.items() if len(values) > 1]  # fmt: skip
    return missing + split


def main() -> int:
    def read(path: str) -> str:
        return (ROOT / path).read_text(encoding="utf-8")

    wrong = faults(read)
    # A number that rises in one place only must be seen, in each of the places.
    for _, path, pattern in PLACES:

        def raised(other: str, path=path, pattern=pattern) -> str:
            if other != path:
                return read(other)
            return re.sub(pattern, lambda m: m[0].replace(m[1], m[1] + "9", 1), read(path), count=1,
                          flags=re.MULTILINE)  # fmt: skip

        if not faults(raised):
            wrong.append(f"{path}: a number raised there alone is not seen: {pattern}")
    print("\n".join(wrong) or "every number agrees")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
