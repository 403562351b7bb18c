"""What the Python commands write: receipts of the schema, an offline page, honest verdicts."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from talea import _receipt, parity
from talea._receipt import write_receipt

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "receipts/schema/receipt.schema.json").read_text())


def valid(path):
    document = json.loads(Path(path).read_text())
    jsonschema.validate(document, SCHEMA)
    return document


def test_parity_receipt_and_page(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_bytes(Path(parity.__file__).read_bytes())
    receipt, page = tmp_path / "r.json", tmp_path / "r.html"
    words = ["parity", "--text", str(text), "--steps", "60", "--quiet", "--width", "32",
             "--json-out", str(receipt), "--report", str(page)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    status = parity.main()
    document = valid(receipt)
    assert document["verdict"] == ("passed" if status == 0 else "failed")
    drift = {g["name"]: g for g in document["gates"]}
    assert all(math.isfinite(g["value"]) for g in drift.values())
    shown = page.read_text()
    assert shown.count("<svg") == 2 and "http" not in shown
    # One twin is one sample of the noise, and over 60 steps a lucky one can be very small: the
    # verdict is that of long runs. Here the distance itself is bounded, far below one step's fall.
    assert document["train"]["drift"]["loss_rms"] < 1e-4
    assert drift["final over first loss"]["passed"]
    assert drift["same state: error of dX over torch's"]["passed"]
    assert drift["same state: error of dW over torch's"]["passed"]


def settings_of(tmp_path, **more):
    text = tmp_path / "text"
    text.write_bytes(Path(parity.__file__).read_bytes())
    settings = dict(text=[str(text)], width=32, layers=1, heads=4, lr=1e-3, seed=1, micro=1, rows=2,
                    length=16, steps=3, device="cpu", bf16=True, quiet=True, vocabulary=2000,
                    judge=1, seconds=math.inf)  # fmt: skip
    return type("Options", (), settings | more)


def test_no_more_steps_than_the_seconds_allow(tmp_path):
    o = settings_of(tmp_path, steps=9, judge=5, seconds=0)
    found = parity.run(o)
    runs = found["runs"].values()
    assert o.steps == parity.MEASURED + 1 and all(len(r["losses"]) == o.steps for r in runs)
    assert list(found["runs"]["torch"]["errors"]) == [0, parity.MEASURED]  # the last one, too


def test_words_of_a_vocabulary():
    text = Path(parity.__file__).read_bytes()
    for vocabulary in (256, 300, 2000):
        ids, count = parity.words(text, vocabulary)
        assert count == vocabulary and max(ids) < vocabulary and len(ids) <= len(text)
    assert parity.words(text, 256)[0] == list(text)
    few, count = parity.words(b"abab", 1000)  # behind the bytes: ab, ba, aba, bab, abab
    assert (few, count) == ([260], 261)
    with pytest.raises(SystemExit, match="256"):
        parity.words(text, 255)


def test_a_wide_band_voids_the_comparison_of_whole_runs(tmp_path):
    """In bf16 one-ulp twins part by more than 1e-3 within steps; the same state still decides."""
    found = parity.run(settings_of(tmp_path, steps=25, lr=1e-2))
    names = [g["name"] for g in found["gates"]]
    assert found["void"] and not any("drift" in name for name in names)
    assert sum(name.startswith("same state") for name in names) == 2
    said = parity.sections(found, settings_of(tmp_path, words=2000))
    assert "void" in said["notes"][0] and said["train"]["lane"] in ("cpu", "reference", "unfused")


@pytest.mark.parametrize("bf16", (False, True))
def test_a_gradient_that_is_off_fails_the_same_state(tmp_path, monkeypatch, bf16):
    exact = parity.talea_loss

    class Off(parity.torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return d * 1.01

    monkeypatch.setattr(parity, "talea_loss", lambda m, x, *a: exact(m, Off.apply(x), *a))
    gates = {g["name"]: g for g in parity.run(settings_of(tmp_path, bf16=bf16))["gates"]}
    assert not gates["same state: error of dX over torch's"]["passed"]
    assert gates["same state: error of dW over torch's"]["passed"]


def test_a_run_that_is_not_finite_stops(tmp_path):
    settings = dict(width=32, layers=1, heads=4, lr=1e-3, seed=1, micro=1, rows=2, length=16,
                    steps=2, device="cpu", bf16=False, quiet=True, vocabulary=256, judge=50)  # fmt: skip
    o = type("Options", (), settings)
    state = parity.GPT(256, 32, 1, 4).state_dict()
    tokens = parity.torch.randint(0, 256, (200,))
    broken = lambda *a: parity.torch_loss(*a) * float("nan")  # noqa: E731
    with pytest.raises(SystemExit, match="not finite"):
        parity.train("broken", broken, state, tokens, o)


def test_numbers_that_are_not_finite_are_written_as_words(tmp_path):
    curve = {"name": "x", "steps": [0, 1], "values": [float("nan"), float("-inf")]}
    path = tmp_path / "r.json"
    write_receipt(str(path), "train", "t", False, {"train": {"curves": [curve]}}, "now", ["t"])
    assert valid(path)["train"]["curves"][0]["values"] == ["NaN", "-Infinity"]


def test_a_told_revision_wins_over_the_checkout(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    monkeypatch.setenv("TALEA_REVISION", "0123abc")
    write_receipt(str(path), "train", "t", None, {"train": {"curves": []}}, "now", ["t"])
    found = valid(path)["provenance"]
    assert found["git_revision"] == "0123abc" and found["git_dirty"] is None


def test_clocks_are_those_of_the_device_that_was_used(monkeypatch):
    """The driver's tools count every device of the machine; torch those it may see."""
    asked = []

    def answer(words, **_):
        asked.extend(words)
        return SimpleNamespace(stdout="580.1, 1980 MHz, 3201 MHz, 0x0\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a device")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid="4-2"))
    monkeypatch.setattr(_receipt.subprocess, "run", answer)
    assert _receipt._device()["clocks"] == "SM 1980 MHz, memory 3201 MHz (at the end)"
    assert "--id=GPU-4-2" in asked


def test_upstream_verdicts():
    spec = importlib.util.spec_from_file_location("upstream", ROOT / "repro/upstream/upstream.py")
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    assert upstream.verdict({"measured": float("nan"), "bound": 1.0}) == "reproduced"
    assert upstream.verdict({"measured": 2.0, "bound": 1.0}) == "reproduced"
    assert upstream.verdict({"measured": 0.5, "bound": 1.0}) == "not shown by this version"
    assert upstream.verdict({"error": "no"}) == "not reproducible here"
    row = {"id": "b", "museum": "B", "text": "t", "bound": 1.0}
    bugs = [upstream.entry("p", v, {**row, "measured": m}, {}) for v, m in (("1", 2.0), ("2", 0.0))]
    upstream.add_fixed_in(bugs)
    assert [b["upstream"] for b in bugs] == ["reproduced", "fixed: shown by 1, not by 2"]
    assert not any(b["passed"] for b in bugs)  # ours did not run: nothing is validated
