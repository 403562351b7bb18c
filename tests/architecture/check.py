#!/usr/bin/env python3
"""What: the rules of the architecture: who may include what, and what a file never holds.
Why: a layer that leaks once leaks for ever; here it fails on the first commit.
Never: part of the build; Python's standard library only.
"""

import ast
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
# What stands beside src, and the folders it may include besides its own; "talea" is the public
# interface. The yardsticks share no code with src; nothing but the tests takes from the tests.
OUTSIDE = {
    "yardsticks": {"talea"},
    "apps": {"talea", "yardsticks", "repro", "core", "device", "io", "ops", "report", "train"},
    "bench": {"talea", "core", "io", "ops"},
    "repro": {"talea", "core", "device", "ops"},
    "tests": {"talea", "yardsticks", "repro", *ROOMS},
    "examples": {"talea"},
}
# Folders on the include path of one of them alone.
OWN = {"tests": {"support", "gpu"}}
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
# What an operator's device lanes share of a row. Its rules are for the host as well.
ROWS = "rows"
RULES = r"ops/\w+/rows/(rule|finish)\.hpp"
DEVICE_LANES = {"cuda", "sm90"}
# A lane's name stands in the lane's own folder and in its operator's table. Whoever else asks, asks
# the table (linear_cross_entropy_lane_table); these are known by what they do with the name.
LANE_NAME = re.compile(
    r'"(sm90|unfused)"|(?=.*lane)[^\n]*"(cuda|cpu|reference)"|"(cuda|cpu|reference)"[^\n]*lane',
    re.I,
)
TABLES = r"src/ops/\w+/(op|not_built\w*)\.cpp"
NAMING = {
    "apps/talea/mamba3/bench.cpp": "its default lanes",
    "apps/talea/mamba3/check.cpp": "its default lanes",
    "apps/talea/sparse_attention/bench.cpp": "its default lanes",
    "apps/talea/sparse_attention/check.cpp": "its default lanes",
    "apps/talea/sparse_attention/explain.cpp": "its default lanes",
    "src/train/config.hpp": "the base of a parity run is the fp64 lane",
    "src/train/gates_exact.cpp": "which gates are exact depends on the fp64 lane",
    "yardsticks/linear_cross_entropy/lanes.cpp": "what the suite asks of each lane",
}
EVERY_LANE = "TALEA_EVERY_LANE("
HEADER = ("What", "Why", "Never")
MARKERS = r"\b(TODO|FIXME|XXX)\b"


