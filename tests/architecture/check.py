#!/usr/bin/env python3
"""What: the rules of the architecture: who may include what, and what a file never holds.
Why: a layer that leaks once leaks for ever; here it fails on the first commit.
Never: part of the build; Python's standard library only.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOMS = {
    # room of src: rooms it may include, besides itself and include/talea. A right that nobody
    # uses is a fault as well: the next leak would go through it.
    "core": set(),
    "algebra": {"core"},
    "dist": {"core"},
    "device": {"core"},
    "io": {"core"},
    "ops": {"core", "algebra", "dist", "device"},
    "report": {"core"},
    "train": {"core", "io", "ops"},
    "capi": {"core", "ops"},
}
# Rooms that know no operator: not even a public header of one.
NEUTRAL = {"core", "algebra", "dist", "device", "io", "report"}
OPERATORS = r"talea/(c/)?(linear_cross_entropy|sparse_attention|mamba3)\.hp?p?"
# The oracle, the plain arithmetic and the cases of an operator: they share no code with src.
YARDSTICKS = ("talea", "yardsticks")
SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh", ".h", ".c"}
# Headers of an engine, and the only places that may include them: what speaks to it, and a test
# that stands for it.
ENGINES = {r"nccl\.h": ("src/dist/", "tests/dist/"), r"mpi\.h": ("src/dist/",)}
CUDA = r"(cuda|cublas|cute/|cutlass|thrust/|cub/).*"
FORBIDDEN = {
    r"\b(secure_)?getenv\s*\(": "getenv: an argument must be able to say it",
    r"\b(printf|puts|fputs|putchar)\s*\(": "prints: a library returns what it knows",
    r"std::(cout|cerr|clog)\b": "prints: a library returns what it knows",
    r"\b(std::)?(_Exit|quick_exit|exit|abort|terminate)\s*\(": "ends the process",
}
CATCH = r"\bcatch\s*\("
MARKERS = r"\b(TODO|FIXME|XXX)\b"


def code_of(text: str) -> str:
    """The text without comments and strings, so that prose may name what code must not."""
    text = re.sub(r'R"(\w*)\((?:.|\n)*?\)\1"', '""', text)
    token = re.compile(r'//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'')
    return token.sub(lambda m: " " if m.group(0)[0] == "/" else '""', text)


def includes_of(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)


def room_of(path: str) -> str:
    return path.split("/")[1] if path.startswith("src/") and path.count("/") > 1 else ""


def lane_of(path: str) -> tuple[str, str] | None:
    """(operator, lane) of a file in a lane's folder."""
    parts = path.split("/")
    return (parts[2], parts[3]) if parts[:2] == ["src", "ops"] and len(parts) > 4 else None


def check_include(path: str, name: str, src_rooms: set[str]) -> str | None:
    first = name.split("/")[0]
    for engine, places in ENGINES.items():
        if re.fullmatch(engine, name) and not path.startswith(places):
            return f"includes {name}: only {' and '.join(places)} may"
    if path.startswith("include/"):
        if first in src_rooms and "/" in name:
            return f"includes {name}: public headers know nothing of src"
        return None
    if path.startswith("src/ops/") and path.endswith("/op.cpp") and re.fullmatch(CUDA, name):
        return f"includes {name}: op.cpp knows no CUDA"
    if path.startswith("yardsticks/") and first in src_rooms and "/" in name:
        return f"includes {name}: yardsticks may include {sorted(YARDSTICKS)} only"
    room = room_of(path)
    if room in NEUTRAL and re.fullmatch(OPERATORS, name):
        return f"includes {name}: {room} knows no operator"
    if room and first in {"tests", "apps", "yardsticks", "bench", "repro"}:
        return f"includes {name}: nothing of src includes {first}"
    if not room or first not in src_rooms or "/" not in name:
        return None
    if first != room and first not in ROOMS.get(room, set()):
        return f"includes {name}: {room} may include {sorted(ROOMS.get(room, set()))} only"
    own, theirs = lane_of(path), lane_of("src/" + name)
    if room == "ops" and first == "ops":
        if path.split("/")[2] != name.split("/")[1]:
            return f"includes {name}: another operator"
        if own and theirs and own[1] != theirs[1]:
            return f"includes {name}: another lane"
    return None


