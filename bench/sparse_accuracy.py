"""What: what rounding P, dS and o costs the gradients of sparse attention, and whether it grows with
the context, as a receipt.
Why: how right 16-bit training is, is a table and a sweep, not an adjective.
Never: compares with anything but fp64 on the same rounded inputs: lane reference, or the page's formulas.

usage: sparse_accuracy.py RECEIPT [--lanes auto|sm90,cuda]

Lanes sm90 and cuda are given device tensors; their truth are the formulas of the page, in fp64.
"""

from __future__ import annotations

import argparse
import sys

import torch
from talea import _receipt
from talea._abi import lib
from talea._sparse_attention import _settings, _torch

ROWS = (("native", False), ("native", True), ("split", False), ("split", True))
ON_DEVICE = ("sm90", "cuda")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def data(s, keys, h, d, dv, k, peak=1.0, shared=False):
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).bfloat16()

    q, kv, d_o = normal(s, h, d) * peak, normal(keys, d), normal(s, h, dv)
    order = torch.rand(s, keys, generator=draw) if s <= 1024 else None
    if order is not None:
        indices = order.topk(k).indices.sort(-1).values.int()
    else:
        indices = torch.randint(1, keys, (s, k), generator=draw, dtype=torch.int32)
    if shared:
        indices[:, 0] = 0
    return q, kv, d_o, indices, torch.ones(h)


def run(problem, dv, lane, operands="native", residual=False, wide=False):
    if lane in ON_DEVICE:
        problem = [t.cuda() for t in problem]
    q, kv, d_o, indices, sink = problem
    if lane == "reference":
        q, kv, d_o = q.double(), kv.double(), d_o.double()
    text = _settings.text_of(value_dim=dv, kv_storage="plain", operands=operands, lane=lane)
    inputs = {"q": q, "kv": kv, "indices": indices, "sink": sink}
    made = {
        "o": q.new_empty((*q.shape[:-1], dv)),
        "lse": q.new_empty(q.shape[:-1], dtype=torch.float32),
    }
    if residual:
        made["o_residual"] = torch.empty_like(made["o"])
    _torch.call("forward", text, inputs, made)
    kept = {} if lane == "reference" else made
    kind = torch.float64 if lane == "reference" else torch.float32 if wide else q.dtype
    out = {
        "dq": q.new_empty(q.shape, dtype=kind),
        "dkv": kv.new_empty(kv.shape, dtype=kind),
        "d_sink": torch.empty_like(sink),
    }
    _torch.call("backward", text, {**inputs, "d_o": d_o, **kept}, out)
    return {n: t.double().cpu() for n, t in {"o": made["o"], **out}.items()}


def as_operand(x, operands):
    """What a 16-bit product sees of x: one number, or the sum of two; or x itself."""
    if operands == "exact":
        return x
    high = x.bfloat16().double()
    return high if operands == "native" else high + (x - high).bfloat16().double()


def by_16_bit_products(problem, dv, operands, residual):
    """The formulas of the page with P and dS rounded as 16-bit products take them, sums exact: what a lane
    whose products take 16-bit operands gives. Lane cpu multiplies in fp32 and rounds neither."""
    q, kv, d_o, indices, sink = (t if t.dtype == torch.int32 else t.double() for t in problem)
    rows, scale = kv[indices.long()], q.shape[-1] ** -0.5
    s = scale * torch.einsum("shd,skd->shk", q, rows)
    m = s.amax(-1, keepdim=True)
    total = torch.logaddexp(s.logsumexp(-1), sink)[..., None]
    o = torch.einsum("shk,skv->shv", as_operand((s - m).exp(), operands), rows[..., :dv])
    o = o * (m - total).exp()
    stored = o if operands == "exact" else o.bfloat16().double()
    if residual:
        stored = stored + (o - stored).bfloat16().double()
    delta = (stored * d_o).sum(-1, keepdim=True)
    p = (s - total).exp()
    ds = p * (torch.einsum("shv,skv->shk", d_o, rows[..., :dv]) - delta)
    p, ds = as_operand(p, operands), as_operand(ds, operands)
    dq = scale * torch.einsum("shk,skd->shd", ds, rows)
    share = scale * torch.einsum("shk,shd->skd", ds, q)
    share[..., :dv] += torch.einsum("shk,shv->skv", p, d_o)
    dkv = torch.zeros_like(kv).index_add_(0, indices.flatten().long(), share.flatten(0, 1))
    d_sink = -((sink[:, None] - total).exp() * delta).sum((0, 2))
    return {
        "o": stored if operands == "exact" else o.bfloat16().double(),
        "dq": dq,
        "dkv": dkv,
        "d_sink": d_sink,
    }


