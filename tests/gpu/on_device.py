#!/usr/bin/env python3
"""What: runs every case that needs a GPU, and a reduced set under the four tools of compute-sanitizer,
many processes at a time over one or several GPUs; writes what passed, failed and was skipped, every
few seconds, so that a run that is cut leaves what it saw (verdict "unfinished").
Why: what the documents claim of a device must be a file that names the revision and the device.
Never: takes a case that did not run for one that passed; starts where a pattern names no case; runs
everything under the sanitizers: a sanitised kernel is a hundred times slower.

usage, in the project's root on a machine with a GPU, after `make cuda`:
  tests/gpu/on_device.py [--gpus 0,1] [--beside 2] [--jobs 16] [--limit SECONDS] [--each SECONDS] [--no-forced]
                         [--no-sanitizers | --sanitizers-alone] [--only 'PATTERN,PATTERN'] [build/cuda/bin] [receipts/h200/tests.json]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from envelope import envelope, machine, now, write  # noqa: E402

CASES = {"talea_gpu_tests": ["*"], "talea_tests": ["*/sm90", "*/cuda", "Cuda*"]}
ALONE = [
    "CudaManners.*",  # these read how much memory of the device is free
    "*Manners.AllocatesNothing/*",
    "SlowNccl.*",  # reads the clock: beside twenty processes a device takes seconds to open
]
LONG = [
    "Sm90Slices",
    "Properties",
    "Ranks",
    "Options",
    "Sm90",
    "Precision",
    "Repeat",
]  # these start first
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")  # the slowest first
# Ways through a lane that sizes decide; these cases are judged on each of them once more.
FORCED = {
    "cuda": ("one_term", "two_terms"),
    "sm90": ("folded", "transformed", "wide", "slices", "chunks", "codes", "not_ahead"),
}
# Those whose cases are drawn, and so can be drawn at a size that the way is for; and two of few words.
FORCED_SUITES = [f"*{s}.*/" for s in ("Options", "Properties")]
FORCED_SUITES += ["*Edges.TiesGoToTheLowestId/", "*Precision.ConfidentRowsKeepTheirDigits/"]
SANITISED = [
    "*Edges.IgnoredRows*/cuda",
    "*Edges.TopKOfEveryWidth/cuda",
    "*Options.EachOutputAlone/cuda",
    "*Options.SeveralPartsOfARow/cuda",
    "*Edges.IgnoredRows*/sm90",
    "*Edges.TopKOfEveryWidth/sm90",
    "*Options.EachOutputAlone/sm90",
    "*Sm90Slices.E*/sm90",
    "*AttentionEdges.OneKeyInTwoSlots/cuda",
    "*AttentionEdges.Sinks/cuda",
    "*AttentionEdges.OneKeyInTwoSlots/sm90",
    "*AttentionEdges.Sinks/sm90",
    "*AttentionFewHeads.TilesWithoutAValidSlot/sm90",
    "*AttentionNarrow.TilesWithoutAValidSlot/sm90",
    "*AttentionSelect.TiesGoToTheLowerIndex/cuda",
    "*AttentionSelect.TiesGoToTheLowerIndex/sm90",
    "*ScanEdges.AResetCutsExactly/cuda",
    "*ScanStates.SlotsOfACache/cuda",
    "*ScanTraining.TheSmallestOfEachRank/sm90",
]
# By their own choice cases so small keep two terms of a gradient: the ways of large weights besides.
SANITISED_FORCED = "*Options.EachOutputAlone/"


def cases_of(program):
    out = subprocess.run(
        [program, "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    suite = ""
    for line in out.stdout.splitlines():
        name = line.split("#")[0].strip()
        if line[:1] != " ":
            suite = name
        else:  # a disabled case, too: it will not run, and that is a failure
            yield suite + name


def matches(case, patterns):
    return any(fnmatch(case, pattern) for pattern in patterns)


def require_matches(patterns, cases):
    """A binary that was built without a lane has no case of it: nothing would fail."""
    idle = [p for p in patterns if not any(fnmatch(case, p) for case in cases)]
    if idle:
        sys.exit(f"no case matches {', '.join(idle)}")


class Runner:
    """A queue of (kind, program, case); kind is "case", "force=WAY", a tool of compute-sanitizer, or
    such a tool and a way."""

    def __init__(self, folder, gpus, beside, limit, each, keep, keep_s):
        self.folder, self.gpus, self.end = folder, gpus, time.monotonic() + limit
        self.each = each  # seconds of a run under a tool
        self.beside = beside  # seen after the others, for cases that need two devices
        self.done, self.lock = {}, threading.Lock()
        self.keep, self.keep_s = keep, keep_s

    def run(self, work, jobs):
        queue = list(reversed(work))
        workers = [threading.Thread(target=self.worker, args=(i, queue)) for i in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(self.keep_s)
                self.keep(self.results())

    def results(self):
        with self.lock:
            return dict(self.done)

    def worker(self, number, queue):
        first = number % len(self.gpus)
        visible = ",".join(self.gpus[first:] + self.gpus[:first] + self.beside)
        while True:
            with self.lock:
                if not queue:
                    return
                job = queue.pop()
            begin = time.monotonic()
            result = self.one(job, visible, number)
            result["seconds"] = round(time.monotonic() - begin, 1)
            with self.lock:
                self.done[job] = result

    def one(self, job, visible, number):
        kind, program, case = job
        left = self.end - time.monotonic()
        if left <= 0:
            return {"state": "failed", "why": "not started within the limit"}
        said = Path(self.folder) / f"{number}.json"
        said.unlink(missing_ok=True)
        command = [program, f"--gtest_filter={case}", f"--gtest_output=json:{said}"]
        ways = [word for word in kind.split() if word.startswith("force=")]
        command += [f"--force={way}" for word in ways for way in word[6:].split(",")]
        tool = kind.split()[0]
        if tool in TOOLS:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment |= {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=min(left, self.each) if tool in TOOLS else left,
                env=os.environ | environment,
            )
        except subprocess.TimeoutExpired:
            return {"state": "failed", "why": "not finished within the limit"}
        return self.judged(kind, ran, said)

    @staticmethod
    def judged(kind, ran, said):
        text = ran.stdout + ran.stderr
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        if ran.returncode != 0 or not said.exists():
            return {"state": "failed", "why": f"exit status {ran.returncode}", "text": text[-3000:]}
        suites = json.loads(said.read_text())["testsuites"]
        entries = [e for s in suites for e in s["testsuite"] if e["status"] == "RUN"]
        if len(entries) != 1 or "failures" in entries[0]:
            return {"state": "failed", "why": f"{len(entries)} cases ran", "text": text[-3000:]}
        if entries[0]["result"] == "SKIPPED":
            why = re.search(r"unavailable: .*", text)
            return {"state": "skipped", "why": why.group(0) if why else "no reason given"}
        ran_on_lane = sum(int(n) for n in re.findall(r"declined, (\d+) runs", text))
        if kind != "case" and not kind.startswith("force="):
            if len(summary) != 1 or not re.search(r"SUMMARY: 0 ", summary[0]):
                return {"state": "failed", "why": f"summaries {summary}", "text": text[-3000:]}
            return {"state": "passed", "summary": summary[0]}
        return {"state": "passed", "runs": ran_on_lane}


def grouped(done):
    """Counts a suite, a lane and a way through it; runs: calls of the lane that were judged."""
    groups = {}
    for (kind, program, case), result in sorted(done.items()):
        if kind != "case" and not kind.startswith("force="):
            continue
        suite, name = case.split(".", 1)
        lane = name.rsplit("/", 1)[1] if "/" in name else ""
        way = kind.removeprefix("force=") if kind != "case" else ""
        key = (Path(program).name, suite.split("/")[-1], lane, way)
        group = groups.setdefault(key, Counter())
        group[result["state"]] += 1
        group["runs"] += result.get("runs", 0)
    for (program, suite, lane, way), states in groups.items():
        counts = {state: states[state] for state in ("passed", "failed", "skipped", "runs")}
        name = "/".join(part for part in (suite, lane, way) if part)
        yield {"name": name, "program": program, "way": way, **counts}


def sanitised(done):
    for tool in TOOLS:
        results = {
            "/".join((case, *(w.removeprefix("force=") for w in kind.split()[1:]))): r
            for (kind, _, case), r in sorted(done.items())
            if kind.split()[0] == tool
        }
        if results:
            states = Counter(r["state"] for r in results.values())
            summaries = Counter(r["summary"] for r in results.values() if "summary" in r)
            counts = {state: states[state] for state in ("passed", "failed", "skipped")}
            yield {"name": tool, **counts, "cases": list(results), "summaries": dict(summaries)}


def listed(folder):
    """(kind, program, case) of every case that needs a device, the long ones first."""
    work = []
    for program, patterns in CASES.items():
        path = f"{folder}/{program}"
        cases = list(cases_of(path))
        require_matches(patterns, cases)
        work += [("case", path, c) for c in cases if matches(c, patterns)]
        for lane, ways in FORCED.items():
            chosen = [c for c in cases if matches(c, [suite + lane for suite in FORCED_SUITES])]
            work += [(f"force={way}", path, c) for way in ways for c in chosen]
    work.sort(key=lambda job: next((i for i, w in enumerate(LONG) if w in job[2]), len(LONG)))
    return work


def sanitised_jobs(jobs):
    """Those of `jobs` that run under the tools: cases by the lane's own choice; besides one on each way, all
    ways in one process, since a tool takes longer to rewrite the kernels than they take to run."""
    for tool in TOOLS:
        for kind, program, case in jobs:
            if kind == "case" and matches(case, SANITISED):
                yield tool, program, case
            for lane, ways in FORCED.items():
                if kind == "case" and fnmatch(case, SANITISED_FORCED + lane):
                    yield f"{tool} force={','.join(ways)}", program, case


def summary(done, planned, seconds, finished):
    states = Counter(result["state"] for result in done.values())
    right = states["passed"] and not states["failed"] and len(done) == planned
    verdict = "passed" if right else "failed"
    said = {"verdict": verdict if finished else "unfinished", "seconds": round(seconds, 1)}
    said["finished"], said["planned"] = finished, planned
    said |= {state: states[state] for state in ("passed", "failed", "skipped")}
    said["suites"], said["sanitizers"] = list(grouped(done)), list(sanitised(done))
    for state in ("failed", "skipped"):
        said[f"{state}_cases"] = [
            {"run": job[0], "case": job[2], **r} for job, r in done.items() if r["state"] == state
        ]
    slow = sorted(done, key=lambda job: -done[job]["seconds"])[:12]
    said["longest"] = [
        {"run": job[0], "case": job[2], "seconds": done[job]["seconds"]} for job in slow
    ]
    return said


def receipt_of(provenance, start, said):
    """Suites are the cases of the receipt; its counts are those of the single tests."""
    cases = [
        {**entry, "lane": (entry["name"].split("/") + ["any"])[1], "passed": not entry["failed"]}
        | {"ran": entry["passed"]}
        for entry in said["suites"]
    ]
    more = {k: v for k, v in said.items() if k not in ("verdict", "suites")}
    verdict = said["verdict"] if said["verdict"] == "passed" else "failed"
    title = "tests that need a device"
    return envelope(provenance, start, title, verdict, "device", cases, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--beside", default="", help="GPUs that are visible, and never the first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=1800, help="seconds for everything")
    parser.add_argument("--each", type=float, default=600, help="seconds of a run under a tool")
    parser.add_argument("--keep", type=float, default=10, help="seconds between two writings")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--no-sanitizers", action="store_true")
    part.add_argument("--sanitizers-alone", action="store_true")
    parser.add_argument("--no-forced", action="store_true", help="lanes by their own choice alone")
    parser.add_argument("--only", default="*", help="cases by name, parted by commas")
    parser.add_argument("bin", nargs="?", default="build/cuda/bin")
    parser.add_argument("receipt", nargs="?", default="receipts/h200/tests.json")
    args = parser.parse_args()
    work = [j for j in listed(args.bin) if not (args.no_forced and j[0].startswith("force="))]
    only = args.only.split(",")
    require_matches(only, [job[2] for job in work])
    if args.only == "*":
        require_matches(ALONE, [job[2] for job in work])
    work = [job for job in work if matches(job[2], only)]
    alone = [job for job in work if job[0] == "case" and matches(job[2], ALONE)]
    together = [job for job in work if job not in alone]
    if not args.no_sanitizers:
        if args.only == "*":
            patterns = [*SANITISED, *(SANITISED_FORCED + lane for lane in FORCED)]
            require_matches(patterns, [job[2] for job in together])
        sanitizers = list(sanitised_jobs(together))
        alone, together = ([], []) if args.sanitizers_alone else (alone, together)
        together = sanitizers + together
    provenance, start = machine(f"{args.bin}/talea"), now()
    begin = time.monotonic()

    def keep(done, finished=False):
        said = summary(done, len(alone + together), time.monotonic() - begin, finished)
        flags = ("no_sanitizers", "sanitizers_alone", "no_forced")
        said["left_out"] = [flag for flag in flags if getattr(args, flag)]
        if args.only != "*":
            said["left_out"].append(f"all but {args.only}")
        write(Path(args.receipt), receipt_of(provenance, start, said))
        return said

    with tempfile.TemporaryDirectory() as folder:
        beside = [gpu for gpu in args.beside.split(",") if gpu]
        runner = Runner(
            folder, args.gpus.split(","), beside, args.limit, args.each, keep, args.keep
        )
        keep({})  # in place of what an earlier run left
        runner.run(alone, 1)
        runner.run(together, args.jobs)
    said = keep(runner.results(), finished=True)
    counts = {state: said[state] for state in ("passed", "failed", "skipped")}
    print(f"{said['verdict']}: {counts}, {said['seconds']} s")
    for entry in said["failed_cases"]:
        print(f"{entry['run']} {entry['case']}: {entry['why']}")
    return said["verdict"] != "passed"


if __name__ == "__main__":
    sys.exit(main())
