"""What: errors of the Mamba-3 scan against fp64: every tensor at one size, over chunks, over lengths, and of angles.
Why: "flat in length" and "to the last digits of fp32" are claims, and this is their receipt.
Never: a truth of the lane under test: the recurrence of lane reference in fp64 on the same inputs.

    python bench/mamba3_accuracy.py --receipt receipts/mamba3/accuracy.json

Two truths, two columns. Where a lane's angles are fp32 increments, summed exactly, it is wrong by what it adds
to those increments ("relative_l2"), and the increments themselves are off the fp64 ones by their rounding
("beside_fp64_increments"). Decision 0031 says why the second grows with the length. Of a lane with fp64
increments the two are one.
"""

from __future__ import annotations

import argparse
import math
import sys

import talea
import torch
from talea._receipt import now, write_receipt

NAMES = ("q", "k", "v", "adt", "dt", "trap", "angles")
# Relative L2 that a lane may have: fp32, every tensor; 16-bit operands, row by row, where a tensor
# without a figure of its own may have the largest of its row.
FP32 = 5e-7
ROW_A = {
    1: {"out": 2.4e-3, "d_q": 3.6e-3, "d_k": 3.6e-3, "d_v": 2.9e-3, "d_adt": 3.2e-3, "d_dt": 2.4e-3,
        "d_trap": 2.4e-3, "d_angles": 4.2e-3, "d_q_bias": 4.0e-3},
    4: {"out": 2.0e-3, "d_q": 3.2e-3, "d_k": 3.1e-3, "d_v": 2.0e-3, "d_adt": 1.7e-3, "d_dt": 1.5e-3,
        "d_angles": 3.6e-3, "d_q_bias": 2.2e-3, "d_mimo_v": 1.3e-3, "d_mimo_out": 1.3e-3},
}  # fmt: skip
# What any chunk may have in fp32, and how much an error may grow beside that of 1024 tokens.
ANY_CHUNK, GROWTH = 2e-6, 1.5
# Gradients of parameters are few numbers, each a cancelled sum over all tokens: one lucky head at 1024 says
# nothing of growth. Over lengths they are held to FP32 itself.
PARAMETERS = ("d_q_bias", "d_k_bias", "d_d")
CHUNKS = {1: (8, 16, 32, 64, 128), 4: (2, 4, 8, 16, 32)}


