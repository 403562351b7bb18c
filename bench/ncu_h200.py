#!/usr/bin/env python3
"""What: hardware counters of lane sm90's kernels, one short `talea bench` under Nsight Compute a case.
Why: where a goal is missed, the reason must be a measured one.
Never: times anything for a ratio: under the profiler kernels run alone and clocks differ.

usage, on a machine with a Hopper GPU: bench/ncu_h200.py [build/cuda/bin/talea] [receipts/h200/ncu.json]
"""

import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
from envelope import envelope, now, write  # noqa: E402

SHAPE = "--hidden 4096 --vocab 128256 --dtype bf16 --repeats 1 --progress none"
# case: arguments, launches left out (the plain products are no launches of ours), launches read;
# 8192 tokens unless it says otherwise
CASES = {
    "training": ("--lanes sm90 --limits 530MiB", 0, 9),
    "training_135": ("--lanes sm90 --limits 135MiB", 0, 9),
    "loss_only": ("--lanes sm90 --limits 32MiB --outputs loss", 0, 8),
    "loss_only_n8": ("--tokens 8 --lanes sm90 --limits 32MiB --outputs loss", 3, 3),
    "all_options": (
        "--lanes sm90 --limits 530MiB --inputs bias,token_weight --label-smoothing 0.1 "
        "--z-loss 1e-4 --softcap 30 --outputs loss,dx,dw,entropy,topk:5",
        0,
        24,
    ),
    "dw_bf16_256": ("--lanes sm90 --limits 256MiB --dw weight", 18, 6),
}
KERNELS = (
    "regex:gemm_kernel|finish_kernel|few_rows_kernel|end_few_kernel|reduce_kernel|transform_kernel"
    "|gather_kernel|compact_kernel|best|rank|weight_part|row_part|add_parts|row_dot|scalar_sums"
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats")
COLUMNS = {
    "time_us": ("gpu__time_duration.sum", 1e-3),
    "tensor_pipe_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_gb_per_s": ("dram__bytes.sum.per_second", 1e-9),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct", 1),
}


def name_of(kernel):
    epilogue = re.search(r"(\w*Epilogue)(<[^>]*>)?", kernel)
    if epilogue:
        return epilogue.group(0)
    own = re.search(r"(\w+_kernel)", kernel)
    return own.group(1) if own else re.sub(r"[<(].*", "", kernel)  # a library's


def read(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    place = {name: i for i, name in enumerate(rows[0])}
    for row in rows[2:]:  # the second line holds the units: ns, byte/s, %
        value = {
            name: float(row[i].replace(",", "")) for name, i in place.items() if is_number(row[i])
        }
        stalls = {
            re.search(r"stalled_(\w+)_per", name).group(1): v
            for name, v in value.items()
            if "issue_stalled" in name and name.endswith(".ratio")
        }
        worst = sorted(stalls, key=stalls.get, reverse=True)[:4]
        yield {
            "kernel": name_of(row[place["Kernel Name"]]),
            **{key: round(value[name] * unit, 2) for key, (name, unit) in COLUMNS.items()},
            "stalled_warps_per_issue": {key: round(stalls[key], 2) for key in worst},
        }


def is_number(text):
    return re.fullmatch(r"-?[\d,]+(\.\d+)?", text) is not None


def main():
    tool = sys.argv[1] if len(sys.argv) > 1 else "build/cuda/bin/talea"
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "receipts/h200/ncu.json")
    start, cases = now(), []
    for case, (arguments, skip, count) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            log, receipt = Path(folder) / "log.csv", Path(folder) / "receipt.json"
            options = f"--clock-control none --csv --page raw --launch-skip {skip}"
            options += f" --launch-count {count}"
            sections = [word for section in SECTIONS for word in ("--section", section)]
            command = ["ncu", *options.split(), "-k", KERNELS, *sections, "--log-file", str(log)]
            shape = SHAPE if "--tokens" in arguments else f"--tokens 8192 {SHAPE}"
            bench = [tool, "bench", *shape.split(), *arguments.split(), "--receipt", str(receipt)]
            subprocess.run([*command, *bench], check=True, stdout=subprocess.DEVNULL)
            said = json.loads(receipt.read_text())["provenance"]
            cases.append(
                {
                    "name": case,
                    "lane": "sm90",
                    "passed": True,  # the profiled call ended; counters are judged by nobody
                    "arguments": f"{shape} {arguments}",
                    "kernels": list(read(log)),
                }
            )
    title = "hardware counters, kernel by kernel"
    write(out, envelope(said, start, title, "not_checked", "counters", cases))


if __name__ == "__main__":
    main()
