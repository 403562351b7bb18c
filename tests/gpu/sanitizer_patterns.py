#!/usr/bin/env python3
"""What: runs each pattern of talea_sanitizer_patterns under racecheck and synccheck; writes a receipt of which they
report, right and wrong ones.
Why: a report of a kernel that is right is the tool's only if the tool reports the smallest such kernel, too.
Never: passes where a wrong pattern is not reported, or where a right one has a wrong sum.

usage, on a machine with a GPU: tests/gpu/sanitizer_patterns.py [build/cuda/bin [receipts/h200/sanitizer_patterns.json]]
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from envelope import envelope, machine, now, write  # noqa: E402

TOOLS = ("racecheck", "synccheck")
WRONG = ("slot_freed_too_early", "named_no_barrier")


def run(program, pattern, tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", program, pattern]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    found = re.search(r"SUMMARY: (\d+)", done.stdout + done.stderr)
    sums = re.search(r"(\d+) of \d+ sums are wrong", done.stdout)
    if not found:
        sys.exit(f"{tool} {pattern}: no summary: {(done.stdout + done.stderr)[-500:]}")
    return int(found.group(1)), int(sums.group(1)) if sums else -1


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/cuda/bin")
    receipt = Path(sys.argv[2] if len(sys.argv) > 2 else "receipts/h200/sanitizer_patterns.json")
    program = str(folder / "talea_sanitizer_patterns")
    provenance, start = machine(folder / "talea"), now()
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    if not set(WRONG) < set(listed):
        sys.exit(f"not every wrong pattern is among {listed}")
    with ThreadPoolExecutor(8) as pool:
        asked = {(p, t): pool.submit(run, program, p, t) for p in listed for t in TOOLS}
        said = {key: future.result() for key, future in asked.items()}
    cases = []
    for pattern in listed:
        right = pattern not in WRONG
        reports = {f"{tool}_reports": said[pattern, tool][0] for tool in TOOLS}
        # Of a wrong one any sum may come; a tool that ends the launch leaves none.
        passed = (
            max(said[pattern, t][1] for t in TOOLS) == 0
            if right
            else reports["racecheck_reports"] > 0
        )
        cases.append({"name": pattern, "lane": "none", "right": right, "passed": passed, **reports})
        print(f"{pattern:34s} {'right' if right else 'wrong':6s} {reports}")
    title = "what racecheck and synccheck report of the smallest kernels"
    verdict = "passed" if all(case["passed"] for case in cases) else "failed"
    write(receipt, envelope(provenance, start, title, verdict, "device", cases))
    return verdict != "passed"


if __name__ == "__main__":
    sys.exit(main())
