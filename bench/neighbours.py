"""What: the public call at a vocabulary beside its aligned neighbour, alternating in one process.
Why: times of two processes are of two clocks: a claim that an odd size costs nothing needs one.
Never: compares single steps, or sizes that were not run side by side.

usage: TALEA_LIBRARY=build/cuda/lib/libtalea.so PYTHONPATH=python python3 bench/neighbours.py
       --receipt receipts/h200/neighbours.json
"""

import argparse
import statistics
import sys

import public
import talea
import torch
from talea._receipt import now, write_receipt

MIB = 1 << 20
# hidden, vocabulary, its neighbour (a multiple of 128 words), limit in MiB, tokens, tokens of the neighbour
PAIRS = [
    (4096, 50257, 50304, 530, 8192, 8192),
    (3584, 151936, 152064, 620, 8192, 8192),
    (3584, 151936, 151936, 620, 8191, 8192),
    (2880, 201088, 201216, 620, 8192, 8192),
    (4096, 16032, 16128, 530, 8192, 8192),
]


class Side:
    """A step of training into an fp32 main gradient."""

    def __init__(self, tokens, hidden, vocab, limit):
        self.name, self.elements = f"{tokens}x{hidden}x{vocab}", tokens * hidden * vocab
        self.x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
        w = torch.randn(vocab, hidden, device="cuda") / hidden**0.5
        self.w = w.bfloat16().requires_grad_()
        self.y = torch.randint(vocab, (tokens,), device="cuda")
        self.options = {"workspace_limit": limit * MIB, "grad_scale": 1.0}
        self.options["main_grad"] = torch.zeros(vocab, hidden, device="cuda")

    def step(self):
        self.x.grad = None
        talea.linear_cross_entropy(self.x, self.w, self.y, **self.options).backward()


def measure(pair, meter, seconds, rounds):
    hidden, vocab, beside, limit, tokens, tokens_beside = pair
    sides = [Side(tokens, hidden, vocab, limit), Side(tokens_beside, hidden, beside, limit)]
    seen = [[], []]
    for round_of in range(rounds):
        for k in (0, 1) if round_of % 2 == 0 else (1, 0):
            seen[k].append(public.sustained(sides[k].step, meter, seconds))
    talea.require_clean()
    for side, own, other in ((sides[0], seen[0], seen[1]), (sides[1], seen[1], seen[1])):
        ms = sorted(one["ms"] for one in own)
        each = statistics.median(ms) / side.elements
        base = statistics.median(one["ms"] for one in other) / sides[1].elements
        yield {
            "name": side.name,
            "case": f"{sides[0].name} beside {sides[1].name}",
            "time": {"median_ms": statistics.median(ms), "p20_ms": ms[0], "p80_ms": ms[-1],
                     "n": len(ms)},
            "time_an_element_over_its_neighbours": each / base,
            "sm_mhz": statistics.median(one["sm_mhz"] for one in own),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each sustained run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--receipt", help="where to write it, .json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    start, meter, runs = now(), public.Meter(), []
    torch.manual_seed(1)
    public.WARM_SECONDS = args.seconds / 2
    for pair in PAIRS:
        for run in measure(pair, meter, args.seconds, args.rounds):
            runs.append(run)
            print(f"{run['name']:20s} {run['time']['median_ms']:8.3f} ms, "
                  f"{run['time_an_element_over_its_neighbours']:.3f} of its neighbour's an element, "
                  f"{run['sm_mhz']:.0f} MHz", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
        if args.receipt:
            sections = {
                "bench": {"limit": "the aligned neighbour, in turns with it, sustained", "runs": runs},
                "notes": ["dW added into an fp32 main gradient; rounds in turns, every second in reverse"],
            }  # fmt: skip
            argv = ["python3", "bench/neighbours.py", *sys.argv[1:]]
            title = "Vocabularies beside their aligned neighbours, the public call"
            write_receipt(args.receipt, "bench", title, None, sections, start, argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
