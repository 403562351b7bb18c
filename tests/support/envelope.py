"""What: the envelope of a receipt for scripts that run test programs: kind, verdict, provenance.
Why: a receipt that another form of script writes must pass the schema and name the same facts.
Never: guesses a fact: the tool beside the test programs says what it was built from and on what it runs.
"""

import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = (
    "bench --tokens 64 --hidden 64 --vocab 512 --dtype bf16 --repeats 1 --progress none "
    "{} --lanes {} --receipt"
)
# A limit is a device lane's: the tool refuses one for a host's.
LIMITS = {"cuda": "--limits 8MiB", "sm90": "--limits 8MiB"}


def now():
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def machine(tool, lane="cuda"):
    """Provenance as the tool writes it of a short run of a lane."""
    with tempfile.TemporaryDirectory() as folder:
        receipt = Path(folder) / "receipt.json"
        subprocess.run(
            [tool, *BENCH.format(LIMITS.get(lane, ""), lane).split(), str(receipt)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        said = json.loads(receipt.read_text(encoding="utf-8"))["provenance"]
    for field in ("clocks", "throttle_reasons"):  # of that short run
        if said["device"]:
            said["device"][field] = "not read"
    return said


def typed(word):
    """An argument without folders of this machine: a path inside the tree from its root, another by name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def envelope(provenance, start, title, verdict, preset, cases, **more):
    """A receipt of kind check; `cases` are dicts with name, lane and passed."""
    right = sum(1 for case in cases if case["passed"])
    argv = [Path(sys.argv[0]).name, *map(typed, sys.argv[1:])]
    return {
        "schema_version": 1,
        "kind": "check",
        "title": title,
        "verdict": verdict,
        "provenance": {**provenance, "argv": argv, "start_time": start, "end_time": now()},
        "check": {
            "preset": preset,
            "passed": right,
            "failed": len(cases) - right,
            "cases": cases,
            **more,
        },
    }


def write(path, receipt):
    """Whole or not at all: a run may be cut at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
