"""What: tools/soak over programs that only pretend to run cases.
Why: its receipt is a claim of many tries; nothing else in CI starts it, and once nobody could.
Never: needs the built tool, or hours.

usage: soak_test.py
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools/soak"
TESTS = """#!{python}
import sys
kind = {kind!r}
if sys.argv[1] == "--gtest_filter=-*":
    print("built from " + ("1" * 40 if kind == "older" else {revision!r}))
    sys.exit()
lane = sys.argv[1].rsplit("/", 1)[1]
if "Properties" in sys.argv[1]:
    print("250 drawn cases, seed 1\\n400 drawn cases, seed 1\\n650 drawn cases")
elif kind != "silent":
    print(f"lane {{lane}}: 3 accepted, 0 declined, 3000 runs")
if kind == "fails":
    print("[  FAILED  ] Lanes/Options.Each/" + lane)
    sys.exit(1)
"""
# As the tool: a host's lane takes no limit.
TOOL = """#!{python}
import json, sys
if "--limits" in sys.argv:
    sys.exit("--limits: of device lanes only")
keys = ("version", "git_revision", "git_dirty", "build", "host", "libraries", "device")
said = dict.fromkeys(keys, None) | {{"git_revision": {revision!r}}}
json.dump({{"provenance": said}}, open(sys.argv[sys.argv.index("--receipt") + 1], "w"))
"""


class Soak(unittest.TestCase):
    def run_with(self, kind, *words, revision=None):
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            for name, text in (("talea_tests", TESTS), ("talea", TOOL)):
                (at / name).write_text(
                    text.format(python=sys.executable, kind=kind, revision=revision)
                )
                (at / name).chmod(0o755)
            receipt = at / "receipt.json"
            done = subprocess.run(
                [sys.executable, SCRIPT, "--no-fuzz", "--bin", at, *words, receipt],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            return done, json.loads(receipt.read_text()) if receipt.exists() else None

    def test_rounds_until_enough_was_seen(self):
        done, receipt = self.run_with("", "--share", "0.1", "--lane", "cpu")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        drawn, runs = receipt["check"]["cases"]
        self.assertEqual((drawn["least_of_a_property"], drawn["rounds"]), (1000, 4))
        self.assertEqual((runs["runs"], runs["rounds"]), (12000, 4))
        self.assertIn("rehearsal", receipt["title"])
        self.assertIn("cpu, without fuzzers", receipt["title"])
        argv = receipt["provenance"]["argv"]  # folders of the machine are no part of it
        self.assertEqual((argv[0], argv[-1]), ("soak", "receipt.json"))
        self.assertEqual([word for word in argv if "/" in word], [])

    def test_a_failure_is_named_with_its_seed_and_ends_nothing(self):
        done, receipt = self.run_with("fails", "--share", "0.1", "--lane", "cpu", "--seed", "5")
        self.assertEqual((done.returncode, receipt["verdict"]), (1, "failed"))
        drawn, runs = receipt["check"]["cases"]
        self.assertEqual(runs["failures"][0], "Lanes/Options.Each/cpu with seed 5")
        self.assertEqual((drawn["rounds"], runs["rounds"], len(runs["failures"])), (4, 4, 4))

    def test_runs_that_nobody_saw_do_not_count(self):
        done, receipt = self.run_with("silent", "--share", "0.1", "--lane", "cpu")
        self.assertEqual(done.returncode, 1)
        self.assertFalse(receipt["check"]["cases"][1]["passed"])

    def test_what_the_time_cut_does_not_pass(self):
        done, receipt = self.run_with("", "--lane", "cpu", "--seconds", "0")
        self.assertEqual((done.returncode, receipt["verdict"]), (1, "failed"))
        drawn, runs = receipt["check"]["cases"]
        self.assertEqual((drawn["drawn"], runs["runs"], runs["asked"]), (0, 0, 100_000))

    def test_a_tool_of_another_revision_speaks_for_nothing(self):
        done, receipt = self.run_with("", "--share", "0.01", "--lane", "cpu", revision="0" * 40)
        self.assertEqual((done.returncode, receipt), (1, None))
        self.assertIn("built from 000", done.stderr)

    def test_tests_of_another_revision_than_the_tool(self):
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=SCRIPT.parent, capture_output=True, text=True
        ).stdout.strip()
        for kind, status in (("older", 1), ("", 0)):
            done, receipt = self.run_with(
                kind, "--share", "0.01", "--lane", "cpu", revision=revision
            )
            self.assertEqual(
                (done.returncode, receipt is None), (status, bool(status)), done.stderr
            )
        self.assertNotIn("1" * 40, done.stderr)

    def test_neither_half_is_no_soak(self):
        done, receipt = self.run_with("", "--no-lanes")
        self.assertEqual((done.returncode, receipt), (2, None))

    def test_each_lane_has_rounds_of_its_own(self):
        _, receipt = self.run_with("", "--share", "0.01", "--lane", "cpu", "--lane", "reference")
        lanes = [case["lane"] for case in receipt["check"]["cases"]]
        self.assertEqual(lanes, ["cpu", "cpu", "reference", "reference"])


if __name__ == "__main__":
    unittest.main()
