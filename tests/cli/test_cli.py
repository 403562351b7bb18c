# What: the command line from outside: exit codes, files, messages, JSON.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library; tensors are written byte by byte.
# usage: test_cli.py TALEA_BINARY [unittest arguments]
import array
import json
import math
import os
import pathlib
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TALEA = os.path.abspath(sys.argv.pop(1))


def npy(path, descr, shape, raw):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + raw
    pathlib.Path(path).write_bytes(data)


def floats(path, shape, values):
    npy(path, "<f4", shape, array.array("f", values).tobytes())


def ids(path, values):
    npy(path, "<i8", (len(values),), array.array("q", values).tobytes())


def safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        kind = {"F32": "f", "I64": "q"}[entry["dtype"]]
        values = array.array(kind)
        values.frombytes(raw[8 + size + begin : 8 + size + end])
        found[name] = (entry["shape"], list(values))
    return found


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        # Two tokens, hidden 1: the logits are the weights (0, log 3) and twice that.
        floats(self.at("x.npy"), (2, 1), [1, 2])
        floats(self.at("w.npy"), (2, 1), [0, math.log(3)])
        ids(self.at("y.npy"), [1, 0])

    def at(self, name):
        return os.path.join(self.folder.name, name)

    def talea(self, *arguments, code=0, **more):
        done = subprocess.run(
            [TALEA, *arguments],
            cwd=self.folder.name,
            capture_output=True,
            text=True,
            timeout=120,
            **more,
        )
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def loss(self, *arguments, code=0):
        base = ["loss", "--hidden", "x.npy", "--weight", "w.npy", "--targets", "y.npy"]
        return self.talea(*base, *arguments, code=code)


class Loss(Case):
    def test_values_names_and_receipt(self):
        self.loss(
            "--outputs",
            "loss,lse,target_logprob,entropy,argmax,topk:2,dx,dw",
            "--out",
            "o.safetensors",
            "--receipt",
            "r.json",
        )
        out = safetensors(self.at("o.safetensors"))
        names = "loss lse target_logprob entropy argmax topk_values topk_ids topk_logprobs dx dw"
        self.assertEqual(sorted(out), sorted(names.split()))
        want = (math.log(4 / 3) + math.log(10)) / 2
        self.assertAlmostEqual(out["loss"][1][0], want, places=6)
        self.assertAlmostEqual(out["dx"][1][1], 0.9 * math.log(3) / 2, places=6)
        self.assertAlmostEqual(out["dw"][1][1], (-0.25 + 1.8) / 2, places=6)
        self.assertEqual(out["argmax"][1], [1, 1])
        self.assertEqual(out["topk_ids"], ([2, 2], [1, 0, 1, 0]))
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        self.assertEqual(receipt["kind"], "loss")
        self.assertEqual(len(os.listdir(self.folder.name)), 5)

    def test_db_is_named(self):
        floats(self.at("b.npy"), (2,), [0, 0])
        self.loss("--bias", "b.npy", "--outputs", "db", "--out", "o.safetensors")
        self.assertAlmostEqual(safetensors(self.at("o.safetensors"))["db"][1][0], -0.325, 6)

    def test_dw_is_added_into_a_main_grad(self):
        floats(self.at("g.npy"), (2, 1), [100, -50])
        self.loss("--outputs", "dw", "--out", "fresh.safetensors")
        fresh = safetensors(self.at("fresh.safetensors"))["dw"][1]
        more = ["--main-grad", "g.npy", "--out", "o.safetensors", "--receipt", "r.json"]
        for lane in ["cpu", "unfused", "reference"]:
            self.loss("--outputs", "dw", "--lane", lane, *more)
            added = safetensors(self.at("o.safetensors"))["dw"][1]
            for sum_, g, d in zip(added, [100, -50], fresh, strict=True):
                self.assertAlmostEqual(sum_, g + d, 4)
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        self.assertTrue(receipt["calls"][0]["problem"]["accumulate_dw"])
        self.assertEqual(receipt["calls"][0]["inputs"][-1]["name"], "main-grad")

    def test_json_is_one_document_and_jsonl_one_line(self):
        receipt = json.loads(self.loss("--json").stdout)
        self.assertEqual(receipt["kind"], "loss")
        line = self.loss("--jsonl").stdout
        self.assertEqual(line.count("\n"), 1)
        self.assertEqual(json.loads(line)["kind"], "loss")

    def test_reductions(self):
        self.loss("--reduction", "none", "--out", "n.safetensors")
        rows = safetensors(self.at("n.safetensors"))["loss"][1]
        self.assertAlmostEqual(rows[0], math.log(4 / 3), places=6)
        self.loss("--reduction", "sum", "--out", "s.safetensors")
        self.assertAlmostEqual(safetensors(self.at("s.safetensors"))["loss"][1][0], sum(rows), 5)
        self.loss("--denominator", "8", "--out", "d.safetensors")
        self.assertAlmostEqual(
            safetensors(self.at("d.safetensors"))["loss"][1][0], sum(rows) / 8, 6
        )

    def test_batch_and_sequence_are_flattened(self):
        floats(self.at("x.npy"), (1, 2, 1), [1, 2])
        self.loss("--outputs", "loss,dx", "--out", "o.safetensors")
        self.assertEqual(safetensors(self.at("o.safetensors"))["dx"][0], [1, 2, 1])
        floats(self.at("u.npy"), (1, 2), [1, 1])
        for flag in ("--upstream-lse", "--upstream-entropy"):
            self.loss("--outputs", "dx", flag, "u.npy", "--out", "o.safetensors")

    def test_tokens_in_other_places_are_refused(self):
        floats(self.at("x.npy"), (2, 1, 1), [1, 2])
        floats(self.at("t.npy"), (1, 2), [1, 1])
        said = self.loss("--token-weight", "t.npy", code=5).stderr
        self.assertIn("--token-weight t.npy: shape [1, 2] beside [2, 1] of the other tokens", said)

    def test_nan_values_are_data(self):
        floats(self.at("x.npy"), (2, 1), [math.nan, 2])
        self.assertIn('"NaN"', self.loss("--json").stdout)

    def test_ranks_and_lanes_by_name(self):
        for lane in ["cpu", "unfused", "reference"]:
            self.assertIn(lane, self.loss("--lane", lane).stdout)


