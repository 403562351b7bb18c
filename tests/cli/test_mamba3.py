# What: talea scan and --operator mamba3 from outside: values, files, layouts, ranks, refusals.
# Why: docs/cli.md is a contract with scripts; only a run of the program can prove it.
# Never: needs more than the standard library; the truth is a loop over tokens.
# usage: test_mamba3.py TALEA_BINARY mpi|none [unittest arguments]
import array
import json
import math
import pathlib
import random
import re
import subprocess
import sys
import unittest

import tool

MPI = sys.argv.pop(1)

B, S, H, G, R, N, P, A = 2, 7, 4, 2, 2, 4, 3, 2
SHAPES = {
    "q": (B, S, R, G, N), "k": (B, S, R, G, N), "v": (B, S, H, P), "z": (B, S, H, P),
    "adt": (B, H, S), "dt": (B, H, S), "trap": (B, H, S), "angles": (B, S, H, A),
    "q-bias": (H, R, N), "k-bias": (H, R, N), "d": (H,), "mimo-v": (H, R, P),
    "mimo-z": (H, R, P), "mimo-out": (H, R, P), "upstream": (B, S, H, P),
}  # fmt: skip
ALL = list(SHAPES)[:-1]


def strides(shape):
    made = [1]
    for extent in reversed(shape[1:]):
        made.insert(0, made[0] * extent)
    return made


