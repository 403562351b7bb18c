"""What: times training steps of the fused loss: Talea's lanes and the libraries people use today.
Why: ratios are worth something only from one process, one chip and interleaved samples.
Never: hides a missing or failing peer: its reason stands in the receipt."""

import argparse
import importlib.metadata
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from talea_ctypes import Library

MIB = 1 << 20


def eager(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def eager_upcast(x, w, y):
    return F.cross_entropy(F.linear(x, w).float(), y)


def make_compile():
    return torch.compile(eager_upcast)


def make_liger():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x, w, y: loss(w, x, y)


def make_quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, w, y: chunked_linear_cross_entropy(x, w, y, chunk_size=4096)


def make_cce():
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, w, y: linear_cross_entropy(x, w, y)


def make_fla():
    from fla.modules import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss()
    return lambda x, w, y: loss(x, y, w)


PEERS = {
    "torch eager": (lambda: eager, "torch"),
    "torch eager, logits upcast": (lambda: eager_upcast, "torch"),
    "torch.compile": (make_compile, "torch"),
    "liger": (make_liger, "liger-kernel"),
    "quack": (make_quack, "quack-kernels"),
    "cut-cross-entropy": (make_cce, "cut-cross-entropy"),
    "fla": (make_fla, "flash-linear-attention"),
}


class Peer:
    """A library with autograd: returns gradients in the inputs' dtype."""

    def __init__(self, name, x, w, y):
        make, package = PEERS[name]
        self.name, self.loss_of, self.y = name, make(), y
        self.version = importlib.metadata.version(package)
        self.x, self.w = x.detach().requires_grad_(), w.detach().requires_grad_()

    def step(self):
        self.x.grad = self.w.grad = None
        loss = self.loss_of(self.x, self.w, self.y)
        loss.backward()
        return loss.detach(), self.x.grad, self.w.grad

    def returned_bytes(self):
        return self.x.numel() * self.x.element_size() + self.w.numel() * self.w.element_size()

    def release(self):
        self.x.grad = self.w.grad = None


class Lane:
    """Talea; dW added into an fp32 main gradient or returned in the weight's dtype."""

    def __init__(self, library, lane, limit_mib, main_grad, x, w, y):
        self.name = f"talea {lane}, limit {limit_mib} MiB, dW " + (
            "fp32" if main_grad else "16-bit"
        )
        self.version = "this build"
        self.library, self.lane, self.limit, self.main = library, lane, limit_mib * MIB, main_grad
        self.x, self.w, self.y = x, w, y
        self.dw = torch.zeros(
            w.shape, dtype=torch.float32 if main_grad else w.dtype, device=w.device
        )
        self.dx = torch.empty_like(x)
        self.loss = torch.empty((), device=x.device)

    def step(self):
        stream = torch.cuda.current_stream().cuda_stream
        args = self.library.prepare(
            {"hidden": self.x, "weight": self.w, "targets": self.y},
            {"loss": self.loss, "dx": self.dx, "dw": self.dw},
            self.lane,
            self.limit,
            self.main,
            stream,
        )
        workspace = torch.empty(args.workspace_bytes, dtype=torch.uint8, device=self.x.device)
        args.workspace = workspace.data_ptr()
        self.library.run(args)
        return self.loss, self.dx, self.dw

    def returned_bytes(self):
        return 0  # allocated before the measurement

    def release(self):
        pass


def timed(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def relative_l2(a, truth):
    return float((a.float() - truth).norm() / truth.norm())


def reference(x, w, y, rows=256):
    """fp32 loss and gradients, in chunks of rows."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    wf, n = w.float(), x.shape[0]
    dx, dw, loss = torch.empty(x.shape, device=x.device), torch.zeros_like(wf), 0.0
    for i in range(0, n, rows):
        xf, t = x[i : i + rows].float(), y[i : i + rows]
        z = xf @ wf.T
        p = torch.softmax(z, -1)
        loss += F.cross_entropy(z, t, reduction="sum").double()
        p[torch.arange(len(t)), t] -= 1
        p /= n
        dx[i : i + rows] = p @ wf
        dw += p.T @ xf
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return float(loss) / n, dx, dw


def extra_mib(who):
    who.release()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    who.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - base - who.returned_bytes()) / MIB


def assemble(args, x, w, y, missing):
    contenders = []
    if args.library:
        library = Library(args.library)
        for lane in args.lanes.split(","):
            for limit in args.limits_mib:
                for main_grad in (True, False):
                    contenders.append(Lane(library, lane, limit, main_grad, x, w, y))
    for name in PEERS:
        try:
            contenders.append(Peer(name, x, w, y))
        except Exception as error:  # a missing package is a row of the receipt
            missing[name] = f"{type(error).__name__}: {error}"
    return contenders


def measure(contenders, products, truth, samples, missing):
    plain, times, facts = [], {}, {}
    for who in list(contenders):
        try:
            loss, dx, dw = (t.clone() for t in who.step())
            main = isinstance(who, Lane) and who.main
            facts[who.name] = {
                "version": who.version,
                "extra_mib": round(extra_mib(who), 1),
                "dx_relative_l2": relative_l2(dx, truth[1]),
                "dw_relative_l2": relative_l2(dw, truth[2]),
                "dw": "fp32 main gradient" if main else "weight dtype",
                "loss_error": abs(float(loss) - truth[0]),
            }
            del loss, dx, dw
        except Exception as error:
            missing[who.name] = f"{type(error).__name__}: {error}"
            contenders.remove(who)
        who.release()
        torch.cuda.empty_cache()
    for sample in range(samples + 1):
        for who in contenders:
            before = timed(products)
            ms = timed(who.step)
            who.release()
            if sample:  # the first round warms up
                plain.append(before)
                times.setdefault(who.name, []).append((ms, before))
    for name, pairs in times.items():
        facts[name]["median_ms"] = statistics.median(ms for ms, _ in pairs)
        facts[name]["times_plain_products"] = statistics.median(ms / p for ms, p in pairs)
        facts[name]["samples_ms"] = [round(ms, 4) for ms, _ in pairs]
    return {"plain_products_median_ms": statistics.median(plain), "contenders": facts}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--library", help="libtalea.so; without it only the peers run")
    parser.add_argument("--lanes", default="cuda")
    parser.add_argument("--limits-mib", type=int, nargs="+", default=[530])
    parser.add_argument("--out", help="receipt (JSON)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("unavailable: no CUDA device", file=sys.stderr)
        return 3
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    x = torch.randn(args.tokens, args.hidden, device=device).bfloat16()
    w = (torch.randn(args.vocab, args.hidden, device=device) / 64).bfloat16()
    y = torch.randint(args.vocab, (args.tokens,), device=device)
    truth = reference(x, w, y)
    z = torch.randn(args.tokens, args.vocab, device=device, dtype=torch.bfloat16)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def products():
        torch.mm(x, w.T, out=z)
        torch.mm(z, w, out=dx)
        torch.mm(z.T, x, out=dw)

    missing = {}
    receipt = {
        "what": "training step against the three plain products, interleaved in one process",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "shape": {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab},
        "dtype": "bfloat16",
        "samples": args.samples,
    }
    receipt |= measure(assemble(args, x, w, y, missing), products, truth, args.samples, missing)
    receipt["not_run"] = missing
    text = json.dumps(receipt, indent=1)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            f.write(text + "\n")
    print(f"plain products {receipt['plain_products_median_ms']:.2f} ms")
    for name, row in receipt["contenders"].items():
        if "median_ms" in row:
            print(
                f"{name:44s} {row['times_plain_products']:.3f} x  {row['extra_mib']:8.1f} MiB  "
                f"dX {row['dx_relative_l2']:.2e}  dW {row['dw_relative_l2']:.2e}"
            )
    for name, reason in missing.items():
        print(f"{name:44s} not run: {reason[:90]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