class Torch(Case):
    """PyTorch's results for small problems, made by bench/torch_parity.py --golden."""

    def test_every_reduction_and_option_of_pytorch(self):
        document = json.loads(pathlib.Path(__file__).with_name("torch_golden.json").read_text())
        self.assertEqual(len(document["cases"]), 24)
        for case in document["cases"]:
            with self.subTest(case["name"]):
                self.repeat(case)

    def repeat(self, case):
        line = ["loss", "--out", "o.safetensors"]
        for name, (shape, values) in case["inputs"].items():
            write = ids if name == "targets" else floats
            write(self.at(name + ".npy"), *([values] if name == "targets" else [shape, values]))
            line += ["--" + name, name + ".npy"]
        line += ["--outputs", ",".join(case["torch"])]
        self.talea(*line, *[word for flag in case["flags"].items() for word in flag])
        found = safetensors(self.at("o.safetensors"))
        empty = case["torch"]["loss"] == ["NaN"]
        for name, truth in case["torch"].items():
            truth = [float(v) for v in truth]
            if empty and name != "loss":  # PyTorch: NaN; the contract asks for exactly 0
                truth = [0.0] * len(truth)
            largest = max([1, *(abs(v) for v in truth if not math.isnan(v))])
            self.assertEqual(len(found[name][1]), len(truth))
            for ours, right in zip(found[name][1], truth, strict=True):
                same = math.isnan(ours) and math.isnan(right)
                self.assertTrue(same or abs(ours - right) <= 2e-6 * largest, (name, ours, right))


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
        self.assertLess(least, 300 << 20)  # not the 2 GiB of a sum of dW
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


class Checks(Case):
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
        self.assertIn("can run here", self.talea("doctor").stdout)

    def test_no_colour_in_a_pipe_and_progress_on_stderr_only(self):
        done = self.talea("explain")
        self.assertNotIn("\033", done.stdout)
        done = self.talea("check", "--preset", "quick", "--progress", "json", "--json")
        json.loads(done.stdout)
        for line in done.stderr.splitlines():
            if line.startswith("{"):
                self.assertIn("progress", json.loads(line))

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
