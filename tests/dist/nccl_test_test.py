"""What: nccl_test.py over a program and a tool that only pretend.
Why: its receipts are what the documents cite, and no machine of the CI has two GPUs to run it on.
Never: needs a device, a compiler or NCCL.

usage: nccl_test_test.py
"""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import nccl_test

# A process a rank; `late` says for which kind and culprit its survivors are.
PROGRAM = """#!{python}
import json, sys
mode = sys.argv[1]
if mode == "facts":
    print(json.dumps({{"revision": "none", "dirty": "clean", "device": {{"name": "none"}}}}))
    sys.exit()
rank, size = int(sys.argv[2]), int(sys.argv[3])
if mode in ("matrix", "callers_comm", "storm"):
    print(f"rank {{rank}} of {{size}}: 5 cases, 0 wrong, 1 declined")
    sys.exit()
culprit = int(sys.argv[6])
if rank == culprit and mode != "disagrees":
    sys.exit()
took = 3.1 if {late!r} == [mode, culprit] else 1.5
said, status = f"rank {{culprit}}: left", 4
if mode == "disagrees":
    said, status = "label_smoothing: the ranks disagree: 0.25 on rank 0", 5
    if culprit != 0:
        said = said.replace("0.25", "0")
print(f"survivor {{rank}} after {{took}} s, kind {{status}}: {{said}}")
sys.exit(status)
"""
TOOL = """#!{python}
import json, sys
where = lambda word: sys.argv[sys.argv.index(word) + 1]
results = json.load(open(where("--results-from")))
if {writes}:
    json.dump(results, open(where("--receipt"), "w"))
sys.exit(results["check"]["failed"] > 0 if {exits} else 5)
"""
MODES = ["matrix", "callers_comm", "storm", *nccl_test.TIMEOUT_S]


class NcclTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_test(self, late=(), writes=True, exits=True):
        """Exit status or message, and the two receipts; None where there is none."""
        fill = {"python": sys.executable, "late": list(late), "writes": writes, "exits": exits}
        for name, text in {"program": PROGRAM, "tool": TOOL}.items():
            (self.folder / name).write_text(text.format(**fill))
            (self.folder / name).chmod(0o755)
        words = [str(self.folder / "program"), "--tool", str(self.folder / "tool")]
        words += ["--lanes", "cuda", "sm90", "--share", "2", "--runs", "4", "--at-once", "4"]
        words += ["--modes", *MODES, "--receipts", str(self.folder)]
        with (
            mock.patch.object(sys, "argv", ["nccl_test.py", *words]),
            mock.patch.object(nccl_test, "nccl_version", lambda library: "0"),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                status = nccl_test.main()
            except SystemExit as e:
                status = e.code
        files = [self.folder / f"nccl_{name}.json" for name in ("matrix", "bad_worlds")]
        return status, *(json.loads(f.read_text()) if f.exists() else None for f in files)

    def test_two_receipts(self):
        status, matrix, bad = self.run_test()
        self.assertEqual(status, 0)
        self.assertEqual((matrix["check"]["passed"], matrix["check"]["failed"]), (5, 0))
        self.assertEqual((bad["check"]["passed"], bad["check"]["failed"]), (5, 0))
        self.assertEqual([c["named_in_time"] for c in bad["check"]["cases"]], [4] * 5)

    def test_a_late_survivor_fails_its_kind(self):
        status, matrix, bad = self.run_test(late=("stops", 1))
        self.assertEqual(status, 1)
        self.assertEqual(matrix["check"]["failed"], 0)
        wrong = [c for c in bad["check"]["cases"] if not c["passed"]]
        self.assertEqual([(c["name"], c["named_in_time"]) for c in wrong], [("stops/world 2", 2)])

    def test_a_receipt_of_an_earlier_run_does_not_stand_for_this_one(self):
        for name in ("matrix", "bad_worlds"):
            (self.folder / f"nccl_{name}.json").write_text('{"check": "of an earlier run"}')
        status, matrix, bad = self.run_test(writes=False)
        self.assertIn("no receipt nccl_matrix.json", status)
        self.assertEqual((matrix, bad), (None, None))

    def test_a_tool_that_fails_is_not_taken_for_a_verdict(self):
        status, matrix, _ = self.run_test(exits=False)
        self.assertIn("exited with 5", status)
        self.assertIsNone(matrix)


if __name__ == "__main__":
    unittest.main()
