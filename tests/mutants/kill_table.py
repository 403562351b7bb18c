#!/usr/bin/env python3
"""What: plants each known bug in turn and expects the tests that the museum names for it to fail.
Why: a test that no bug can fail is a defect; a page that names tests must be right about them.
Never: counts a refusal to start as a kill, nor a failure of a test that fails without a bug, too.

usage: kill_table.py PROGRAM MUSEUM [BUG,BUG]   plants every bug, or those named (PROGRAM is built with
         TALEA_MUTANTS); those of a lane's plan where PROGRAM has that lane
       kill_table.py --names PROGRAM MUSEUM SOURCE   only checks that what the museum names exists
       kill_table.py --device RECEIPT PROGRAM MUSEUM TOOL [JOBS [SECONDS [BUG,BUG]]]   plants in
         the lanes of a GPU what the museum lists for them, on a machine that has one, or those named;
         TOOL says the revision and the device. Behind SECONDS no bug is planted any more: the receipt
         lists it as not run ("unfinished")
"""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from envelope import envelope, machine, now, write  # noqa: E402

EACH_SECONDS = float(os.environ.get("EACH_SECONDS", 300))  # of a run of the tests
CASE = re.compile(r"[A-Z]\w+\.\w+")
# The way through a lane that the benchmarks time: their weights are large, those of the cases small.
CLAIMED = {"cuda": "--force=one_term", "sm90": "--force=folded"}
# Bugs of a kernel that neither that way nor a problem's own choice takes.
ELSEWHERE = {("sm90", "pass_run_twice"): "--force=transformed"}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=EACH_SECONDS,
    )


