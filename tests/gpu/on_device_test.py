"""What: on_device.py over programs that only pretend to hold cases.
Why: its receipt is what the documents cite, and no machine of the CI has a GPU to run it on.
Never: needs a device, a compiler or compute-sanitizer.

usage: on_device_test.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT = Path(__file__).with_name("on_device.py")
CASES = {
    "talea_gpu_tests": [
        "Sizes.Large",
        "CudaManners.Frees",
        "Some/Manners.AllocatesNothing/cuda",
        "SlowNccl.Start",
    ],
    "talea_tests": ["All/Options.Each/sm90", "All/Options.Each/cuda", "CudaManners.Graph"],
}
# Each once, and those of Options once more on each of the ways through their lane.
PLANNED = sum(map(len, CASES.values())) + 2 + 7

# A program of GoogleTest as on_device.py sees it: lists its cases, runs one, writes its JSON.
PROGRAM = """#!{python}
import json, os, sys, time
words = dict(word.lstrip("-").split("=", 1) if "=" in word else (word.lstrip("-"), "") for word in sys.argv[1:])
cases = {cases!r}
if "gtest_list_tests" in words:
    for case in cases:
        print(*case.rsplit(".", 1), sep=".\\n  ")
    sys.exit()
case = words["gtest_filter"]
kind = {kinds!r}.get(case, "passes")
if kind == "waits":
    time.sleep(600)
run = "NOTRUN" if "DISABLED_" in case else "RUN"
entry = {{"status": run, "result": "SUPPRESSED" if run == "NOTRUN" else "COMPLETED"}}
if kind == "fails":
    entry["failures"] = [{{}}]
path = words["gtest_output"].removeprefix("json:")
json.dump({{"testsuites": [{{"testsuite": [entry]}}]}}, open(path, "w"))
sys.exit(kind == "fails")
"""
# Notes how it was called, runs what it was given and finds nothing.
SANITIZER = """#!{python}
import pathlib, subprocess, sys
at = sys.argv.index("9") + 1
with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
    print(*sys.argv[2:3], *(w for w in sys.argv if w.startswith("--force")), file=calls)
