# What: `talea train` killed, interrupted, without disk and without a reader.
# Why: nothing may be lost: at most the update in hand, never a receipt, never a half file.
# Never: counts a run that failed by itself as killed, or a check that did not happen as passed.
# usage: interruptions.py TALEA_BINARY [unittest arguments]; TALEA_KILLS sets the number of kills.
import json
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TALEA = os.path.abspath(sys.argv.pop(1))
KILLS = int(os.environ.get("TALEA_KILLS", "200"))
SMALL = "--hidden 16 --ffn 16 --heads 2 --layers 1 --grad-accum 2 --total-tokens 56 --twins 1"


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        draw = random.Random(5)
        text = "".join(draw.choice("etaoin shrdlu\n") for _ in range(6000))
        (self.folder / "text.txt").write_text(text)

    def start(self, steps, *more, **options):
        flags = f"--text text.txt --epochs 1000 --max-steps {steps} {SMALL} --quiet".split()
        return subprocess.Popen(
            [TALEA, "train", *flags, *more],
            cwd=self.folder,
            stdout=options.pop("stdout", subprocess.DEVNULL),
            stderr=subprocess.PIPE,
            **options,
        )

    def train(self, steps, *more, code=0, **options):
        with self.start(steps, *more, **options) as child:
            _, said = child.communicate(timeout=300)
        self.assertEqual(child.returncode, code, said.decode())
        return said.decode()

    def bytes_of(self, name):
        return (self.folder / name).read_bytes()

    def step_of(self, folder):
        """Updates in the checkpoint; 0: there is none."""
        path = self.folder / folder / "checkpoint.safetensors"
        if not path.exists():
            return 0
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        begin = json.loads(raw[8 : 8 + size])["candidate/counters"]["data_offsets"][0]
        return struct.unpack("<q", raw[8 + size + begin : 16 + size + begin])[0]

    def complete(self, receipt):
        """The receipt is whole: the tool itself reads and validates it."""
        subprocess.run([TALEA, "compare", receipt, receipt], cwd=self.folder, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        return json.loads(self.bytes_of(receipt))


class Kills(Case):
    def test_kills_lose_at_most_one_step_and_never_a_receipt(self):
        steps = 60
        start = time.monotonic()
        self.train(steps, "--checkpoint", "whole", "--json-out", "whole.json")
        span = time.monotonic() - start
        whole = self.bytes_of("whole/checkpoint.safetensors")
        draw = random.Random(9)
        killed = finished = saved = 0
        while killed < KILLS:
            before = self.step_of("part")
            child = self.start(steps, "--checkpoint", "part", "--resume", "--json-out", "part.json",
                               "--jsonl", stdout=subprocess.PIPE)  # fmt: skip
            time.sleep(draw.uniform(0, 0.6 * span))
            child.kill()
            lines, said = child.communicate()
            reported = [json.loads(s)["step"] for s in lines.splitlines(True) if s.endswith(b"\n")]
            if child.returncode == -signal.SIGKILL:
                killed += 1
            else:
                self.assertEqual(child.returncode, 0, said.decode())
            saved = self.step_of("part")
            # The update that was reported last may not be saved yet; every one before it is.
            self.assertGreaterEqual(saved, max([before, *(s - 1 for s in reported)]))
            if finished or child.returncode == 0:
                self.assertTrue(self.complete("part.json")["train"]["completed"])
            if child.returncode == 0:
                finished += 1
                self.assertEqual(self.bytes_of("part/checkpoint.safetensors"), whole)
                for name in ("checkpoint.safetensors", "steps.jsonl"):
                    (self.folder / "part" / name).unlink()
        print(f"{killed} kills, {finished} runs finished between them")
        self.assertGreater(finished, 0)
        self.train(steps, "--checkpoint", "part", "--resume", "--json-out", "part.json")
        self.assertEqual(self.bytes_of("part/checkpoint.safetensors"), whole)
        # What the killed ones were writing is cleared away.
        self.assertEqual(len(list((self.folder / "part").iterdir())), 2)
        # The same curves, although they came in pieces.
        curves = [self.complete(f)["train"]["curves"] for f in ("whole.json", "part.json")]
        self.assertEqual(*curves)

    def test_a_signal_saves_the_update_in_hand(self):
        self.train(9, "--checkpoint", "whole")
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            child = self.start(100000, "--checkpoint", "part", "--json-out", "part.json", "--jsonl",
                               stdout=subprocess.PIPE)  # fmt: skip
            for _ in range(3):
                child.stdout.readline()
            child.send_signal(number)
            lines, said = child.communicate(timeout=60)
            self.assertEqual(child.returncode, code, said.decode())
            train = self.complete("part.json")["train"]
            self.assertFalse(train["completed"])
            self.assertEqual(self.step_of("part"), train["updates"])
            for file in (self.folder / "part").iterdir():
                file.unlink()


class NoRoom(Case):
    @staticmethod
    def limit(size):
        def apply():  # in the child: a write past `size` fails, as on a full disk
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        return apply

    def test_no_room_for_the_journal(self):
        # Long enough for the journal to be the larger file.
        self.train(700, "--checkpoint", "part", "--checkpoint-every", "700")
        sizes = [os.path.getsize(self.folder / "part" / f) for f in
                 ("steps.jsonl", "checkpoint.safetensors")]  # fmt: skip
        self.assertGreater(*sizes)
        said = self.train(800, "--checkpoint", "part", "--resume", code=4,
                          preexec_fn=self.limit(sizes[0] + 10000))  # fmt: skip
        self.assertIn("steps.jsonl", said)
        reached = self.step_of("part")
        self.assertGreater(reached, 700)
        self.train(reached + 3, "--checkpoint", "part", "--resume")
        self.train(reached + 3, "--checkpoint", "again", "--checkpoint-every", "1000")
        name = "checkpoint.safetensors"
        self.assertEqual(self.bytes_of(f"part/{name}"), self.bytes_of(f"again/{name}"))

    def test_no_room_for_the_checkpoint(self):
        said = self.train(3, "--checkpoint", "state", code=4, preexec_fn=self.limit(20000))
        self.assertIn("checkpoint.safetensors", said)
        self.assertEqual(os.listdir(self.folder / "state"), ["steps.jsonl"])
        self.train(3, "--checkpoint", "state", "--resume")
        self.assertEqual(self.step_of("state"), 3)

    def test_no_room_for_the_receipt(self):
        self.train(2, "--json-out", "r.json")
        old = self.bytes_of("r.json")
        said = self.train(40, "--json-out", "r.json", code=4, preexec_fn=self.limit(len(old)))
        self.assertIn("r.json", said)
        self.assertEqual(self.bytes_of("r.json"), old)
        self.assertEqual(sorted(os.listdir(self.folder)), ["r.json", "text.txt"])
        said = self.train(2, "--json-out", "r.json", "--report", "r.html", code=4,
                          preexec_fn=self.limit(len(old) + 200))  # fmt: skip
        self.assertIn("r.html", said)
        self.complete("r.json")
        self.assertFalse((self.folder / "r.html").exists())

    def test_a_full_stdout_is_a_failure(self):
        with open("/dev/full", "wb") as full:
            self.train(40, "--jsonl", "--json-out", "r.json", code=4, stdout=full)
            self.assertFalse((self.folder / "r.json").exists())
            # The receipt is written before its summary is printed.
            self.train(2, "--json-out", "r.json", code=4, stdout=full)
            self.complete("r.json")

    def test_a_reader_that_went_away_is_none(self):
        child = self.start(200, "--jsonl", "--json-out", "r.json", "--checkpoint", "state",
                           stdout=subprocess.PIPE)  # fmt: skip
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read()
        child.stderr.close()
        self.assertEqual(child.wait(), 0, said.decode())
        train = self.complete("r.json")["train"]
        self.assertTrue(train["completed"])
        self.assertEqual((train["updates"], self.step_of("state")), (200, 200))


if __name__ == "__main__":
    unittest.main()