def check_header(path: str, text: str) -> str | None:
    """The file opens with a comment of three lines or more: what, why (it exists so that), never."""
    opening = re.match(r"(//[^\n]*\n)+|/\*(?:.|\n)*?\*/", text)
    comment = opening.group(0) if opening else ""
    why = re.search(r"\bWhy: |\bExists ", comment)
    never = re.search(r"\bNever\b", comment)
    if comment.count("\n") < 2 or not why or not never or never.start() < why.start():
        return "the header of what, why and never is needed"
    return None


def check_file(path: str, text: str, src_rooms: set[str]) -> list[str]:
    found = [check_include(path, name, src_rooms) for name in includes_of(text)]
    found.append(check_header(path, text))
    code = code_of(text)
    if path.startswith(("src/", "include/")):
        for pattern, reason in FORBIDDEN.items():
            if re.search(pattern, code):
                found.append(f"{re.search(pattern, code).group(0)!r}: {reason}")
    if not path.startswith(("src/capi/", "apps/", "tests/")) and re.search(CATCH, code):
        if path.startswith(("src/", "include/")):
            found.append("catch: only src/capi and apps may")
    if re.search(MARKERS, text):
        found.append("an unfinished place: " + re.search(MARKERS, text).group(0))
    return [f"{path}: {complaint}" for complaint in found if complaint]


def check_tree(root: Path) -> list[str]:
    src_rooms = {p.name for p in (root / "src").iterdir() if p.is_dir()}
    found = [f"src/{room}: a room the rules do not know" for room in src_rooms - ROOMS.keys()]
    used: set[tuple[str, str]] = set()
    for top in ("include", "src", "apps", "tests", "bench", "yardsticks"):
        for file in sorted((root / top).rglob("*")) if (root / top).is_dir() else []:
            if file.suffix in SUFFIXES and file.is_file():
                path = file.relative_to(root).as_posix()
                text = file.read_text(encoding="utf-8")
                found += check_file(path, text, src_rooms)
                used |= {(room_of(path), name.split("/")[0]) for name in includes_of(text)}
    return found + unused_rights(src_rooms, used)


def unused_rights(src_rooms: set[str], used: set[tuple[str, str]]) -> list[str]:
    return [
        f"src/{room}: may include {other} and does not: take the right away"
        for room, others in ROOMS.items()
        for other in sorted(others)
        if room in src_rooms and (room, other) not in used
    ]