def code_of(text: str) -> str:
    """The text without comments and strings, so that prose may name what code must not."""
    text = re.sub(r'R"(\w*)\((?:.|\n)*?\)\1"', '""', text)
    token = re.compile(r'//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'')
    return token.sub(lambda m: " " if m.group(0)[0] == "/" else '""', text)


def includes_of(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)


def rights_of(top: str) -> set[str]:
    return OUTSIDE[top] | OWN.get(top, set())


def room_of(path: str) -> str:
    return path.split("/")[1] if path.startswith("src/") and path.count("/") > 1 else ""


def lane_of(path: str) -> tuple[str, str] | None:
    """(operator, lane) of a file in a lane's folder, or in the folder of rows that lanes share."""
    parts = path.split("/")
    return (parts[2], parts[3]) if parts[:2] == ["src", "ops"] and len(parts) > 4 else None


def check_lanes(path: str, name: str) -> str | None:
    """Includes between the folders of one operator."""
    own, theirs = lane_of(path), lane_of("src/" + name)
    if not theirs or (own and own[1] == theirs[1]):
        return None
    if theirs[1] != ROWS:
        if own and own[1] == ROWS:
            return f"includes {name}: rows know no lane"
        return f"includes {name}: another lane" if own else None
    if not re.fullmatch(RULES, name) and not (own and own[1] in DEVICE_LANES):
        return f"includes {name}: of rows, only the rules are for the host"
    return None


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
    room, top = room_of(path), path.split("/")[0]
    if re.fullmatch(r"apps/talea/[^/]+", path) and name.startswith("ops/"):
        return f"includes {name}: what one operator has of the tool is in its folder"
    if top in OUTSIDE:
        known = src_rooms | OUTSIDE.keys() | OWN["tests"]
        if "/" in name and first in known and first != top and first not in rights_of(top):
            return f"includes {name}: {top} may include {sorted(OUTSIDE[top])} only"
        return None
    if room in NEUTRAL and re.fullmatch(OPERATORS, name):
        return f"includes {name}: {room} knows no operator"
    if room and first in OUTSIDE.keys() | OWN["tests"]:
        return f"includes {name}: nothing of src includes {first}"
    if not room or first not in src_rooms or "/" not in name:
        return None
    if first != room and first not in ROOMS.get(room, set()):
        return f"includes {name}: {room} may include {sorted(ROOMS.get(room, set()))} only"
    if room == "ops" and first == "ops":
        if path.split("/")[2] != name.split("/")[1]:
            return f"includes {name}: another operator"
        return check_lanes(path, name)
    return None


def check_header(path: str, text: str) -> str | None:
    """The file opens with a comment of three lines or more: what, why, never."""
    opening = re.match(r"(//[^\n]*\n)+|/\*(?:.|\n)*?\*/", text)
    comment = opening.group(0) if opening else ""
    places = [re.search(rf"^(//|/\*| \*)? *{tag}: ", comment, re.M) for tag in HEADER]
    if not all(places) or sorted(places, key=re.Match.start) != places:
        return "the header of what, why and never is needed, each at the beginning of a line"
    return None


def check_file(path: str, text: str, src_rooms: set[str]) -> list[str]:
    found = [check_include(path, name, src_rooms) for name in includes_of(text)]
    found.append(check_header(path, text))
    if re.fullmatch(r"tests/ops/[^/]+", path):
        found.append("a test of an operator is in the operator's folder")
    code = code_of(text)
    if path.startswith(("src/", "include/")):
        for pattern, reason in FORBIDDEN.items():
            if re.search(pattern, code):
                found.append(f"{re.search(pattern, code).group(0)!r}: {reason}")
    may = ("src/capi/", "src/dist/agree.cpp", "apps/", "tests/")
    if not path.startswith(may) and re.search(CATCH, code):
        if path.startswith(("src/", "include/")):
            found.append("catch: only src/capi, src/dist/agree.cpp and apps may")
    if re.search(MARKERS, text):
        found.append("an unfinished place: " + re.search(MARKERS, text).group(0))
    return [f"{path}: {complaint}" for complaint in found if complaint]


def names_lane(path: str, text: str) -> bool:
    """Whether the file types a lane's name where it should ask the table."""
    lines = [re.sub(r"//[^\n]*", "", line) for line in text.splitlines()]
    if not any(LANE_NAME.search(line) for line in lines):
        return False
    lane = lane_of(path)
    if path.startswith("tests/"):  # a test may be of a lane; one that runs on each may not
        return EVERY_LANE in text or path.startswith("tests/support/")
    return not lane and not re.fullmatch(TABLES, path) and path.startswith(
        ("src/", "apps/", "yardsticks/", "include/", "python/talea/")
    )  # fmt: skip


# Functions that stand for another package's, with its parameters.
STANDING_FOR = "python/talea/integrations/"
MOST_POSITIONAL = 8
# With a public way beside each name.
PRIVATE_TORCH = "python/talea/_fast.py"


def check_python(path: str, text: str) -> list[str]:
    """No function takes more than eight arguments by their place."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            count = len(node.args.posonlyargs) + len(node.args.args)
            if count > MOST_POSITIONAL:
                found.append(f"{path}: {node.name} takes {count} arguments by place; at most 8")
    return found


def check_package(root: Path) -> list[str]:
    found = []
    for file in sorted((root / "python/talea").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        if not path.startswith(STANDING_FOR):
            found += check_python(path, text)
        if path != PRIVATE_TORCH and re.search(r"\btorch\._(C|dynamo)\b", text):
            found.append(f"{path}: names what PyTorch keeps private: only {PRIVATE_TORCH} may")
        if names_lane(path, re.sub(r"#[^\n]*", "", text)):
            found.append(f"{path}: types a lane's name: the table knows")
    return found


def check_tree(root: Path) -> list[str]:
    src_rooms = {p.name for p in (root / "src").iterdir() if p.is_dir()}
    found = [f"src/{room}: a room the rules do not know" for room in src_rooms - ROOMS.keys()]
    used: set[tuple[str, str]] = set()
    naming: set[str] = set()
    for top in ("include", "src", *OUTSIDE):
        for file in sorted((root / top).rglob("*")) if (root / top).is_dir() else []:
            if file.suffix in SUFFIXES and file.is_file():
                path = file.relative_to(root).as_posix()
                text = file.read_text(encoding="utf-8")
                found += check_file(path, text, src_rooms)
                if names_lane(path, text):
                    naming.add(path)
                where = room_of(path) or top
                used |= {(where, name.split("/")[0]) for name in includes_of(text)}
    found += hidden_headers(root)
    for build in sorted((root / "apps").rglob("CMakeLists.txt")) + [
        root / "yardsticks/CMakeLists.txt"
    ]:
        if build.is_file():
            found += check_build(build.relative_to(root).as_posix(), build.read_text())
    found += [f"{p}: types a lane's name: the table knows" for p in sorted(naming - NAMING.keys())]
    if (root / "python/talea").is_dir():
        found += check_package(root)
        found += [f"{p}: may type a lane's name and does not" for p in NAMING.keys() - naming]
    tops = {top for top in OUTSIDE if (root / top).is_dir()}
    return found + unused_rights(src_rooms | tops, used)


def hidden_headers(root: Path) -> list[str]:
    """Both folders are include paths: a name that both have means whichever comes first."""
    return [
        f"tests/{p}: hides src/{p} where tests come first"
        for p in sorted(f.relative_to(root / "tests") for f in (root / "tests").rglob("*.hpp"))
        if (root / "src" / p).is_file()
    ]


def check_build(path: str, text: str) -> list[str]:
    """The tool and the yardsticks are built from sources of their own."""
    code = re.sub(r"#[^\n]*", "", text)
    named = re.search(r"\btests\b", code)
    return [f"{path}: builds from tests, which nothing else builds from"] if named else []


def unused_rights(rooms: set[str], used: set[tuple[str, str]]) -> list[str]:
    return [
        f"{room}: may include {other} and does not: take the right away"
        for room, others in {**ROOMS, **OUTSIDE}.items()
        for other in sorted(others)
        if room in rooms and (room, other) not in used
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
    ("yardsticks/x/a.cpp", "yardsticks may include", GOOD + '#include "support/hold.hpp"\n'),
    ("yardsticks/x/a.cpp", "yardsticks may include", GOOD + '#include "ops/x/lane.hpp"\n'),
    ("apps/talea/a.cpp", "", GOOD + '#include "yardsticks/x/a.hpp"\n#include "record.hpp"\n'),
    ("apps/talea/a.cpp", "apps may include", GOOD + '#include "support/temp_dir.hpp"\n'),
    ("apps/talea/a.cpp", "apps may include", GOOD + '#include "dist/agree.hpp"\n'),
    ("apps/talea/a.cpp", "in its folder", GOOD + '#include "ops/x/receipt.hpp"\n'),
    ("apps/talea/x/a.cpp", "", GOOD + '#include "ops/x/receipt.hpp"\n'),
    ("tests/ops/a_test.cpp", "operator's folder", GOOD),
    ("tests/ops/x/a_test.cpp", "", GOOD),
    ("bench/a.cpp", "bench may include", GOOD + '#include "yardsticks/x/a.hpp"\n'),
    ("repro/x/a.cpp", "repro may include", GOOD + '#include "train/a.hpp"\n'),
    ("examples/c/a.c", "examples may include", GOOD + '#include "core/fail.hpp"\n'),
    ("tests/x/a.cpp", "", GOOD + '#include "support/hold.hpp"\n#include "ops/x/lane.hpp"\n'),
    ("tests/x/a.cpp", "tests may include", GOOD + '#include "bench/nccl/a.hpp"\n'),
    ("src/ops/x/a.cpp", "nothing of src", GOOD + '#include "support/hold.hpp"\n'),
    ("src/dist/nccl.cpp", "", GOOD + "#include <nccl.h>\n"),
    ("tests/dist/a.cpp", "", GOOD + "#include <nccl.h>\n"),
    ("src/ops/x/cuda/a.cpp", "only src/dist/", GOOD + "#include <nccl.h>\n"),
    ("src/core/a.cpp", "only src/dist/", GOOD + "#include <mpi.h>\n"),
    ("src/ops/x/cpu/a.cpp", "another lane", GOOD + '#include "ops/x/cuda/b.hpp"\n'),
    ("src/ops/x/sm90/a.cpp", "another lane", GOOD + '#include "ops/x/cuda/rows.hpp"\n'),
    ("src/ops/x/sm90/a.cu", "", GOOD + '#include "ops/x/rows/tokens.cuh"\n'),
    ("src/ops/x/rows/a.cu", "", GOOD + '#include "ops/x/rows/b.hpp"\n#include "ops/x/lane.hpp"\n'),
    ("src/ops/x/rows/a.cu", "rows know no lane", GOOD + '#include "ops/x/cuda/logit.cuh"\n'),
    ("src/ops/x/cpu/a.cpp", "", GOOD + '#include "ops/x/rows/rule.hpp"\n'),
    ("src/ops/x/cpu/a.cpp", "only the rules", GOOD + '#include "ops/x/rows/tokens.hpp"\n'),
    ("src/ops/x/op.cpp", "only the rules", GOOD + '#include "ops/x/rows/call.hpp"\n'),
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
    ("src/dist/a.cpp", "only src/capi", GOOD + "void f() { try { g(); } catch (...) {} }\n"),
    ("src/dist/agree.cpp", "", GOOD + "void f() { try { g(); } catch (...) {} }\n"),
    ("src/capi/a.cpp", "", GOOD + "void f() { try { g(); } catch (...) {} }\n"),
    ("src/core/a.cpp", "is needed", "// What: x.\n\n#include <cmath>\n"),
    ("tests/core/a.cpp", "is needed", "#include <cmath>\nint x;\nint y;\n"),
    ("src/core/a.cpp", "is needed", "// X.\n// Exists so that y.\n// Never z.\n"),
    ("src/core/a.cpp", "is needed", "// What: x. Why: y,\n// and more.\n// Never: z.\n"),
    ("src/core/a.cpp", "unfinished", GOOD + "// TO" + "DO: later\n"),
]


# Whether the name is one that should have been asked for.
LANE_TESTS = [
    ("src/ops/x/sm90/lane.cpp", False, 'return {.name = "sm90"};'),
    ("src/ops/x/op.cpp", False, 'absent_lane<Operator>("sm90", DeviceKind::cuda)'),
    ("src/ops/x/describe.cpp", True, 'if (p.options.lane == "cpu") return;'),
    ("src/core/operator.hpp", True, 'if (lane.name == "unfused"sv) continue;'),
    ("src/core/views.cpp", False, 'return t.device == DeviceKind::cpu ? "cpu" : "cuda";'),
    ("src/core/views.cpp", False, '// "sm90" in prose'),
    ("apps/talea/bench.cpp", True, 'bool device = lane == "cuda";'),
    ("yardsticks/x/run.cpp", True, 'if (lane != "sm90") return c;'),
    ("python/talea/functional.py", True, 'if lane == "cpu":'),
    ("tests/ops/x_test.cpp", False, 'verify("cpu", c);  EXPECT_EQ(lane, "cpu");'),
    ("tests/ops/x_test.cpp", True, 'TALEA_EVERY_LANE(X);\nif (lane() == "cpu") return;'),
    ("tests/support/lane_test.hpp", True, 'if (lane() != "sm90") return;'),
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
        for top in ("src", "tests"):
            (Path(folder) / top / "attic").mkdir(parents=True, exist_ok=True)
            (Path(folder) / top / "attic" / "a.hpp").write_text("")
        if len(hidden_headers(Path(folder))) != 1:
            failed.append("self-test: a hidden header was accepted")
    for path, wanted, text in LANE_TESTS:
        if names_lane(path, text) != wanted:
            failed.append(f"self-test: {path} with {text!r}: {'accepted' if wanted else 'refused'}")
    many = ", ".join("abcdefghi")
    if not check_python("a.py", f"def f({many}):\n    pass\n"):
        failed.append("self-test: nine arguments by place were accepted")
    if check_python("a.py", f"def f({many[:-3]}, *, i):\n    pass\n"):
        failed.append("self-test: eight arguments by place were refused")
    if check_build("x", "# not tests\nfile(GLOB s a/*.cpp)\n"):
        failed.append("self-test: a build file was refused")
    if not check_build("x", "file(GLOB s ${PROJECT_SOURCE_DIR}/tests/support/*.cpp)\n"):
        failed.append("self-test: a build file took from tests")
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