print("========= ERROR SUMMARY: 0 errors")
sys.exit(subprocess.run(sys.argv[at:]).returncode)
"""
TOOL = """#!{python}
import json, sys
keys = ("version", "git_revision", "git_dirty", "build", "host", "libraries")
said = dict.fromkeys(keys, "pretended") | {{"device": {{"name": "none"}}}}
json.dump({{"provenance": said}}, open(sys.argv[sys.argv.index("--receipt") + 1], "w"))
"""


class OnDevice(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin, self.receipt = Path(folder.name), Path(folder.name) / "tests.json"

    def start(self, cases, kinds=None, more=("--no-sanitizers",)):
        fill = {"python": sys.executable, "kinds": kinds or {}}
        texts = {name: PROGRAM.format(cases=own, **fill) for name, own in cases.items()}
        tools = {"talea": TOOL.format(**fill), "compute-sanitizer": SANITIZER.format(**fill)}
        for name, text in (texts | tools).items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        quick = ["--jobs", "2", "--keep", "0.2", *more]
        return subprocess.Popen(
            [sys.executable, SCRIPT, *quick, self.bin, self.receipt],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"},
        )

    def finish(self, cases, kinds=None, more=("--no-sanitizers",)):
        job = self.start(cases, kinds, more)
        said, _ = job.communicate(timeout=60)
        receipt = json.loads(self.receipt.read_text()) if self.receipt.exists() else None
        return job.returncode, said, receipt

    def with_case(self, program, case):
        return CASES | {program: [*CASES[program], case]}

    def test_all_pass(self):
        status, said, receipt = self.finish(CASES)
        self.assertEqual(status, 0, said)
        self.assertEqual((receipt["verdict"], receipt["check"]["passed"]), ("passed", PLANNED))

    def test_a_receipt_says_what_was_left_out(self):
        status, said, receipt = self.finish(CASES, more=["--no-sanitizers", "--no-forced"])
        self.assertEqual(status, 0, said)
        check = receipt["check"]
        self.assertEqual((check["passed"], check["planned"]), (PLANNED - 9, PLANNED - 9))
        self.assertEqual(check["left_out"], ["no_sanitizers", "no_forced"])

    def test_a_part_of_the_cases_says_so(self):
        status, said, receipt = self.finish(
            CASES, more=["--no-sanitizers", "--no-forced", "--only", "Sizes.*,*Manners*"]
        )
        self.assertEqual(status, 0, said)
        check = receipt["check"]
        self.assertEqual((check["passed"], check["planned"]), (4, 4))
        self.assertEqual(check["left_out"][-1], "all but Sizes.*,*Manners*")
        status, said, _ = self.finish(CASES, more=["--no-sanitizers", "--only", "Sizes.*,Nothing*"])
        self.assertEqual(status, 1)
        self.assertIn("no case matches Nothing*", said)

    def test_the_sanitizers_alone_take_each_way(self):
        one = "All/Options.EachOutputAlone/sm90"
        cases = CASES | {"talea_tests": [one, *CASES["talea_tests"]]}
        status, said, receipt = self.finish(
            cases, more=["--sanitizers-alone", "--only", "*EachOutputAlone*"]
        )
        self.assertEqual(status, 0, said)
        check = receipt["check"]
        # By the lane's own choice and on seven ways together, with each of four tools; no case without one.
        self.assertEqual((check["passed"], check["planned"], check["cases"]), (8, 8, []))
        calls = (self.bin / "calls").read_text().splitlines()
        ways = "folded transformed wide slices chunks codes not_ahead".split()
        self.assertEqual(len(set(calls)), 8)
        self.assertEqual(calls.count(" ".join(["racecheck", *(f"--force={w}" for w in ways)])), 1)
        for tool in check["sanitizers"]:
            self.assertIn(f"{one}/{','.join(ways)}", tool["cases"])
            self.assertEqual((tool["passed"], tool["failed"]), (2, 0))
        self.assertIn("sanitizers_alone", check["left_out"])

    def test_a_failure_is_one(self):
        status, _, receipt = self.finish(CASES, {"Sizes.Large": "fails"})
        self.assertEqual(status, 1)
        self.assertEqual(receipt["verdict"], "failed")
        self.assertEqual([c["case"] for c in receipt["check"]["failed_cases"]], ["Sizes.Large"])

    def test_a_disabled_case_fails(self):
        cases = self.with_case("talea_gpu_tests", "Sizes.DISABLED_Larger")
        status, _, receipt = self.finish(cases)
        self.assertEqual(status, 1)
        self.assertEqual([c["why"] for c in receipt["check"]["failed_cases"]], ["0 cases ran"])

    def test_a_lane_that_was_not_built_ends_the_run(self):
        cases = CASES | {"talea_tests": [c for c in CASES["talea_tests"] if "sm90" not in c]}
        status, said, receipt = self.finish(cases)
        self.assertEqual((status, receipt), (1, None))
        self.assertIn("no case matches */sm90", said)

    def test_a_cut_run_leaves_what_it_saw(self):
        self.receipt.write_text('{"check": {"passed": 99}}')  # of an earlier run
        job = self.start(CASES, {"Sizes.Large": "waits"})
        end, seen = time.monotonic() + 60, None
        while time.monotonic() < end and (seen or {}).get("check", {}).get("passed") != PLANNED - 1:
            time.sleep(0.2)
            seen = json.loads(self.receipt.read_text())
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        check = seen["check"]
        said = (seen["verdict"], check["finished"], check["passed"], check["planned"])
        self.assertEqual(said, ("failed", False, PLANNED - 1, PLANNED))


if __name__ == "__main__":
    unittest.main()
