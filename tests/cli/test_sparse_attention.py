# What: talea attend and talea index from outside: values, files, receipts, ranks, refusals.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library; the truth is plain loops.
# usage: test_sparse_attention.py TALEA_BINARY mpi|none [unittest arguments]
import array
import json
import math
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import unittest

import tool

ENGINE = sys.argv.pop(1)

S, KEYS, H, D, DV, K = 7, 19, 4, 12, 8, 5
HI, DI = 3, 6


def ints(path, shape, values):
    tool.npy(path, "<i4", shape, array.array("i", values).tobytes())


def safetensors(path, entries):
    header, raw = {}, b""
    for name, (dtype, shape, data) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(raw), len(raw) + len(data)],
        }
        raw += data
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + raw)


class SparseCase(tool.Case):
    def setUp(self):
        super().setUp()
        draw = random.Random(3)

        def normal(*shape):
            return [draw.gauss(0, 1) for _ in range(math.prod(shape))]

        self.q, self.kv = normal(S, H, D), normal(KEYS, D)
        self.d_o, self.sink = normal(S, H, DV), normal(H)
        self.lists = [sorted(draw.sample(range(KEYS), K)) for _ in range(S)]
        self.lists[1] = [-1] * K
        self.lists[2][3:] = [-1, -1]
        tool.floats(self.at("q.npy"), (S, H, D), self.q)
        tool.floats(self.at("kv.npy"), (KEYS, D), self.kv)
        tool.floats(self.at("do.npy"), (S, H, DV), self.d_o)
        tool.floats(self.at("sink.npy"), (H,), self.sink)
        ints(self.at("i.npy"), (S, K), sum(self.lists, []))
        self.iq, self.ik, self.iw = normal(S, HI, DI), normal(KEYS, DI), normal(S, HI)
        tool.floats(self.at("iq.npy"), (S, HI, DI), self.iq)
        tool.floats(self.at("ik.npy"), (KEYS, DI), self.ik)
        tool.floats(self.at("iw.npy"), (S, HI), self.iw)

    def attend(self, *more, code=0):
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy", "--value-dim", str(DV)]
        return self.talea("attend", *flags, *more, code=code)

    def index(self, *more, code=0):
        flags = ["--index-q", "iq.npy", "--index-k", "ik.npy", "--index-weights", "iw.npy"]
        return self.talea("index", *flags, *more, code=code)

    def read(self, name):
        return tool.safetensors(self.at(name))

    def receipt(self, name="r.json"):
        return json.loads(pathlib.Path(self.at(name)).read_text())

    def compare(self, a, b, bound=1e-5):
        left, right = self.read(a), self.read(b)
        self.assertEqual(left.keys(), right.keys())
        for name, (shape, values) in left.items():
            self.assertEqual(shape, right[name][0])
            pairs = [(x, y) for x, y in zip(values, right[name][1], strict=True)]
            self.assertTrue(all(x == y or math.isfinite(x - y) for x, y in pairs), name)
            error = math.sqrt(sum((x - y) ** 2 for x, y in pairs if x != y))
            size = math.sqrt(sum(x * x for x, _ in pairs if math.isfinite(x)))
            self.assertLessEqual(error, bound * size, name)

    def truth(self, s, h):
        """(o, lse) of one query and head."""
        row = self.q[(s * H + h) * D :][:D]
        keys = [j for j in self.lists[s] if j >= 0]
        logits = [
            sum(a * b for a, b in zip(row, self.kv[j * D :][:D], strict=False)) / D**0.5
            for j in keys
        ]
        if not keys:
            return [0.0] * DV, math.inf
        lse = math.log(sum(map(math.exp, logits)))
        total = math.log(math.exp(lse) + math.exp(self.sink[h]))
        p = [math.exp(x - total) for x in logits]
        return [
            sum(w * self.kv[j * D + c] for w, j in zip(p, keys, strict=False)) for c in range(DV)
        ], lse


