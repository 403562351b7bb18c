# What: runs the NCCL test program, a process a GPU: the option matrix, and worlds with a bad rank.
# Why: only the launcher of the processes can see that none hangs.
# Never: leaves a process behind, counts a world that did not run, or takes a receipt for written.
import argparse
import ctypes
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMEOUT_S = {"dies": 1, "stops": 1, "absent": 1, "absent_init": 1, "disagrees": 10}
# callers_comm: over a communicator of the caller's; storm: thousands of small exchanges.
MATRICES = ("matrix", "callers_comm", "storm")
LIMIT_S = 60  # to the end of a world with a bad rank, NCCL's start included
MATRIX_LIMIT_S = 300
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}  # no multicast


class Devices:
    """The GPUs; each takes `share` worlds at a time, a process each."""

    def __init__(self, count, share):
        self.load, self.share = [0] * count, share
        self.changed = threading.Condition()

    def free(self):
        least_first = sorted(range(len(self.load)), key=lambda d: self.load[d])
        return [d for d in least_first if self.load[d] < self.share]

    def take(self, count):
        with self.changed:
            self.changed.wait_for(lambda: len(self.free()) >= count)
            taken = self.free()[:count]
            for device in taken:
                self.load[device] += 1
            return taken

    def give_back(self, taken):
        with self.changed:
            for device in taken:
                self.load[device] -= 1
            self.changed.notify_all()


def start(options, mode, devices, file, *last):
    """One process a rank, each seeing one device, its output in a file of its own."""
    jobs = []
    for rank, device in enumerate(devices):
        command = [options.program, mode, str(rank), str(len(devices)), file, options.library]
        env = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(device)}
        out = tempfile.TemporaryFile("w+")
        job = subprocess.Popen(
            command + [str(x) for x in last], stdout=out, stderr=subprocess.STDOUT, env=env
        )
        jobs.append((job, out))
    return jobs


def text_of(out):
    with out:
        out.seek(0)
        return out.read()


def matrix(options, devices, mode, lane, ranks):
    taken = devices.take(ranks)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        jobs = start(options, mode, taken, folder + "/world", lane)
        while any(job.poll() is None for job, _ in jobs):
            if time.monotonic() - begin > MATRIX_LIMIT_S:
                for job, _ in jobs:
                    job.kill()
            time.sleep(0.05)
        texts = [text_of(out) for _, out in jobs]
    devices.give_back(taken)
    took = time.monotonic() - begin
    ends = [
        re.search(r"rank \d+ of \d+: (\d+) cases, (\d+) wrong, (\d+) declined", t) for t in texts
    ]
    right = all(ends) and all(job.returncode == 0 for job, _ in jobs)
    right = right and all(int(end[1]) > 0 and end[2] == "0" for end in ends)
    if not right:
        print("\n".join(texts))
    counts = f"{ends[0][1]} cases, {ends[0][3]} declined" if all(ends) else "no count"
    verdict = "right" if right else "WRONG"
    print(f"{mode}, lane {lane}, world {ranks}: {counts}: {verdict}, {took:.1f} s", flush=True)
    case = {"name": f"{mode}/{lane}/world {ranks}", "lane": lane, "passed": right, "ranks": ranks}
    if all(ends):
        case |= {"cases": int(ends[0][1]), "not_taken_by_this_lane": int(ends[0][3])}
    return case | {"seconds": round(took, 1)}


