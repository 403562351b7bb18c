# What: the planning model of `talea explain --ranks` against the measured runs of receipts/ranks.
# Why: a prediction for 512 ranks is worth what its terms are worth where they can be measured.
# Never: fits anything to the runs it is checked on: one rank's time and the bare links go in.
# usage: test_plan.py TALEA_BINARY RECEIPTS_FOLDER
import json
import pathlib
import subprocess
import sys

BOUND = 0.08  # of the measured time


def rates_of(bench, ranks):
    one = next(run for run in bench["runs"] if run["ranks"] == 1)
    links = {
        (x["collective"], x["bytes"]): x["time"]["median_ms"] * 1e-3
        for x in bench["links"]
        if x.get("multiprocessors", 0) == 0
    }
    (reduce_bytes, reduce_s) = next((b, s) for (name, b), s in links.items() if "fp32" in name)
    latency = links["all_gather", 8]
    wire = 2 * (ranks - 1) / ranks * reduce_bytes
    return {
        "--product-tflops": one["flops"] / one["time"]["median_ms"] / 1e9,
        "--link-gb": wire / (reduce_s - latency) / 1e9,
        "--link-us": latency * 1e6,
    }


def predicted_ms(talea, receipt, ranks, rates, *flags):
    problem = receipt["calls"][0]["problem"]
    command = [talea, "explain", "--json", "--dtype", "bf16", "--ranks", str(ranks), *flags]
    for name in ("tokens", "hidden", "vocab"):
        command += [f"--{name}", str(problem[name])]
    limit = receipt["calls"][0]["options"]["workspace_limit_bytes"]
    command += ["--workspace-limit", str(limit)]
    for flag, value in rates.items():
        command += [flag, f"{value:.6g}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["plan"][-1]["seconds"] * 1e3


def main():
    talea, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    compared, wrong = 0, 0
    for file in sorted(folder.glob("*.json")):
        receipt = json.loads(file.read_text())
        bench = receipt.get("bench", {})
        if "links" not in bench:
            continue
        for run in bench["runs"]:
            at_once = run["name"] == "world R, dX summed at once"
            beside = run["name"].startswith("world R, dX beside dW, ")
            if not at_once and not beside:
                continue
            flags = ["--dx-beside-dw"] if beside else []
            rates = rates_of(bench, run["ranks"])
            predicted = predicted_ms(talea, receipt, run["ranks"], rates, *flags)
            measured = run["time"]["median_ms"]
            off = predicted / measured - 1
            compared += 1
            right = abs(off) <= BOUND
            wrong += not right
            print(
                f"{file.name}, {run['name']}: predicted {predicted:.3f} ms, measured "
                f"{measured:.3f} ms, {off:+.1%}{'' if right else ': outside the bound'}"
            )
    print(f"{compared} runs compared, {wrong} outside {BOUND:.0%}")
    return 0 if compared > 0 and wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
