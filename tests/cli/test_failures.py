# What: what the command line refuses: exit codes, messages, and what stays as it was.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library.
# usage: test_failures.py TALEA_BINARY [unittest arguments]
import array
import json
import os
import pathlib
import re
import struct
import subprocess
import unittest

from tool import TALEA, Case, floats, ids, npy, safetensors


class Failures(Case):
    def expect(self, code, words, *arguments):
        before = sorted(os.listdir(self.folder.name))
        done = self.loss(*arguments, "--out", "o.safetensors", "--receipt", "r.json", code=code)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(sorted(os.listdir(self.folder.name)), before, "something was written")

    def test_an_operator_that_is_none(self):
        for subcommand in ("check", "bench", "explain"):
            done = self.talea(subcommand, "--operator", "convolution", code=2)
            self.assertIn("convolution", done.stderr + done.stdout)

    def test_usage(self):
        self.talea(code=2)
        said = self.talea("frobnicate", code=2).stderr
        self.assertIn("frobnicate: no such subcommand; one of loss, ", said)
        self.talea("loss", code=2)
        said = self.talea("loss", "--hiden", "x.npy", code=2).stderr
        self.assertIn("--hiden: no such flag; --hidden is required", said)
        self.expect(2, ["label_smoothing = 2"], "--label-smoothing", "2")
        self.expect(2, ["--softcap 0"], "--softcap", "0")
        self.expect(2, ["--vocab 0"], "--vocab", "0")
        self.expect(2, ["--vocab -1"], "--vocab", "-1")
        for ranks in ([], ["--ranks", "4"]):
            self.assertIn("vocab = 0", self.talea("explain", "--vocab", "0", *ranks, code=2).stderr)
        self.expect(2, ["--outputs entropi"], "--outputs", "entropi")
        self.expect(2, ["topk:99"], "--outputs", "topk:99")
        self.expect(2, ["'QiB'"], "--workspace-limit", "3QiB")
        self.expect(2, ["fastest"], "--lane", "fastest")
        self.expect(2, ["--denominator often"], "--denominator", "often")

    def test_an_empty_value_is_not_a_missing_flag(self):
        """As of a shell variable that is not set: a bias left out in silence is another loss."""
        for flag in "bias class-weight token-weight upstream softcap main-grad out receipt".split():
            self.expect(2, [f"--{flag}: an empty value"], f"--{flag}", "")
        self.assertIn("--epochs", self.talea("train", "--epochs", "", code=2).stderr)

    def test_numbers_are_taken_as_written_or_not_at_all(self):
        shape = ["--hidden", "8", "--vocab", "16"]
        for text in ["99999999999999999999", "010", "0x10", "1e3", "-1"]:
            self.assertIn(
                "--tokens", self.talea("explain", "--tokens", text, *shape, code=2).stderr
            )
            self.talea("check", "--list", "--seed", text, code=2)
        self.expect(2, ["--ignore-index"], "--ignore-index", "99999999999999999999")
        self.expect(2, ["'-5'"], "--workspace-limit", "-5")
        self.expect(2, ["1.5.2MiB"], "--workspace-limit", "1.5.2MiB")
        for text in ["nan", "0", "1e300", "inf"]:  # 1e300 s once was no time at all
            self.expect(2, ["timeout"], "--ranks", "2", "--rank-timeout", text)
        self.expect(2, ["--rank-timeout: nan"], "--rank-timeout", "nan")
        huge = ["--tokens", "1099511627776", "--hidden", "1099511627776"]
        self.assertIn("64 bits", self.talea("explain", *huge, code=2).stderr)
        large = ["--tokens", "1073741824", "--hidden", "4096", "--vocab", "131072"]
        self.talea("explain", *large, "--workspace-limit", "16GiB")

    def test_flags_that_would_do_nothing(self):
        for flags in ["--nodes 4", "--sequence-parallel", "--link-gb 9", "--ranks 8 --link-gb nan"]:
            self.talea("explain", *flags.split(), code=2)
        for rate in ("--product-tflops", "--link-gb", "--link-us", "--node-gb", "--node-us"):
            said = self.talea("explain", "--ranks", "8", rate, "nan", code=2).stderr
            self.assertIn(f"{rate}: nan", said)
        uneven = "explain --ranks 8 --tokens 9 --sequence-parallel"
        self.assertIn("9 tokens", self.talea(*uneven.split(), code=2).stderr)
        small = "bench --tokens 8 --hidden 8 --vocab 32 --repeats 1".split()
        for flags in ["--limits 1MiB", "--inputs bias", "--dw fp32", "--spread 2", "--lane cpu"]:
            said = self.talea(*small, *flags.split(), code=2).stderr
            self.assertIn(flags.split()[0], said)
        self.talea(*small, "--late-upstream", code=2)
        self.talea(*small, "--also-plain", code=2)
        self.talea("repro", "--all", "none_backward", code=2)
        self.talea("train", "--resume", code=2)
        self.talea("train", "--checkpoint-every", "2", code=2)
        floats(self.at("u.npy"), (2,), [1, 1])
        for flag in ("--upstream", "--upstream-lse", "--upstream-entropy"):
            self.expect(2, [flag, "needs dx, dw or db"], flag, "u.npy")
        self.expect(2, ["twice"], "--outputs", "topk:1,topk:2")
        self.expect(2, ["--sequence-parallel: needs --ranks"], "--sequence-parallel")
        self.expect(2, ["--rank-timeout 5: needs --ranks"], "--rank-timeout", "5")

    def test_options_of_what_was_not_asked_for(self):
        """In the words `FLAG [VALUE]: why`, before a file is read."""
        floats(self.at("c.npy"), (2,), [1, 3])
        for flags in (
            "--dw-sum bf16 | --outputs loss,dx", "--dx-sum bf16 | --outputs loss,dw --ranks 2",
        ):  # fmt: skip
            idle, more = flags.split(" | ")
            self.expect(2, [f"{idle}: "], *idle.split(), *more.split())
        for line in (
            "bench --runs-from r.json | --tokens 5", "bench --lanes sm90 | --ranks 2",
            "bench --lanes sm90 --limits 1MiB | --workspace-limit 2MiB",
            "bench --lanes sm90 --outputs loss | --dw fp32",
            "check --results-from r.json | --lane cpu", "check --list | --ranks 2",
            "check --case x | --preset full",
            "explain --ranks 4 | --lane cpu", "explain --ranks 4 | --node-gb 5",
            "explain --ranks 1 | --link-gb 5", "repro list | --device cuda",
            "train --text t | --quick", "train --text t --gate drift_smoke | --lr 1",
            "train --text t --mutant-table | --gate drift_smoke", "train --text t | --momentum 0.5",
            "train --text t --optimizer sgd | --beta1 0.5", "train --text t | --min-lr 1",
            "train --text t --model tiny | --heads 2", "train --text t | --curve-points 5",
            "train --text t --mixer running-mean | --heads 2",
            "check --operator mamba3 --list | --lane cpu",
            "check --operator mamba3 --tokens 3 | --preset full",
            "check --operator sparse_attention --list | --lane cpu",
            "check --operator sparse_attention --case 1 | --preset full",
        ):  # fmt: skip
            command, idle = line.split(" | ")
            said = self.talea(*command.split(), *idle.split(), code=2).stderr
            self.assertIn(f"talea: {idle}: ", said)

    def test_one_description_serves_every_pass_and_reduction(self):
        """What this one does not read of it is a note, and changes nothing."""
        floats(self.at("c.npy"), (2,), [1, 3])
        base = "loss --hidden x.npy --weight w.npy --targets y.npy"
        small = "--tokens 5 --repeats 1"
        scan = f"--operator mamba3 {small} --heads 2 --state-dim 8 --head-dim 8 --pass step"
        keys = f"--operator sparse_attention {small} --keys 9 --dim 16 --value-dim 8 --top-k 3"
        for line in (
            f"{base} --reduction none | --denominator 3",
            f"{base} --reduction sum | --denominator weighted",
            f"{base} --reduction sum | --on-empty zero",
            f"{base} --outputs lse | --label-smoothing 0.1",
            f"{base} --outputs entropy,topk:1 | --reduction sum",
            f"{base} --outputs argmax | --z-loss 1e-4", f"{base} --outputs lse | --class-weight c.npy",
            "loss --hidden x.npy --weight w.npy --outputs lse | --ignore-index 1",
            f"bench --hidden 8 --vocab 30 {small} --reduction sum | --on-empty zero",
            "explain --outputs lse | --z-loss 1", f"check {scan} | --chunk 4",
            f"bench {scan} | --schedule parallel", f"explain {scan} | --chunk 4",
            f"check {keys} --pass select --index-heads 2 --index-dim 4 | --heads 2",
            f"bench {keys} --heads 2 | --index-dim 8",
            f"explain {keys} --pass select | --heads 4",
        ):  # fmt: skip
            command, idle = line.split(" | ")
            words = command.split()
            if words[0] != "bench":
                words = [w for w in words if w not in ("--repeats", "1")]
            made = self.talea(*words, *idle.split())
            self.assertIn(f"talea: {idle}: not read: ", made.stderr)
            self.assertNotIn("not read", self.talea(*words, *idle.split(), "-q").stderr)
            if words[0] == "loss":
                self.talea(*words, "--out", "a.safetensors")
                self.talea(*words, *idle.split(), "--out", "b.safetensors")
                a, b = (pathlib.Path(self.at(f"{n}.safetensors")).read_bytes() for n in "ab")
                self.assertEqual(a, b, line)

    def test_no_output_takes_the_place_of_an_input(self):
        raw = pathlib.Path(self.at("x.npy")).read_bytes()
        self.expect_kept(["--out", "x.npy"], ["--receipt", "x.npy"], ["--receipt", "./x.npy"])
        self.expect_kept(["--out", "o.npy"], ["--out", "o"])
        self.expect_kept(["--out", "o.safetensors", "--receipt", "o.safetensors"])
        self.assertEqual(pathlib.Path(self.at("x.npy")).read_bytes(), raw)
        text = "as the tally is split " * 20
        pathlib.Path(self.at("t.txt")).write_text(text)
        train = "train --text t.txt --preset smoke --max-steps 1 --twins 0".split()
        outputs = ("--json-out", "--report", "--initial-parameters-out")
        for flag in outputs:
            self.assertIn(flag, self.talea(*train, flag, "./t.txt", code=2).stderr)
        self.talea(*train, "--json-out", "a", "--report", "a", code=2)
        self.assertEqual(pathlib.Path(self.at("t.txt")).read_text(), text)
        for line in ("check --results-from t.txt", "bench --runs-from t.txt"):
            self.talea(*line.split(), "--receipt", "t.txt", code=2)
        # Nor is a place that cannot be found out after the work.
        for line in [*([*train, flag] for flag in outputs), ["check", "--preset", "full", "--receipt"],
                     ["bench", "--receipt"], ["repro", "--all", "--receipt"]]:  # fmt: skip
            done = self.talea(*line, "missing/r", code=4)
            self.assertIn(f"{line[-1]} missing/r: missing is no folder", done.stderr)
            self.assertEqual(done.stdout, "")
        self.loss("--receipt", "r.json")
        self.talea("report", "r.json", "--out", "r.json", code=2)
        self.talea("report", "r.json")

    def expect_kept(self, *lines):
        for line in lines:
            before = sorted(os.listdir(self.folder.name))
            self.assertIn(line[-1], self.loss(*line, code=2).stderr)
            self.assertEqual(sorted(os.listdir(self.folder.name)), before)

    def test_train_refuses_numbers_without_a_meaning(self):
        pathlib.Path(self.at("t.txt")).write_text("as the tally is split " * 20)
        run = "train --text t.txt --preset smoke --max-steps 1 --twins 0".split()
        for name, text in [
            ("heads", "0"), ("max-steps", "-1"), ("total-tokens", "-3"), ("warmup-steps", "-2"),
            ("lr", "nan"), ("lr", "-1"), ("clip", "nan"), ("beta1", "1"), ("weight-decay", "-1"),
        ]:  # fmt: skip
            self.assertIn(name, self.talea(*run, "--" + name, text, code=2).stderr)
        self.assertIn("--text", self.talea("train", "--preset", "smoke", code=2).stderr)
        self.talea(*run)

    def test_unavailable(self):
        self.expect(3, ["cuda"], "--lane", "cuda")
        self.talea("check", "--lane", "sm90", code=3)
        self.talea("explain", "--lane", "sm90", code=3)

    def test_device(self):
        """Where there is none it is named; where there is one, its files are the host's."""
        for word in ("gpu", "cuda:", "cuda:x", "cuda1"):
            self.assertIn(f"--device {word}: one of", self.loss("--device", word, code=2).stderr)
        here = self.loss("--lane", "cuda", "--device", "cpu", code=2).stderr
        self.assertIn("lane cuda runs on a GPU", here)
        there = self.loss("--lane", "cpu", "--device", "cuda:1", code=2).stderr
        self.assertIn("lane cpu runs on the host", there)
        lanes = json.loads(self.talea("doctor", "--json").stdout)["lanes"]
        if not next(x["state"] for x in lanes if x["subject"] == "cuda").startswith("on"):
            self.assertIn("--device cuda", self.loss("--device", "cuda", code=3).stderr)
            self.assertIn("--lane sm90: ", self.loss("--lane", "sm90", code=3).stderr)
            return
        self.assertIn("--ranks 2", self.loss("--device", "cuda", "--ranks", "2", code=2).stderr)
        wanted = ["--outputs", "loss,lse,argmax,dx,dw,db", "--json", "--out"]
        host = json.loads(self.loss(*wanted, "h.safetensors").stdout)["calls"][0]["values"]["loss"]
        for where in (["--lane", "cuda"], ["--device", "cuda:0"]):
            device = json.loads(self.loss(*wanted, "d.safetensors", *where).stdout)
            self.assertAlmostEqual(device["calls"][0]["values"]["loss"], host, places=5)
            self.assertTrue(device["provenance"]["device"]["name"])
            found = safetensors(self.at("d.safetensors"))
            for name, (shape, values) in safetensors(self.at("h.safetensors")).items():
                self.assertEqual(found[name][0], shape)
                for mine, theirs in zip(found[name][1], values, strict=True):
                    self.assertAlmostEqual(mine, theirs, places=5, msg=name)

    def test_run_time(self):
        done = self.loss("--out", "missing/o.safetensors", code=4)
        self.assertIn("missing/o.safetensors", done.stderr)
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w") as full:
                code = subprocess.run([TALEA, "explain"], stdout=full).returncode
            self.assertEqual(code, 4)

    def test_invalid_target(self):
        ids(self.at("y.npy"), [1, 7])
        self.expect(5, ["--targets y.npy: targets[1] = 7"])

    def test_invalid_shape(self):
        ids(self.at("y.npy"), [1, 0, 1])
        self.expect(5, ["--targets y.npy: ", "[3]"])
        floats(self.at("one.npy"), (2,), [1, 2])
        said = self.talea("loss", "--hidden", "one.npy", "--weight", "w.npy", code=5).stderr
        self.assertIn("--hidden one.npy: shape [2] where two dimensions", said)

    def test_invalid_dtype(self):
        ids(self.at("x.npy"), [1, 0])
        npy(self.at("x.npy"), "<i8", (2, 1), array.array("q", [1, 2]).tobytes())
        self.expect(5, ["--hidden x.npy: hidden: dtype int64", "bf16"])
        npy(self.at("x.npy"), "<f8", (2, 1), array.array("d", [1, 2]).tobytes())
        self.expect(5, ["--weight w.npy: weight: dtype fp32", "fp64"])
        floats(self.at("x.npy"), (2, 1), [1, 2])
        floats(self.at("y.npy"), (2,), [1, 0])
        self.expect(5, ["--targets y.npy: targets: dtype fp32", "int64"])

    def test_invalid_class_weight(self):
        floats(self.at("c.npy"), (2,), [1, -3])
        self.expect(5, ["--class-weight c.npy: class_weight[1] = -3"], "--class-weight", "c.npy")

    def test_a_limit_is_kept_or_named(self):
        for limit in ["1", "64B", "1KiB"]:
            words = [
                f"workspace_limit = {limit.replace('KiB', '024').strip('B')} bytes",
                "needs at least",
            ]
            self.expect(2, words, "--workspace-limit", limit)
        done = self.loss("--workspace-limit", "1", "--outputs", "loss,dx,dw", code=2)
        least = int(re.search(r"lane cpu needs at least (\d+) bytes", done.stderr)[1])
        outputs = ["--outputs", "loss,dx,dw", "--receipt", "r.json", "--workspace-limit"]
        self.loss(*outputs, str(least))
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        measured = receipt["calls"][0]["cost"]["measured_peak_extra_bytes"]
        self.assertLessEqual(measured, least)  # of the heap of the process, workspace and all
        self.assertGreater(measured, least / 2)
        self.expect(2, [str(least)], "--outputs", "loss,dx,dw", "--workspace-limit", str(least - 1))

    def test_explain_names_the_least_limit(self):
        shape = ["--tokens", "8192", "--hidden", "4096", "--vocab", "128256", "--dtype", "bf16"]
        small = ["--workspace-limit", "256MiB"]
        done = self.talea("explain", *shape, *small, code=2)
        least = int(re.search(r"lane cpu needs at least (\d+) bytes", done.stderr)[1])
        self.assertLess(
            least, 1 << 30
        )  # with or without bf16 products; not the 2 GiB of a sum of dW
        self.assertIn("lane cpu needs at least", done.stdout)
        self.assertIn("lane unfused needs at least", done.stdout)
        self.talea("explain", *shape, "--workspace-limit", str(least))
        said = json.loads(self.talea("explain", *shape, *small, "--json", code=2).stdout)
        self.assertIsNone(said["lane"])
        self.talea("explain", *shape)  # auto takes what the best lane needs

    def test_invalid_main_grad(self):
        floats(self.at("g.npy"), (1, 2), [0, 0])
        self.expect(5, ["main-grad g.npy", "[1, 2]"], "--main-grad", "g.npy", "--outputs", "dw")
        self.expect(2, ["--main-grad", "dw"], "--main-grad", "g.npy")

    def test_a_folder_is_no_output(self):
        os.mkdir(self.at("folder.safetensors"))
        for flags in (["--out"], ["--out", "o.safetensors", "--receipt"]):
            said = self.loss(*flags, "folder.safetensors", code=4).stderr
            self.assertIn(f"{flags[-1]} folder.safetensors: is a folder", said)
        self.assertFalse(os.path.exists(self.at("o.safetensors")))

    def test_missing_file_names_flag_and_file(self):
        done = self.talea(
            "loss", "--hidden", "no.npy", "--weight", "w.npy", "--targets", "y.npy", code=5
        )
        self.assertIn("hidden", done.stderr)
        self.assertIn("no.npy", done.stderr)

    def test_hostile_npy(self):
        whole = pathlib.Path(self.at("x.npy")).read_bytes()
        hostile = {
            "truncated": whole[:-3],
            "no header": whole[:9],
            "empty": b"",
            "negative": whole.replace(b"(2, 1)", b"(-2,1)"),
            "huge": whole.replace(b"(2, 1), }          ", b"(4611686018427387904, 9), }")[:200],
            "object": whole.replace(b"<f4", b"|O8"),
            "big endian": whole.replace(b"<f4", b">f4"),
        }
        for name, raw in hostile.items():
            with self.subTest(name):
                pathlib.Path(self.at("x.npy")).write_bytes(raw)
                self.expect(5, ["x.npy"])

    def test_hostile_safetensors(self):
        def write(header, data=b"\0" * 8):
            pathlib.Path(self.at("x.safetensors")).write_bytes(
                struct.pack("<Q", len(header)) + header + data
            )

        entry = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}'
        headers = {
            "overlap": entry + b',"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "duplicate": entry + b',"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
            "beyond": b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,800]}}',
            "negative": b'{"a":{"dtype":"F32","shape":[-2,1],"data_offsets":[0,8]}}',
            "not json": b"hello",
        }
        for name, header in headers.items():
            with self.subTest(name):
                write(header)
                done = self.talea(
                    *"loss --hidden x.safetensors --weight w.npy --targets y.npy".split(),
                    "--out",
                    "o.safetensors",
                    code=5,
                )
                self.assertIn("x.safetensors", done.stderr)
                self.assertFalse(os.path.exists(self.at("o.safetensors")))
        pathlib.Path(self.at("x.safetensors")).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
        self.talea(*"loss --hidden x.safetensors --weight w.npy --targets y.npy".split(), code=5)

    def test_hostile_receipts(self):
        for raw in ["", "{}", '{"kind": "loss", "kind": "loss"}', "[" * 5000]:
            with self.subTest(raw[:20]):
                pathlib.Path(self.at("r.json")).write_text(raw)
                self.assertIn("r.json", self.talea("report", "r.json", code=5).stderr)
                self.talea("compare", "r.json", "r.json", code=5)
        self.assertFalse(os.path.exists(self.at("report.html")))

    def test_a_failed_run_leaves_the_old_file(self):
        pathlib.Path(self.at("o.safetensors")).write_text("old")
        ids(self.at("y.npy"), [1, 7])
        self.loss("--out", "o.safetensors", code=5)
        self.assertEqual(pathlib.Path(self.at("o.safetensors")).read_text(), "old")


if __name__ == "__main__":
    unittest.main()
