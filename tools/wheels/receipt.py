"""What: a receipt (receipts/schema) of a wheel: size, digest, libraries, every file with its size.
Why: what a page says of a wheel is then held to one that was built.
Never: runs what is in the wheel's library beyond asking it for its revision.

usage: PYTHONPATH=FOLDER_WITH_THE_WHEEL python -m tools.wheels.receipt WHEEL OUT [NOTE...]
"""

import json
import sys
from pathlib import Path

from talea._receipt import now, write_receipt


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    start, wheel, out = now(), Path(argv[0]), argv[1]
    told = json.loads(Path(str(wheel).removesuffix(".whl") + ".json").read_text())
    cases = [{"name": of["file"], "lane": "cpu", "passed": True, **of} for of in told["libraries"]]
    notes = [f"{told['wheel']}: {told['bytes']} bytes, SHA-256 {told['sha256']}"]
    notes += [f"made of {part}" for part in told["made_of"]]
    notes += [f"{size} bytes: {name}" for name, size in told["files"].items()]
    device = any(of["device_code_bytes"] for of in told["libraries"])
    lanes = [*(["sm90", "cuda"] if device else []), "cpu"]
    own = max(told["libraries"], key=lambda of: of["file"].endswith("libtalea.so"))
    of_own = {
        "glibc": own["newest"]["GLIBC"],
        "device_code": ", ".join(own.get("device_code", ["none"])),
    }
    check = {"preset": "wheel", "lanes": lanes, **of_own, "cases": cases, "passed": len(cases), "failed": 0,
             "bytes": told["bytes"], "files": len(told["files"])}  # fmt: skip
    write_receipt(out, "check", f"What {told['wheel']} holds", True,
                  {"check": check, "notes": [*argv[2:], *notes]}, start,
                  ["python", "-m", "tools.wheels.receipt", f"dist/{wheel.name}"])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
