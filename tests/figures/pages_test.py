"""What: tools/attention_page, scan_page, h200_page and peer_page over receipts in which no two figures are equal.
Why: a page that is drawn wrong is what its program says, so the check of figures passes it: a row left out, two
columns that change places.
Never: reads the real receipts.

usage: pages_test.py
"""

import importlib.machinery
import importlib.util
import sys
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
sys.dont_write_bytecode = True


def tool(name):
    loader = importlib.machinery.SourceFileLoader(f"page_{name}", str(TOOLS / name))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(loader.name, loader, origin=str(TOOLS / name))
    )
    module.__file__ = str(TOOLS / name)
    loader.exec_module(module)
    return module


class Used:
    """What tools/check_figures hands to a program of tools/."""

    def __init__(self, h100=(), **documents):
        of = {"h200": documents, "h100": dict(h100)}
        self.documents = {f"receipts/{chip}/{name}.json": made
                          for chip, them in of.items() for name, made in them.items()}  # fmt: skip

    def load(self, path):
        return self.documents[path]


def rows_of(text):
    """Of each table of a text: header -> cell, a row; a header that comes twice has its number behind it."""
    tables, heads = [], None
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = None
        elif set(line) <= set("|-"):
            continue
        elif heads is None:
            heads = [h if h not in cells[:i] else f"{h} {i}" for i, h in enumerate(cells)]
            tables.append([])
        else:
            assert len(cells) == len(heads), line
            tables[-1].append(dict(zip(heads, cells, strict=True)))
    return tables


def timed(case, name, ms, **more):
    return {"case": case, "name": name, "time": {"median_ms": ms, "n": 2}, **more}


class AttentionPage(unittest.TestCase):
    def setUp(self):
        same, other = {"repeats_bit_for_bit": True}, {"repeats_bit_for_bit": False}
        self.bench = {
            "runs": [
                timed("f1", "ours", 4.5, ratio=1.25, extra_bytes=700 << 20, relative_l2=2.5e-3,
                      sustained_ms=[4.4, 4.6], **same),
                timed("f1", "theirs", 3.25, ratio=1.5, extra_bytes=900 << 20, relative_l2=3.5e-3,
                      sustained_ms=[3.0, 3.5], **other),
                timed("b1", "ours", 15.5, ratio=2.75, extra_bytes=11 << 20, relative_l2=5e-3,
                      dq_relative_l2=5e-3, dkv_relative_l2=4e-3),
                timed("d2", "theirs", 0.025, ratio=6.5, extra_bytes=0, relative_l2=6e-3, **same),
                timed("i2", "ours", 0.5, recall=0.9875, relative_l2=0.0125, **same),
            ],
            "not_run": {"f1: another": "refused | so", "i1": "ended", "i3": "ended", "i1_fp8": "late",
                        "d1": "ended, and ran elsewhere"},
        }  # fmt: skip
        self.other = {"runs": [timed("d1", "ours", 0.75, ratio=8.5, relative_l2=7e-3, **same)],
                      "not_run": {"d1: another": "refused there"}}  # fmt: skip

    def tables(self):
        h100 = {"attention_peers": {"bench": self.other}}
        return tool("attention_page").tables(Used(h100, attention_peers={"bench": self.bench}))

    def test_each_cell_stands_under_its_head(self):
        made = self.tables()
        heads = (
            "row",
            "chip",
            "who",
            "ms",
            "x its products",
            "extra MiB",
            "o, relative L2",
            "repeats",
        )
        wanted = [("f1", "H200", "theirs", "3.250", "1.50", "900", "3.50e-03", "differs between runs"),
                  ("f1", "H200", "ours", "4.500", "1.25", "700", "2.50e-03", "bit for bit")]  # fmt: skip
        wanted = [dict(zip(heads, row, strict=True)) for row in wanted]
        self.assertEqual(rows_of(made["forward"]), [wanted])
        (row,) = rows_of(made["backward"])[0]
        self.assertEqual(row["dq, dkv, relative L2"], "5.00e-03, 4.00e-03")
        self.assertEqual((row["x its products"], row["repeats"]), ("2.75", "not seen"))
        other, row = rows_of(made["decode"])[0]
        self.assertEqual((row["row"], row["ms"], row["extra MiB"]), ("d2", "0.0250", "0"))
        self.assertEqual((other["row"], other["chip"], other["ms"]), ("d1", "H100", "0.750"))
        (row,) = rows_of(made["index"])[0]
        self.assertEqual(
            (row["error"], row["x its products"], row["extra MiB"]), ("recall 0.9875", "", "")
        )
        self.assertEqual(
            [tuple(r.values()) for r in rows_of(made["refused"])[0]],
            [
                ("f1", "H200", "another", "refused / so"),
                ("i1, i3", "H200", "all of the row", "ended"),
                ("i1_fp8", "H200", "all of the row", "late"),
                ("d1", "H100", "another", "refused there"),
            ],
        )
        self.assertIn("up to 17 %", made["spread"])

    def test_rows_that_have_not_run_and_rows_that_no_table_has(self):
        del self.bench["runs"][2]
        self.assertEqual(rows_of(self.tables()["backward"]), [])
        self.assertIn("None of these rows has run", self.tables()["backward"])
        self.bench["runs"].append(timed("f9", "ours", 1.0))
        with self.assertRaisesRegex(ValueError, "f9"):
            self.tables()


