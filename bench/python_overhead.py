"""What: what Python adds to a call: the operator over its C function, and the import over torch's.
Why: small batches and short generations feel every microsecond between loss() and the kernel.
Never: times the kernel; the problem is a few rows, so that the call is all there is.

usage: python bench/python_overhead.py [--device cpu|cuda] [--receipt F.json]
       python bench/python_overhead.py --operators [...]: the scan and sparse attention instead,
       whose calls Python makes by what it kept of an equal one
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import overhead_calls
import talea
import torch
from talea._linear_cross_entropy import _call, _tensors
from talea._linear_cross_entropy._settings import Config
from talea._receipt import now, write_receipt

CALL_LIMIT_US, IMPORT_LIMIT_MS = 15.0, 20.0
OPERATOR_LIMITS_US = {  # on CPU tensors, the library's own time among it
    "scan, no gradient": 45.0, "scan, forward": 60.0, "scan, a step": 45.0,
    "attention, no gradient": 35.0, "attention, forward": 50.0, "attention, packed rows": 40.0,
    "select": 50.0, "scan, over torch's own": 120.0, "attention, over torch's own": 80.0,
}  # fmt: skip
DEVICE_LIMIT_US = 18.0  # with gradients, whose memory comes from a slower allocator


def sample(call, count, device):
    """Microseconds a call: the host's time, the device idle at the start and never waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e6


def described(samples_us, scale=1e-3):
    cuts = statistics.quantiles(samples_us, n=10)
    return {
        "median_ms": statistics.median(samples_us) * scale,
        "p20_ms": cuts[1] * scale,
        "p80_ms": cuts[7] * scale,
        "n": len(samples_us),
    }


def c_call(x, w, y, need):
    """The library's function on structs that are filled: what a binding pays that prepares no call."""
    config, inputs = Config(outputs=("loss",)), (x, w, None, y)
    described = _tensors.Described(config, inputs, need)
    held = [*_tensors.allocate(described.makers, inputs), described.workspace()]
    addresses = [t.data_ptr() for t in (x, w, y, *held)]
    described.plan.place(addresses[:-1], addresses[-1], described.stream())
    function, reference = _call.operate, described.plan.ref
    return (lambda: function(reference, None)), (described, held)


def split(call, count, device):
    """Microseconds of a Python call: in the C function that it calls, and beside that."""
    function, inside = _call.operate_again, 0.0

    def timed(*arguments):
        nonlocal inside
        begin = time.perf_counter()
        status = function(*arguments)
        inside += time.perf_counter() - begin
        return status

    _call.operate_again = timed
    try:
        whole = sample(call, count, device)
    finally:
        _call.operate_again = function
    inside *= 1e6 / count
    return inside, whole - inside


class Nothing(torch.autograd.Function):
    """What torch itself takes for a differentiable call and its backward."""

    loss = torch.empty(())

    @staticmethod
    def forward(ctx, x, w, y):
        ctx.save_for_backward(x, w, y)
        ctx.gradients = torch.empty_like(x), torch.empty_like(w)
        return torch.empty_like(Nothing.loss)

    @staticmethod
    def backward(ctx, upstream):
        return *ctx.gradients, None


def there_and_back(loss_of, x, w, y):
    def call():
        loss_of(x, w, y).backward()
        x.grad = w.grad = None

    return call


FORWARD, LOSS_ONLY, TRAINING = "loss and gradients", "loss only", "forward and backward"
CASES = {  # name: the call, what it is measured over, its limit
    FORWARD: ("Python", "C", CALL_LIMIT_US),
    LOSS_ONLY: ("Python, loss only", "C, loss only", CALL_LIMIT_US),
    TRAINING: ("Python, with backward()", "C", None),
    f"{TRAINING}, over torch's own": ("Python, with backward()", "C, nothing", CALL_LIMIT_US),
}


