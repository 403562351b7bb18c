"""What: what Python adds to a call: the operator over its C function, and the import over torch's.
Why: small batches and short generations feel every microsecond between loss() and the kernel.
Never: times the kernel; the problem is a few rows, so that the call is all there is.

usage: python bench/python_overhead.py [--device cpu|cuda] [--receipt F.json]
"""

import argparse
import statistics
import subprocess
import sys
import time

import talea
import torch
from talea import _abi, _torch
from talea._receipt import now, write_receipt

CALL_LIMIT_US, IMPORT_LIMIT_MS = 15.0, 200.0


def sample(call, count, repeats):
    """Microseconds a call, one figure a repeat."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begin) / count * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return found


def described(samples_us, scale=1e-3):
    cuts = statistics.quantiles(samples_us, n=10)
    return {
        "median_ms": statistics.median(samples_us) * scale,
        "p20_ms": cuts[1] * scale,
        "p80_ms": cuts[7] * scale,
        "n": len(samples_us),
    }


def c_call(device, x, w, y):
    """The library's function on prepared structs: what any binding must pay."""
    _torch._plans.clear()
    talea.linear_cross_entropy(x, w, y)
    ((key, _),) = _torch._plans.items()
    plan = _torch._plans.pop(key)  # ours alone: a call would put its own addresses into it
    held = [torch.empty((), device=device), torch.empty_like(x), torch.empty_like(w)]
    held.append(torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device))
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    addresses = [t.data_ptr() for t in (x, w, y, *held[:3])]
    plan.place(addresses, held[3].data_ptr(), stream)
    function, reference = _abi.lib.talea_linear_cross_entropy, plan.ref
    return (lambda: function(reference, None)), (plan, held)


def measure_calls(device, count, repeats):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(4, 64, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    y = torch.randint(0, 64, (4,), device=device)
    bare, kept = c_call(device, x, w, y)
    calls = {"C function": bare, "Python call": lambda: talea.linear_cross_entropy(x, w, y)}
    times = {name: [] for name in calls}
    for call in calls.values():
        sample(call, count, 1)
    for _ in range(repeats):  # in turns, so that a change of clock meets both
        for name, call in calls.items():
            times[name] += sample(call, count, 1)
    del kept
    return times


def import_ms(what):
    code = f"import time, torch; b = time.perf_counter(); {what}; print(time.perf_counter() - b)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return 1e3 * float(done.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--repeats", type=int, default=21)
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--receipt")
    o = p.parse_args()
    start = now()
    torch.set_num_threads(1)
    times = measure_calls(o.device, o.count, o.repeats)
    imports = [import_ms("import talea; talea.linear_cross_entropy") for _ in range(5)]
    added = [a - b for a, b in zip(times["Python call"], times["C function"], strict=True)]
    case = f"4 tokens, 64 x 64, {o.device}, forward with both gradients"
    runs = [
        {"name": name, "case": case, "time": described(values)} for name, values in times.items()
    ]
    runs.append({"name": "Python over C", "case": case, "time": described(added)})
    runs.append({"name": "import", "case": "beyond torch", "time": described(imports, 1.0)})
    gates = [
        {"name": "microseconds a call over the C function", "value": statistics.median(added),
         "limit": CALL_LIMIT_US, "passed": statistics.median(added) <= CALL_LIMIT_US},
        {"name": "milliseconds of import beyond torch", "value": statistics.median(imports),
         "limit": IMPORT_LIMIT_MS, "passed": statistics.median(imports) <= IMPORT_LIMIT_MS},
    ]  # fmt: skip
    for gate in gates:
        print(f"{gate['name']:45} {gate['value']:8.2f}  (limit {gate['limit']:g})")
    passed = all(g["passed"] for g in gates)
    if o.receipt:
        bench = {"limit": "the same call through the C function", "runs": runs}
        argv = ["python", "bench/python_overhead.py", *sys.argv[1:]]
        title = "What Python adds to a call"
        write_receipt(
            o.receipt, "bench", title, passed, {"bench": bench, "gates": gates}, start, argv
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
