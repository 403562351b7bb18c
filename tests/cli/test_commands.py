# What: the other subcommands from outside: check, explain, compare, bench, report.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library.
# usage: test_commands.py TALEA_BINARY [unittest arguments]
import array
import json
import os
import pathlib
import re
import shlex
import signal
import struct
import subprocess
import time
import unittest

from tool import TALEA, Case


class Checks(Case):
    def test_every_fact_of_every_host_lane_is_told(self):
        """A receipt with an empty one is not written."""
        small = "--tokens 9 --repeats 1 --receipt r.json".split()
        loss = ["--hidden", "8", "--vocab", "30", "--outputs"]
        for lane in ("cpu", "unfused", "reference"):
            bench = ["bench", *small, "--lanes", lane]
            for outputs in ("loss", "lse,topk:2", "loss,dx", "dw", "loss,dx,dw"):
                self.talea(*bench, *loss, outputs)
            for name in ("forward", "backward", "step"):
                self.talea(*bench, "--operator", "mamba3", "--heads", "2", "--pass", name)
            attention = ["--operator", "sparse_attention", "--keys", "70", "--top-k", "5", "--pass"]
            for name in ("forward", "backward", "select", "index_loss"):
                if lane != "unfused" or name in ("forward", "backward"):
                    self.talea(*bench, *attention, name)

    def test_quick_passes_and_its_receipt_reads_back(self):
        done = self.talea("check", "--preset", "quick", "--receipt", "c.json")
        self.assertIn("passed:", done.stdout)
        self.talea("report", "c.json", "--out", "c.html")
        page = pathlib.Path(self.at("c.html")).read_text()
        self.assertIn("<svg", page)
        self.assertNotIn("<script", page)
        self.talea("compare", "c.json", "c.json")

    def test_a_verdict_that_got_worse_is_exit_1(self):
        self.talea("check", "--case", "mean/fp32/17x13x67", "--receipt", "a.json")
        receipt = json.loads(pathlib.Path(self.at("a.json")).read_text())
        receipt["verdict"] = "failed"
        receipt["check"]["cases"][0]["passed"] = False
        pathlib.Path(self.at("b.json")).write_text(json.dumps(receipt))
        self.assertIn("worse", self.talea("compare", "a.json", "b.json", code=1).stdout)

    def test_one_case_as_a_reproducer_names_it(self):
        line = "talea check --case everything/bf16/17x13x67 --seed 3 --lane cpu"
        self.talea(*shlex.split(line)[1:])
        self.talea("check", "--case", "nothing", code=2)
        names = self.talea("check", "--list").stdout.split()
        self.assertIn("everything/bf16/17x13x67", names)
        self.assertEqual(len(names), len(set(names)))

    def test_lists_are_json_too(self):
        for line in ("check --list", "check --list --operator sparse_attention",
                     "check --list --operator mamba3", "repro list"):  # fmt: skip
            whole = json.loads(self.talea(*line.split(), "--json").stdout)
            lines = self.talea(*line.split(), "--jsonl").stdout.splitlines()
            self.assertEqual([json.loads(one) for one in lines], whole)
            self.assertTrue(all(one["name"] for one in whole))
        one = self.talea("repro", "none_backward", "--json").stdout
        self.assertEqual(json.loads(one)["id"], "none_backward")

    def test_jsonl_is_one_object_a_case(self):
        out = self.talea("check", "--case", "sum/fp32/17x13x67", "--jsonl").stdout
        lanes = [json.loads(line)["lane"] for line in out.splitlines()]
        self.assertEqual(lanes, ["cpu", "unfused", "reference"])


