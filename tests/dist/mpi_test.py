# What: runs the MPI test program in worlds of several sizes, and in worlds with one bad rank.
# Why: a fault is a matter of whole processes; only their launcher can see that none hangs.
# Never: leaves a process behind.
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 4  # worlds of faults beside each other: they mostly wait
TIMEOUT_S = {"dies": 0.6, "stops": 0.6, "absent": 1.5, "disagrees": 10, "refuses": 10}
OPTION = {"loss": "label_smoothing", "attention": "scale", "scan": "norm_eps"}  # 0.25 of one rank
DATA = {"loss": "targets\\[0\\] = 1000000", "attention": r"indices: -?\d+ at batch"}  # of one rank
RANKS = 3
LATE = "not every rank reached MPI_Init"


def mpirun(program, ranks, *arguments, limit_s, expected=0):
    """Exit code and lines of one world. Its launcher has a folder of its own: two that begin at once
    make the same one, and one of them fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return launched(program, ranks, arguments, limit_s, expected, {**os.environ, "TMPDIR": folder})


def launched(program, ranks, arguments, limit_s, expected, environment):
    # Recovery keeps the launcher from killing the survivors before they can say what they saw.
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
    command += ["--enable-recovery", "--continuous"]
    command += ["--mca", "btl", "self,vader", "--mca", "btl_vader_single_copy_mechanism", "none"]
    command += ["-n", str(ranks), program, *map(str, arguments)]
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    # The launcher waits for ever for a stopped rank: it is ended once everybody has spoken.
    timer = threading.Timer(limit_s, end, (job,))
    timer.start()
    lines = []
    for line in job.stdout:
        lines.append(line.rstrip())
        if expected and sum(1 for said in lines if said.startswith("survivor ")) == expected:
            end(job)
            break
    lines += [line.rstrip() for line in job.stdout]
    code = job.wait()
    timer.cancel()
    return code, lines


def end(job):
    """Asks the launcher to end its processes, stopped ones included; Open MPI 5 may not answer."""
    ranks = descendants(job.pid)
    job.terminate()
    try:
        job.wait(3)
    except subprocess.TimeoutExpired:
        job.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid):
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def matrix(program, ranks):
    code, lines = mpirun(program, ranks, "matrix", limit_s=240)
    good = sum(
        1 for line in lines if re.fullmatch(r"rank \d+ of \d+: [1-9]\d* cases, 0 wrong", line)
    )
    if code != 0 or good != ranks:
        print("\n".join(lines))
    print(f"world {ranks}: exit {code}, {good} of {ranks} ranks right")
    return code == 0 and good == ranks


def one_fault(program, kind, culprit, operator):
    """What is wrong with one world that has a bad rank; empty: every survivor named it in time.

    Where a busy machine did not bring all ranks to MPI_Init in time, there was no bad rank yet:
    such a world begins again, with more time.
    """
    for longer in (1, 4, 16):
        wrong = one_world(program, kind, culprit, operator, longer * TIMEOUT_S[kind])
        if kind == "absent" or LATE not in wrong:
            break
    return wrong


def one_world(program, kind, culprit, operator, timeout_s):
    begin = time.monotonic()
    everyone = kind in ("disagrees", "refuses")
    survivors = [r for r in range(RANKS) if everyone or r != culprit]
    # Who has come leaves a file here, so that an absent rank can be named.
    with tempfile.TemporaryDirectory() as presence:
        arguments = (kind, culprit, timeout_s, presence, operator)
        limit_s = 20 + timeout_s
        _, lines = mpirun(program, RANKS, *arguments, limit_s=limit_s, expected=len(survivors))
    pattern = r"survivor (\d+) after ([\d.]+) s, kind (\d+): (.*)"
    said = {
        int(m[1]): (float(m[2]), int(m[3]), m[4])
        for m in (re.search(pattern, line) for line in lines)
        if m
    }
    if kind == "refuses":
        expected, status = f"(rank {culprit}: )?{DATA[operator]}", 5
    elif everyone:
        first = r"0\.25" if culprit == 0 else r"(?!0\.25)\S+"
        expected, status = f"{OPTION[operator]}: the ranks disagree: {first} on rank 0", 5
    else:
        expected, status = f"rank {culprit}:", 4
    right = all(
        r in said
        and said[r][0] <= timeout_s + 2
        and said[r][1] == status
        and re.match(expected, said[r][2])
        and (kind != "refuses" or said[r][2].startswith("rank ") == (r != culprit))
        for r in survivors
    )
    took = f"{operator}, {kind} of rank {culprit}: after {time.monotonic() - begin:.1f} s\n"
    return "" if right else took + "\n".join(lines)


def fault(program, kind, operator, runs):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(
            pool.map(lambda run: one_fault(program, kind, run % RANKS, operator), range(runs))
        )
    wrong = [text for text in found if text]
    print(*wrong, f"{operator}, {kind}: {runs - len(wrong)} of {runs} named in time", sep="\n", flush=True)
    return not wrong


def main():
    program, mode = sys.argv[1], sys.argv[2]
    if not shutil.which("mpirun"):
        print("mpirun is missing (Debian: openmpi-bin)")
        return 1
    if mode == "matrix":
        right = matrix(program, int(sys.argv[3]))
    else:
        operator = sys.argv[3]
        right = fault(program, mode, operator, 20 if operator == "loss" else 2 * RANKS)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
