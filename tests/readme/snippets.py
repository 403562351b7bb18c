#!/usr/bin/env python3
# What: runs the code fences of README.md as they stand in the file.
# Why: the first lines that anybody copies must work, on a machine that has only what README names.
# Never: edits a line, or writes into the tree.
"""usage: snippets.py sh|c|python [FILE]

sh      each fence by `bash -euo pipefail`, in a temporary folder that shows the tree's own entries;
        lines that call make are left out: CI has run those targets before
c       a fence with main() is built against an install and run; of another one each line has to stand
        in a file of examples/c, which is built from the install and run instead
python  each fence by this interpreter, with the names of tests/readme/given.py
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600  # seconds a fence


def fences(text: str):
    """(line, language, code) of each fence."""
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2]


def command(words, folder, **more):
    done = subprocess.run(
        words, cwd=folder, timeout=LIMIT, stdin=subprocess.DEVNULL, text=True, check=False, **more
    )
    if done.returncode != 0:
        raise SystemExit(f"exit {done.returncode}: {' '.join(map(str, words))[:300]}")
    return done


def run_sh(code: str, folder: Path) -> str:
    kept = []
    for line in code.splitlines():
        target = re.match(r"make (\w+)", line)
        if target and not re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M):
            raise SystemExit(f"no such target: {line}")
        if not target:
            kept.append(line)
    script = "\n".join(kept).strip()
    if not script:
        return "make only"
    for entry in ROOT.iterdir():
        (folder / entry.name).symlink_to(entry)
    command(["bash", "-euo", "pipefail", "-c", script], folder)
    return "ran"


def stands_in(code: str, example: Path) -> bool:
    def lines(text):
        return {" ".join(line.split()) for line in text.splitlines() if line.strip()}

    return lines(code) <= lines(example.read_text())


def run_c(code: str, folder: Path) -> str:
    source = folder / "snippet.c"
    source.write_text(code)
    said = "built from an install, ran"
    if "main(" not in code:
        examples = sorted((ROOT / "examples/c").glob("*.c"))
        found = [e for e in examples if stands_in(code, e)]
        if not found:
            raise SystemExit(f"its lines stand in none of {[e.name for e in examples]}")
        source, said = found[0], f"stands in {found[0].name}; {said}"
    prefix = folder / "prefix"
    command(
        ["cmake", "--install", ROOT / "build", "--prefix", prefix],
        folder,
        stdout=subprocess.DEVNULL,
    )
    config = next(prefix.rglob("talea.pc")).parent
    flags = command(
        ["pkg-config", f"--define-variable=prefix={prefix}", "--cflags", "--libs", "talea"],
        folder,
        env={**os.environ, "PKG_CONFIG_PATH": str(config)},
        stdout=subprocess.PIPE,
    ).stdout.split()
    command(
        ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", source, *flags, "-o", "snippet"], folder
    )
    command([folder / "snippet"], folder, env={**os.environ, "LD_LIBRARY_PATH": str(config.parent)})
    return said


def run_python(code: str, folder: Path) -> str:
    given = (ROOT / "tests/readme/given.py").read_text()
    command([sys.executable, "-W", "error::UserWarning", "-c", given + "\n" + code], folder)
    return "ran"


def main(words) -> int:
    runners = {"sh": run_sh, "c": run_c, "python": run_python}
    if not words or words[0] not in runners or len(words) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    page = Path(words[1]) if len(words) > 1 else ROOT / "README.md"
    failed = 0
    for line, language, code in fences(page.read_text()):
        if language != words[0]:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = runners[language](code, Path(folder))
            except (SystemExit, subprocess.TimeoutExpired) as error:
                said, failed = str(error), failed + 1
                print(code, file=sys.stderr)
        print(
            f"{page.name}:{line} {language}: {said} ({time.monotonic() - began:.1f} s)", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