def one_fault(options, kind, ranks, run):
    """Seconds until the last survivor named the bad rank, and what is wrong: empty if nothing."""
    timeout_s, begin, culprit = TIMEOUT_S[kind], time.monotonic(), run % ranks
    everyone = kind == "disagrees"
    survivors = [r for r in range(ranks) if everyone or r != culprit]
    seen = [(run + rank) % options.devices for rank in range(ranks)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        jobs = start(options, kind, seen, folder + "/world", culprit, timeout_s)
        while any(jobs[r][0].poll() is None for r in survivors):
            if time.monotonic() - begin > LIMIT_S:
                break
            time.sleep(0.02)
        hung = [r for r in survivors if jobs[r][0].poll() is None]
        for job, _ in jobs:
            if job.poll() is None:
                job.send_signal(signal.SIGKILL)  # ends stopped ones, too
                job.wait()
        texts = [text_of(out) for _, out in jobs]
    expected, status = f"rank {culprit}:", 4
    if everyone:
        expected = f"label_smoothing: the ranks disagree: {0.25 if culprit == 0 else 0} on rank 0"
        status = 5
    pattern = r"survivor (\d+) after ([\d.]+) s, kind (\d+): (.*)"
    worst = 0.0
    for r in survivors:
        said = re.search(pattern, texts[r])
        worst = max(worst, float(said[2]) if said else LIMIT_S)
        if (
            r in hung
            or not said
            or not float(said[2]) <= timeout_s + 2
            or int(said[3]) != status
            or jobs[r][0].returncode != status
            or not said[4].startswith(expected)
        ):
            state = " hung" if r in hung else ""
            return worst, len(hung), f"{kind} of rank {culprit}, rank {r}{state}: {texts[r]}"
    return worst, 0, ""


def fault_case(options, kind, ranks, found):
    wrong = [text for _, _, text in found if text]
    worst, hung = max(seconds for seconds, _, _ in found), sum(h for _, h, _ in found)
    right = f"{len(found) - len(wrong)} of {len(found)} named in time"
    print(*wrong, f"{kind}, world {ranks}: {right}; slowest {worst:.2f} s, {hung} hung", sep="\n")
    sys.stdout.flush()
    case = {"name": f"{kind}/world {ranks}", "lane": "cuda", "passed": not wrong}
    case |= {"ranks": ranks}
    case |= {"worlds": len(found), "named_in_time": len(found) - len(wrong), "hung": hung}
    case |= {"slowest_survivor_s": worst, "timeout_s": TIMEOUT_S[kind]}
    return case | {"allowed_s": TIMEOUT_S[kind] + 2}


def run_all(options, keep):
    """Matrices first, as the devices allow; then all bad worlds, so many side by side."""
    devices = Devices(options.devices, options.share)
    worlds = [
        (mode, lane, ranks)
        for ranks in sorted(options.ranks, reverse=True)  # the widest find room first
        for mode in options.modes
        if mode in MATRICES
        for lane in (options.lanes[:1] if mode == "storm" else options.lanes)
    ]
    good, bad = [], []
    with ThreadPoolExecutor(max(1, len(worlds))) as pool:
        for job in [pool.submit(matrix, options, devices, *world) for world in worlds]:
            good.append(job.result())
            keep("nccl_matrix", good)
    kinds = [(k, r) for r in options.bad_ranks for k in options.modes if k not in MATRICES]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = {
            (kind, ranks): [
                pool.submit(one_fault, options, kind, ranks, run) for run in range(options.runs)
            ]
            for kind, ranks in kinds
        }
        for (kind, ranks), runs in found.items():
            bad.append(fault_case(options, kind, ranks, [run.result() for run in runs]))
            keep("nccl_bad_worlds", bad)
    return good + bad


def nccl_version(library):
    version = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    v = version.value
    return f"{v // 10000}.{v // 100 % 100}.{v % 100}"


TITLES = {
    "nccl_matrix": "Ranks as GPUs over NCCL: option matrix, caller's communicator, many exchanges",
    "nccl_bad_worlds": "Ranks as GPUs over NCCL: worlds with a bad rank",
}
NOTES = {
    "nccl_matrix": "every rank against the world of one on its device; large: dX summed in halves",
    "nccl_bad_worlds": "every survivor must name the bad rank within timeout_s + 2 s of the fault "
    "and exit with the status of its error",
}


class Receipts:
    """By `talea check --results-from`, which holds them to the schema."""

    def __init__(self, options):
        self.options, self.folder = options, Path(options.receipts)
        self.start = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = subprocess.run(
            [options.program, "facts"], capture_output=True, text=True, check=True
        )
        self.facts, self.nccl = json.loads(said.stdout), nccl_version(options.library)
        for name in TITLES:  # what an earlier run left must not pass for this one's
            (self.folder / f"{name}.json").unlink(missing_ok=True)

    def keep(self, name, cases):
        """Written anew as the cases end: a run that is cut leaves what it saw."""
        wrong = sum(not case["passed"] for case in cases)
        check = {"preset": name.replace("_", " "), "lanes": sorted({c["lane"] for c in cases})}
        check |= {"passed": len(cases) - wrong, "failed": wrong, "cases": cases}
        facts = self.facts
        built = f"test program built from {facts['revision']}, {facts['dirty']}"
        results = {
            "argv": ["python3", *sys.argv],
            "start_time": self.start,
            "title": TITLES[name],
            "libraries": {"nccl": self.nccl},
            "device": facts["device"],
            "notes": [f"{built}; {self.options.devices} devices", NOTES[name]],
            "check": check,
        }
        with tempfile.TemporaryDirectory() as folder:
            file, written = Path(folder) / "results.json", Path(folder) / f"{name}.json"
            file.write_text(json.dumps(results))
            line = [self.options.tool, "check", "--quiet", "--results-from", file]
            ran = subprocess.run([*line, "--receipt", written], stdout=subprocess.DEVNULL)
            if ran.returncode != (1 if wrong else 0) or not written.exists():
                sys.exit(f"no receipt {name}.json: `talea check` exited with {ran.returncode}")
            part = self.folder / f"{name}.json.part"
            part.write_text(written.read_text())
            part.replace(self.folder / f"{name}.json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--library", default="libnccl.so.2")
    parser.add_argument("--lanes", nargs="+", default=["cuda"], help="storm, bad worlds: the first")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--bad-ranks", type=int, nargs="+", default=[2], help="of bad worlds")
    parser.add_argument("--runs", type=int, default=20, help="bad worlds of a kind and size")
    parser.add_argument("--devices", type=int, default=0, help="of the machine; worlds rotate")
    parser.add_argument("--share", type=int, default=1, help="matrices on one device at a time")
    parser.add_argument("--at-once", type=int, default=1, help="bad worlds side by side")
    parser.add_argument(
        "--modes", nargs="+", required=True, help=", ".join([*MATRICES, *TIMEOUT_S])
    )
    parser.add_argument("--receipts", help="folder of nccl_matrix.json and nccl_bad_worlds.json")
    parser.add_argument("--tool", default="build/cuda/bin/talea")
    options = parser.parse_args()
    options.devices = options.devices or max(options.ranks + options.bad_ranks)
    keep = Receipts(options).keep if options.receipts else lambda name, cases: None
    cases = run_all(options, keep)
    return 0 if cases and all(case["passed"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
