#!/usr/bin/env python3
"""What: plants each known bug in turn and expects the suite to fail.
Why: a test that no bug can fail is a defect; the kill table proves that ours can.
Never: counts a refusal to start as a kill.
"""

import re
import subprocess
import sys
import time

# Enough of the suite to see every mutant, in about a second; the filter is printed with the table.
FILTER = ":".join(
    [
        "Compare.*",
        "Judged.*",
        "SameBits.*",
        "Errors.Lanes",
        "GlobalDenominator.*",
        "Lanes/Edges.*/cpu",
        "Lanes/Options.EachPair/cpu",
        "Lanes/Options.EveryLayout/cpu",
        "Lanes/Options.EverySubsetOfTheGradients/cpu",
        "Lanes/Large.*/cpu",
        "Lanes/Precision.ConfidentRowsKeepTheirDigits/cpu",
        "Lanes/Precision.TargetsTwoHundredNatsBelow/cpu",
        "Lanes/Precision.SixteenBitInputsSeeAnFp32Softmax/cpu",
        "Lanes/Precision.ManyRowsIntoOneWeightGradient/cpu",
        "Lanes/Repeat.AnyNumberOfThreads/cpu",
        "Lanes/Repeat.SecondBackwardIsACallOfItsOwn/cpu",
        "Lanes/Repeat.MainGradientAdds/cpu",
    ]
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, errors="replace", timeout=300
    )


def killer(program: str, name: str) -> str:
    """The first case that fails with the mutant planted; empty if it survives."""
    done = run(program, f"--mutant={name}", f"--gtest_filter={FILTER}", "--gtest_fail_fast")
    failed = re.search(r"^\[  FAILED  \] ([\w/.]+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed.group(1)
    started = re.findall(r"^\[ RUN      \] ([\w/.]+)", done.stdout, re.MULTILINE)
    if done.returncode < 0 and started:
        return f"{started[-1]} (signal {-done.returncode})"
    if done.returncode != 0:
        sys.exit(f"{name}: the program did not run: {done.stderr.strip()}")
    return ""


def main() -> int:
    program = sys.argv[1]
    listed = [line.split("\t") for line in run(program, "--list-mutants").stdout.splitlines()]
    if len(listed) < 10:
        sys.exit("this program has no mutants planted: configure with TALEA_MUTANTS=ON")
    clean = run(program, f"--gtest_filter={FILTER}")
    if clean.returncode != 0:
        print(clean.stdout[-4000:])
        sys.exit("without a mutant the cases must pass")
    begin, survivors = time.monotonic(), []
    width = max(len(name) for name, _ in listed)
    for name, text in listed:
        by = killer(program, name)
        print(f"{name:{width}}  {'killed by ' + by if by else 'SURVIVES: ' + text}", flush=True)
        if not by:
            survivors.append(name)
    killed = len(listed) - len(survivors)
    share = 100 * killed / len(listed)
    print(f"{killed} of {len(listed)} killed ({share:.0f} %), {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
