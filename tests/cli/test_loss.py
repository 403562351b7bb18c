# What: the loss from the command line: values, names, receipts, PyTorch's results.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library.
# usage: test_loss.py TALEA_BINARY [unittest arguments]
import json
import math
import os
import pathlib
import unittest

from tool import Case, floats, ids, safetensors


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


if __name__ == "__main__":
    unittest.main()
