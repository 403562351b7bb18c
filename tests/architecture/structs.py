#!/usr/bin/env python3
"""What: every ctypes struct of the Python package against the C headers: sizes, offsets, names.
Why: a field in the wrong place is read as another one, and nothing says so.
Never: has a list of fields: both sides are asked.

usage: structs.py SOURCE_DIR C_COMPILER LIBRARY
"""

import ctypes
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Module of the package: the prefix of its structs' names in C.
MODULES = {
    "talea._abi": "talea",
    "talea._linear_cross_entropy._c": "talea_linear_cross_entropy",
    "talea._mamba3._c": "talea_mamba3",
    "talea._sparse_attention._c": "talea_sparse_attention",
}
# A name in C whose Python class has another.
NAMES = {"talea_linear_cross_entropy_late": "talea_linear_cross_entropy_late_args"}
# Parts of a result: Python reads it as JSON.
RESULTS = r"_facts$|^talea_lane_decline$|^talea_mamba3_(product|exchange)$"


def is_struct(value) -> bool:
    known = isinstance(value, type) and issubclass(value, ctypes.Structure)
    return known and value is not ctypes.Structure


def structs_of(module, prefix: str) -> list[tuple[str, type]]:
    """(name in C, class) of every struct of the module, those of its passes' doors too."""
    found = [
        (f"{prefix}_{snake(value.__name__)}", value)
        for name, value in vars(module).items()
        if is_struct(value) and not name.startswith("_")
    ]
    for door in getattr(module, "DOORS", {}).values():
        found += [
            (f"{door.prefix}_{part}", getattr(door, part))
            for part in ("inputs", "outputs", "options", "args")
        ]
    return [(NAMES.get(name, name), struct) for name, struct in found]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("_")).lower()


def c_names(root: Path) -> set[str]:
    headers = [root / "include/talea/talea.h", *(root / "include/talea/c").glob("*.h")]
    text = "\n".join(h.read_text(encoding="utf-8") for h in headers)
    return set(re.findall(r"^\} (talea_\w+);", text, re.MULTILINE))


def layout_of_c(root: Path, compiler: str, wanted: dict[str, type]) -> list[str]:
    """A line a struct and a field, printed by a program that the compiler makes of the headers."""
    body = []
    for name, struct in wanted.items():
        body.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            at = f"offsetof({name}, {field}), sizeof((({name}*)0)->{field})"
            body.append(f'  printf("{name}.{field} %zu %zu\\n", {at});')
    text = "#include <stddef.h>\n#include <stdio.h>\n#include <talea/talea.h>\nint main(void) {\n"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "layout.c", Path(folder) / "layout"
        source.write_text(text + "\n".join(body) + "\n  return 0;\n}\n")
        subprocess.run(
            [compiler, f"-I{root}/include", "-x", "c", source, "-o", program], check=True
        )
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return said.splitlines()


def layout_of_python(wanted: dict[str, type]) -> list[str]:
    lines = []
    for name, struct in wanted.items():
        lines.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            lines.append(f"{name}.{field} {place.offset} {place.size}")
    return lines


def main() -> int:
    root, compiler = Path(sys.argv[1]), sys.argv[2]
    os.environ["TALEA_LIBRARY"] = sys.argv[3]
    sys.path.insert(0, str(root / "python"))
    known, wanted, also, wrong = c_names(root), {}, [], []
    for module_name, prefix in MODULES.items():
        for name, struct in structs_of(importlib.import_module(module_name), prefix):
            if name in known:
                wanted[name] = struct
            elif struct not in wanted.values():
                also.append((name, struct))
    wrong += [f"{name}: no such struct in the headers" for name, struct in also
              if struct not in wanted.values()]  # fmt: skip
    unheld = {n for n in known - wanted.keys() if not re.search(RESULTS, n)}
    wrong += [f"{n}: in the headers, and held to by nothing in Python" for n in sorted(unheld)]
    for ours, theirs in zip(
        layout_of_python(wanted), layout_of_c(root, compiler, wanted), strict=True
    ):
        if ours != theirs:
            wrong.append(f"Python has {ours}, C has {theirs}")
    if len(wanted) < 20:
        wrong.append(f"{len(wanted)} structs were found: too few to have held anything")
    print("\n".join(wrong) or f"{len(wanted)} structs lie as the headers say")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
