#!/usr/bin/env python3
"""What: adds an option that needs no mathematics to a copy of the sources, and counts the places.
Why: a field that lives in many lists is forgotten in one of them; five files are the promise.
Never: changes the tree; the copy is compiled and thrown away.

usage: five_places.py [SOURCE_DIR [COMPILER]]
"""

import ast
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 5
# file: (the text before which the new line goes, the new line)
EDITS = {
    "include/talea/linear_cross_entropy.hpp": (
        "  int threads = 0; ",
        "  int64_t probe = 7;\n",
    ),
    "include/talea/c/linear_cross_entropy.h": (
        "  const char* lane; /* null or",
        "  int64_t probe;\n",
    ),
    "src/ops/linear_cross_entropy/fields.hpp": (
        '    Field{"threads"',
        '    Field{"probe", &Options::probe, &COptions::probe, true, "a probe"},\n',
    ),
    "python/talea/_linear_cross_entropy/_c.py": (
        '        ("lane", c.c_char_p),',
        '        ("probe", c.c_int64),\n',
    ),
    "python/talea/_linear_cross_entropy/_settings.py": (
        '    lane: str = "auto"',
        "    probe: int = 7\n",
    ),
}
# Defaults, C to C++, what ranks compare, the receipt's and the flags' loops: all see the option.
PROGRAM = r"""
#include <cstddef>
#include <cstdio>
#include "capi/tensor.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
using namespace talea;
int main() {
  talea_linear_cross_entropy_options c;
  capi::write_defaults<lce::Options>(&c, sizeof c, lce::option_fields);
  const long default_value = c.probe;
  c.probe = 41;
  lce::Options o;
  capi::read_options("options", &c, o, lce::option_fields);
  for_each_field(lce::option_fields, [&](const auto& f) {
    if (std::string(f.name) != "probe") return;
    std::printf("%ld %ld %zu %zu %s %d %s\n", default_value, static_cast<long>(o.probe),
                offsetof(talea_linear_cross_entropy_options, probe), sizeof c,
                text_of(o.*f.member).c_str(), f.agreed, f.about);
  });
}
"""


def python_layout(copy: Path) -> tuple[int, int]:
    """Offset of the option and size of the struct, from the text of _c.py alone."""
    tree = ast.parse(
        (copy / "python/talea/_linear_cross_entropy/_c.py").read_text(encoding="utf-8")
    )
    wanted = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options"]
    space = {"c": ctypes}
    exec(compile(ast.Module(wanted, []), "_c.py", "exec"), space)  # noqa: S102
    return space["Options"].probe.offset, ctypes.sizeof(space["Options"])


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    compiler = sys.argv[2] if len(sys.argv) > 2 else "c++"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("include", "src"):
            shutil.copytree(root / name, copy / name)
        (copy / "python").mkdir()
        shutil.copytree(root / "python/talea", copy / "python/talea")
        for name, (anchor, line) in EDITS.items():
            text = (copy / name).read_text(encoding="utf-8")
            assert text.count(anchor) == 1, f"{name}: {anchor!r} occurs {text.count(anchor)} times"
            (copy / name).write_text(text.replace(anchor, line + anchor), encoding="utf-8")
        (copy / "probe.cpp").write_text(PROGRAM, encoding="utf-8")
        flags = ["-std=c++20", "-O0", "-DFMT_HEADER_ONLY=1", f"-I{copy}/include", f"-I{copy}/src"]
        door = copy / "src/capi/tensor.cpp"
        program = copy / "probe"
        subprocess.run([compiler, *flags, copy / "probe.cpp", door, "-o", program], check=True)
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        offset, size = python_layout(copy)
        call = (copy / "python/talea/_linear_cross_entropy/_settings.py").read_text(
            encoding="utf-8"
        )
    expected = f"7 41 {offset} {size} 41 1 a probe\n"
    found = [] if said == expected else [f"the option arrived as {said!r}, not {expected!r}"]
    if len(EDITS) > MOST:
        found.append(f"{len(EDITS)} places; at most {MOST}")
    if re.search(r'"z_loss"', call):
        found.append("_settings.py lists the options a second time")
    print("\n".join(found) or f"{len(EDITS)} places: {', '.join(EDITS)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
