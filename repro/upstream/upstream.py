"""What: runs the pinned released packages against the bugs they had or have, on a GPU.
Why: "fixed in" and "still there" are worth what was run.
Never: claims a version that did not run; a package that cannot run says why.

usage: python repro/upstream/upstream.py --receipt F.json [--wheels DIR] [--only PACKAGE]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from talea._receipt import now, write_receipt

HERE = Path(__file__).parent
PACKAGE_SECONDS = 180


def pinned():
    for line in (HERE / "packages.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            words = line.split()
            yield words[-1].split("==")[0], words[-1].split("==")[1], words


def install(words, wheels, folder):
    """The release alone, beside whatever else is there: each version in its own folder."""
    source = ["--no-index", "--find-links", wheels] if wheels else []
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    done = subprocess.run([*command, *source, *words], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def run(package, folder=None):
    paths = [p for p in (folder, os.environ.get("PYTHONPATH")) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [sys.executable, HERE / "cases.py", package],
            capture_output=True, text=True, env=environment, timeout=PACKAGE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        rows = [json.loads(x) for x in out.decode().splitlines() if x.startswith("{")]
        return rows, f"stopped after {PACKAGE_SECONDS} s"
    rows = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    failed = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
    return rows, failed


def install_and_run(job, wheels):
    package, _, words = job
    with tempfile.TemporaryDirectory() as folder:
        why = install(words, wheels, folder) if words else None
        return ([], why) if why else run(package, folder)


def verdict(row):
    if "error" in row:
        return "not reproducible here"
    value = row["measured"]
    shown = not value <= row["bound"] or math.isnan(value)
    return "reproduced" if shown else "not shown by this version"


def add_fixed_in(bugs):
    """A bug shown by a version and not by a later one that ran was fixed in between."""
    for package in {b["package"] for b in bugs}:
        for name in {b["id"].split(" ")[0] for b in bugs if b["package"] == package}:
            seen = None
            for bug in (b for b in bugs if b["package"] == package and b["bug"] == name):
                if bug["upstream"] == "reproduced":
                    seen = bug["version"]
                elif seen and bug["upstream"] == "not shown by this version":
                    bug["upstream"] = f"fixed: shown by {seen}, not by {bug['version']}"


def entry(package, version, row, ours):
    said = verdict(row)
    beside = ours.get(row["id"], {})
    ours_holds = "measured" in beside and verdict(beside) == "not shown by this version"
    markers = (["BUG_REPRODUCED"] if said == "reproduced" else []) + (
        ["FIX_VALIDATED"] if ours_holds else []
    )
    return {
        "id": f"{row['id']} {package} {version}",
        "title": row["text"],
        "bug": row["id"],
        "museum": row["museum"],
        "package": package,
        "version": version,
        "upstream": said,
        "markers": markers,
        "passed": ours_holds,
        "theirs": {k: v for k, v in row.items() if k not in ("id", "museum", "text")},
        "talea": {k: v for k, v in beside.items() if k not in ("id", "museum", "text")},
    }


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--receipt", required=True)
    p.add_argument("--wheels", help="a folder of wheels, for a machine without a network")
    p.add_argument("--only", help="one package")
    o = p.parse_args()
    if not torch.cuda.is_available():
        print("upstream: no CUDA device; these packages are GPU code", file=sys.stderr)
        return 3
    start = now()
    todo = [(n, v, words) for n, v, words in pinned() if o.only in (None, n)]
    todo = [("talea", "", None), *todo, ("torch", torch.__version__, None)]
    with ThreadPoolExecutor(len(todo)) as pool:  # mostly compilers at work: side by side
        ran = list(pool.map(lambda job: install_and_run(job, o.wheels), todo))
    ours = {row["id"]: row for row in ran[0][0]}
    bugs, not_run, libraries = [], [], {}
    for (package, version, _), (rows, failed) in zip(todo, ran, strict=True):
        if failed:
            not_run.append(f"{package} {version}: {failed}")
        if package == "talea":
            continue
        libraries[f"{package} {version}"] = "did not run" if failed and not rows else "ran"
        bugs += [entry(package, version, row, ours) for row in rows]
    add_fixed_in(bugs)
    for b in bugs:
        figure = b["theirs"].get("measured", b["theirs"].get("error"))
        mine = b["talea"].get("measured", b["talea"].get("error"))
        print(f"{b['id']:50} {b['upstream']:45} {figure!s:.40}  talea {mine!s:.24}")
    for line in not_run:
        print(f"not run: {line}")
    passed = bool(bugs) and all(b["passed"] for b in bugs)
    sections = {"repro": {"bugs": bugs}, "notes": not_run}
    argv = ["python", "repro/upstream/upstream.py", *sys.argv[1:]]
    title = "Released packages against the bugs they had or have"
    write_receipt(o.receipt, "repro", title, passed, sections, start, argv, libraries)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
