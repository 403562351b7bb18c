"""What: kill_table.py over a program that only pretends to have bugs planted.
Why: the receipt of --device is what the documents cite, and no machine of the CI has a GPU or the
     lanes whose plans have bugs.
Never: needs a device or a compiler.

usage: kill_table_test.py
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).with_name("kill_table.py")
MUSEUM = """
| B1 | a cause | `Options.Each` | `b1_first` |
| B2 | another | `Edges.Each`, `Options.Each` | `b2_second` |

| lane | planted |
|---|---|
| `cuda` | `b1_first`, `b2_second` |
| `sm90` | `b2_second` |
"""
PROGRAM = """#!{python}
import sys
if "--gtest_list_tests" in sys.argv:
    for suite in ("Options", "Edges"):
        print(f"Lanes/{{suite}}.", *("  Each/" + lane for lane in ("cuda", "sm90", "cpu")), sep=chr(10))
    sys.exit()
if "--list-mutants" in sys.argv:
    print(*(f"d{{i}}\tdevice: a cause" for i in range(9)), sep=chr(10))
    print("b1_first\tplan: a cause", "b2_second\tanother", sep=chr(10))
    sys.exit()
words = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
lane = words["gtest_filter"].rsplit("/", 1)[1]
kinds = {kinds!r}
kind = kinds.get((lane, words.get("mutant", "")), "")
kind = kinds.get((lane, words.get("mutant", ""), words.get("force", "")), kind)
if kind == "refuses":
    sys.exit(2)
if kind == "fails":
    print("[  FAILED  ] Lanes/Options.Each/" + lane)
    sys.exit(1)
print("[  PASSED  ] 0 tests." if kind == "empty" else "[  PASSED  ] 1 test.")
"""
TOOL = """#!{python}
import json, sys
keys = ("version", "git_revision", "git_dirty", "build", "host", "libraries")
said = dict.fromkeys(keys, "pretended") | {{"argv": ["/a/folder"], "device": {{"clocks": 1}}}}
json.dump({{"provenance": said}}, open(sys.argv[sys.argv.index("--receipt") + 1], "w"))
"""
KILLED = {("cuda", "b1_first"): "fails", ("cuda", "b2_second"): "fails"}
KILLED |= {("sm90", "b2_second"): "fails"}


class OnDevice(unittest.TestCase):
    def run_with(self, kinds, page=MUSEUM):
        with tempfile.TemporaryDirectory() as folder:
            at = {name: Path(folder) / name for name in ("program", "tool", "page", "receipt")}
            at["page"].write_text(page)
            for name, text in (("program", PROGRAM), ("tool", TOOL)):
                at[name].write_text(text.format(python=sys.executable, kinds=kinds))
                at[name].chmod(0o755)
            order = (at["receipt"], at["program"], at["page"], at["tool"])
            done = subprocess.run(
                [sys.executable, SCRIPT, "--device", *order],
                capture_output=True,
                text=True,
                timeout=60,
            )
            receipt = at["receipt"]
            return done, json.loads(receipt.read_text()) if receipt.exists() else None

    def test_all_are_killed(self):
        done, receipt = self.run_with(KILLED)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((receipt["verdict"], receipt["check"]["passed"]), ("passed", 3))
        self.assertEqual(receipt["check"]["cases"][2]["killed_by"], "Lanes/Options.Each/sm90")
        self.assertEqual(receipt["provenance"]["argv"][:2], ["kill_table.py", "--device"])
        self.assertLess(receipt["provenance"]["start_time"], receipt["provenance"]["end_time"])

    def test_a_survivor_fails_the_table(self):
        done, receipt = self.run_with(KILLED | {("sm90", "b2_second"): ""})
        self.assertEqual(done.returncode, 1)
        self.assertEqual((receipt["verdict"], receipt["check"]["passed"]), ("failed", 2))
        self.assertIn("SURVIVES", done.stdout)

    def test_a_refusal_is_no_kill(self):
        done, receipt = self.run_with(KILLED | {("cuda", "b1_first"): "refuses"})
        self.assertNotEqual(done.returncode, 0)
        self.assertIsNone(receipt)

    def test_without_a_bug_the_cases_must_run_and_pass(self):
        for kind in ("fails", "empty"):
            done, receipt = self.run_with(KILLED | {("sm90", ""): kind})
            self.assertEqual(done.returncode, 1, kind)
            self.assertEqual((receipt["verdict"], receipt["check"]["passed"]), ("failed", 2), kind)
            self.assertIn("Edges.Each/sm90", receipt["check"]["fail_without_a_bug"], kind)
            self.assertIn(
                "Options.Each/sm90 --force=folded", receipt["check"]["fail_without_a_bug"]
            )

    def test_a_bug_whose_tests_no_lane_runs_survives(self):
        page = MUSEUM.replace("`Options.Each` | `b1_first`", "`Other.Each` | `b1_first`")
        done, receipt = self.run_with(KILLED, page)
        self.assertEqual((done.returncode, receipt["check"]["passed"]), (1, 2))

    def test_a_way_in_which_a_test_fails_anyway_kills_nothing_there(self):
        done, receipt = self.run_with(KILLED | {("sm90", "", "folded"): "fails"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        row = receipt["check"]["cases"][2]
        self.assertEqual(row["killed_by"], "Lanes/Options.Each/sm90")
        self.assertEqual(row["killed_in_the_way_of_the_benchmarks_by"], "")
        self.assertEqual(len(receipt["check"]["fail_without_a_bug"]), 2)

    def test_a_bug_that_only_the_size_decides_is_killed_in_the_own_way(self):
        done, receipt = self.run_with(KILLED | {("cuda", "b1_first", "one_term"): ""})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        row = receipt["check"]["cases"][0]
        self.assertEqual((row["passed"], row["killed_in_the_way_of_the_benchmarks_by"]), (True, ""))


class OnHost(unittest.TestCase):
    KILLED = {("reference:Options.Each", bug): "fails" for bug in ("b1_first", "b2_second")}

    def run_with(self, kinds, page=MUSEUM, *more):
        with tempfile.TemporaryDirectory() as folder:
            program, at = Path(folder) / "program", Path(folder) / "page"
            at.write_text(page)
            program.write_text(PROGRAM.format(python=sys.executable, kinds=kinds))
            program.chmod(0o755)
            order = [sys.executable, SCRIPT, program, at, *more]
            return subprocess.run(order, capture_output=True, text=True, timeout=60)

    def test_a_plan_has_bugs_where_its_tests_are(self):
        done = self.run_with(self.KILLED)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 of 2 killed", done.stdout)
        done = self.run_with(self.KILLED | {("reference:Options.Each", "b1_first"): ""})
        self.assertEqual(done.returncode, 1)
        self.assertIn("SURVIVES: plan: a cause", done.stdout)

    def test_a_plan_of_a_lane_that_is_not_built_has_none(self):
        page = MUSEUM.replace("`Options.Each` | `b1_first`", "`Other.Each` | `b1_first`")
        done = self.run_with(self.KILLED, page)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("1 of 1 killed", done.stdout)

    def test_those_named_alone(self):
        done = self.run_with(self.KILLED, MUSEUM, "b1_first")
        self.assertIn("1 of 1 killed", done.stdout)


if __name__ == "__main__":
    unittest.main()