def measure_calls(device, count, repeats):
    """Microseconds a call, by name: the samples of each, taken in turns."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(4, 64, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    y = torch.randint(0, 64, (4,), device=device)
    Nothing.loss = torch.empty((), device=device)
    bare, kept = c_call(x, w, y, (True, True, False))
    bare_loss, kept_loss = c_call(x, w, y, (False, False, False))
    fixed = x.detach(), w.detach()
    calls = {
        "C": bare,
        "Python": lambda: talea.linear_cross_entropy(x, w, y),
        "C, loss only": bare_loss,
        "Python, loss only": lambda: talea.linear_cross_entropy(*fixed, y),
        "torch, nothing": there_and_back(Nothing.apply, x, w, y),
        "torch, nothing, no backward()": lambda: Nothing.apply(x, w, y),
        "Python, with backward()": there_and_back(talea.linear_cross_entropy, x, w, y),
    }
    times = {name: [] for name in calls}
    for call in calls.values():  # descriptions, allocations, the interpreter's own caches
        sample(call, 20 * count, device)
    for _ in range(repeats):  # in turns, so that a change of clock meets all
        for name, call in calls.items():
            times[name].append(sample(call, count, device))
    del kept, kept_loss
    shares = [split(calls["Python"], count, device) for _ in range(repeats)]
    times["C, called by Python"], times["Python, beside that"] = map(
        list, zip(*shares, strict=True)
    )
    times["C, nothing"] = [a + b for a, b in zip(times["C"], times["torch, nothing"], strict=True)]
    return times


def measure_operators(device, count, repeats):
    """Microseconds a call of the other operators, by name, and of them those in the library."""
    calls = overhead_calls.calls_of(device)
    times = {name: [] for name in calls}
    for call in calls.values():
        sample(call, 20 * count, device)
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(sample(call, count, device))
    for name in ("scan", "attention"):
        whole, own = times[f"{name}, forward and backward"], times.pop(f"torch's own, as {name}")
        times[f"{name}, over torch's own"] = [a - b for a, b in zip(whole, own, strict=True)]
    if device == "cuda":  # backward is made in a thread of torch's, whose calls are kept there
        calls = {n: c for n, c in calls.items() if "backward" not in n}
    inside = overhead_calls.Inside(time.perf_counter)
    for name, call in calls.items():
        if name in times:
            times[f"{name}: in the library"] = samples = []
            for _ in range(repeats):
                inside.seconds = 0.0
                sample(call, count, device)
                samples.append(inside.seconds / count * 1e6)
    return times


def imports_ms(count):
    """Of processes that have torch already, with the bytecode beside the sources that pip leaves.

    The first one is not counted: it compiles that bytecode and warms the files.
    """
    code = "import time, torch; b = time.perf_counter(); import talea; talea.linear_cross_entropy"
    words = [sys.executable, "-c", f"{code}; print(1e3 * (time.perf_counter() - b))"]
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = folder
        how = {"capture_output": True, "text": True, "check": True, "env": env}
        return [float(subprocess.run(words, **how).stdout) for _ in range(count + 1)][1:]


def gate(name, values, limit):
    value = statistics.median(values)
    return {"name": name, "value": value, "limit": limit, "passed": value <= limit}


def report_operators(o):
    """The runs and gates of --operators."""
    times = measure_operators(o.device, o.count, o.repeats)
    case = f"a token or a query, {o.device}"
    runs = [{"name": n, "case": case, "time": described(v)} for n, v in times.items()]
    limits = OPERATOR_LIMITS_US if o.device == "cpu" else {}
    return runs, [gate(f"microseconds, {n}", times[n], most) for n, most in limits.items()]


def report_loss(o):
    """The runs and gates of the loss, and of the import."""
    times = measure_calls(o.device, o.count, o.repeats)
    imports = imports_ms(o.imports) if o.imports else None
    problem = f"4 tokens, 64 x 64, {o.device}"
    runs = [{"name": n, "case": problem, "time": described(v)} for n, v in times.items()]
    gates = []
    for name, (call, over, limit) in CASES.items():
        if o.device == "cuda" and over == "C, nothing":
            limit = None  # a bf16 backward reads its scalar: that row waits for the device
        elif o.device == "cuda" and name == FORWARD:
            limit = DEVICE_LIMIT_US
        added = [a - b for a, b in zip(times[call], times[over], strict=True)]
        runs.append({"name": f"{name}: added", "case": problem, "time": described(added)})
        if limit is not None:
            gates.append(gate(f"microseconds added, {name}", added, limit))
    if imports:
        runs.append({"name": "import", "case": "beyond torch", "time": described(imports, 1.0)})
        gates.append(gate("milliseconds of import beyond torch", imports, IMPORT_LIMIT_MS))
    return runs, gates


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--repeats", type=int, default=200)
    p.add_argument(
        "--count", type=int, default=40, help="calls a sample; few, so that no queue fills"
    )
    p.add_argument("--imports", type=int, default=3, help="processes that import; each loads torch")
    p.add_argument("--operators", action="store_true", help="the scan and sparse attention")
    p.add_argument("--receipt")
    o = p.parse_args()
    start = now()
    torch.set_num_threads(1)
    runs, gates = report_operators(o) if o.operators else report_loss(o)
    for run in runs:
        print(f"{run['name']:50} {run['time']['median_ms'] * 1e3:8.2f} us")
    for g in gates:
        print(f"{g['name']:60} {g['value']:8.2f}  (limit {g['limit']:g})")
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