class ScanPage(unittest.TestCase):
    PEER, SSD = "mamba_ssm 1, SISO in Triton", "Mamba-2's SSD, another recurrence"

    def setUp(self):
        def of(which, name, ms, **more):
            return timed(f"S1, {which}", name, ms, **more)

        def limit(ratio):
            return {"limit_ms": 1, "ratio": ratio}

        errors = {"errors": {"out": 1.5e-3, "d_q": 2.5e-3, "d_k": 3.5e-3}}
        self.older = [
            of("limit", "a plain product", 9.0),
            of("forward", "Talea", 1.5, **limit(2.5), **errors),
            of("forward", "Talea, save_states", 1.75, **errors),
            of("forward", "Talea, dense", 0.75),
            of("forward", self.PEER, 4.5, **limit(8.25), errors={"out": 7e-3}),
            of("forward", self.SSD, 5.5),
            of("backward", "Talea", 0.95, extra_bytes_of_both=800 << 20, **limit(7.5)),
            of("backward", "Talea, save_states", 9.5),
            of("backward", self.PEER, 10.5, extra_bytes_of_both=1100 << 20),
            of("backward", self.SSD, 12.5),
            of("forward and backward", "Talea", 13.5),
            of("forward and backward", self.SSD, 14.5, extra_bytes=1300 << 20),
            timed("M4 R2, forward", "Talea", 2.5, **limit(4.0)),
            timed("M4 R2, backward", "Talea", 3.5, **limit(6.1)),
            timed("D1, step", "Talea", 0.5, relative_l2=4e-3),
            timed("D1, step", "a copy of the states", 0.25),
            timed("T, first call, S1 with S 3003", "Talea", 14.5, again_ms=15.5),
        ]
        self.newer = [
            of("forward", "Talea", 0.25, errors={"out": 8.5e-3}),
            timed("S2, forward", "Talea", 0.05),
            timed("D1, step", "Talea", 0.625, relative_l2=4e-3),
            timed("D1, step", "a copy of the states", 0.5),
        ]
        of_size = {"errors": {"out": 1.5e-3, "d_k": 3.5e-3, "d_q": 2.5e-3}}
        self.sweep = self.receipt(
            "c" * 40,
            [timed("length 16", "SISO, forward", 0.5, **of_size),
             timed("length 16", "SISO, backward", 1.5)],
            notes=["largest growth of all: 2 x"], argv=["bench", "--note", "processes ran beside it"],
        )  # fmt: skip

    @staticmethod
    def receipt(revision, runs, notes=(), not_run=(), argv=("bench",)):
        return {"bench": {"runs": runs, "not_run": dict(not_run)}, "notes": list(notes),
                "provenance": {"git_revision": revision, "argv": list(argv)}}  # fmt: skip

    def tables(self, newer_first=False):
        refused = {
            "S1: theirs": "no room",
            "S3: ours": "no time",
            "V: ours": "no time",
            "all": "away",
        }
        older = self.receipt(
            "a" * 40, self.older, ["two rounds", "rows before D1: beside others"], refused
        )
        newer = self.receipt("b" * 40, self.newer)
        page = tool("scan_page")
        page.SWEEP = "receipts/h200/sweep.json"
        listed = [("receipts/h200/older.json", ""), ("receipts/h200/newer.json", "of few rows")]
        alone = [("receipts/h100/older.json", "")]
        page.CARDS = {"H200": listed[::-1] if newer_first else listed, "H100": alone}
        used = Used({"older": older}, older=older, newer=newer, sweep=self.sweep)
        return page.tables(used)

    def test_each_cell_stands_under_its_head(self):
        made = self.tables()
        rank_2, row, peer, ssd = rows_of(made["scan_h100"])[0]
        self.assertTrue(row.pop("problem").startswith("S1: SISO"))
        self.assertEqual(row, {
            "who": "Talea", "forward, ms": "**1.50 (2.5 x; 2.00 dense)**", "backward, ms": "0.950 (7.5 x)",
            "backward with `save_states`, ms": "9.50", "extra MiB": "800", "out, error": "1.5e-3",
            "largest other error": "3.5e-3 (d_k)", "goal: forward; backward": "0.45; 1.0 ms", "at": "aaaaaaa",
        })  # fmt: skip
        self.assertEqual(
            list(peer.values())[:6], ["S1", self.PEER, "4.50 (8.2 x)", "10.50", "", "1100"]
        )
        self.assertEqual(list(peer.values())[6:], ["7.0e-3", "", "", "aaaaaaa"])
        self.assertEqual(list(ssd.values())[:6], ["S1", self.SSD, "5.50", "12.50", "", "1300"])
        self.assertEqual(list(rank_2.values())[2:4], ["2.50 (4.0 x)", "**3.50 (6.1 x)**"])
        for said in (
            "- Not run at aaaaaaa: theirs, S1: no room.",
            "- Not run at aaaaaaa: ours, S3, V: no time.",
            "- Not run at aaaaaaa: all, M4 R2, S1: away.",
            "- Note, aaaaaaa: rows before D1: beside others (measured in the order S1, M4 R2, D1, T).",
        ):
            self.assertIn(said, made["scan_h100"])
        first = rows_of(made["scan_first"])[0][0]
        self.assertEqual(
            list(first.values()), ["S1 with S 3003, Talea", "H200", "14.5", "15.5", "aaaaaaa"]
        )
        (row,) = rows_of(made["scan_sizes"])[0]
        self.assertEqual(
            list(row.values()), ["length 16", "0.500", "1.50", "1.5e-3", "3.5e-3 (d_k)"]
        )
        self.assertEqual(list(row)[1:4], ["SISO: forward, ms", "backward, ms", "out"])
        self.assertIn("- Largest growth of all: 2 x.", made["scan_sizes"])
        self.assertIn("- Note, ccccccc: processes ran beside it.", made["scan_sizes"])

    def test_a_row_is_of_the_newest_receipt_that_has_it(self):
        made = self.tables()
        rank_2, row, peer, ssd, second = rows_of(made["scan_h200"])[0]
        self.assertEqual((row["forward, ms"], row["backward, ms"]), ("0.250", ""))
        self.assertEqual((row["at"], second["at"], rank_2["at"]), ("bbbbbbb", "bbbbbbb", "aaaaaaa"))
        # Peers that the newest receipt has not are those of the one that has them.
        self.assertEqual((peer["who"], peer["forward, ms"]), (self.PEER, "4.50 (8.2 x)"))
        self.assertEqual((peer["at"], ssd["at"]), ("aaaaaaa", "aaaaaaa"))
        # An eighth of S1's tokens times heads, and 1.5 times its time at most for each.
        self.assertEqual(second["forward, ms"], "**0.050**")
        self.assertNotIn("theirs", made["scan_h200"])
        self.assertIn("- Not run at aaaaaaa: ours, S3, V: no time.", made["scan_h200"])
        self.assertIn("- Note, bbbbbbb: of few rows.", made["scan_h200"])
        steps = [list(row.values())[1:] for row in rows_of(made["scan_steps"])[0]]
        self.assertEqual(steps, [
            ["H200", "0.625", "1.25", "4.0e-3", "bbbbbbb"], ["H200", "0.500", "1.00", "", "bbbbbbb"],
            ["H100", "0.500", "**2.00**", "4.0e-3", "aaaaaaa"], ["H100", "0.250", "1.00", "", "aaaaaaa"],
        ])  # fmt: skip
        _, row, *_ = rows_of(self.tables(newer_first=True)["scan_h200"])[0]
        self.assertEqual(row["at"], "aaaaaaa")

    def test_a_run_that_no_table_has(self):
        for strange in (timed("S9, forward", "Talea", 1.0), timed("S1, sideways", "Talea", 1.0)):
            for runs in (self.older, self.newer):
                runs.append(strange)
                with self.assertRaisesRegex(ValueError, strange["case"]):
                    self.tables()
                runs.pop()


