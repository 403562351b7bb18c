# What: docs/cli.md beside the tool itself: subcommands, the flags that a section names, shown outputs.
# Why: a page about a program is right as long as somebody compares them.
# Never: needs files beyond the repository's own.
# usage: test_page.py TALEA_BINARY [unittest arguments]
import os
import pathlib
import re
import shlex
import subprocess
import unittest

from tool import TALEA

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/cli.md").read_text()
SECTIONS = dict(re.findall(r"^## talea (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
ELSEWHERE = {"train", "repro"}  # pages of their own


def told(*words):
    return subprocess.run([TALEA, *words], capture_output=True, text=True, check=True).stdout


class Page(unittest.TestCase):
    def setUp(self):
        listed = told("--help").split("Subcommands:")[1]
        self.subcommands = set(re.findall(r"^ +([a-z]+) {2,}", listed, re.M))

    def test_it_lists_and_describes_every_subcommand(self):
        table = re.findall(r"^\| `([a-z]+)` \|", PAGE, re.M)
        self.assertEqual(sorted(table), sorted(self.subcommands))
        self.assertEqual(set(SECTIONS), self.subcommands - ELSEWHERE)

    def test_the_flags_that_a_section_names_are_there(self):
        for name in ("explain", "doctor", "report", "compare"):  # the others name each other's, too
            known = told(name, "--help")
            for flag in set(re.findall(r"--[a-z][a-z-]+", SECTIONS[name])):
                self.assertIn(flag, known, name)

    def test_the_outputs_that_it_shows_are_real(self):
        """`console` to the letter; `text`, of one machine, by the first word of each line."""
        blocks = re.findall(r"^```(console|text)\n\$ talea (.*)\n((?:.*\n)*?)```$", PAGE, re.M)
        self.assertEqual(len(blocks), 4)
        for kind, command, shown in blocks:
            with self.subTest(command):
                line = f"{shlex.quote(TALEA)} {command}"
                done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, text=True,
                                      capture_output=True, env={**os.environ, "NO_COLOR": "1"})  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
                said, shown = done.stdout.strip().splitlines(), shown.strip().splitlines()
                if kind == "text":  # which lanes are on differs, not which there are
                    said, shown = ([x.split()[:1] for x in y[:-1]] for y in (said, shown))
                self.assertEqual(said, shown)


if __name__ == "__main__":
    unittest.main()