def draw(tokens, heads, cols, head_dim, rank, dtype, seed):
    """Parameters and decay rates come first, from a generator of their own: a longer one is the same model."""
    model, g = (torch.Generator().manual_seed(s) for s in (seed, seed + 1))

    def normal(*shape, scale=1.0, by=g):
        return torch.randn(shape, generator=by, dtype=torch.float64) * scale

    ranked = (rank,) if rank > 1 else ()
    t = {
        "q_bias": normal(heads, *ranked, cols, scale=0.3, by=model),
        "k_bias": normal(heads, *ranked, cols, scale=0.3, by=model),
        "d": normal(heads, by=model),
        "q": normal(1, tokens, *ranked, 1, cols) / cols**0.25,
        "k": normal(1, tokens, *ranked, 1, cols) / cols**0.25,
        "v": normal(1, tokens, heads, head_dim),
        "trap": normal(1, heads, tokens),
        "angles": normal(1, tokens, 1, cols // 4),
        "z": normal(1, tokens, heads, head_dim),
    }
    dt = torch.nn.functional.softplus(normal(1, heads, tokens) - 3)
    t["dt"], t["adt"] = dt, -dt * (1 + normal(1, heads, 1, by=model).abs())
    if rank > 1:
        t.update({n: 1 / rank + normal(heads, rank, head_dim, scale=0.3, by=model)
                  for n in ("mimo_v", "mimo_out")})  # fmt: skip
    # Steps and parameters are fp32 beside 16-bit operands, as a model keeps them.
    narrow = ("q", "k", "v", "z", "trap", "angles")
    return {n: x.to(dtype if n in narrow else torch.float32) for n, x in t.items()}


def rates_of(angles, lane):
    """tanh(angles) to the bit as the lane forms it in fp32: each as a sequence of one token, whose length is
    the power of two that leaves the last twelve bits of the rate as the fraction of a turn. None of a lane
    whose rates have more digits."""
    flat = angles.detach().reshape(-1).float()
    n, rough = flat.numel(), flat.double().tanh()
    unit = torch.exp2((torch.frexp(rough)[1] - 24).double())  # of the last of 24 bits
    ends, zeros = torch.arange(n + 1, dtype=torch.int32), torch.zeros
    made = talea.mamba3(
        zeros(1, n, 1, 2), zeros(1, n, 1, 2), zeros(1, n, 1, 1), zeros(1, 1, n),
        (2 / (unit * 4096)).float().reshape(1, 1, n), zeros(1, 1, n), flat.reshape(1, n, 1, 1),
        cu_seqlens=ends, return_final=True, lane=lane)  # fmt: skip
    read = made.final.angle.reshape(-1).double() * (4096 / (2 * math.pi))
    low, whole = read.round(), (rough / unit).round()
    if (read - low).abs().max() > 0.02:
        return None
    apart = torch.remainder(low - whole + 2048, 4096) - 2048
    return ((whole + apart) * unit).float().reshape(angles.shape)


def increments(angles, dt, lane):
    """[1, S, H, A] in turns: what the lane adds to its angle, an fp32 product where its rates are fp32."""
    rates = rates_of(angles, lane)
    if rates is None:
        return angles.double().tanh() * (0.5 * dt.double().mT[..., None])
    return product(rates, dt)


def product(rates, dt):
    return rates.float() * (0.5 * dt.float().mT[..., None])


def run(t, dtype, lane, chunk, rates=None):
    """With rates: angles turn by the fp32 increments of these, and gradients are those at the angles given."""
    wide = dtype == torch.float64
    t = {n: (x.double() if wide else x).detach().requires_grad_() for n, x in t.items()}
    given = dict(t)
    if rates is not None:
        dt = t["dt"].detach().mT[..., None]
        rounded = 2 * product(rates, t["dt"].detach()).double() / dt
        exact = t["angles"].tanh().expand_as(rounded)
        given["angles"] = torch.atanh(exact + (rounded - exact).detach())
    more = {n: x for n, x in given.items() if n not in NAMES}
    made = talea.mamba3(
        *(given[n] for n in NAMES), **more, return_final=True, lane=lane, chunk=chunk
    )
    g = torch.Generator().manual_seed(1)
    up = torch.randn(made.out.shape, generator=g, dtype=torch.float64).to(torch.bfloat16)
    grads = torch.autograd.grad(made.out, list(t.values()), up.to(made.out.dtype))
    found = {"out": made.out.detach(), "final_ssm": made.final.ssm.detach()}
    found.update({"d_" + n: x for n, x in zip(t, grads, strict=True)})
    return found, made.receipt()


def relative_l2(ours, truth):
    return float((ours.double() - truth).norm() / truth.norm())


def truths(t, lane):
    """Beside the increments that the contract prescribes, and beside fp64 ones."""
    rates = rates_of(t["angles"], lane)
    exact = run(t, torch.float64, "reference", 0)[0]
    return (exact if rates is None else run(t, torch.float64, "reference", 0, rates)[0]), exact


def case(name, t, found, truth, limits):
    """limits: of each tensor, or None where the caller judges."""
    ours, receipt = found
    errors = {n: relative_l2(ours[n], truth[0][n]) for n in truth[0]}
    off = {n: relative_l2(ours[n], truth[1][n]) for n in truth[1]}
    above = [n for n, e in errors.items() if limits and not e <= limits[n]]
    print(f"{name:28} " + " ".join(f"{n} {e:.1e}" for n, e in errors.items()),
          f"| fp64 increments: final_ssm {off['final_ssm']:.1e}",
          f"ABOVE: {' '.join(above)}" if above else "", file=sys.stderr)  # fmt: skip
    made = {"name": name, "lane": receipt["lane"], "passed": not above, "chunk": receipt["chunk_tokens"],
            "relative_l2": errors, "beside_fp64_increments": off}  # fmt: skip
    if limits:
        made.update(limits=limits, above=above)
    return made


def by_place(t, ours, truth, chunk):
    """Relative error of d_angles at the first and at the last eighth of the chunks."""
    place = torch.arange(t["dt"].shape[-1]) % chunk
    first, last = place < max(chunk // 8, 1), place >= chunk - max(chunk // 8, 1)
    pick = lambda keep: relative_l2(ours["d_angles"][:, keep], truth["d_angles"][:, keep])  # noqa: E731
    return {"first_eighth": pick(first), "last_eighth": pick(last)}


def sizes(o):
    """Section 4's rows, then fp32 over chunks."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rank, form in ((1, "SISO"), (4, "MIMO R 4")):
            t = draw(o.tokens, 4, 128, 64, rank, dtype, 11)
            truth = truths(t, o.lane)
            row = ROW_A[rank]
            limits = {n: FP32 if dtype == torch.float32 else row.get(n, max(row.values()))
                      for n in truth[0]}  # fmt: skip
            found = run(t, dtype, o.lane, 0)
            name = f"{form} {str(dtype)[6:]} {o.tokens}"
            cases.append(case(name, t, found, truth, limits))
            if dtype != torch.float32:
                continue
            for chunk in CHUNKS[rank]:
                found = run(t, dtype, o.lane, chunk)
                limits = dict.fromkeys(truth[0], ANY_CHUNK)
                cases.append(case(f"{name} chunk {chunk}", t, found, truth, limits))
                errors = cases[-1]["relative_l2"]
                cases[-1]["above_fp32_row"] = [n for n, e in errors.items() if not e <= FP32]
                cases[-1]["d_angles_by_place"] = by_place(t, found[0], truth[0], chunk)
    return cases


def lengths(o):
    """One model, one chunk, fp32: no error beside the prescribed increments grows with the length."""
    cases, length = [], 256
    while length <= o.longest:
        t = draw(length, 4, 64, 32, 1, torch.float32, 12)
        found = run(t, torch.float32, o.lane, 0)
        cases.append(case(f"length {length}", t, found, truths(t, o.lane), None))
        length *= 4
    anchor = next((c["relative_l2"] for c in cases if c["name"] == "length 1024"), None)
    for c in cases:
        growth = {n: e / anchor[n] for n, e in c["relative_l2"].items()} if anchor else {}
        c["growth"] = growth
        c["above"] = [n for n, g in growth.items()
                      if not (c["relative_l2"][n] <= FP32 if n in PARAMETERS else g <= GROWTH)]  # fmt: skip
        c["passed"] = not c["above"]
        print(f"{c['name']}: " + " ".join(f"{n} {g:.2f}" for n, g in growth.items()),
              f"ABOVE: {' '.join(c['above'])}" if c["above"] else "", file=sys.stderr)  # fmt: skip
    return cases


def on_circle(found, truth):
    apart = torch.remainder(found.double() - truth + math.pi, 2 * math.pi) - math.pi
    return float(apart.abs().max())


def turned(tokens, lane, pairs=8):
    """Angle behind the last token beside the exact sum of the lane's increments, largest over pairs, radians."""
    g = torch.Generator().manual_seed(13)
    angles = torch.randn(1, tokens, 1, pairs, generator=g)
    dt = torch.nn.functional.softplus(torch.randn(1, 1, tokens, generator=g) - 3)
    steps = increments(angles, dt, lane)[0, :, 0]
    # Integers of 2^-64 turn, wrapping as the contract has them: high and low halves stay exact in fp64.
    high = torch.floor(steps.double() * 2.0**32)
    low = (steps.double() * 2.0**32 - high) * 2.0**32
    total = torch.remainder(
        high.long().sum(0).double() / 2.0**32 + low.long().sum(0).double() / 2.0**64, 1.0
    )
    truth = total * (2 * math.pi)
    rows = torch.zeros(1, 1, 1, 1).expand(1, tokens, 1, 2 * pairs)
    made = talea.mamba3(rows, rows, torch.zeros(1, tokens, 1, 1), -dt, dt, torch.zeros(1, 1, tokens), angles,
                        return_final=True, lane=lane)  # fmt: skip
    in_radians = steps.float() * torch.tensor(2 * math.pi)
    running, whole = torch.zeros(pairs), torch.tensor(2 * math.pi)
    for row in in_radians:  # one addition a token, in fp32
        running = running + row
        running = torch.where(running.abs() >= whole, running - whole.copysign(running), running)
    return {"exact_turns": on_circle(made.final.angle[0, 0], truth), "running_fp32": on_circle(running, truth),
            "stored_bf16": on_circle(running.bfloat16(), truth)}  # fmt: skip


def angles(o):
    cases, tokens = [], 256
    while tokens <= o.turns:
        errors = turned(tokens, o.lane)
        # One rounding of an angle below 2 pi to fp32 is 2^-22 at most, and sin and cos read its turn.
        cases.append({"name": f"angle {tokens}", "lane": "cpu", "passed": errors["exact_turns"] <= 2.0**-21,
                      "radians": errors})  # fmt: skip
        print(cases[-1]["name"], errors, file=sys.stderr)
        tokens *= 4
    return cases


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--lane", default="auto")
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--longest", type=int, default=65536)
    p.add_argument("--turns", type=int, default=1 << 20)
    p.add_argument("--receipt")
    o = p.parse_args()
    start = now()
    cases = sizes(o) + lengths(o) + angles(o)
    failed = sum(not c["passed"] for c in cases)
    if o.receipt:
        section = {"preset": "accuracy", "operator": "mamba3", "lanes": [cases[0]["lane"]],
                   "passed": len(cases) - failed, "failed": failed, "cases": cases}  # fmt: skip
        write_receipt(o.receipt, "check", "Mamba-3 scan: errors against fp64, and over lengths",
                      failed == 0, {"check": section}, start,
                      ["python", "bench/mamba3_accuracy.py", *sys.argv[1:]])  # fmt: skip
    print("pass" if not failed else f"fail: {failed} of {len(cases)}")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
