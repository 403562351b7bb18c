# What: ranks from the command line: threads, processes under mpirun, and a rank that never comes.
# Why: --ranks and mpirun must give what one rank gives, in one receipt, and exit 4 by name.
# Never: needs more than the standard library; without MPI the threads alone are tested, and said.
# usage: test_ranks.py TALEA_BINARY mpi|none [unittest arguments]
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import unittest

import tool

ENGINE = sys.argv.pop(1)

TOKENS, HIDDEN, VOCAB = 24, 5, 37
# With recovery and to the end: neither a rank that is killed nor one that fails ends the others.
RECOVERY = ["--enable-recovery", "--continuous"]


class Ranks(tool.Case):
    def setUp(self):
        super().setUp()
        draw = random.Random(7)
        floats = [draw.gauss(0, 1) for _ in range((TOKENS + VOCAB) * HIDDEN)]
        tool.floats(self.at("x.npy"), (TOKENS, HIDDEN), floats[: TOKENS * HIDDEN])
        tool.floats(self.at("w.npy"), (VOCAB, HIDDEN), floats[TOKENS * HIDDEN :])
        tool.ids(self.at("y.npy"), [draw.randrange(VOCAB) for _ in range(TOKENS)])

    def command(self, *more):
        flags = ["--hidden", "x.npy", "--weight", "w.npy", "--targets", "y.npy"]
        flags += ["--label-smoothing", "0.1", "--outputs", "loss,lse,argmax,topk:3,dx,dw"]
        return ["loss", *flags, *more]

    def compare(self, a, b):
        left, right = tool.safetensors(self.at(a)), tool.safetensors(self.at(b))
        self.assertEqual(left.keys(), right.keys())
        for name, (shape, values) in left.items():
            self.assertEqual(shape, right[name][0])
            error = math.sqrt(
                sum((x - y) ** 2 for x, y in zip(values, right[name][1], strict=True))
            )
            size = math.sqrt(sum(x * x for x in values))
            self.assertLessEqual(error, 1e-5 * size, name)

    def check_receipt(self, file, ranks, engine):
        with open(self.at(file)) as text:
            receipt = json.load(text)
        (call,) = receipt["calls"]
        reductions = call["reductions"]
        self.assertEqual(reductions["collective"], engine)
        self.assertEqual([s["rank"] for s in reductions["shards"]], list(range(ranks)))
        self.assertEqual(reductions["shards"][0]["begin"], 0)
        self.assertEqual(reductions["shards"][-1]["end"], VOCAB)
        notes = [n for n in call["notes"] if re.match(r"rank \d+ of \d+: vocabulary rows", n)]
        self.assertEqual(len(notes), ranks)

    def test_threads_equal_one_rank(self):
        self.talea(*self.command("--out", "one.safetensors"))
        for ranks in (2, 3, 8):
            out, receipt = f"{ranks}.safetensors", f"{ranks}.json"
            flags = ["--ranks", str(ranks), "--out", out, "--receipt", receipt]
            self.talea(*self.command(*flags))
            self.compare("one.safetensors", out)
            self.check_receipt(receipt, ranks, "threads")
            self.talea(*self.command(*flags, "--sequence-parallel"))
            self.compare("one.safetensors", out)

    def test_a_world_of_one_has_the_flags_of_a_world(self):
        self.talea(*self.command("--out", "one.safetensors"))
        more = ["--ranks", "1", "--sequence-parallel", "--rank-timeout", "5"]
        self.talea(*self.command(*more, "--out", "world.safetensors"))
        self.compare("one.safetensors", "world.safetensors")

    def test_many_more_ranks_than_words(self):
        self.talea(*self.command("--out", "one.safetensors"))
        self.talea(*self.command("--out", "many.safetensors", "--ranks", "200"))
        self.compare("one.safetensors", "many.safetensors")

    def test_tokens_that_do_not_divide_are_named(self):
        done = self.talea(*self.command("--ranks", "5", "--sequence-parallel"), code=2)
        self.assertIn("24 tokens do not divide among 5 ranks", done.stderr)

    def test_the_dtype_of_the_sum_of_dx_reaches_the_lanes(self):
        more = ["--lane", "cpu"]
        self.talea(*self.command("--ranks", "2", "--dx-sum", "fp32", *more))
        done = self.talea(*self.command("--ranks", "2", "--dx-sum", "bf16", *more), code=3)
        self.assertIn("dx_sum = bf16", done.stderr)
        self.assertIn("--ranks", self.talea(*self.command("--dx-sum", "bf16"), code=2).stderr)

    def test_check_names_the_factor_of_local_means(self):
        done = self.talea("check", "--ranks", "8", "--lane", "cpu")
        self.assertIn("8 ranks x 1024 tokens: with the local mean the gradient is 8 x", done.stdout)
        self.assertIn("with the global mean 1 x", done.stdout)

    def test_check_under_sequence_parallelism(self):
        self.talea("check", "--ranks", "3", "--lane", "cpu", "--sequence-parallel")

    def test_training_keeps_its_losses(self):
        with open(self.at("text"), "w") as text:
            text.write("the quick brown fox jumps over the lazy dog; " * 50)
        base = ["train", "--text", "text", "--preset", "smoke", "--max-steps", "20"]
        curves = []
        for ranks in ("1", "4"):
            done = self.talea(*base, "--ranks", ranks, "--jsonl", "--loss-lane", "cpu")
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(len(lines), 20)
            curves.append([line["loss"] for line in lines])
        for a, b in zip(*curves, strict=True):
            self.assertLessEqual(abs(a - b), 1e-5 * abs(a))

    def test_bench_and_plan(self):
        shape = ["--tokens", "32", "--hidden", "16", "--vocab", "200"]
        self.talea("bench", *shape, "--ranks", "2", "--repeats", "1", "--receipt", "b.json")
        self.assertEqual(self.receipt_engine("b.json"), "threads")
        done = self.talea("explain", *shape, "--ranks", "4096", "--nodes", "512", "--json")
        plan = json.loads(done.stdout)["plan"]
        self.assertEqual([line["ranks"] for line in plan], [2**i for i in range(13)])
        self.assertEqual(plan[-1]["nodes"], 512)

    def plan(self, *more, code=0):
        shape = ["--tokens", "8192", "--hidden", "4096", "--vocab", "128256", "--dtype", "bf16"]
        done = self.talea("explain", *shape, *more, "--json", code=code)
        return json.loads(done.stdout)["plan"] if code == 0 else done.stderr

    def test_the_plan_follows_its_rates_and_flags(self):
        one, two, four = self.plan("--ranks", "4")
        self.assertEqual((one["efficiency"], one["dx_wire_bytes"]), (1, 0))
        self.assertAlmostEqual(four["products_s"], one["products_s"] / 4)
        # An all-reduce of S bytes sends 2 (R - 1) / R S from each rank.
        for line, share in ((two, 1), (four, 1.5)):
            self.assertEqual(line["dx_wire_bytes"], share * 8192 * 4096 * 4)
        for line in (two, four):
            parts = line["products_s"] + line["states_s"] + line["dx_exposed_s"] + line["hidden_s"]
            self.assertAlmostEqual(line["seconds"], parts)
        beside = self.plan("--ranks", "4", "--dx-beside-dw")[-1]
        self.assertEqual(beside["dx_exposed_s"], 0)
        self.assertLess(beside["seconds"], four["seconds"])
        spread = self.plan("--ranks", "4", "--sequence-parallel")[-1]
        self.assertEqual(spread["hidden_bytes"], 8192 // 4 * 4096 * 2)
        self.assertGreater(spread["hidden_wire_bytes"], 0)
        fast = self.plan("--ranks", "4", "--link-gb", "1000", "--link-us", "10")[-1]
        self.assertLess(fast["seconds"], four["seconds"])
        slow = self.plan("--ranks", "4", "--product-tflops", "67")[-1]
        self.assertGreater(slow["products_s"], 9 * four["products_s"])

    def test_plans_that_cannot_be_are_named(self):
        said = self.plan("--ranks", "6", "--nodes", "4", code=2)
        self.assertIn("--nodes 4: 6 ranks do not divide among them", said)
        for flags in (["--ranks", "0"], ["--ranks", "4097"], ["--ranks", "2", "--link-gb", "0"]):
            self.assertIn(flags[-2], self.plan(*flags, code=2))

    def receipt_engine(self, file):
        with open(self.at(file)) as text:
            return json.load(text)["calls"][0]["reductions"]["collective"]


class Doctor(tool.Case):
    def test_knows_the_plugin(self):
        found = json.loads(self.talea("doctor", "--json").stdout)["machine"]
        state = next(f["state"] for f in found if f["subject"] == "MPI")
        self.assertTrue(state.startswith("plug-in found" if ENGINE == "mpi" else "no plug-in"))


class Processes(Ranks):
    """The same over MPI; only where the plug-in was built."""

    def mpirun(self, arguments, code, *more):
        done = subprocess.run(
            [*tool.MPIRUN, *arguments],
            cwd=self.folder.name,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def test_processes_equal_one_rank(self):
        self.talea(*self.command("--out", "one.safetensors"))
        flags = ["--out", "mpi.safetensors", "--receipt", "mpi.json", "--json"]
        done = self.mpirun(["-n", "3", tool.TALEA, *self.command(*flags)], 0)
        json.loads(done.stdout)  # one receipt, from rank 0
        self.compare("one.safetensors", "mpi.safetensors")
        self.check_receipt("mpi.json", 3, "mpi")
        self.mpirun(["-n", "3", tool.TALEA, *self.command(*flags, "--sequence-parallel")], 0)
        self.compare("one.safetensors", "mpi.safetensors")

    def test_check_and_training(self):
        done = self.mpirun(["-n", "2", tool.TALEA, "check", "--lane", "cpu"], 0)
        self.assertEqual(done.stdout.count("passed: "), 1)
        with open(self.at("text"), "w") as text:
            text.write("the quick brown fox jumps over the lazy dog; " * 50)
        train = ["train", "--text", "text", "--preset", "smoke", "--max-steps", "5", "--jsonl"]
        done = self.mpirun(["-n", "2", tool.TALEA, *train], 0)
        self.assertEqual(len(done.stdout.splitlines()), 5)

    def test_a_program_found_through_PATH_finds_the_plug_in(self):
        folder, name = os.path.split(os.path.abspath(tool.TALEA))
        path = f"PATH={folder}{os.pathsep}{os.environ['PATH']}"
        check = ["check", "--lane", "cpu", "--case", "mean/fp32/17x13x67"]
        done = self.mpirun(["-n", "2", "env", path, name, *check], 0)
        self.assertEqual(done.stdout.count("passed: "), 1)

    def test_a_rank_that_never_comes_is_named_with_exit_code_4(self):
        # With recovery the launcher itself ends with 0: each process says how it ended. One program
        # for all, because the launcher of Open MPI 5.0.7 ends by a signal where it is given two.
        say = """
            if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then sleep 6; else "$@"; echo "exit $?"; fi
        """
        us = ["-n", "3", "sh", "-c", say, "sh", tool.TALEA, *self.command("--rank-timeout", "1.5")]
        done = self.mpirun([*RECOVERY, *us], 0)
        self.assertEqual(done.stdout.count("exit 4"), 2, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("talea: rank 2: "), 2, done.stderr)

    def test_a_rank_that_dies_or_stops_is_named_with_exit_code_4(self):
        """In the middle of a run; a stopped rank is ended once the others have spoken."""
        with open(self.at("text"), "w") as text:
            text.write("the quick brown fox jumps over the lazy dog; " * 400)
        train = ["train", "--text", "text", "--preset", "smoke", "--max-steps", "100000"]
        check = ["check", "--preset", "full", "--lane", "cpu"]
        bad = """
            "$@" & pid=$!
            if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then
              sleep 2; kill -$SIGNAL $pid; [ $SIGNAL = KILL ] || { sleep 4; kill -KILL $pid; }
            fi
            wait $pid; echo "rank $OMPI_COMM_WORLD_RANK exit $?"
        """
        for signal in ("KILL", "STOP"):
            for command in (train, check):
                us = ["-n", "3", "env", f"SIGNAL={signal}", "sh", "-c", bad, "sh", tool.TALEA]
                quiet = ["--quiet", "--rank-timeout", "1"]
                done = self.mpirun([*RECOVERY, *us, *command, *quiet], 0)
                for rank in (0, 2):
                    self.assertIn(f"rank {rank} exit 4\n", done.stdout + "\n", done.stderr)
                self.assertEqual(done.stderr.count("talea: rank 1: did not arrive"), 2, done.stderr)

    def test_a_wrong_number_of_ranks_is_refused(self):
        done = self.mpirun(["-n", "2", tool.TALEA, *self.command("--ranks", "3")], 2)
        self.assertIn("mpirun started 2 processes", done.stderr)


if __name__ == "__main__":
    if ENGINE == "none":
        print("built without MPI: ranks as threads only")
        del Processes
    elif not shutil.which("mpirun"):
        sys.exit("the MPI plug-in was built, but mpirun is missing (Debian: openmpi-bin)")
    else:  # each test once: the class inherits the helpers, not the tests
        for name in [n for n in vars(Ranks) if n.startswith("test_")]:
            setattr(Processes, name, None)
    unittest.main()