def truth_of(problem, dv, lanes):
    if set(lanes) <= set(ON_DEVICE):
        right = by_16_bit_products([t.cuda() for t in problem], dv, "exact", False)
        return {n: t.cpu() for n, t in right.items()}
    return run(problem, dv, "reference")


def error(ours, truth):
    return float((ours - truth).norm() / truth.norm())


def takes(lane, operands):
    return lane != "sm90" or operands == "native"


def table(rows, lanes):
    for name, peak in (("flat", 1.0), ("peaked", 4.0)):
        problem = data(512, 1024, 16, 128, 64, 256, peak)
        truth = truth_of(problem, 64, lanes)
        for operands, residual in ROWS:
            for lane in lanes:
                if not takes(lane, operands):
                    continue
                wide = run(problem, 64, lane, operands, residual, wide=True)
                narrow = run(problem, 64, lane, operands, residual)
                rows.append({
                    "name": f"{name}, {operands}{', o_residual' if residual else ''}", "lane": lane,
                    "passed": not (operands == "split" and residual) or error(wide["dkv"], truth["dkv"]) <= 2e-5,
                    "dkv_fp32": error(wide["dkv"], truth["dkv"]), "dkv_bf16": error(narrow["dkv"], truth["dkv"]),
                    "dq_fp32": error(wide["dq"], truth["dq"]), "d_sink": error(wide["d_sink"], truth["d_sink"]),
                    "o": error(wide["o"], truth["o"]),
                })  # fmt: skip
                print(rows[-1])
            ours = by_16_bit_products(problem, 64, operands, residual)
            rows.append({
                "name": f"{name}, {operands}{', o_residual' if residual else ''}, 16-bit products",
                "lane": "none", "passed": True,
                "dkv_fp32": error(ours["dkv"], truth["dkv"]),
                "dkv_bf16": error(ours["dkv"].bfloat16().double(), truth["dkv"]),
                "dq_fp32": error(ours["dq"], truth["dq"]), "d_sink": error(ours["d_sink"], truth["d_sink"]),
                "o": error(ours["o"], truth["o"]),
            })  # fmt: skip
            print(rows[-1])


def sweep(rows, lanes):
    first = {}
    for s in LENGTHS:
        problem = data(s, 512, 1, 16, 16, 4, shared=True)
        truth = truth_of(problem, 16, lanes)
        for lane in lanes:
            found = {}
            for operands, residual in (("native", False), ("split", True)):
                if not takes(lane, operands):
                    continue
                ours = run(problem, 16, lane, operands, residual, wide=True)
                found[f"{operands}_dkv"] = error(ours["dkv"], truth["dkv"])
                found[f"{operands}_shared_key"] = error(ours["dkv"][0], truth["dkv"][0])
            at_first = first.setdefault(lane, found)
            flat = found["native_dkv"] <= 1.5 * at_first["native_dkv"]
            flat = flat and found.get("split_dkv", 0.0) <= 2e-5
            rows.append({"name": f"context {s}", "lane": lane, "passed": flat, **found})
            print(rows[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--lanes", default="auto")
    args = parser.parse_args()
    start, rows, lanes = _receipt.now(), [], args.lanes.split(",")
    table(rows, lanes)
    sweep(rows, lanes)
    failed = sum(not r["passed"] for r in rows)
    section = {"preset": "512 queries, 16 heads, K 256, 128/64; then one key that all select",
               "lanes": lanes, "passed": len(rows) - failed, "failed": failed, "cases": rows}  # fmt: skip
    _receipt.write_receipt(
        args.receipt, "check", "Accuracy of sparse attention's gradients, bf16 inputs", failed == 0,
        {"check": section}, start, ["python", "bench/sparse_accuracy.py", *sys.argv[1:]],
        {"lanes": lib.talea_sparse_attention_lanes().decode()},
    )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