GOOD = "// What: x.\n// Why: y.\n// Never: z.\n"
# Each breaks exactly one rule, or none where the second field is empty.
SELF_TESTS = [
    ("src/core/a.cpp", "", GOOD + '#include "core/fail.hpp"\n#include "talea/error.hpp"\n'),
    ("src/core/a.cpp", "core may include", GOOD + '#include "ops/x/contract.hpp"\n'),
    ("src/core/a.cpp", "core may include", GOOD + '#include "algebra/row_state.hpp"\n'),
    ("src/dist/a.cpp", "dist may include", GOOD + '#include "ops/x/contract.hpp"\n'),
    ("src/device/cpu/a.cpp", "device may include", GOOD + '#include "ops/x/contract.hpp"\n'),
    ("src/core/a.cpp", "core knows no operator", GOOD + '#include "talea/mamba3.hpp"\n'),
    ("src/algebra/a.cpp", "algebra may include", GOOD + '#include "dist/agree.hpp"\n'),
    ("src/dist/a.cpp", "dist knows no operator", GOOD + '#include "talea/sparse_attention.hpp"\n'),
    ("src/io/a.cpp", "io knows no operator", GOOD + '#include "talea/c/linear_cross_entropy.h"\n'),
    ("src/device/cpu/a.cpp", "device may include", GOOD + '#include "dist/agree.hpp"\n'),
    ("src/io/a.cpp", "io may include", GOOD + '#include "dist/agree.hpp"\n'),
    ("src/report/a.cpp", "report may include", GOOD + '#include "io/npy.hpp"\n'),
    ("src/train/a.cpp", "train may include", GOOD + '#include "device/cpu/isa.hpp"\n'),
    ("src/capi/a.cpp", "capi may include", GOOD + '#include "io/npy.hpp"\n'),
    ("src/ops/x/a.cpp", "ops may include", GOOD + '#include "io/npy.hpp"\n'),
    ("src/ops/x/a.cpp", "", GOOD + '#include "talea/mamba3.hpp"\n#include "core/a.hpp"\n'),
    ("src/ops/x/a.cpp", "nothing of src", GOOD + '#include "yardsticks/x/oracle.hpp"\n'),
    (
        "yardsticks/x/a.cpp",
        "",
        GOOD + '#include "yardsticks/x/a.hpp"\n#include "talea/error.hpp"\n',
    ),
    ("yardsticks/x/a.cpp", "yardsticks may include", GOOD + '#include "core/half.hpp"\n'),
    ("src/dist/nccl.cpp", "", GOOD + "#include <nccl.h>\n"),
    ("tests/dist/a.cpp", "", GOOD + "#include <nccl.h>\n"),
    ("src/ops/x/cuda/a.cpp", "only src/dist/", GOOD + "#include <nccl.h>\n"),
    ("src/core/a.cpp", "only src/dist/", GOOD + "#include <mpi.h>\n"),
    ("src/ops/x/cpu/a.cpp", "another lane", GOOD + '#include "ops/x/cuda/b.hpp"\n'),
    ("src/ops/x/sm90/a.cpp", "another lane", GOOD + '#include "ops/x/cuda/rows.hpp"\n'),
    ("src/ops/x/cpu/a.cpp", "", GOOD + '#include "ops/x/cpu/b.hpp"\n'),
    ("src/ops/x/cpu/a.cpp", "", GOOD + '#include "ops/x/contract.hpp"\n'),
    ("src/ops/x/cpu/a.cpp", "another operator", GOOD + '#include "ops/y/contract.hpp"\n'),
    ("src/ops/x/op.cpp", "knows no CUDA", GOOD + "#include <cuda_runtime.h>\n"),
    ("include/talea/a.hpp", "nothing of src", GOOD + '#include "core/fail.hpp"\n'),
    ("src/core/a.cpp", "getenv", GOOD + 'auto x = std::getenv("X");\n'),
    ("src/core/a.cpp", "", GOOD + '// getenv( is not used; printf( neither\nauto x = "exit(";\n'),
    ("src/core/a.cpp", "prints", GOOD + 'void f() { std::cout << "x"; }\n'),
    ("src/core/a.cpp", "prints", GOOD + 'void f() { printf("x"); }\n'),
    ("src/core/a.cpp", "", GOOD + 'void f() { snprintf(a, 1, "x"); }\n'),
    ("src/core/a.cpp", "ends the process", GOOD + "void f() { std::abort(); }\n"),
    ("src/core/a.cpp", "ends the process", GOOD + "void f() { exit(1); }\n"),
    ("src/core/a.cpp", "only src/capi", GOOD + "void f() { try { g(); } catch (...) {} }\n"),
    ("src/capi/a.cpp", "", GOOD + "void f() { try { g(); } catch (...) {} }\n"),
    ("src/core/a.cpp", "is needed", "// What: x.\n\n#include <cmath>\n"),
    ("tests/core/a.cpp", "is needed", "#include <cmath>\nint x;\nint y;\n"),
    ("src/core/a.cpp", "unfinished", GOOD + "// TO" + "DO: later\n"),
]


def self_test() -> list[str]:
    failed = []
    rooms = set(ROOMS)
    for path, wanted, text in SELF_TESTS:
        found = check_file(path, text, rooms)
        right = len(found) == 1 and wanted in found[0] if wanted else not found
        if not right:
            failed.append(f"self-test: {path} with {text.splitlines()[3:]}: {found or 'accepted'}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "src" / "attic").mkdir(parents=True)
        if not check_tree(Path(folder)):
            failed.append("self-test: an unknown room was accepted")
    if unused_rights({"io"}, {("io", "core")}) or not unused_rights({"io"}, {("io", "io")}):
        failed.append("self-test: an unused right was accepted, or a used one was not")
    return failed


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    found = self_test() + check_tree(root)
    print("\n".join(found) or "every rule holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