class Problem:
    """Flat lists by flag name, and the recurrence over them in doubles."""

    def __init__(self, seed=3):
        draw = random.Random(seed)
        self.x = {n: [draw.gauss(0, 1) for _ in range(math.prod(s))] for n, s in SHAPES.items()}
        self.x["adt"] = [-abs(v) / 2 for v in self.x["adt"]]
        self.x["dt"] = [abs(v) / 2 for v in self.x["dt"]]
        # What the program reads is fp32.
        self.x = {n: list(array.array("f", v)) for n, v in self.x.items()}

    def at(self, name, *index):
        return self.x[name][sum(i * s for i, s in zip(index, strides(SHAPES[name]), strict=True))]

    def row(self, name, b, t, h, r, theta):
        x = [self.at(name, b, t, r, h // (H // G), n) + self.at(name + "-bias", h, r, n)
             for n in range(N)]  # fmt: skip
        for i, angle in enumerate(theta):
            u, w, j = x[i], x[i + N // 2], i + N // 2
            x[i] = u * math.cos(angle) - w * math.sin(angle)
            x[j] = u * math.sin(angle) + w * math.cos(angle)
        return x

    def out(self):
        made = {}
        for b in range(B):
            for h in range(H):
                state, theta, before = [[0.0] * N for _ in range(P)], [0.0] * A, None
                for t in range(S):
                    dt, lam = self.at("dt", b, h, t), 1 / (1 + math.exp(-self.at("trap", b, h, t)))
                    for i in range(A):
                        theta[i] += math.pi * math.tanh(self.at("angles", b, t, h, i)) * dt
                    k = [self.row("k", b, t, h, r, theta) for r in range(R)]
                    v = [[self.at("v", b, t, h, p) * self.at("mimo-v", h, r, p) for p in range(P)]
                         for r in range(R)]  # fmt: skip
                    decay = math.exp(self.at("adt", b, h, t))
                    for p in range(P):
                        for n in range(N):
                            if before:
                                state[p][n] += (1 - lam) * dt * sum(
                                    before[1][r][p] * before[0][r][n] for r in range(R))  # fmt: skip
                            state[p][n] *= decay
                            state[p][n] += lam * dt * sum(v[r][p] * k[r][n] for r in range(R))
                    before = (k, v)
                    q = [self.row("q", b, t, h, r, theta) for r in range(R)]
                    for p in range(P):
                        total = 0.0
                        for r in range(R):
                            y = sum(state[p][n] * q[r][n] for n in range(N))
                            y += self.at("d", h) * v[r][p]
                            u = self.at("z", b, t, h, p) * self.at("mimo-z", h, r, p)
                            total += y * u / (1 + math.exp(-u)) * self.at("mimo-out", h, r, p)
                        made[b, t, h, p] = total
        return [made[b, t, h, p] for b in range(B) for t in range(S) for h in range(H)
                for p in range(P)]  # fmt: skip

    def loss(self):
        return sum(a * b for a, b in zip(self.out(), self.x["upstream"], strict=True))


def turned(values, shape, order):
    """The values of axes `order` of a tensor of `shape`, and their shape."""
    steps = strides(shape)
    new = [shape[i] for i in order]
    places = [0]
    for i in order:
        places = [p + j * steps[i] for p in places for j in range(shape[i])]
    return [values[p] for p in places], new


class ScanCase(tool.Case):
    def setUp(self):
        super().setUp()
        self.problem = Problem()
        for name, shape in SHAPES.items():
            tool.floats(self.at(name + ".npy"), shape, self.problem.x[name])

    def scan(self, *more, names=ALL, code=0, **keywords):
        flags = [w for n in names for w in (f"--{n}", f"{n}.npy")]
        return self.talea("scan", *flags, *more, code=code, **keywords)

    def tensors(self, *more, **keywords):
        self.scan(*more, "--out", "o.safetensors", **keywords)
        return tool.safetensors(self.at("o.safetensors"))

    def close(self, ours, truth, tolerance=2e-5):
        self.assertEqual(len(ours), len(truth))
        scale = max(map(abs, truth))
        for a, b in zip(ours, truth, strict=True):
            self.assertLessEqual(abs(a - b), tolerance * scale)


class Scan(ScanCase):
    def test_values_names_and_receipt(self):
        names = "out,final_angle,final_ssm,final_k,final_v"
        made = self.tensors("--outputs", names, "--receipt", "r.json")
        self.assertEqual(sorted(made), sorted(names.split(",")))
        self.assertEqual(made["out"][0], [B, S, H, P])
        self.assertEqual(made["final_k"][0], [B, R, H, N])
        self.close(made["out"][1], self.problem.out())
        receipt = json.loads(pathlib.Path(self.at("r.json")).read_text())
        self.assertEqual((receipt["kind"], len(receipt["calls"])), ("scan", 1))
        call = receipt["calls"][0]
        self.assertEqual(call["ran"]["rotary_pairs"], "halves")
        self.assertEqual(call["ran"]["quadratic_bytes"], 0)
        self.assertEqual(len(call["inputs"]), len(ALL))
        self.assertEqual(sorted(call["values"]), sorted(names.split(",")))

    def test_gradients_are_slopes(self):
        made = self.tensors(
            "--upstream", "upstream.npy", "--outputs", "out,d_dt,d_q,d_mimo_v,d_k_bias"
        )
        for name in ("dt", "q", "mimo-v", "k-bias"):
            ours = made["d_" + name.replace("-", "_")]
            self.assertEqual(ours[0], list(SHAPES[name]))
            for place in (0, len(ours[1]) // 2, len(ours[1]) - 1):
                kept, ends = self.problem.x[name][place], []
                for step in (1e-4, -1e-4):
                    self.problem.x[name][place] = kept + step
                    ends.append(self.problem.loss())
                self.problem.x[name][place] = kept
                slope = (ends[0] - ends[1]) / 2e-4
                self.assertAlmostEqual(ours[1][place], slope, delta=2e-3 * max(1, abs(slope)))

    def test_a_limit_is_refused_before_the_first_pass(self):
        """Of both passes and all ranks: with the number that is named the command runs."""
        flags = ["--upstream", "upstream.npy", "--outputs", "out,d_dt", "--threads", "1"]
        for ranks in ([], ["--ranks", "2", "--cut", "heads"], ["--ranks", "2", "--cut", "tokens"]):
            limit = [*flags, *ranks, "--workspace-limit"]
            low = self.scan(*limit, "1", code=2).stderr
            least = re.search(r"passes of this command need at least (\d+) bytes", low)[1]
            low = self.scan(*limit, str(int(least) - 1), code=2).stderr
            self.assertIn(f"passes of this command need at least {least} bytes", low)
            self.scan(*limit, least)

    def test_layouts_of_files(self):
        wanted = self.tensors("--upstream", "upstream.npy", "--outputs", "out,d_q")
        rows = {"bsgrn": (0, 1, 3, 2, 4), "sbrgn": (1, 0, 2, 3, 4)}
        for layout, order in rows.items():
            for name in ("q", "k"):
                values, shape = turned(self.problem.x[name], SHAPES[name], order)
                tool.floats(self.at(name + ".npy"), shape, values)
            for name in ("v", "z", "angles", "upstream"):
                swap = (1, 0, 2, 3) if layout == "sbrgn" else (0, 1, 2, 3)
                values, shape = turned(self.problem.x[name], SHAPES[name], swap)
                tool.floats(self.at(name + ".npy"), shape, values)
            made = self.tensors(
                "--layout", layout, "--upstream", "upstream.npy", "--outputs", "out,d_q"
            )
            values, shape = turned(wanted["d_q"][1], SHAPES["q"], order)
            self.assertEqual(made["d_q"], (list(shape), values))
            if layout == "sbrgn":
                self.assertEqual(made["out"][0], [S, B, H, P])

    def test_a_machine_reads_it(self):
        said = json.loads(self.scan("--json").stdout)
        self.assertEqual(said["calls"][0]["operator"], "mamba3")
        self.assertIn("lane", self.scan().stdout)

    def test_refusals(self):
        tool.npy(self.at("none.npy"), "<i4", (0,), b"")
        less = [n for n in ALL if n != "z"]
        for more, code, words, names in (
            (["--outputs", "d_q"], 2, "upstream", ALL),
            (["--outputs", "d_norm_weight", "--upstream", "upstream.npy"], 2, "norm_weight", ALL),
            (["--outputs", "y"], 2, "unknown", ALL),
            (["--outputs", "out,out"], 2, "twice", ALL),
            ([], 2, "--mimo-z", less),
            (["--norm-weight", "v.npy"], 2, "--head-norm", ALL),
            (["--ranks", "2"], 2, "--cut", ALL),
            (["--cut", "heads"], 2, "--ranks", ALL),
            (["--chunk", "-1"], 2, "chunk", ALL),
            (["--norm-eps", "x"], 2, "--norm-eps", ALL),
            (["--lane", "nobody"], 2, "nobody", ALL),
            (["--out", "o.npy"], 2, "--out", ALL),
            (["--initial-ssm", "v.npy"], 5, "--initial-ssm v.npy: initial_ssm", ALL),
            (["--upstream", "dt.npy", "--outputs", "d_q"], 5, "upstream", ALL),
            (["--cu-seqlens", "missing.npy"], 5, "missing.npy", ALL),
            (["--cu-seqlens", "none.npy"], 5, "--cu-seqlens none.npy: cu_seqlens: shape", ALL),
        ):
            done = self.scan(*more, names=names, code=code)
            self.assertIn(words, done.stderr, more)
        tool.floats(self.at("adt.npy"), (B, H, S + 1), [0.0] * B * H * (S + 1))
        self.assertIn("--adt adt.npy: adt", self.scan(code=5).stderr)

    def test_axes_are_named_as_the_help_has_them(self):
        said = self.scan("--initial-angle", "v.npy", names=ALL[:7], code=5).stderr
        self.assertIn("4 axes where [n,H,A] is needed", said)

    def test_packed(self):
        for name in ("q", "k", "v", "z", "angles"):
            count = math.prod(SHAPES[name]) // B
            tool.floats(
                self.at(name + ".npy"), (1, *SHAPES[name][1:]), self.problem.x[name][:count]
            )
        for name in ("adt", "dt", "trap"):
            tool.floats(self.at(name + ".npy"), (1, H, S), self.problem.x[name][: H * S])
        for cu, code in (([0, 3, 3, 7], 0), ([0, 5, 3, 7], 5), ([0, 9], 5)):
            raw = array.array("i", cu).tobytes()
            tool.npy(self.at("cu.npy"), "<i4", (len(cu),), raw)
            done = self.scan("--cu-seqlens", "cu.npy", "--outputs", "out,final_v", "--out",
                             "o.safetensors", code=code)  # fmt: skip
            if code:
                self.assertIn("--cu-seqlens cu.npy: cu_seqlens", done.stderr)
        made = tool.safetensors(self.at("o.safetensors"))
        self.assertEqual(made["final_v"][0], [3, H, P])
        self.assertEqual(made["final_v"][1][2 * H * P :], made_v(self.problem, 6))


def made_v(problem, token):
    return problem.x["v"][token * H * P : (token + 1) * H * P]


class Defaults(ScanCase):
    def test_an_upstream_asks_for_backward(self):
        self.assertEqual(set(self.tensors()), {"out"})
        made = self.tensors("--upstream", "upstream.npy")
        asked = ["out", *("d_" + name.replace("-", "_") for name in ALL)]
        self.assertEqual(set(made), set(asked))
        self.assertEqual(
            made, self.tensors("--upstream", "upstream.npy", "--outputs", ",".join(asked))
        )
        self.assertIn("--step", self.scan("--upstream", "upstream.npy", "--step", code=2).stderr)


class Steps(ScanCase):
    def test_steps_are_the_prefill(self):
        names = "out,final_angle,final_ssm,final_k,final_v"
        whole = self.tensors("--outputs", names)
        for lane in ("cpu", "reference"):
            made = self.tensors("--outputs", names, "--step", "--lane", lane, "--receipt", "r.json")
            for name, (shape, values) in whole.items():
                self.assertEqual(made[name][0], shape)
                self.close(made[name][1], values)
            call = json.loads(pathlib.Path(self.at("r.json")).read_text())["calls"][0]
            self.assertEqual((call["ran"]["pass"], call["ran"]["lane"]), ("step", lane))
        self.close(self.tensors("--step")["out"][1], whole["out"][1])

    def test_no_token_takes_no_step(self):
        for name, shape in SHAPES.items():
            if (B, S) == shape[:2] or (B, H, S) == shape:
                tool.floats(self.at(name + ".npy"), [n * (n != S) for n in shape], [])
        ssm = [float(i) for i in range(B * H * P * N)]
        tool.floats(self.at("ssm.npy"), (B, H, P, N), ssm)
        flags = ["--initial-ssm", "ssm.npy", "--outputs", "out,final_ssm", "--receipt", "r.json"]
        for more in ([], ["--step"]):
            made = self.tensors(*flags, *more)
            self.assertEqual(made["out"][0], [B, 0, H, P])
            self.assertEqual(made["final_ssm"][1], ssm)

    def test_a_step_reads_no_chunk(self):
        wanted = self.tensors("--step")
        for more in (["--chunk", "2"], ["--schedule", "parallel"]):
            self.assertIn(": not read: a step has no chunks", self.scan("--step", *more).stderr)
            self.assertEqual(self.tensors("--step", *more), wanted)

    def test_steps_go_on_from_states(self):
        names = "out,final_angle,final_ssm,final_k,final_v"
        states = {"initial-angle": (B, H, A), "initial-ssm": (B, H, P, N),
                  "initial-k": (B, R, H, N), "initial-v": (B, H, P)}  # fmt: skip
        draw, flags = random.Random(5), []
        for name, shape in states.items():
            values = [draw.gauss(0, 1) for _ in range(math.prod(shape))]
            tool.floats(self.at(name + ".npy"), shape, values)
            flags += [f"--{name}", f"{name}.npy"]
        whole = self.tensors(*flags, "--outputs", names)
        made = self.tensors(*flags, "--outputs", names, "--step")
        for name, (_, values) in whole.items():
            self.close(made[name][1], values)

    def test_refusals(self):
        for more, words in (
            (["--outputs", "d_q", "--upstream", "upstream.npy"], "--step"),
            (["--ranks", "2", "--cut", "heads"], "--step"),
        ):
            self.assertIn(words, self.scan("--step", *more, code=2).stderr)


class Ranks(ScanCase):
    NAMES = "out,final_angle,final_ssm,final_k,final_v,d_q,d_k,d_v,d_dt,d_angles,d_q_bias,d_mimo_v"

    def both(self, *more):
        return self.tensors("--upstream", "upstream.npy", "--outputs", self.NAMES, *more)

    def test_nothing_to_share(self):
        """No sequence, and no head: outputs without an element, gradients of parameters 0."""
        for name, shape in SHAPES.items():
            if shape[0] == B:
                tool.floats(self.at(name + ".npy"), (1, *shape[1:]), self.problem.x[name][::B])
        tool.npy(self.at("cu.npy"), "<i4", (1,), bytes(4))
        cut = ("--ranks", "2", "--cut", "heads")
        made = self.both("--cu-seqlens", "cu.npy", *cut)
        self.assertEqual(made["final_ssm"][0], [0, H, P, N])
        self.assertEqual(set(made["d_q_bias"][1]), {0.0})
        for name, shape in SHAPES.items():
            if name in ("q", "k"):
                extents = [B, S, R, 1, N]
            elif name in ("adt", "dt", "trap"):
                extents = [B, 0, S]
            elif shape[0] == B:
                extents = [B, S, 0, shape[3]]
            else:
                extents = [0, *shape[1:]]
            tool.floats(self.at(name + ".npy"), extents, [0.0] * math.prod(extents))
        self.assertEqual(self.both(*cut)["out"][0], [B, S, 0, P])

    def test_threads(self):
        one = self.both()
        for cut in ("heads", "tokens"):
            for ranks in (1, 2, 3, 5):
                made = self.both("--ranks", str(ranks), "--cut", cut)
                for name, (shape, values) in one.items():
                    self.assertEqual(made[name][0], shape)
                    self.close(made[name][1], values)

    def test_processes(self):
        if MPI == "none":
            self.skipTest("built without MPI")
        one = self.both()
        flags = [w for n in ALL for w in (f"--{n}", f"{n}.npy")]
        for cut in ("heads", "tokens"):
            for ranks in (2, 3):
                more = ["--upstream", "upstream.npy", "--outputs", self.NAMES, "--cut", cut,
                        "--out", "m.safetensors", "--receipt", "m.json"]  # fmt: skip
                launch = [*tool.MPIRUN, "-n", str(ranks), tool.TALEA, "scan", *flags, *more]
                done = subprocess.run(launch, cwd=self.folder.name, capture_output=True, text=True,
                                      timeout=120)  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
                made = tool.safetensors(self.at("m.safetensors"))
                threads = self.both("--ranks", str(ranks), "--cut", cut)
                for name, (_, values) in one.items():
                    self.close(made[name][1], values)
                    self.assertEqual(made[name], threads[name], name)
                call = json.loads(pathlib.Path(self.at("m.json")).read_text())["calls"][0]
                self.assertEqual((call["collective"], len(call["pieces"])), ("mpi", ranks))


class Commands(ScanCase):
    def test_explain_check_and_bench(self):
        sizes = ["--tokens", "16", "--heads", "2", "--state-dim", "8", "--head-dim", "4"]
        said = self.talea("explain", "--operator", "mamba3", *sizes, "--rank", "2", "--json").stdout
        self.assertEqual(json.loads(said)["operator"], "mamba3")
        for step in ("backward", "step"):
            self.talea("explain", "--operator", "mamba3", *sizes, "--pass", step)
        # Tensors of more than a terabyte are none the less apart.
        far = ["--tokens", "8589934592", *sizes[2:], "--rank", "8", "--lane", "cpu"]
        far += ["--workspace-limit", "1000GiB", "--pass", "backward"]
        self.talea("explain", "--operator", "mamba3", *far)
        done = self.talea("check", "--operator", "mamba3", *sizes, "--dtype", "fp32", "--json")
        check = json.loads(done.stdout)["check"]
        self.assertEqual((check["operator"], check["failed"]), ("mamba3", 0))
        self.assertGreater(check["passed"], 0)
        lane = check["lanes"][0]
        for step, tensors in (("forward", {"out"}), ("backward", {"d_q"}), ("step", {"out"})):
            done = self.talea("check", "--operator", "mamba3", "--pass", step, *sizes, "--groups", "1",
                              "--json")  # fmt: skip
            check = json.loads(done.stdout)["check"]
            made = {e["tensor"] for e in check["cases"][0]["errors"]}
            self.assertEqual((check["pass"], check["failed"]), (step, 0))
            self.assertTrue(tensors <= made)
            self.assertEqual("d_q" in made, step == "backward")
        said = self.talea("explain", "--operator", "mamba3", *sizes, "--pass", "step").stdout
        self.assertIn(" 1 tokens", said)
        said = self.talea("bench", "--operator", "mamba3", *sizes, "--lanes", lane, "--repeats", "2",
                          "--receipt", "b.json", "--json").stdout  # fmt: skip
        run = json.loads(said)["bench"]["runs"][0]
        self.assertGreater(run["ratio"], 0)
        self.talea("report", "b.json", "--out", "b.html")
        self.talea("compare", "b.json", "b.json")

    def test_flags_that_would_do_nothing_are_refused(self):
        flags = [w for n in ("q", "k", "v", "adt", "dt", "trap") for w in (f"--{n}", f"{n}.npy")]
        for more, words in (
            (
                ["--upstream", "upstream.npy", "--outputs", "out"],
                "--upstream upstream.npy: needs a d_* among --outputs",
            ),
            (["--norm-eps", "1e-3"], "--norm-eps 1e-3: needs --head-norm"),
            (["--rank-timeout", "5"], "--rank-timeout 5: needs --ranks"),
        ):
            self.assertIn(words, self.talea("scan", *flags, *more, code=2).stderr)
        done = self.talea("scan", *flags, "--rotary-pairs", "halves")
        self.assertIn("--rotary-pairs halves: not read: needs --angles", done.stderr)

    def test_sizes_that_no_scan_has_are_named(self):
        groups = ["--heads", "3", "--groups", "2"], "G = 2 groups do not divide H = 3 heads"
        for more, words in (
            groups, (["--state-dim", "0"], "N = 0"), (["--state-dim", "5", "--rank", "2"], "even N"),
            (["--chunk", "-3"], "--chunk -3"), (["--dtype", "fp64"], "--dtype fp64"),
        ):  # fmt: skip
            done = self.talea("check", "--operator", "mamba3", "--tokens", "3", *more, code=2)
            self.assertIn(words, done.stderr)
        for command in ("explain", "bench"):
            done = self.talea(command, "--operator", "mamba3", *groups[0], code=2)
            self.assertIn(groups[1], done.stderr)

    def test_flags_of_another_operator_are_refused(self):
        self.talea("bench", "--operator", "mamba3", "--vocab", "5", code=2)
        self.talea("explain", "--rank", "2", code=2)


if __name__ == "__main__":
    unittest.main()
