"""What: tools/check_receipts and tools/stale_receipts over a small repository, each rule broken once.
Why: a checker of provenance that nothing can fail checks nothing.
Never: needs the built tool or the real receipts.

usage: receipts_test.py
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BUILD = {"compiler": "c", "type": "Release", "flags": "", "options": []}


class Small(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.git("init", "-q")
        self.write("src/device/cpu/a.cpp", "int a;\n")
        self.first = self.commit()
        self.receipt()

    def git(self, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", self.root, *who, *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"GIT_COMMITTER_DATE": "2026-11-21T08:00:00Z"},
        )
        return done.stdout.strip()

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "one")
        return self.git("rev-parse", "HEAD")

    def receipt(self, **changed):
        at = {
            "git_revision": self.first,
            "git_dirty": False,
            "build": BUILD,
            "device": None,
            "start_time": "2026-11-21T09:00:00.000Z",
            "end_time": "2026-11-21T09:01:00.000Z",
        }
        run = {"name": "cpu", "lane": "cpu", "time": {"median_ms": 100, "n": 10}}
        document = {"kind": "bench", "provenance": at, "bench": {"runs": [run]}}
        for place, value in changed.items():
            *path, last = place.split("__")
            part = document
            for key in path:
                part = part[int(key)] if isinstance(part, list) else part[key]
            part[last] = value
        self.write("receipts/cpu/a.json", json.dumps(document))

    def run_tool(self, name, *words):
        done = subprocess.run(
            [sys.executable, TOOLS / name, "--root", self.root, *words],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def fails_by(self, rule, **changed):
        self.receipt(**changed)
        status, said = self.run_tool("check_receipts")
        self.assertEqual(status, 1, said)
        self.assertIn(f"receipts/cpu/a.json: {rule}:", said)

    def test_a_sound_receipt_passes(self):
        self.assertEqual(self.run_tool("check_receipts")[0], 0)
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 0)

    def test_a_revision_that_is_not_in_history(self):
        self.fails_by("revision", provenance__git_revision="0" * 40)
        self.fails_by("revision", provenance__git_revision="told")
        self.fails_by("revision", provenance__git_revision=self.first[:12])

    def test_a_commit_beside_history(self):
        self.git("checkout", "-q", "-b", "beside")
        beside = self.commit()
        self.git("checkout", "-q", "-")
        self.fails_by("revision", provenance__git_revision=beside)

    def test_a_tree_with_changes(self):
        self.fails_by("clean", provenance__git_dirty=True)
        self.fails_by("git", provenance__git_dirty=None)

    def test_a_script_that_does_not_name_its_library(self):
        self.fails_by("library", provenance__build={**BUILD, "type": "wheel"})
        library = {"version": "1", "git_revision": "0" * 40, "git_dirty": False}
        self.fails_by("library", provenance__library=library)
        for dirty in (True, None):
            library = {"version": "1", "git_revision": self.first, "git_dirty": dirty}
            self.fails_by("library", provenance__library=library)

    def test_a_start_that_is_the_end(self):
        self.fails_by("span", provenance__end_time="2026-11-21T09:00:00.004Z")
        self.fails_by("span", provenance__start_time="")

    def test_a_span_shorter_than_what_was_timed(self):
        self.fails_by("span", provenance__end_time="2026-11-21T09:00:00.300Z")  # ten runs of 0.1 s

    def test_a_run_of_a_revision_to_come_and_one_that_has_not_ended(self):
        self.fails_by("span", provenance__start_time="2026-11-21T07:50:00.000Z")
        self.fails_by("span", provenance__end_time="2999-01-01T00:00:00.000Z")
        self.fails_by("span", provenance__start_time="2026-11-21T09:02:00.000Z")

    def test_a_verdict_that_its_cases_do_not_bear(self):
        self.fails_by("verdict", verdict="failed")
        for right, said in ((False, (2, 0)), (True, (1, 1))):
            cases = [{"name": "a", "passed": True}, {"name": "b", "passed": right}]
            check = {"passed": said[0], "failed": said[1], "cases": cases}
            for verdict in ("passed", "failed"):
                self.fails_by("verdict", verdict=verdict, check=check)
        for section in ("gates", "mutants", "sentinels"):
            self.fails_by("verdict", verdict="passed", **{section: [{"passed": False}]})
        self.receipt(verdict="failed", gates=[{"passed": False}])
        self.assertEqual(self.run_tool("check_receipts")[0], 0)

    def test_numbers_that_are_none(self):
        for value in ("nan", -1, float("inf"), float("nan"), "3"):
            self.fails_by("numbers", bench__runs__0__seconds=value)
            self.fails_by("numbers", bench__runs__0__asked={"runs": [1, value]})
        self.fails_by("numbers", bench__runs__0__time__p20_ms=101, bench__runs__0__time__p80_ms=102)
        self.fails_by("numbers", bench__runs__0__time__p20_ms=98, bench__runs__0__time__p80_ms=99)
        self.receipt(bench__runs__0__time__p20_ms=99, bench__runs__0__time__p80_ms=101)
        self.assertEqual(self.run_tool("check_receipts")[0], 0)

    def test_a_mean_or_a_ratio_that_its_rounds_do_not_bear(self):
        """Of two rounds and what they are divided by; each figure wrong once."""
        run = {"name": "cpu", "sustained_ms": [90, 110], "time": {"median_ms": 100, "n": 2},
               "limit_ms": 50, "ratio": 2, "sustained_ratio": 1.5, "sustained_ratios": [1.4, 1.6]}  # fmt: skip
        self.receipt(bench__runs=[run])
        self.assertEqual(self.run_tool("check_receipts")[0], 0)
        for wrong in (
            {"time": {"median_ms": 101, "n": 2}, "ratio": 2.02},
            {"ratio": 1.9},
            {"sustained_ratio": 1.4},
        ):
            self.fails_by("rounds", bench__runs=[run | wrong])

    def test_a_device_that_nobody_names(self):
        self.fails_by("device", bench__runs__0__lane="sm90")
        self.receipt()
        (self.root / "receipts/cpu/a.json").rename(self.root / "receipts/cpu/h200.json")
        status, said = self.run_tool("check_receipts")
        self.assertEqual(status, 1, said)
        self.assertIn("receipts/cpu/h200.json: device:", said)

    def test_a_folder_of_the_machine(self):
        self.fails_by("folders", title="/home/somebody/x")

    def test_a_known_gap_stands_until_it_is_closed(self):
        self.write("receipts/gaps.txt", "cpu/*.json | git | 2026-11-21 | the reason\n")
        self.receipt(provenance__git_dirty=None)
        self.assertEqual(self.run_tool("check_receipts")[0], 0)
        self.fails_by("clean", provenance__git_dirty=True)  # nobody to ask is not changed sources
        self.write("receipts/gaps.txt", "cpu/*.json | git | 2026-11-20 | the reason\n")
        self.fails_by("git", provenance__git_dirty=None)  # begun later than the gap is known of
        self.write("receipts/gaps.txt", "cpu/*.json | git | 2026-11-21 | the reason\n")
        self.receipt()
        status, said = self.run_tool("check_receipts")
        self.assertEqual(status, 1)
        self.assertIn("any more", said)

    def test_code_that_changed_since(self):
        self.write("src/device/cpu/a.cpp", "int b;\n")
        self.commit()
        status, said = self.run_tool("stale_receipts", "--check")
        self.assertEqual(status, 1)
        self.assertIn("src/device/cpu/a.cpp: NO WHY", said)
        self.write("receipts/older.txt", "cpu/*.json | 2026-11-20 | no quiet machine\n")
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 1)  # begun the day after
        self.write("receipts/older.txt", "cpu/*.json | 2026-11-21 | no quiet machine\n")
        status, said = self.run_tool("stale_receipts", "--check")
        self.assertEqual(status, 0)
        self.assertIn("no quiet machine", said)

    def changed_listed(self, name, old, new, moved=""):
        """A receipt of old text, which changes and may move: listed as older than its code."""
        self.write(name, old)
        self.first = self.commit()
        self.receipt(bench__runs__0__lane="sm90", provenance__device={"name": "a chip"})
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 0)
        if moved:
            (self.root / name).unlink()
        self.write(moved or name, new)
        self.commit()
        status, said = self.run_tool("stale_receipts", "--check")
        self.assertEqual(status, 1, said)
        self.assertIn(moved or name, said)

    def test_code_that_all_lanes_share_and_headers_of_a_device(self):
        self.changed_listed("src/algebra/a.hpp", "int a;\n", "int b;\n")
        self.changed_listed("src/device/sm90/a.cuh", "int a;\n", "int b;\n")

    def test_the_state_of_another_operator(self):
        self.write("src/algebra/scan_state.hpp", "int a;\n")
        self.commit()
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 0)
        self.write("src/algebra/row_state.hpp", "int a;\n")
        self.commit()
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 1)

    def test_the_operator_is_known_by_what_a_receipt_is_called(self):
        names = {
            "scan_peers": "mamba3",
            "attention_peers": "sparse_attention",
            "peers": "linear_cross_entropy",
        }
        for changed in names.values():
            self.write(f"src/ops/{changed}/op.cpp", "int a;\n")
        self.first = self.commit()
        for changed in names.values():
            self.write(f"src/ops/{changed}/op.cpp", "int b;\n")
            self.commit()
            for name in (*names, "h200/tests"):
                self.receipt()
                file = self.root / f"receipts/cpu/{name}.json"
                file.parent.mkdir(exist_ok=True)
                (self.root / "receipts/cpu/a.json").rename(file)
                status, said = self.run_tool("stale_receipts", "--check")
                file.unlink()
                self.assertEqual(status, names.get(name, changed) == changed, (name, changed, said))
            self.git("revert", "--no-edit", "HEAD")

    def test_a_script_that_is_newer_than_its_library(self):
        library = {"version": "1", "git_revision": self.first, "git_dirty": False}
        self.write("src/device/cpu/a.cpp", "int b;\n")
        self.first = self.commit()
        self.receipt()
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 0)
        self.receipt(provenance__library=library)
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 1)

    def test_code_that_moved_and_changed(self):
        lines = [f"int a{i};\n" for i in range(100)]
        changed = "".join(lines[:50] + ["int b;\n"] + lines[51:])
        folder = "src/ops/linear_cross_entropy/sm90"
        self.changed_listed(f"{folder}/a.cu", "".join(lines), changed, f"{folder}/moved.cu")

    def test_code_of_another_lane_or_only_moved(self):
        self.write("src/ops/linear_cross_entropy/sm90/a.cpp", "int b;\n")
        (self.root / "src/device/cpu/a.cpp").rename(self.root / "src/device/cpu/moved.cpp")
        self.commit()
        self.assertEqual(self.run_tool("stale_receipts", "--check")[0], 0)


if __name__ == "__main__":
    unittest.main()
