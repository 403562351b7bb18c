# What: runs the NCCL test program, a process a GPU: the option matrix, and worlds with a bad rank.
# Why: only the launcher of the processes can see that none hangs.
# Never: leaves a process behind, or counts a world that did not run.
import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = {"dies": 1, "stops": 1, "absent": 1, "absent_init": 1, "disagrees": 10}
# callers_comm: over a communicator of the caller's; storm: thousands of small exchanges.
MATRICES = ("matrix", "callers_comm", "storm")
LIMIT_S = 60  # to the end of a world, NCCL's start included


def start(options, mode, ranks, file, *last, first=0):
    """One process a rank, each seeing one device, its output in a file of its own."""
    jobs = []
    for rank in range(ranks):
        command = [options.program, mode, str(rank), str(ranks), file, options.library]
        device = (first + rank) % max(options.devices, ranks)
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(device), "NCCL_NVLS_ENABLE": "0"}
        out = tempfile.TemporaryFile("w+")
        job = subprocess.Popen(
            command + [str(x) for x in last], stdout=out, stderr=subprocess.STDOUT, env=env
        )
        jobs.append((job, out))
    return jobs


def text_of(out):
    out.seek(0)
    return out.read()


def matrix(options, mode, ranks):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        jobs = start(
            options, mode, ranks, folder + "/world", options.lane, first=options.first_device
        )
        begin = time.monotonic()
        while any(job.poll() is None for job, _ in jobs):
            if time.monotonic() - begin > 300:
                for job, _ in jobs:
                    job.kill()
            time.sleep(0.05)
        texts = [text_of(out) for _, out in jobs]
    ends = [re.search(r"rank \d+ of \d+: (\d+) cases, 0 wrong, (\d+) declined", t) for t in texts]
    right = all(ends) and all(job.returncode == 0 for job, _ in jobs)
    if not right:
        print("\n".join(texts))
    counts = f"{ends[0][1]} cases, {ends[0][2]} declined" if all(ends) else "no count"
    took = time.monotonic() - begin
    print(
        f"{mode}, lane {options.lane}, world {ranks}: {counts}: {'right' if right else 'WRONG'}",
        end="",
    )
    print(f", {took:.1f} s", flush=True)
    text = counts if mode == "storm" else f"{counts}; every rank against the world of one"
    return {"name": f"{mode}/world {ranks}", "lane": options.lane, "passed": right, "text": text}


def one_fault(options, kind, ranks, run):
    """What is wrong with one world that has a bad rank; empty: every survivor named it in time."""
    timeout_s, begin, culprit = TIMEOUT_S[kind], time.monotonic(), run % ranks
    everyone = kind == "disagrees"
    survivors = [r for r in range(ranks) if everyone or r != culprit]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        jobs = start(options, kind, ranks, folder + "/world", culprit, timeout_s, first=run)
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
    for r in survivors:
        said = re.search(pattern, texts[r])
        if (
            r in hung
            or not said
            or float(said[2]) > timeout_s + 2
            or int(said[3]) != status
            or not said[4].startswith(expected)
        ):
            return f"{kind} of rank {culprit}, rank {r}{' hung' if r in hung else ''}: {texts[r]}"
    return ""


def faults(options, kind, ranks):
    begin = time.monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = range(options.runs)
        found = list(pool.map(lambda run: one_fault(options, kind, ranks, run), runs))
    wrong = [text for text in found if text]
    took = f"{time.monotonic() - begin:.1f} s"
    right = f"{options.runs - len(wrong)} of {options.runs} named in time"
    print(*wrong, f"{kind}, world {ranks}: {right}; {took}", sep="\n", flush=True)
    return {"name": f"{kind}/world {ranks}", "lane": "cuda", "passed": not wrong, "text": right}


def write_results(options, start_time, cases):
    """What `talea check --results-from` makes a receipt of."""
    wrong = sum(not case["passed"] for case in cases)
    check = {"preset": "nccl ranks", "lanes": sorted({case["lane"] for case in cases})}
    check |= {"passed": len(cases) - wrong, "failed": wrong, "cases": cases}
    results = {
        "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "start_time": start_time,
        "title": "Ranks as GPUs over NCCL: option matrix and bad worlds",
        "libraries": {"nccl": os.path.basename(os.path.realpath(options.library))},
        "notes": [
            "Run by tests/dist/nccl_test.py on the machine with the GPUs; cpu, os and environment "
            "above are of the machine that wrote the receipt.",
            f"faults: survivors must name the bad rank within its timeout + 2 s: {TIMEOUT_S}",
        ],
        "check": check,
    }
    with open(options.results, "w") as file:
        json.dump(results, file, indent=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--library", default="libnccl.so.2")
    parser.add_argument("--lane", default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=0, help="of the machine; worlds rotate")
    parser.add_argument("--first-device", type=int, default=0, help="of a matrix")
    parser.add_argument("--at-once", type=int, default=1, help="worlds of faults side by side")
    parser.add_argument(
        "--modes", nargs="+", required=True, help=", ".join([*MATRICES, *TIMEOUT_S])
    )
    parser.add_argument("--results", help="write them for talea check --results-from")
    options = parser.parse_args()
    start_time = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    cases = []
    for mode in options.modes:
        run = matrix if mode in MATRICES else faults
        for ranks in options.ranks:
            cases.append(run(options, mode, ranks))
            if options.results:
                write_results(options, start_time, cases)
    return 0 if all(case["passed"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
