"""The command line of the proof: what it read, what both ways cost, how far each is from fp64."""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch

from .. import _receipt
from .._abi import Error
from . import measure, picture
from .model import DTYPES, Head, load, take_head

_EXAMPLE = "example: python -m talea.prove ./Llama-3.2-1B --text notes.txt --report proof.html"
# Fused must not be further from fp64 than eager, but for what one rounding of the result moves.
_SLACK, _FLOOR = 1.05, 1e-6
_NAMES = {"loss": "loss", "dx": "gradient of the hidden states", "dw": "gradient of the weight",
          "db": "gradient of the bias"}  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m talea.prove",
        description="Runs a model's output layer and loss dense and fused, and compares both.",
        epilog=_EXAMPLE + "; exit codes: 0 fused is as near to fp64 as eager, 1 it is not or "
        "the head is not understood, 2 usage, 5 the model or text cannot be read",
    )
    p.add_argument("model", help="a local folder of a Hugging Face model, or a config.json")
    p.add_argument("--text", help="a text file; random ids without it")
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, help="instead of the config's")
    p.add_argument("--lane", default="auto")
    p.add_argument("--workspace-limit", type=int, help="bytes; the library's default without it")
    p.add_argument("--seconds", type=float, default=1.0, help="of timing for each way")
    p.add_argument("--receipt", help="JSON of everything found")
    p.add_argument("--report", help="one offline HTML page")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    o = p.parse_args(argv)
    if o.tokens < 1:
        p.error(f"--tokens {o.tokens}: must be at least 1")
    return o


def compare(head: Head, found: list[measure.Contender]) -> list[dict]:
    """Error figures of the fused way beside eager, as receipts hold them."""
    marks = measure.distances(head, found)
    if "fused" not in marks:
        return []
    figures = []
    for tensor, ours in marks["fused"].items():
        eager = marks.get("dense", {}).get(tensor)
        reference = eager.relative if eager else math.inf
        limit = _SLACK * reference + _FLOOR
        value, truth = ours.at
        dtype = found[1].results[tensor].dtype
        spacing = torch.finfo(dtype).eps * max(abs(truth), torch.finfo(dtype).tiny)
        figures.append({
            "tensor": tensor, "lane": (found[1].receipt or {}).get("lane", "fused"),
            "passed": ours.relative <= limit, "abs": ours.worst,
            "rel": ours.worst / abs(truth) if truth else math.inf if ours.worst else 0.0,
            "rel_l2": ours.relative, "ulp": ours.worst / spacing,
            "worst_index": [] if tensor == "loss" else ours.index, "ours": value, "truth": truth,
            "eager_abs": eager.worst if eager else math.nan,
            "eager_rel_l2": eager.relative if eager else math.nan, "tolerance": limit,
        })  # fmt: skip
    return figures


def sections(head: Head, found: list[measure.Contender], figures: list[dict]) -> dict:
    dense = found[0]
    case = f"{head.hidden.shape[0]}x{head.hidden.shape[1]}x{head.weight.shape[0]}"
    runs = []
    for c in (c for c in found if not c.error):
        times = sorted(c.milliseconds)
        at = lambda share, t=times: t[min(len(t) - 1, int(share * len(t)))]  # noqa: E731
        runs.append({
            "name": c.name, "case": case, "lane": (c.receipt or {}).get("lane", "torch eager"),
            "time": {"median_ms": c.median_ms, "p20_ms": at(0.2), "p80_ms": at(0.8),
                     "n": len(times)},
            "ratio": c.median_ms / dense.median_ms if dense.milliseconds else math.nan,
            "extra_bytes": c.extra_bytes, "total_bytes": c.total_bytes,
        })  # fmt: skip
    notes = [head.architecture, *head.notes]
    notes += [f"{c.name} did not run: {c.error}" for c in found if c.error]
    if head.declined:
        notes.append(f"patch() declines: {head.declined}")
    fused = found[1].receipt or {}
    notes += [f"lane {d['lane']} declined: {d['reason']}" for d in fused.get("declined", [])]
    # Loss and gradients are judged here; whether the model itself can be patched is said beside.
    gates = [{"name": "the model's own forward agrees with the patched one",
              "passed": not head.declined, "text": head.declined}]  # fmt: skip
    return {"bench": {"limit": "the dense head of this model in the same process", "runs": runs},
            "errors": figures, "gates": gates, "notes": notes}  # fmt: skip