class Others(Case):
    def test_explain_answers_its_own_example(self):
        """Of every operator; a lane that cannot keep the limit is a row, not the end."""
        for operator in ("linear_cross_entropy", "sparse_attention", "mamba3"):
            help_text = self.talea("explain", "--operator", operator, "--help").stdout
            example = re.search(r"^Example: +talea (explain .*(?:\n .*)*)", help_text, re.M)[1]
            said = json.loads(self.talea(*example.split(), "--json").stdout)
            self.assertTrue(said["lane"], operator)
            self.assertEqual(said["operator"], operator)
        wide = "--operator sparse_attention --tokens 4096 --keys 8192 --heads 128 --top-k 2048"
        lanes = json.loads(self.talea("explain", *wide.split(), "--json").stdout)["lanes"]
        reasons = {lane["name"]: lane.get("reason", "") for lane in lanes}
        self.assertIn("cannot be kept", reasons["unfused"])
        self.assertEqual(reasons["reference"], "")
        scan = "--operator mamba3 --tokens 65536 --heads 64 --pass backward --workspace-limit 1MiB"
        refused = self.talea("explain", *scan.split(), code=2)
        self.assertIn("cannot be kept", refused.stdout)
        self.assertRegex(
            refused.stderr, "workspace_limit = 1048576 bytes: .* at least [0-9]+ bytes"
        )
        unknown = self.talea("explain", *wide.split(), "--lane", "nope", code=2)
        self.assertEqual(unknown.stdout, "")

    def test_bench(self):
        done = self.talea(
            *"bench --tokens 64 --hidden 32 --vocab 500 --repeats 2 --json".split(),
            *["--receipt", "b.json"],
            *["--ignored-fraction", "0,0.7", "--dtype", "fp32,bf16"],
        )
        bench = json.loads(done.stdout)["bench"]
        self.assertEqual(len(bench["runs"]), 1 + 2 * 2 * 2)
        self.assertEqual(bench["runs"][1]["ratio_to_first"], 1)
        for run in bench["runs"][1:]:
            self.assertGreater(run["ratio"], 0)
            self.assertGreater(run["ratio_to_first"], 0)
            self.assertLessEqual(run["extra_bytes"], run["declared_bytes"] + (1 << 20))
        self.talea("report", "b.json")

    def test_bench_under_a_ceiling_on_the_instruction_set(self):
        line = "bench --tokens 16 --hidden 16 --vocab 100 --repeats 1 --lanes cpu --json --isa avx2"
        if " avx2 " not in pathlib.Path("/proc/cpuinfo").read_text():
            self.assertIn("avx2", self.talea(*line.split(), code=3).stderr)
            return
        receipt = json.loads(self.talea(*line.split()).stdout)
        self.assertIn("AVX2", receipt["provenance"]["host"]["isa"])
        self.assertIn("AVX2", " ".join(receipt["calls"][0]["notes"]))
        self.talea("bench", "--isa", "avx3", code=2)

    def test_results_of_another_program_become_a_receipt(self):
        time_ = {"median_ms": 2.5, "p20_ms": 2, "p80_ms": 3, "n": 3}
        runs = [{"name": "theirs", "case": "c", "time": time_}]
        document = {"argv": ["python", "bench/x.py"], "start_time": "2026-01-02T03:04:05.000Z"}
        document |= {"title": "t", "libraries": {"torch": "9"}, "notes": ["n"]}
        bench = document | {"bench": {"limit": "none", "runs": runs}}
        check = document | {"check": {"preset": "p", "passed": 1, "failed": 0, "cases": []}}
        one = {"name": "a", "lane": "cpu", "passed": True}

        def record(subcommand, flag, content, code=0):
            pathlib.Path(self.at("from.json")).write_text(json.dumps(content))
            return self.talea(subcommand, flag, "from.json", "--receipt", "r.json", code=code)

        record("bench", "--runs-from", bench)
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        self.assertEqual(receipt["bench"]["runs"], runs)
        self.assertEqual(receipt["provenance"]["argv"], ["python", "bench/x.py"])
        self.assertEqual(receipt["provenance"]["libraries"]["torch"], "9")
        os.unlink(self.at("r.json"))
        for field in document:
            broken = {k: v for k, v in bench.items() if k != field}
            self.assertIn(field, record("bench", "--runs-from", broken, code=5).stderr)
        self.assertIn("cases", record("check", "--results-from", check, code=5).stderr)
        self.assertFalse(os.path.exists(self.at("r.json")))
        check["check"]["cases"] = [one]
        record("check", "--results-from", check)
        device = {"name": "a GPU", "driver": "1", "runtime": "2", "clocks": "3"}
        device["throttle_reasons"] = "none"
        record("check", "--results-from", check | {"device": device})
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        self.assertEqual(receipt["provenance"]["device"], device)
        record("check", "--results-from", check | {"device": {"name": "a GPU"}}, code=5)
        check["check"]["cases"] = [one, one | {"passed": False}]
        record("check", "--results-from", check, code=1)
        self.assertEqual(
            json.loads(pathlib.Path(self.at("r.json")).read_text())["verdict"], "failed"
        )

    def test_bench_keeps_host_and_device_lanes_apart(self):
        small = "bench --tokens 8 --hidden 8 --vocab 32 --repeats 1 --lanes".split()
        self.talea(*small, "cpu,cuda", code=2)
        self.talea(*small, "cuda,cpu", code=2)
        lanes = json.loads(self.talea("explain", "--json").stdout)["lanes"]
        reason = next(lane["reason"] for lane in lanes if lane["name"] == "cuda")
        if "host memory" not in reason:  # not built, or no device
            self.assertIn("CUDA", self.talea(*small, "cuda", code=3).stderr)

    def test_explain_and_doctor(self):
        lanes = {
            lane["name"]: lane
            for lane in json.loads(self.talea("explain", "--json").stdout)["lanes"]
        }
        self.assertTrue(lanes["cpu"]["accepts"])
        self.assertTrue(lanes["sm90"]["reason"])
        doctor = json.loads(self.talea("doctor", "--json").stdout)
        self.assertEqual(len(doctor["lanes"]), 5)
        on = {x["subject"]: x["state"].startswith("on") for x in doctor["lanes"]}
        for name in ("sparse_attention", "mamba3"):
            for one in doctor["lanes_of"][name]:
                self.assertEqual(one["state"].startswith("on"), on[one["subject"]], one)
                self.assertEqual(bool(one["mend"]), not on[one["subject"]], one)
        self.assertIn("can run here", self.talea("doctor").stdout)

    def test_no_colour_in_a_pipe_and_progress_on_stderr_only(self):
        done = self.talea("explain")
        self.assertNotIn("\033", done.stdout)
        done = self.talea("check", "--preset", "quick", "--progress", "json", "--json")
        json.loads(done.stdout)
        told = [json.loads(line) for line in done.stderr.splitlines()]
        self.assertTrue(all("progress" in line or "note" in line for line in told), told)

    def test_a_closed_pipe_is_no_failure(self):
        run = subprocess.Popen(
            [TALEA, "check", "--preset", "full", "--list"], stdout=subprocess.PIPE
        )
        run.stdout.readline()
        run.stdout.close()
        self.assertEqual(run.wait(60), 0)

    def test_signals(self):
        for number, code in [(signal.SIGINT, 130), (signal.SIGTERM, 143)]:
            run = subprocess.Popen(
                [TALEA, "check", "--preset", "full", "--receipt", "full.json"],
                cwd=self.folder.name,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(0.5)
            run.send_signal(number)
            self.assertEqual(run.wait(60), code)
            self.assertFalse(os.path.exists(self.at("full.json")))

    def test_every_help_names_exit_codes_and_an_example_that_runs(self):
        self.talea("--version")
        pathlib.Path(self.at("README.md")).write_text("the tally stick is split in two\n" * 40)
        self.talea("check", "--case", "mean/fp32/17x13x67", "--receipt", "check.json")
        for name in ["before.json", "after.json"]:
            pathlib.Path(self.at(name)).write_bytes(
                pathlib.Path(self.at("check.json")).read_bytes()
            )
        raw = array.array("f", [0, 1]).tobytes()
        header = b'{"lm_head.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}'
        pathlib.Path(self.at("w.safetensors")).write_bytes(
            struct.pack("<Q", len(header)) + header + raw
        )
        # attend, index and scan run their examples on files: their own tests do.
        for name in "loss check bench explain doctor report compare train repro".split():
            with self.subTest(name):
                text = self.talea(name, "--help").stdout
                self.assertRegex(text, r"Exit codes: 0 done[;,]")
                example = re.search(
                    r"Example: +talea (.*?)\n\s*\n", text.replace("\\\n", " ") + "\n\n", re.S
                )
                self.talea(*shlex.split(example.group(1)))

    def subcommands(self):
        listed = self.talea("--help").stdout.split("Subcommands:")[1]
        return re.findall(r"^ +([a-z]+) {2,}", listed, re.M)

    def test_no_letter_is_both_a_flag_and_a_tensor(self):
        # CLI11 from 2.4 on counts -q and --q as one name, and then no subcommand starts.
        for name in self.subcommands():
            text = self.talea(name, "--help").stdout
            short = set(re.findall(r"(?<![\w-])-([a-z])\b", text.split("Options:")[1]))
            long = set(re.findall(r"^ +(?:-\w,)?--([a-z])\b(?![-\w])", text, re.M))
            self.assertFalse((short - {"q"}) & long, name)
            self.assertNotIn("-q,", text, name)
            self.assertNotIn("-v,", text, name)

    def test_verbose_is_a_letter_of_every_subcommand(self):
        line = ["loss", "--hidden", "x.npy", "--weight", "w.npy", "--targets", "y.npy", "--json"]
        said = self.talea("-v", *line).stderr
        self.assertEqual(re.findall(r"(\w+) is (\w\.npy): (\w+) \[(.*?)\]", said),
                         [("hidden", "x.npy", "fp32", "2, 1"), ("weight", "w.npy", "fp32", "2, 1"),
                          ("targets", "y.npy", "int64", "2")])  # fmt: skip
        self.assertRegex(said, r"(?m)^talea: \d.* of ")
        self.assertRegex(said, r"(?m)^talea: took .* resident$")
        after = self.talea(*line, "-v")
        self.assertEqual(len(after.stderr.splitlines()), len(said.splitlines()))
        json.loads(after.stdout)
        self.assertEqual(self.talea("-v", *line, "-q").stderr, "")
        self.assertEqual(self.talea(*line).stderr, "")
        self.assertIn(
            "took", self.talea("-v", "loss", "--hidden", "none.npy", *line[3:], code=5).stderr
        )

    def test_quiet_is_a_letter_of_every_subcommand(self):
        line = ["check", "--case", "mean/fp32/17x13x67"]
        if not self.talea(*line).stderr:
            self.skipTest("every lane is here: check has nothing to be quiet about")
        self.assertEqual(self.talea(*line, "-q").stderr, "")
        self.assertEqual(self.talea("-q", *line).stderr, "")
        self.assertEqual(self.talea(*line, "--quiet").stderr, "")
        self.assertIn("--nothing", self.talea("bench", "--nothing", code=2).stderr)


if __name__ == "__main__":
    unittest.main()