class Attend(SparseCase):
    def test_values_names_and_receipt(self):
        names = "o,lse,row_max,dq,dkv,d_sink"
        flags = ["--sink", "sink.npy", "--upstream", "do.npy", "--outputs", names]
        self.attend(*flags, "--out", "o.safetensors", "--receipt", "r.json")
        out = self.read("o.safetensors")
        self.assertEqual(sorted(out), sorted(names.split(",")))
        self.assertEqual(out["dkv"][0], [KEYS, D])
        for s in range(S):
            for h in range(H):
                o, lse = self.truth(s, h)
                at = s * H + h
                self.assertTrue(out["lse"][1][at] == lse or abs(out["lse"][1][at] - lse) < 1e-5)
                for c in range(DV):
                    self.assertAlmostEqual(out["o"][1][at * DV + c], o[c], places=5)
        receipt = self.receipt()
        self.assertEqual(receipt["kind"], "attend")
        self.assertEqual([c["pass"] for c in receipt["calls"]], ["forward", "backward"])
        call = receipt["calls"][0]
        self.assertEqual(call["slots"]["valid"], S * K - K - 2)
        self.assertEqual(call["scores"]["full_scores_bytes"], 0)
        self.assertEqual(call["kv_path"], call["kv"]["path"])
        self.assertEqual(call["scores_home"], call["scores"]["home"])
        self.assertEqual(len(call["inputs"][0]["sha256"]), 64)
        self.talea("report", "r.json", "--out", "r.html")
        self.assertIn("sparse_attention", pathlib.Path(self.at("r.html")).read_text())

    def test_ranks_equal_one(self):
        flags = ["--sink", "sink.npy", "--upstream", "do.npy", "--causal"]
        flags += ["--q-position-base", "8", "--outputs", "o,lse,dq,dkv,d_sink"]
        self.attend(*flags, "--out", "one.safetensors")
        for cut in ("heads", "sequence"):
            for ranks in ("2", "3", "8"):
                more = ["--ranks", ranks, "--cut", cut, "--out", "r.safetensors"]
                self.attend(*flags, *more, "--receipt", "r.json")
                self.compare("one.safetensors", "r.safetensors")
                call = self.receipt()["calls"][0]
                self.assertEqual(call["ranks"]["cut"], cut)
                self.assertEqual(len(call["ranks"]["shares"]), int(ranks))
                self.assertEqual(call["slots"]["given"], S * K)

    def test_a_world_of_one_may_be_cut(self):
        self.attend("--out", "one.safetensors")
        for cut in ("heads", "sequence"):
            more = ["--ranks", "1", "--cut", cut, "--rank-timeout", "5"]
            self.attend(*more, "--out", "r.safetensors")
            self.compare("one.safetensors", "r.safetensors")

    @unittest.skipIf(ENGINE == "none", "no MPI in this build")
    def test_processes_equal_one(self):
        flags = ["--sink", "sink.npy", "--upstream", "do.npy"]
        self.attend(*flags, "--out", "one.safetensors")
        for cut in ("heads", "sequence"):
            base = ["attend", "--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy"]
            base += ["--value-dim", str(DV), "--cut", cut, "--out", "m.safetensors"]
            done = tool.subprocess.run(
                [*tool.MPIRUN, "-n", "3", tool.TALEA, *base, *flags],
                cwd=self.folder.name, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            self.compare("one.safetensors", "m.safetensors")

    def test_packed_sequences_cut_by_rows(self):
        cu = [0, 3, 3, S]
        ints(self.at("cu.npy"), (4,), cu)
        ints(self.at("i.npy"), (S, K), [(3 * i) % S for i in range(S * K)])
        tool.floats(self.at("kv.npy"), (S, D), self.kv[: S * D])
        flags = ["--layout", "thd", "--cu-seqlens-q", "cu.npy", "--cu-seqlens-k", "cu.npy"]
        self.attend(*flags, "--causal", "--out", "one.safetensors")
        for ranks in ("2", "5"):
            more = ["--ranks", ranks, "--cut", "sequence", "--out", "r.safetensors"]
            self.attend(*flags, "--causal", *more)
            self.compare("one.safetensors", "r.safetensors")

    def test_sbhd_is_the_same_numbers(self):
        # B = 1, so that the file's order is that of bshd.
        tool.floats(self.at("q4.npy"), (S, 1, H, D), self.q)
        tool.floats(self.at("kv4.npy"), (KEYS, 1, D), self.kv)
        ints(self.at("i4.npy"), (S, 1, 1, K), sum(self.lists, []))
        self.attend("--outputs", "o,lse", "--out", "one.safetensors")
        flags = ["--q", "q4.npy", "--kv", "kv4.npy", "--indices", "i4.npy", "--value-dim", str(DV)]
        self.talea("attend", *flags, "--layout", "sbhd", "--out", "two.safetensors")
        one, two = self.read("one.safetensors"), self.read("two.safetensors")
        self.assertEqual(two["o"][0], [S, 1, H, DV])
        self.assertEqual(one["o"][1], two["o"][1])

    def test_what_sbhd_turns(self):
        """Pages and what has no batch lie as they lie; the sizes fit in either reading."""

        def same(kv, *flags):
            flags = [*flags, "--indices", "i.npy", "--value-dim", str(DV), "--kv", kv]
            self.talea("attend", *entry, *flags, "--out", "one.safetensors")
            self.talea("attend", *turned, *flags, "--out", "two.safetensors")
            one, two = self.read("one.safetensors"), self.read("two.safetensors")
            for name in one:
                self.assertEqual(one[name][1], two[name][1], name)
            cut = ["--ranks", "2", "--cut", "sequence", "--out", "r.safetensors"]
            self.talea("attend", *entry, *flags, *cut)
            self.compare("one.safetensors", "r.safetensors")

        tool.floats(self.at("b.npy"), (1, S, H, D), self.q)
        tool.floats(self.at("s.npy"), (S, 1, H, D), self.q)
        tool.floats(self.at("u.npy"), (1, S, H, DV), self.d_o)
        tool.floats(self.at("v.npy"), (S, 1, H, DV), self.d_o)
        entry = ["--q", "b.npy", "--upstream", "u.npy"]
        turned = ["--q", "s.npy", "--upstream", "v.npy", "--layout", "sbhd"]
        ints(self.at("i.npy"), (S, S), [(3 * i) % D for i in range(S * S)])
        for name, shape in (("pages.npy", (3, 5, D)), ("square.npy", (D, D))):
            tool.floats(self.at(name), shape, self.kv[: math.prod(shape)])
            tool.floats(self.at("sum_" + name), shape, self.kv[: math.prod(shape)])
        same("pages.npy", "--index-space", "slots", "--main-grad", "sum_pages.npy")
        same("square.npy", "--main-grad", "sum_square.npy")

    def test_scales_are_turned_as_rows_are(self):
        q = [self.q[: 2 * H * D], self.q[2 * H * D : 4 * H * D]]  # two entries of two queries
        swapped = [q[b][s * H * D :][: H * D] for s in (0, 1) for b in (0, 1)]
        tool.floats(self.at("b.npy"), (2, 2, H, D), sum(q, []))
        tool.floats(self.at("s.npy"), (2, 2, H, D), sum(swapped, []))
        rows = [bytes([0x30 + 2 * r]) * D for r in range(4)]
        for name, order in (("b", (0, 1, 2, 3)), ("s", (0, 2, 1, 3))):
            entries = {"kv": ("F8_E4M3", [2, 2, D], b"".join(rows[r] for r in order))}
            safetensors(self.at(name + ".safetensors"), entries)
            tool.floats(self.at(name + "_scale.npy"), (2, 2), [0.25 + r for r in order])
        ints(self.at("i.npy"), (2, 2, 1), [0, 1, 1, 0])
        for name, layout in (("b", "bshd"), ("s", "sbhd")):
            self.talea("attend", "--q", name + ".npy", "--kv", name + ".safetensors",
                       "--kv-scale", name + "_scale.npy", "--kv-storage", "fp8_scaled",
                       "--indices", "i.npy", "--value-dim", str(DV), "--layout", layout,
                       "--out", name + "_o.safetensors")  # fmt: skip
        one, two = (self.read(n)["o"][1] for n in ("b_o.safetensors", "s_o.safetensors"))
        size = H * DV
        turned = [two[(s * 2 + b) * size :][:size] for b in (0, 1) for s in (0, 1)]
        self.assertEqual(one, sum(turned, []))

    def test_positions_are_of_the_causal_rule(self):
        ints(self.at("p.npy"), (S,), range(S))
        for flags in (["--q-positions", "p.npy"], ["--q-position-base", "3"]):
            done = self.attend(*flags, code=2)
            self.assertIn(flags[0] + ": without --causal", done.stderr)
            self.index("--top-k", "3", *flags, code=2)
        self.index("--top-k", "3", "--key-stride", "2", code=2)
        flags = ["--q-positions", "p.npy", "--causal", "--receipt", "r.json"]
        self.attend(*flags)
        self.assertEqual(self.receipt()["calls"][0]["notes"], [])
        done = self.attend(*flags, "--q-position-base", "4")
        self.assertIn("q_position_base = 4", done.stdout)

    def test_main_grad_is_added_to(self):
        tool.floats(self.at("g.npy"), (KEYS, D), [5.0] * (KEYS * D))
        flags = ["--upstream", "do.npy", "--outputs", "dkv"]
        self.attend(*flags, "--out", "one.safetensors")
        self.attend(*flags, "--main-grad", "g.npy", "--out", "two.safetensors")
        one, two = (self.read(f)["dkv"][1] for f in ("one.safetensors", "two.safetensors"))
        for a, b in zip(one, two, strict=True):
            self.assertAlmostEqual(a + 5, b, places=5)

    def test_fp8_storage(self):
        # 0x38 is 1.0 in e4m3: every value is the scale.
        entries = {"kv": ("F8_E4M3", [KEYS, D], bytes([0x38]) * (KEYS * D))}
        safetensors(self.at("kv8.safetensors"), entries)
        tool.floats(self.at("scale.npy"), (KEYS,), [0.25] * KEYS)
        flags = ["--q", "q.npy", "--kv", "kv8.safetensors", "--indices", "i.npy"]
        flags += ["--value-dim", str(DV), "--kv-storage", "fp8_scaled"]
        more = ["--kv-scale", "scale.npy", "--out", "o.safetensors", "--receipt", "r.json"]
        self.talea("attend", *flags, *more)
        values = self.read("o.safetensors")["o"][1]
        self.assertTrue(all(abs(v - 0.25) < 1e-6 or v == 0 for v in values))
        self.assertTrue(self.receipt()["calls"][0]["kv"]["path"])
        done = self.talea("attend", *flags, code=5)
        self.assertIn("kv_scale", done.stderr)

    def test_foreign_indices(self):
        lists = sum(self.lists, [])
        lists[2], lists[30] = 99, -7
        ints(self.at("i.npy"), (S, K), lists)
        done = self.attend("--out", "o.safetensors")
        self.assertIn("foreign", done.stdout)
        self.assertIn("slot 2 is 99", done.stdout)
        os.remove(self.at("o.safetensors"))
        for ranks in ((), ("--ranks", "3", "--cut", "sequence")):
            flags = ["--index-check", "report", "--out", "o.safetensors", *ranks]
            done = self.attend(*flags, code=5)
            self.assertIn("i.npy: 2 foreign indices; the first, in flat slot 2, is 99", done.stderr)
            self.assertTrue(os.path.exists(self.at("o.safetensors")))
        os.remove(self.at("o.safetensors"))
        done = self.attend("--index-check", "checked", "--out", "o.safetensors", code=5)
        self.assertIn("99", done.stderr)
        self.assertFalse(os.path.exists(self.at("o.safetensors")))

    def test_a_refused_index_is_told_by_its_place_in_the_whole(self):
        lists = sum(self.lists, [])
        lists[6 * K + 2], lists[-1] = 77, -7
        ints(self.at("i.npy"), (S, K), lists)
        flags = ["--index-check", "checked", "--out", "o.safetensors"]
        for cut in ([], ["--ranks", "2", "--cut", "heads"], ["--ranks", "3", "--cut", "sequence"]):
            done = self.attend(*flags, *cut, code=5)
            where = "i.npy: indices: 77 at batch 0, query 6, slot 2 lies outside its space (2 such)"
            self.assertIn(where, done.stderr)
            self.assertFalse(os.path.exists(self.at("o.safetensors")))

    def test_a_scale_of_0_is_the_default(self):
        self.attend("--scale", "0", "--out", "a.safetensors")
        self.attend("--out", "b.safetensors")
        self.assertEqual(self.read("a.safetensors"), self.read("b.safetensors"))

    def test_plain_storage_is_never_dequantised(self):
        done = self.attend("--fp8-path", "in_kernel", "--out", "a.safetensors")
        self.assertIn("--fp8-path in_kernel: not read: needs --kv-storage", done.stderr)
        self.attend("--out", "b.safetensors")
        self.compare("a.safetensors", "b.safetensors")

    def test_refusals_name_flag_or_file(self):
        def expect(code, word, *more):
            before = sorted(os.listdir(self.folder.name))
            flags = [*more, "--out", "x.safetensors", "--receipt", "x.json"]
            self.assertIn(word, self.attend(*flags, code=code).stderr)
            self.assertEqual(sorted(os.listdir(self.folder.name)), before)

        expect(2, "--outputs o,dq", "--outputs", "o,dq")
        expect(2, "--outputs entropy", "--outputs", "entropy")
        expect(2, "--upstream do.npy", "--upstream", "do.npy", "--outputs", "o")
        expect(2, "--ranks 2", "--ranks", "2")
        expect(2, "--cut heads: needs --ranks", "--cut", "heads")
        expect(2, "--rank-timeout 5: needs --ranks", "--rank-timeout", "5")
        expect(2, "--layout thd", "--layout", "thd")
        expect(2, "--scale nan", "--scale", "nan")
        expect(2, "--main-grad", "--main-grad", "kv.npy")
        expect(2, "d_sink", "--outputs", "d_sink", "--upstream", "do.npy")
        expect(3, "--dkv-sum atomic: ", "--dkv-sum", "atomic")
        expect(3, "atomic", "--dkv-sum", "atomic", "--upstream", "do.npy")
        expect(5, "--sink: none.npy", "--sink", "none.npy")
        expect(5, "--sink do.npy: sink: ", "--sink", "do.npy")
        expect(5, "--upstream q.npy: d_o: ", "--upstream", "q.npy")
        expect(5, "--upstream-lse q.npy: d_lse: ", "--upstream-lse", "q.npy")
        expect(5, "--topk-length q.npy: topk_length: ", "--topk-length", "q.npy")
        expect(2, "--q-positions", "--q-positions", "q.npy:key")
        done = self.talea("attend", "--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy", code=2)
        self.assertIn("--value-dim", done.stderr)
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy", "--value-dim", "13"]
        self.assertIn("--value-dim 13", self.talea("attend", *flags, code=2).stderr)
        done = self.attend("--out", "q.npy", code=2)
        self.assertIn("--out q.npy", done.stderr)


class Check(SparseCase):
    def test_a_pass_of_given_sizes(self):
        check = ["check", "--operator", "sparse_attention", "--receipt", "r.json"]
        heads, index = ["--heads", "3", "--dim", "32"], ["--index-heads", "2", "--index-dim", "8"]
        attends = [*heads, "--value-dim", "16"]
        for name, more in (
            ("forward", attends), ("backward", attends), ("select", index),
            ("index_loss", [*heads, *index]),
        ):  # fmt: skip
            self.talea(
                *check, "--tokens", "5", "--keys", "30", "--top-k", "7", *more, "--pass", name
            )
            cases = self.receipt()["check"]["cases"]
            self.assertEqual({c["name"] for c in cases}, {"sizes"})
            judged = [c["lane"] for c in cases if "declined" not in c]
            self.assertEqual(judged[:2], ["cpu", "unfused"] if name < "i" else ["cpu", "reference"])
        for words, flags in (
            ("--value-dim 64", ["--dim", "32"]),
            ("--keys 0", ["--keys", "0"]),
            ("--case", ["--keys", "9", "--case", "1"]),
        ):
            self.assertIn(words, self.talea(*check, *flags, code=2).stderr)
        self.assertIn("no such lane", self.talea(*check, "--lane", "fastest", code=2).stderr)
        self.assertIn("a device lane", self.talea(*check, "--lane", "sm90", code=3).stderr)
        for command in ("explain", "bench"):
            for words, flags in (("D = 0", ["--dim", "0"]), ("600", ["--value-dim", "600"])):
                done = self.talea(command, "--operator", "sparse_attention", *flags, code=2)
                self.assertIn(words, done.stderr)


class Index(SparseCase):
    def score(self, t, j):
        total = 0
        for h in range(HI):
            dot = sum(self.iq[(t * HI + h) * DI + c] * self.ik[j * DI + c] for c in range(DI))
            total += self.iw[t * HI + h] * max(dot, 0)
        return total

    def run_tool(self, *arguments):
        return subprocess.run([tool.TALEA, *arguments], capture_output=True, text=True,
                              cwd=self.folder.name)  # fmt: skip

    def test_the_limit_that_a_refusal_names_is_enough(self):
        tool = self.run_tool
        sizes = ["--operator", "sparse_attention", "--tokens", "9", "--keys", "70", "--heads", "2"]
        sizes += ["--dim", "16", "--value-dim", "8", "--top-k", "5"]
        for command in (["explain"], ["bench", "--lanes", "unfused", "--repeats", "1"]):
            low = tool(*command, *sizes, "--workspace-limit", "1KiB", "--json")
            named = re.search(r"lane unfused needs at least (\d+) bytes", low.stdout + low.stderr)
            self.assertIsNotNone(named, low.stdout + low.stderr)
            done = tool(*command, *sizes, "--workspace-limit", named[1], "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("needs at least", done.stdout + done.stderr)

    def test_a_limit_holds_on_every_lane(self):
        """What is measured of the heap of the process, workspace and all, is within the limit."""
        many = 3000
        tool.floats(self.at("kv.npy"), (many, D), [1 / (1 + i) for i in range(many * D)])
        tool.floats(self.at("ik.npy"), (many, DI), [1 / (1 + i) for i in range(many * DI)])
        loss = ["--loss", "dense", "--q", "q.npy", "--kv", "kv.npy", "--value-dim", str(DV)]
        attend = ["attend", "--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy"]
        attend += ["--value-dim", str(DV), "--upstream", "do.npy"]
        index = ["index", "--index-q", "iq.npy", "--index-k", "ik.npy", "--index-weights", "iw.npy"]
        for lane in ("cpu", "unfused", "reference"):
            for flags in (attend, [*index, "--top-k", "4"], [*index, *loss]):
                if lane == "unfused" and flags is not attend:
                    continue
                flags = [*flags, "--lane", lane, "--threads", "1", "--receipt", "r.json"]
                low = self.run_tool(*flags, "--workspace-limit", "1")
                self.assertEqual(low.returncode, 2, (flags, low.stderr))
                limit = int(re.search(r"needs? at least (\d+) bytes", low.stderr)[1])
                done = self.run_tool(*flags, "--workspace-limit", str(limit))
                self.assertEqual(done.returncode, 0, (flags, done.stderr))
                for call in self.receipt()["calls"]:
                    measured = call["cost"]["measured_peak_extra_bytes"]
                    self.assertLessEqual(measured, limit, flags)

    def test_a_limit_is_refused_before_the_first_pass(self):
        """Of all passes and ranks: with the number that is named the command runs."""
        attend = ["attend", "--q", "q.npy", "--kv", "kv.npy", "--indices", "i.npy"]
        attend += ["--value-dim", str(DV), "--upstream", "do.npy"]
        index = ["index", "--index-q", "iq.npy", "--index-k", "ik.npy", "--index-weights", "iw.npy"]
        index += ["--top-k", "4", "--loss", "sparse", "--q", "q.npy", "--kv", "kv.npy"]
        index += ["--value-dim", str(DV)]
        for flags, cut in ((attend, "heads"), (index, "sequence")):
            for ranks in ([], ["--ranks", "2", "--cut", cut]):
                limit = [*flags, *ranks, "--threads", "1", "--workspace-limit"]
                low = self.talea(*limit, "1", code=2).stderr
                least = re.search(r"passes of this command need at least (\d+) bytes", low)[1]
                low = self.talea(*limit, str(int(least) - 1), code=2).stderr
                self.assertIn(f"passes of this command need at least {least} bytes", low)
                self.talea(*limit, least)

    def test_selection(self):
        flags = ["--top-k", "4", "--outputs", "indices,topk_length,scores", "--causal"]
        self.index(*flags, "--out", "o.safetensors", "--receipt", "r.json")
        out = self.read_any("o.safetensors")
        for t in range(S):
            order = sorted(range(t + 1), key=lambda j: (-self.score(t, j), j))[:4]
            want = sorted(order) + [-1] * (4 - len(order))
            self.assertEqual(out["indices"][t * 4 : t * 4 + 4], want)
            self.assertEqual(out["topk_length"][t], len(order))
        call = self.receipt()["calls"][0]
        self.assertEqual(call["pass"], "select")
        self.assertIn("lower index", call["indexer"]["selection_rule"])

    def read_any(self, name):
        raw = pathlib.Path(self.at(name)).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        found = {}
        for key, entry in json.loads(raw[8 : 8 + size]).items():
            if key == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            values = array.array({"F32": "f", "I32": "i", "I64": "q"}[entry["dtype"]])
            values.frombytes(raw[8 + size + begin : 8 + size + end])
            found[key] = list(values)
        return found

    def test_loss_follows_its_selection(self):
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", str(DV)]
        names = "indices,index_loss,dindex_q,dindex_k,dindex_weights"
        both = ["--top-k", "4", "--loss", "sparse", "--outputs", names]
        self.index(*flags, *both, "--out", "a.safetensors", "--receipt", "r.json")
        one = self.read_any("a.safetensors")
        self.assertEqual([c["pass"] for c in self.receipt()["calls"]], ["select", "index_loss"])
        denominator = self.receipt()["calls"][1]["indexer"]["denominator"]
        self.assertEqual(denominator["value"], S)
        self.assertEqual(self.receipt()["calls"][1]["problem"]["value_dim"], DV)
        self.index(*flags, "--loss", "sparse", "--indices", "a.safetensors:indices",
                   "--out", "b.safetensors")  # fmt: skip
        two = self.read_any("b.safetensors")
        for name, values in two.items():
            self.assertEqual(values, one[name], name)
        self.index(*flags, "--loss", "dense", "--out", "c.safetensors")
        self.assertGreater(self.read_any("c.safetensors")["index_loss"][0], 0)
        for cut in ("heads", "sequence"):
            more = ["--ranks", "3", "--cut", cut, "--out", "d.safetensors"]
            self.index(*flags, "--loss", "dense", *more)
            self.compare("c.safetensors", "d.safetensors")

    def test_a_loss_without_gradients_has_no_accumulators_of_them(self):
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", str(DV), "--loss", "dense"]
        for lane in ("cpu", "reference"):
            for names, said in (("index_loss", False), ("index_loss,dindex_q,dindex_k", True)):
                self.index(*flags, "--lane", lane, "--outputs", names, "--receipt", "r.json")
                numerics = self.receipt()["calls"][0]["numerics"]
                for name in ("accumulator_dq", "accumulator_dkv", "dkv_order"):
                    self.assertEqual(numerics[name] != "not requested", said, (lane, name))

    def test_every_rank_of_a_cut_selects_as_one_does(self):
        """Ranks that share out the heads of the attention hold the whole indexer."""
        names = ["--top-k", "3", "--outputs", "indices,topk_length,scores"]
        self.index(*names, "--out", "one.safetensors")
        for cut in ("heads", "sequence"):
            self.index(*names, "--ranks", "3", "--cut", cut, "--out", "r.safetensors")
            self.assertEqual(self.read_any("one.safetensors"), self.read_any("r.safetensors"))

    def test_a_given_denominator_divides_the_sum_of_all_ranks(self):
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", str(DV), "--loss", "dense"]
        flags += ["--denominator", "10"]
        self.index(*flags, "--out", "one.safetensors")
        for cut in ("heads", "sequence"):
            more = ["--ranks", "3", "--cut", cut, "--out", "r.safetensors", "--receipt", "r.json"]
            self.index(*flags, *more)
            self.compare("one.safetensors", "r.safetensors")

    def test_a_selection_by_stride_and_its_loss(self):
        flags = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", str(DV), "--loss", "sparse"]
        stride = ["--top-k", "3", "--causal", "--key-stride", "2"]
        self.index(*flags, *stride, "--outputs", "indices,index_loss", "--out", "a.safetensors")
        found = self.read_any("a.safetensors")
        self.assertEqual(found["indices"][:6], [-1, -1, -1, 0, -1, -1])

    def test_refusals_name_the_flag(self):
        loss = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", "2", "--loss", "sparse"]
        for words, flags in (
            ("--top-k", []),
            ("--loss sparse: needs --q", ["--loss", "sparse", "--top-k", "3", "--value-dim", "4"]),
            ("--outputs index_loss", ["--top-k", "3", "--outputs", "index_loss"]),
            ("--q q.npy", ["--top-k", "3", "--q", "q.npy"]),
            ("--scale", ["--top-k", "3", "--scale", "2"]),
            ("--coeff", ["--top-k", "3", "--coeff", "2"]),
            ("--value-dim", ["--top-k", "3", "--value-dim", "2"]),
            ("--denominator-scope", ["--top-k", "3", "--denominator-scope", "global"]),
            ("--cut sequence: needs --ranks", ["--top-k", "3", "--cut", "sequence"]),
            ("--topk-length i.npy", [*loss, "--top-k", "3", "--topk-length", "i.npy"]),
            ("--begin i.npy", [*loss, "--indices", "i.npy", "--begin", "i.npy"]),
            ("--key-stride 2", [*loss, "--causal", "--indices", "i.npy", "--key-stride", "2"]),
        ):
            self.assertIn(words, self.index(*flags, code=2).stderr)

    def test_one_process_is_all_ranks(self):
        """Its rows are those of the world: a global scope is the local one, and says so."""
        loss = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", "2", "--loss", "sparse"]
        said = {}
        for scope in ("local", "global"):
            more = [*loss, "--top-k", "3", "--denominator-scope", scope, "--json"]
            call = json.loads(self.index(*more).stdout)["calls"][-1]["indexer"]
            self.assertEqual(call["denominator"].pop("scope"), scope)
            said[scope] = call
        self.assertEqual(said["local"], said["global"])

    def test_no_slot_selects_no_key(self):
        names = "indices,topk_length,scores"
        self.index("--top-k", "0", "--outputs", names, "--out", "o.safetensors")
        made = self.read_any("o.safetensors")
        self.assertEqual((made["indices"], made["scores"]), ([], []))
        self.assertEqual(set(made["topk_length"]), {0})

    def test_slots_without_a_selection_are_noted(self):
        self.index("--top-k", "3", "--out", "i.safetensors")
        loss = ["--q", "q.npy", "--kv", "kv.npy", "--value-dim", "2", "--loss", "sparse"]
        loss += ["--indices", "i.safetensors:indices", "--top-k", "3"]
        note = "--top-k 3: no output asks for a selection"
        self.assertIn(note, self.index(*loss).stdout)
        call = json.loads(self.index(*loss, "--json").stdout)["calls"][0]
        self.assertIn(note, call["notes"])


if __name__ == "__main__":
    unittest.main()