def lines(head: Head, found: list[measure.Contender], figures: list[dict]) -> list[list[str]]:
    rows = []
    for c in found:
        if c.error:
            rows.append([c.name, f"did not run: {c.error}", "", ""])
            continue
        rows.append([c.name, f"{c.median_ms:.3g} ms", f"{c.extra_bytes / 2**20:.1f} MiB",
                     f"{c.total_bytes / 2**20:.1f} MiB"])  # fmt: skip
    return rows


def patch_line(head: Head) -> str:
    if head.declined:
        return f"not patched: {head.declined}"
    return "from talea.integrations import transformers as talea_hf; talea_hf.patch(model)"


def report(head: Head, found, figures, verdict: str) -> str:
    ran = {c.name: c for c in found if not c.error}
    errors = [[_NAMES[f["tensor"]], f"{f['rel_l2']:.2e}", f"{f['eager_rel_l2']:.2e}",
               f"{f['tolerance']:.2e}", "yes" if f["passed"] else "NO"] for f in figures]  # fmt: skip
    fused = found[1].receipt or {}
    declined = [[d["lane"], d["reason"]] for d in fused.get("declined", [])]
    parts = [
        picture.table(["", ""], [
            ["model", head.architecture], ["tokens", head.hidden.shape[0]],
            ["hidden", head.hidden.shape[1]], ["vocabulary", head.weight.shape[0]],
            ["dtype", str(head.weight.dtype).removeprefix("torch.")],
            ["device", str(head.weight.device)],
            *[["", note] for note in head.notes], ["to use it", patch_line(head)],
        ]),
        picture.bars("Memory above inputs and returned gradients", "MiB",
                     {n: c.extra_bytes / 2**20 for n, c in ran.items()}),
        picture.bars("Time of loss and gradients", "ms", {n: c.median_ms for n, c in ran.items()}),
        "<h2>Distance from fp64, relative L2</h2>",
        picture.table(["", "fused", "dense", "1.05 x dense + 1e-6", "fused within"], errors),
        f"<p>Lane that ran: {fused.get('lane', 'none')}.</p>",
        picture.table(["lane", "why it declined"], declined) if declined else "",
    ]  # fmt: skip
    return picture.page(f"{head.architecture}: its head dense and fused", verdict, parts)


def main(argv: list[str] | None = None) -> int:
    o = parse(argv)
    start, begin = _receipt.now(), time.time()

    def say(text: str) -> None:
        if not o.quiet:
            print(f"[{time.time() - begin:6.1f} s] {text}", file=sys.stderr)

    try:
        say(f"reading {o.model}")
        model, origin = load(o.model, o.device, o.dtype)
        say("hidden states, and the model's own forward dense and fused")
        head = take_head(o.model, model, origin, o.text, o.tokens)
        del model
        say("timing both ways")
        found = list(measure.contenders(head, o.seconds, o.workspace_limit, o.lane))
        say("fp64 truth, block by block")
        figures = compare(head, found)
    except Error as error:
        print(f"talea.prove: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"talea.prove: {error}", file=sys.stderr)
        return 5
    passed = bool(figures) and all(f["passed"] for f in figures) and not head.declined
    verdict = (
        "PASSED: fused is as near to fp64 as dense, within 1.05 x + 1e-6" if passed else "FAILED"
    )
    if o.receipt:
        argv = ["python", "-m", "talea.prove", *(sys.argv[1:] if argv is None else argv)]
        _receipt.write_receipt(o.receipt, "bench", f"{head.architecture}: dense and fused head",
                               passed, sections(head, found, figures), start, argv)  # fmt: skip
    if o.report:
        _receipt.write(o.report, report(head, found, figures, verdict))
    print(f"{head.architecture}  {'  '.join(head.notes)}")
    print(f"{'':8}{'time':>24}{'extra memory':>16}{'above inputs':>16}")
    for row in lines(head, found, figures):
        print(f"{row[0]:8}{row[1]:>24}{row[2]:>16}{row[3]:>16}")
    for f in figures:
        print(f"{_NAMES[f['tensor']]:32} fused {f['rel_l2']:.2e}   dense {f['eager_rel_l2']:.2e}")
    print(f"use it: {patch_line(head)}")
    print(verdict)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