class H200Page(unittest.TestCase):
    def test_suites_by_lane_and_by_way_that_was_forced(self):
        def case(name, ran, failed=0, skipped=0):
            return {"name": name, "ran": ran, "passed": True, "failed": failed, "skipped": skipped}

        said = {"passed": 7, "failed": 1, "skipped": 2, "sanitizers": [], "failed_cases": [],
                "skipped_cases": [{"case": "Edges.A", "run": "case", "why": "no device"}],
                "cases": [case("Edges/cuda", 3), case("Edges/sm90", 4, 1, 2), case("Plans/", 5),
                          case("Edges/sm90/wide", 6), case("Options/cuda/one", 8)]}  # fmt: skip
        page = tool("h200_page")
        at = {"git_revision": "d" * 40, "device": {"name": "chip", "driver": "1"}}
        page.counted = lambda _: (said, at)
        text = "\n".join(page.test_lines())
        own, forced = rows_of(text)
        self.assertEqual([list(row.values()) for row in own],
                         [["Edges", "3", "4 (1 failed, 2 skipped)", ""], ["Plans", "", "", "5"]])  # fmt: skip
        self.assertEqual(list(own[0]), ["cases that passed", "`cuda`", "`sm90`", "of no lane"])
        self.assertEqual(forced, [
            {"way that was forced": "`sm90/wide`", "Edges": "6", "Options": ""},
            {"way that was forced": "`cuda/one`", "Edges": "", "Options": "8"},
        ])  # fmt: skip
        self.assertIn("7 passed, 1 failed, 2 skipped.", text)
        self.assertIn("skipped: `Edges.A` (case): no device", text)


