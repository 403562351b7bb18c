"""Receipts of the Python runs: the schema of the repository's receipts/schema, written whole.

Written beside its name, synced and renamed, after the work it reports has ended.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from ._abi import lib

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_LOGS")

# What runs: changed or unknown files elsewhere change no result.
SOURCES = [f":/{folder}" for folder in ("python", "bench", "repro", "include", "src", "cmake")]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def device_name() -> str:
    """What the driver's tools call torch's device 0: CUDA_VISIBLE_DEVICES may have chosen it."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else "0"


def _device():
    import torch

    if not torch.cuda.is_available():
        return None
    query = "driver_version,clocks.sm,clocks.mem,clocks_throttle_reasons.active"
    try:
        words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        words.append(f"--id={device_name()}")
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        driver, sm, memory, reasons = [x.strip() for x in said.splitlines()[0].split(",")]
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        driver = sm = memory = reasons = "not read"
    return {
        "name": torch.cuda.get_device_name(0),
        "driver": driver,
        "runtime": f"CUDA {torch.version.cuda}",
        "clocks": f"SM {sm}, memory {memory} (at the end)",
        "throttle_reasons": reasons,
    }


def provenance(argv: list[str], start: str, libraries: dict[str, str]) -> dict:
    """argv as a user would type it from the repository's root."""
    import torch

    # What ran is the library; scripts of another revision, or changed ones, make the run dirty.
    # A copy of a tree without git is told its revision by whoever runs it.
    revision = lib.talea_build_revision().decode()
    built = {"version": lib.talea_version().decode(), "git_revision": revision, "git_dirty": None}
    if revision != "unknown":
        built["git_revision"] = revision.removesuffix("-dirty")
        built["git_dirty"] = revision.endswith("-dirty")
    told = os.environ.get("TALEA_REVISION")
    scripts = told or _git("rev-parse", "HEAD") or "unknown"
    changed = None if told else _git("status", "--porcelain", "--", *SOURCES)
    return {
        "version": built["version"],
        "git_revision": scripts,
        "git_dirty": None if changed is None else bool(changed),
        "library": built,
        "build": {"compiler": "", "type": "wheel", "flags": "", "options": []},
        "argv": argv,
        "host": {
            "cpu": _cpu(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "os": platform.platform(),
        },
        "device": _device(),
        "libraries": {"python": platform.python_version(), "torch": torch.__version__, **libraries},
        "environment": {k: os.environ[k] for k in ENVIRONMENT if k in os.environ},
        "start_time": start,
        "end_time": now(),
    }


def _finite(value):
    """JSON has no NaN: numbers that are not finite are written as words, never dropped."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write(path: str, text: str) -> None:
    folder = os.path.dirname(path) or "."
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)


def write_receipt(path: str, kind: str, title: str, passed: bool | None, sections: dict, start: str,
                  argv: list[str] | None = None, libraries: dict | None = None) -> dict:  # fmt: skip
    document = {
        "schema_version": 1,
        "kind": kind,
        "title": title,
        "verdict": {None: "not_checked", True: "passed", False: "failed"}[passed],
        "provenance": provenance(argv or sys.argv, start, libraries or {}),
        **_finite(sections),
    }
    write(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document
