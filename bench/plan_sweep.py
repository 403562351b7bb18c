"""What: the public call over limits and sizes: its time beside the plan's own prediction.
Why: a plan is chosen by what it predicts; a limit that costs more than a larger one would not, or a
     prediction that is far off, is a cliff that a user falls from without a word.
Never: times sizes that do not fit, or leaves out a point that was slow.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python python3 bench/plan_sweep.py
       --receipt receipts/h200/plan_sweep.json
"""

import argparse
import re
import sys

import talea
import torch
from public import products_of, timed
from talea._receipt import now, write_receipt

MIB = 1 << 20
SHAPES = [  # tokens, hidden, vocabulary
    (8192, 4096, 128256), (8192, 2304, 256000), (8192, 2880, 201088), (16384, 8192, 152064),
    (1024, 4096, 128256), (64, 4096, 128256), (1, 4096, 128256), (65536, 2048, 32000),
    (8192, 1024, 512000), (8192, 512, 8192), (32768, 4096, 50257),
]  # fmt: skip
LIMITS = ["auto", 64, 135, 265, 530, 1050, 2100, 4096]
KINDS = {
    "training": {},
    "dw_sum=weight": {"dw_sum": "weight"},
    "main_grad": {"main_grad": True, "grad_scale": 1.0},
    "frozen head": {"frozen": True},
    "loss only": {"loss_only": True},
}


def predicted_ms(receipt):
    found = re.search(r"predicted ([0-9.e+]+) ms", " ".join(receipt["notes"]))
    return float(found.group(1)) if found else None


def point(x, w, y, main, limit, how, seconds):
    options = dict(how)
    alone = options.pop("loss_only", False)
    x, w = x.detach().requires_grad_(not alone), w.detach()
    w.requires_grad_(not (alone or options.pop("frozen", False)))
    options["workspace_limit"] = limit if limit == "auto" else limit * MIB
    if options.get("main_grad"):
        options["main_grad"] = main

    def step(**more):
        x.grad = w.grad = None
        found = talea.linear_cross_entropy(x, w, y, **options, **more)
        if not alone:
            (found.loss if more else found).backward()
        return found

    receipt = step(outputs=("loss",)).receipt()
    each = timed(step, 2)
    steps = max(3, int(seconds * 1000 / each))
    timed(step, steps)
    return {
        "ms": timed(step, steps), "predicted_ms": predicted_ms(receipt),
        "products": round(receipt["products"], 2), "lane": receipt["lane"],
        "chunk_rows": receipt["chunk_rows"], "chunks": receipt["chunks"],
        "workspace_bytes": receipt["workspace_bytes"],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.1, help="of each point")
    parser.add_argument("--shapes", help="tokens x hidden x vocabulary, as 8192x4096x128256;...")
    parser.add_argument("--limits", help="auto or MiB, parted by ';' (default: all)")
    parser.add_argument("--kinds", help="names, parted by ';' (default: all)")
    parser.add_argument("--receipt", help="where to write it, .json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, device, runs, not_run = now(), torch.device("cuda", 0), [], {}
    torch.manual_seed(1)
    shapes, kinds, limits = SHAPES, KINDS, LIMITS
    if args.limits:
        limits = [n if n == "auto" else int(n) for n in args.limits.split(";")]
    if args.shapes:
        shapes = [tuple(int(n) for n in s.split("x")) for s in args.shapes.split(";")]
    if args.kinds:
        kinds = {name: KINDS[name] for name in args.kinds.split(";")}
    for n, d, v in shapes:
        case = f"{n}x{d}x{v}"
        x = torch.randn(n, d, device=device).bfloat16()
        w = (torch.randn(v, d, device=device) / d**0.5).bfloat16()
        y = torch.randint(v, (n,), device=device)
        main = torch.zeros(v, d, device=device) if "main_grad" in kinds else None
        work = products_of(x, w)[3]
        timed(work, max(2, int(args.seconds * 1000 / timed(work, 2))))
        plain = timed(work, max(2, int(args.seconds * 1000 / timed(work, 2))))
        del work
        torch.cuda.empty_cache()
        for kind, how in kinds.items():
            for limit in limits:
                name = f"{kind}, {limit}" + ("" if limit == "auto" else " MiB")
                try:
                    made = point(x, w, y, main, limit, how, args.seconds)
                except talea.Error as error:
                    not_run[f"{case}: {name}"] = str(error).splitlines()[0]
                    continue
                ms = made.pop("ms")
                runs.append({
                    "name": name, "case": case, **made, "products_ms": plain, "ratio": ms / plain,
                    "time": {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "n": 1},
                })  # fmt: skip
                said = f"{made['predicted_ms'] or 0:.2f} predicted"
                print(f"{case:20s} {name:24s} {ms:8.2f} ms, {said}, {ms / plain:.3f}, "
                      f"{made['chunks']} x {made['chunk_rows']}, {made['products']} products",
                      flush=True)  # fmt: skip
        del x, w, y, main
        torch.cuda.empty_cache()
    talea.require_clean()
    if args.receipt:
        sections = {"bench": {"limit": "three plain products (torch.mm, bf16) of the same case",
                              "runs": runs, "not_run": not_run},
                    "notes": ["one sample a point: back to back after the same time of the same"]}  # fmt: skip
        argv = ["python3", "bench/plan_sweep.py", *sys.argv[1:]]
        write_receipt(args.receipt, "bench", "Limits and sizes: time beside the plan's prediction",
                      None, sections, start, argv)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