def museum(page: str) -> dict[str, list[str]]:
    """The tests that are named for each mutant, from the tables of the page."""
    named = {}
    for line in Path(page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 3 or not cells[-1].startswith("`"):
            continue
        for mutant in re.findall(r"`(\w+)`", cells[-1]):
            named[mutant] = re.findall(r"`([^`]+)`", cells[-2])
    return named


def of_devices(page: str) -> dict[str, list[str]]:
    """The mutants that are planted in each lane of a GPU, from the page's table of two columns."""
    rows = re.findall(r"^\| `(cuda|sm90)` \| (.*) \|$", Path(page).read_text(), re.MULTILINE)
    return {lane: re.findall(r"`(\w+)`", mutants) for lane, mutants in rows}


def gtest_cases(program: str) -> set[str]:
    """Suite.Case of every case that this program runs, without the instance it is run for."""
    cases, suite = set(), ""
    for line in run(program, "--gtest_list_tests").stdout.splitlines():
        if re.match(r"\S", line):
            suite = line.split("#")[0].strip().rstrip(".").split("/")[-1]
        elif "DISABLED_" not in line:
            cases.add(f"{suite}.{line.split('#')[0].strip().split('/')[0]}")
    return cases


def lanes_of_cases(program: str) -> set[tuple[str, str]]:
    """(Suite.Case, lane) of every case that this program runs on a lane."""
    found, suite = set(), ""
    for line in run(program, "--gtest_list_tests").stdout.splitlines():
        words = line.split("#")[0].strip()
        if re.match(r"\S", line):
            suite = words.rstrip(".").split("/")[-1]
        elif "/" in words:
            case, lane = words.split("/", 1)
            found.add((f"{suite}.{case}", lane))
    return found


def cases_of_devices(source: str) -> set[str]:
    """Suite.Case of the tests that only a lane of a GPU runs, or a program that has such lanes:
    elsewhere the program lists none."""
    texts = [file.read_text() for file in Path(source).glob("tests/ops/*/*_test.cpp")]
    built = [text for text in texts if re.search("^#ifdef TALEA_WITH_CUDA", text, re.M)]
    plain = [case for text in built for case in re.findall(r"^TEST\((\w+), (\w+)\)", text, re.M)]
    lone = {
        s
        for text in texts
        for s in re.findall(r"^GTEST_ALLOW_UNINSTANTIATED\w+\((\w+)\)", text, re.M)
    }
    cases = [case for text in texts for case in re.findall(r"^TEST_P\((\w+), (\w+)\)", text, re.M)]
    return {".".join(case) for case in [*plain, *(c for c in cases if c[0] in lone)]}


def filter_of(tests: list[str], lane: str = "") -> str:
    """The named cases on one lane, or on the host's."""
    kinds = [f"*{{}}/{lane}"] if lane else ["*{}/cpu", "*{}/reference", "{}"]
    return ":".join(kind.format(t) for t in tests if CASE.fullmatch(t) for kind in kinds)


def killer(program: str, name: str, cases: str, *more: str) -> str:
    """The first of the cases that fails with the mutant planted; empty if it survives."""
    done = run(program, f"--mutant={name}", f"--gtest_filter={cases}", "--gtest_fail_fast", *more)
    failed = re.search(r"^\[  FAILED  \] ([\w/.]+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed.group(1)
    started = re.findall(r"^\[ RUN      \] ([\w/.]+)", done.stdout, re.MULTILINE)
    if done.returncode < 0 and started:
        return f"{started[-1]} (signal {-done.returncode})"
    if done.returncode != 0:
        sys.exit(f"{name}: the program did not run: {done.stderr.strip()}")
    return ""


def check_names(program: str, page: str, source: str) -> int:
    """Each test and mutant of the page exists, and each mutant of the library is on the page."""
    named, cases = museum(page), gtest_cases(program) | cases_of_devices(source)
    headers = [
        Path(source) / name for name in ("src/core/mutant.hpp", "src/core/kernel_mutant.hpp")
    ]
    headers += Path(source).glob("src/ops/*/mutants.hpp")
    header = "\n".join(file.read_text() for file in headers)
    switches = Path(source, "tests/support/main.cpp").read_text()
    known = set(re.findall(r"X\((\w+),", header)) | set(re.findall(r'{"(\w+)", Compare', switches))
    wrong = [f"{m}: on the page, planted nowhere" for m in sorted(named.keys() - known)]
    wrong += [f"{m}: planted, not on the page" for m in sorted(known - named.keys())]
    planted = {m for mutants in of_devices(page).values() for m in mutants}
    wrong += [f"{m}: of a device, with no test" for m in sorted(planted - named.keys())]
    for mutant, tests in named.items():
        if not any(CASE.fullmatch(t) for t in tests):
            wrong.append(f"{mutant}: no test is named for it")
        for test in tests:
            exists = test in cases if CASE.fullmatch(test) else (Path(source) / test).exists()
            if not exists:
                wrong.append(f"{mutant}: {test} does not exist")
    rows = set(re.findall(r"^\| ((?:B|SA)\d+) \|", Path(page).read_text(), re.MULTILINE))
    wrong += [f"B{i}: missing" for i in range(1, 27) if f"B{i}" not in rows]
    wrong += [f"SA{i}: missing" for i in range(1, 41) if f"SA{i}" not in rows]
    print("\n".join(wrong) or f"{len(named)} bugs, each with tests that exist")
    return 1 if wrong else 0


def ways_of(lane: str, name: str) -> tuple[str, ...]:
    """That of the benchmarks first; the bugs and tests of attention and the scan know one way."""
    alone = re.match(r"(sa\d|m3_)|(Attention|Scan)", name)
    ways = ("",) if alone else (CLAIMED[lane], "")
    return (ELSEWHERE[lane, name],) if (lane, name) in ELSEWHERE else ways


class Clean:
    """Whether a case runs, and passes, where nothing is planted: asked for once a lane, test and way."""

    def __init__(self, program: str):
        self.program, self.said, self.lock = program, {}, threading.Lock()

    def passes(self, lane: str, test: str, way: str) -> bool:
        with self.lock:
            mine = (lane, test, way) not in self.said
            answer = self.said.setdefault((lane, test, way), Future())
        if mine:
            try:
                done = run(self.program, f"--gtest_filter={filter_of([test], lane)}", *way.split())
                ran = "[  PASSED  ] 0 tests" not in done.stdout
                answer.set_result(done.returncode == 0 and ran)
            except subprocess.TimeoutExpired:
                answer.set_result(False)
        return answer.result()

    def unfit(self) -> list[str]:
        failed = [key for key, answer in sorted(self.said.items()) if not answer.result()]
        return [f"{test}/{lane} {way}".strip() for lane, test, way in failed]


def planted(clean: Clean, lane: str, name: str, tests: list[str]) -> dict[str, str]:
    """Who kills the bug, by way. A test that fails without a bug in that way, too, kills nothing; behind the
    first killer no more tests are run."""
    for way in ways_of(lane, name):
        for test in tests:
            try:
                by = killer(clean.program, name, filter_of([test], lane), *way.split())
            except subprocess.TimeoutExpired:
                continue
            if by and clean.passes(lane, test, way):
                return {way: by}
    return {}


def on_device(
    receipt: str,
    program: str,
    page: str,
    tool: str,
    jobs: str = "",
    seconds: str = "inf",
    only: str = "",
) -> int:
    """Each lane with each of its bugs, many processes at a time, and without one what killed it."""
    lanes, start, end = of_devices(page), now(), time.monotonic() + float(seconds)
    named, runs, clean = museum(page), lanes_of_cases(program), Clean(program)
    of = {
        (lane, name): [test for test in named[name] if (test, lane) in runs]
        for lane, names in lanes.items()
        for name in names
        if not only or name in only.split(",")
    }

    def in_time(*key_and_tests) -> dict[str, str] | None:
        return planted(clean, *key_and_tests) if time.monotonic() < end else None

    with ThreadPoolExecutor(int(jobs or os.cpu_count())) as pool:
        first = sorted(of, key=lambda key: -len(ways_of(*key)))  # two ways take the longest
        each = {key: pool.submit(in_time, *key, of[key]) for key in first}
        asked = {key: each[key].result() for key in of}
    found = {key: ways for key, ways in asked.items() if ways is not None}
    not_run = [f"{name}/{lane}" for lane, name in asked.keys() - found.keys()]
    table = [
        {
            "lane": lane,
            "bug": name,
            "killed_by": next(iter(ways.values()), ""),
            "killed_in_the_way_of_the_benchmarks_by": ways.get(CLAIMED[lane], ""),
        }
        for (lane, name), ways in found.items()
    ]
    for row in table:
        print(f"{row['lane']:5} {row['bug']:32} {row['killed_by'] or 'SURVIVES'}")
    unfit = clean.unfit()
    for case in unfit:
        print(f"fails without a bug, and kills nothing: {case}")
    killed = sum(1 for row in table if row["killed_by"])
    passed = bool(table) and killed == len(table)
    cases = [{**row, "name": row["bug"], "passed": bool(row["killed_by"])} for row in table]
    verdict = "unfinished" if not_run and passed else "passed" if passed else "failed"
    title = "bugs planted in the lanes of a device"
    said = envelope(
        machine(tool),
        start,
        title,
        verdict,
        "mutants",
        cases,
        fail_without_a_bug=unfit,
        not_run=sorted(not_run),
    )
    write(Path(receipt), said)
    print(f"{killed} of {len(table)} killed, {len(not_run)} not run")
    return 0 if verdict == "passed" else 1


def main() -> int:
    if sys.argv[1] == "--names":
        return check_names(*sys.argv[2:5])
    if sys.argv[1] == "--device":
        return on_device(*sys.argv[2:9])
    program, named, cases = sys.argv[1], museum(sys.argv[2]), gtest_cases(sys.argv[1])
    listed = [line.split("\t") for line in run(program, "--list-mutants").stdout.splitlines()]
    if len(listed) < 10:
        sys.exit("this program has no mutants planted: configure with TALEA_MUTANTS=ON")
    listed = [row for row in listed if not row[1].startswith("device: ")]  # no place on the host
    listed = [
        row
        for row in listed
        if not row[1].startswith("plan: ") or cases.intersection(named.get(row[0], []))
    ]
    if len(sys.argv) > 3:
        listed = [row for row in listed if row[0] in sys.argv[3].split(",")]
    everything = sorted({t for name, _ in listed for t in named.get(name, [])})
    clean = run(program, f"--gtest_filter={filter_of(everything)}")
    if clean.returncode != 0:
        print(clean.stdout[-4000:])
        sys.exit("without a mutant the cases must pass")
    begin, survivors = time.monotonic(), []
    width = max(len(name) for name, _ in listed)
    for name, text in listed:
        by = killer(program, name, filter_of(named.get(name, [])))
        print(f"{name:{width}}  {'killed by ' + by if by else 'SURVIVES: ' + text}", flush=True)
        if not by:
            survivors.append(name)
    killed = len(listed) - len(survivors)
    share = 100 * killed / len(listed)
    print(f"{killed} of {len(listed)} killed ({share:.0f} %), {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