class PeerPage(unittest.TestCase):
    def test_each_cell_stands_under_its_head(self):
        def run(name, at):
            return {"name": name, "version": "1", "extra_mib": at + 2, "total_mib": at + 3,
                    "sustained_ratio": at, "ratio": at + 1, "dx_relative_l2": at * 1e-3,
                    "dw_relative_l2": at * 1e-4, "confident_dx_median": at * 1e-2,
                    "confident_dx_worst": at * 1e-1}  # fmt: skip

        bench = {"runs": [run("slow", 5), run("fast", 2)], "not_run": {"none": "a | b"}}
        *rows, none = rows_of(tool("peer_page").table({"bench": bench}))[0]
        self.assertEqual([row["who"] for row in rows], ["fast (1)", "slow (1)"])
        self.assertEqual(list(rows[0].items())[1:], [
            ("x products, sustained", "2.000"), ("single calls", "3.000"), ("extra MiB", "4"),
            ("with gradients", "5"), ("dX, dW relative L2", "2.00e-03, 2.00e-04"),
            ("dX where p > 0.999: median, worst", "2.0e-02, 2.0e-01"),
        ])  # fmt: skip
        self.assertEqual(none["x products, sustained"], "not run: a / b")


if __name__ == "__main__":
    unittest.main()
