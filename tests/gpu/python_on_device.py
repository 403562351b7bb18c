#!/usr/bin/env python3
"""What: runs every file of python/tests on a machine with a GPU, each in a process of its own, several at a time;
writes what passed, failed and was skipped as a receipt.
Why: what the documents claim of Python on a device must be a file that names the revision and the device.
Never: takes a file that ran no test for one that passed, unless it says what it misses.

usage, in the project's root, with TALEA_LIBRARY and PYTHONPATH=python as for the tests:
  tests/gpu/python_on_device.py [--jobs 8] [--each SECONDS] [--only 'PATTERN,PATTERN'] RECEIPT
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from talea import _receipt

TESTS = Path(__file__).resolve().parents[2] / "python/tests"
LONG = ("test_torch.py", "test_integrations.py", "test_mamba3.py")  # these start first


def run(file, each, folder):
    """One file: counts, and which failed and why."""
    said = Path(folder) / f"{file.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={said}"]
    begin, why = time.monotonic(), ""
    try:
        ran = subprocess.run(
            [*command, file.name], cwd=TESTS, capture_output=True, text=True, timeout=each
        )
        tail = (ran.stdout + ran.stderr)[-1500:]
    except subprocess.TimeoutExpired:
        ran, why, tail = None, f"not finished within {each:g} seconds", ""
    found = list(xml.parse(said).iter("testcase")) if said.exists() else []
    failed = [c for c in found if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c.find("skipped") for c in found if c.find("skipped") is not None]
    if ran is not None and not failed and (ran.returncode not in (0, 5) or not found):
        why = f"exit status {ran.returncode}: {tail}"
    # Of a whole file that is skipped the message says nothing, the text why.
    said_of = {
        s.text if s.get("message") == "collection skipped" else s.get("message") for s in skipped
    }
    reasons = sorted({re.sub(r"(?s).*Skipped: ", "", w or "").strip("')") for w in said_of})
    names = [
        {"name": c.get("name"), "why": (c.find("failure") if c.find("failure") is not None
                                        else c.find("error")).get("message", "")[:400]}
        for c in failed
    ]  # fmt: skip
    return {
        "name": file.stem, "lane": "any", "passed": not failed and not why,
        "ran": len(found) - len(failed) - len(skipped), "failed": len(failed) + bool(why),
        "skipped": len(skipped), "seconds": round(time.monotonic() - begin, 1),
        **({"why": why} if why else {}), **({"failed_cases": names} if names else {}),
        **({"skipped_for": reasons} if reasons else {}),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--each", type=float, default=900, help="seconds of a file")
    parser.add_argument("--only", default="*", help="files by name, parted by commas")
    parser.add_argument("receipt")
    o = parser.parse_args()
    if not Path(o.receipt).resolve().parent.is_dir():
        parser.error(f"{o.receipt}: no such folder")
    files = [
        f for f in TESTS.glob("test_*.py") if any(fnmatch(f.stem, p) for p in o.only.split(","))
    ]
    if not files:
        sys.exit(f"python_on_device: no file matches {o.only}")
    files.sort(key=lambda f: (f.name not in LONG, f.name))
    start = _receipt.now()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(o.jobs) as pool:
        cases = list(pool.map(lambda f: run(f, o.each, folder), files))
    cases.sort(key=lambda c: c["name"])
    counts = {key: sum(c[name] for c in cases) for key, name in
              (("passed", "ran"), ("failed", "failed"), ("skipped", "skipped"))}  # fmt: skip
    right = not counts["failed"] and counts["passed"] > 0
    _receipt.write_receipt(
        o.receipt, "check", "python tests on a device", right,
        {"check": {"preset": "python on a device", **counts, "cases": cases}}, start,
        ["python", "tests/gpu/python_on_device.py", *sys.argv[1:]],
    )  # fmt: skip
    for c in cases:
        if not c["passed"]:
            print(c["name"], c.get("why", ""), *(f["name"] for f in c.get("failed_cases", [])))
    print(" ".join(f"{n} {name}," for name, n in counts.items()).rstrip(","))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
