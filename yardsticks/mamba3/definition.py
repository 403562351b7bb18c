"""The Mamba-3 scan in plain fp64: what docs/mamba3.md defines, in code that runs.

scan, scan_adjoint               the recurrence, token by token, and its adjoint written by hand
chunk_scan, chunk_scan_adjoint   the shifted form over chunks, which the fast lanes compute
`python definition.py` holds gradients against central differences and, where torch is there,
autograd of a third form, and chunks against the recurrence; exit code 1 when one of them is off.
Names and shapes as in docs/mamba3.md, always with a rank axis R (SISO: R = 1); optional tensors may be
missing. A sequence's arrays are [T, H, ...], a chunk's [H, rows, ...], row = (token, r).
"""

import numpy as np

PI = np.pi
STATES = ("angle", "ssm", "k", "v")
SHAPES = {
    "q": "BSRGN",
    "k": "BSRGN",
    "v": "BSHP",
    "z": "BSHP",
    "adt": "BHS",
    "dt": "BHS",
    "trap": "BHS",
    "angles": "BSHA",
    "q_bias": "HRN",
    "k_bias": "HRN",
    "d": "H",
    "mimo_v": "HRP",
    "mimo_z": "HRP",
    "mimo_out": "HRP",
    "norm_weight": "HP",
    "initial_angle": "nHA",
    "initial_ssm": "nHPN",
    "initial_k": "nRHN",
    "initial_v": "nHP",
}


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def outer(v, k):  # sum over r of v_r k_r^T: [..., P, N]
    return np.einsum("...rp,...rn->...pn", v, k)


def pair(x, A, pairs):  # views of the two members of each rotated pair
    if pairs == "interleaved":
        return x[..., 0 : 2 * A : 2], x[..., 1 : 2 * A : 2]
    return x[..., :A], x[..., x.shape[-1] // 2 :][..., :A]


def torque(t, g, s, x):  # of each pair: what turning t adds to <t, g>
    (u, w), (a, b) = (pair(i, s["theta"].shape[-1], x["pairs"]) for i in (t, g))
    return u * b - w * a


def rotate(x, cos, sin, pairs):  # x [..., H, R, N], cos and sin [..., H, A]; -sin turns back
    out, c, s = x + 0, cos[..., None, :], sin[..., None, :]
    (u, w), (a, b) = pair(x, c.shape[-1], pairs), pair(out, c.shape[-1], pairs)
    a[...], b[...] = u * c - w * s, u * s + w * c
    return out


def complete(x):  # missing tensors as the neutral ones they stand for; sequences; sizes
    (B, S, R, G, N), (H, P), cu = x["q"].shape, x["v"].shape[2:], x.get("cu_seqlens")
    A = 0 if x.get("angles") is None else x["angles"].shape[-1]
    where = (
        [(b, 0, S) for b in range(B)]
        if cu is None
        else [(0, *c) for c in zip(cu, cu[1:], strict=False)]
    )
    size = dict(B=B, S=S, R=R, G=G, N=N, H=H, P=P, A=A, n=len(where))
    full = {
        "pairs": "interleaved",
        "norm": False,
        "eps": 1e-5,
        "chunk": 3,
        "z": None,
        "reduce": R == 1 or x.get("mimo_out") is not None,
        **x,
    }
    for c in (c for c in SHAPES if full.get(c) is None and c != "z"):
        full[c] = (np.ones if c[:4] in ("mimo", "norm") else np.zeros)([size[i] for i in SHAPES[c]])
    return full, where, size


def prepare(x, size, n, b, lo, hi):  # what the scan of sequence n reads: section 1.2
    group = np.arange(size["H"]) // (size["H"] // size["G"])  # of each head
    s = {c: x[c][b, :, lo:hi].T for c in ("adt", "dt", "trap")}
    s["lam"] = sigmoid(s["trap"])
    s["gamma"], s["b"] = s["lam"] * s["dt"], (1 - s["lam"]) * s["dt"]
    s["rate"] = np.broadcast_to(np.tanh(x["angles"][b, lo:hi]), (hi - lo, size["H"], size["A"]))
    s["theta"] = x["initial_angle"][n] + np.cumsum(PI * s["rate"] * s["dt"][:, :, None], axis=0)
    for c in "qk":
        s[c] = x[c][b, lo:hi][:, :, group].swapaxes(1, 2) + x[c + "_bias"]
        s[c] = rotate(s[c], np.cos(s["theta"]), np.sin(s["theta"]), x["pairs"])
    s["v"], s["k_in"] = x["v"][b, lo:hi, :, None] * x["mimo_v"], x["initial_k"][n].swapaxes(0, 1)
    s["v_in"] = x["initial_v"][n][:, None] * x["mimo_v"]
    return s


def finish(x, y, z):
    """Norm, gate, output projection of raw y [T, H, R, P], and what their adjoint needs."""
    rstd = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + x["eps"]) if x["norm"] else 1.0
    normed = y * rstd * x["norm_weight"][:, None] if x["norm"] else y
    u = None if z is None else z[:, :, None] * x["mimo_z"]
    gate = 1.0 if z is None else u * sigmoid(u)
    return normed * gate * x["mimo_out"], rstd, normed, u, gate


def scan(x, s, h):  # the recurrence: raw y, the last state [H, P, N], what the adjoint reads
    y, kept, k, v = np.zeros_like(s["v"]), [], s["k_in"], s["v_in"]
    at = lambda c, t: s[c][t][:, None, None]  # noqa: E731
    for t in range(len(y)):
        before = h + at("b", t) * outer(v, k)  # Hs of t - 1
        k, v = s["k"][t], s["v"][t]
        h = np.exp(at("adt", t)) * before + at("gamma", t) * outer(v, k)
        y[t] = np.einsum("hpn,hrn->hrp", h, s["q"][t]) + x["d"][:, None, None] * v
        kept.append((before, h))
    return y, h, kept


def scan_adjoint(x, s, kept, dy, g):
    """From dL/dy and g = dL/dh of the last token: gradients of what scan read."""
    r = {c: np.zeros_like(s[c]) for c in ("q", "k", "v", "adt", "gamma", "b")}
    r["v"] += x["d"][:, None, None] * dy
    at = lambda c, t: s[c][t][:, None, None]  # noqa: E731
    for t in reversed(range(len(dy))):
        (before, h), k, v = kept[t], s["k"][t], s["v"][t]
        r["q"][t] = np.einsum("hpn,hrp->hrn", h, dy[t])
        g = g + outer(dy[t], s["q"][t])
        r["k"][t] += at("gamma", t) * np.einsum("hpn,hrp->hrn", g, v)
        r["v"][t] += at("gamma", t) * np.einsum("hpn,hrn->hrp", g, k)
        r["gamma"][t] = (g * outer(v, k)).sum((1, 2))
        g = np.exp(at("adt", t)) * g  # dL/dHs of t - 1
        r["adt"][t] = (g * before).sum((1, 2))
        k, v = (s["k"][t - 1], s["v"][t - 1]) if t else (s["k_in"], s["v_in"])
        r["b"][t] = (g * outer(v, k)).sum((1, 2))
        if t:
            r["k"][t - 1] += at("b", t) * np.einsum("hpn,hrp->hrn", g, v)
            r["v"][t - 1] += at("b", t) * np.einsum("hpn,hrn->hrp", g, k)
    turn = sum(torque(s[c], r[c], s, x).sum(2) for c in "qk")
    r["theta"] = np.cumsum(turn[::-1], axis=0)[::-1]  # the angle of t turns all later tokens too
    return r, g


def chunk_of(x, s, lo):
    """Rows of the chunk from token lo: q, k, v, Gamma, e^L, e^(L_C - L), key's scale, M, same."""
    hi, (H, R) = min(lo + x["chunk"], len(s["dt"])), s["v"].shape[1:3]
    per_row = lambda t: np.repeat(t, R, axis=0).T[:, :, None]  # noqa: E731
    t, L = np.arange(hi - lo).repeat(R), per_row(np.cumsum(np.maximum(s["adt"][lo:hi], -800), 0))
    scale = s["gamma"] + np.concatenate([s["b"][1:], 0 * s["b"][:1]])  # the last key waits for none
    scale, gamma, same = per_row(scale[lo:hi]), per_row(s["gamma"][lo:hi]), t[:, None] == t
    M = np.exp(np.where(t[:, None] > t, L - L.swapaxes(1, 2), -np.inf))
    rows = (s[c][lo:hi].swapaxes(0, 1).reshape(H, len(t), -1) for c in "qkv")
    Gamma = M * scale.swapaxes(1, 2) + gamma * same
    return *rows, Gamma, np.exp(L), np.exp(L[:, -1:] - L), scale, M, same


def chunk_scan(x, s, h):  # scan by chunks: section 1.4
    y, kept = np.zeros_like(s["v"]), []
    h = h + (s["b"][:1, :, None, None] * outer(s["v_in"], s["k_in"])).sum(0)
    for lo in range(0, len(y), x["chunk"]):
        q, k, v, Gamma, eL, eR, scale = chunk_of(x, s, lo)[:7]
        kept.append(h)
        Y = eL * (q @ h.swapaxes(1, 2)) + (q @ k.swapaxes(1, 2) * Gamma) @ v
        Y += x["d"][:, None, None] * v
        y[lo : lo + x["chunk"]] = Y.reshape(len(Y), -1, *y.shape[2:]).swapaxes(0, 1)
        h = eL[:, -1:] * h + (eR * scale * v).swapaxes(1, 2) @ k
    return y, h, kept + [h]


def chunk_scan_adjoint(x, s, kept, dy, E):
    """scan_adjoint by chunks: section 2.2. The one product dO v^T serves dq, dk, dgamma and d."""
    R, last = dy.shape[2], torque(kept[-1], E, s, x).sum(1)
    r = {c: np.zeros_like(s[c]) for c in ("q", "k", "v", "adt", "gamma", "b", "theta")}
    for i in reversed(range(len(kept) - 1)):
        q, k, v, Gamma, eL, eR, scale, M, same = chunk_of(x, s, i * x["chunk"])
        H, m, at = *q.shape[:2], slice(i * x["chunk"], i * x["chunk"] + q.shape[1] // R)
        tokens = lambda t, H=H, m=m: t.reshape(H, m // R, R, -1).sum(2).swapaxes(0, 1)  # noqa: E731
        until = lambda t, tokens=tokens: np.cumsum(tokens(t)[::-1], axis=0)[::-1]  # noqa: E731
        dO = dy[at].swapaxes(0, 1).reshape(H, m, -1)
        W, S = dO @ v.swapaxes(1, 2), q @ k.swapaxes(1, 2)  # [query row, key row]
        dq = eL * (dO @ kept[i]) + (W * Gamma) @ k
        dk = (W * Gamma).swapaxes(1, 2) @ q + eR * scale * (v @ E)
        dv = (S * Gamma).swapaxes(1, 2) @ dO + eR * scale * (k @ E.swapaxes(1, 2))
        ds = tokens(k * ((W * M).swapaxes(1, 2) @ q + eR * (v @ E))).sum(2)
        r["gamma"][at] = ds + tokens(W * S * same).sum(2)
        r["b"][at.start + 1 : at.stop + 1] = ds[: len(dy) - at.start - 1]  # b of t scales key t - 1
        r["adt"][at] = (kept[i + 1] * E).sum((1, 2)) + until(q * dq - k * dk).sum(2)
        turn = until(torque(q, dq, s, x) + torque(k, dk, s, x))
        r["theta"][at] = last - torque(kept[i + 1], E, s, x).sum(1) + turn
        for c, t in (("q", dq), ("k", dk), ("v", dv + x["d"][:, None, None] * dO)):
            r[c][at] = t.reshape(H, m // R, R, -1).swapaxes(0, 1)
        E = eL[:, -1:] * E + (eL * dO).swapaxes(1, 2) @ q
    r["b"][0] = (E * outer(s["v_in"], s["k_in"])).sum((1, 2))
    return r, E


def forward(x, scan=scan):  # out, the final states, what backward reads
    x, where, size = complete(x)
    out = np.zeros([size[c] for c in ("BSHP" if x["reduce"] else "BSRHP")])
    final, tape = {c: x["initial_" + c].copy() for c in STATES}, []  # an empty sequence hands on
    for n, (b, lo, hi) in enumerate(where):
        s, z = prepare(x, size, n, b, lo, hi), None if x["z"] is None else x["z"][b, lo:hi]
        y, h, kept = scan(x, s, x["initial_ssm"][n])
        o = finish(x, y, z)[0]
        out[b, lo:hi] = o.sum(2) if x["reduce"] else o.swapaxes(1, 2)
        if hi > lo:
            final["angle"][n], final["ssm"][n] = s["theta"][-1] % (2 * PI), h
            final["k"][n], final["v"][n] = s["k"][-1].swapaxes(0, 1), x["v"][b, hi - 1]
        tape.append((s, y, z, kept))
    return out, final, (x, where, size, tape)


def backward(saved, up, up_final, scan_adjoint=scan_adjoint):
    """Gradients of sum(out * up) + sum(final * up_final), by the name of the tensor."""
    x, where, size, tape = saved
    g = {c: np.zeros_like(x[c]) for c in SHAPES if x[c] is not None}
    g.update({"initial_" + c: up_final[c].copy() for c in STATES})  # an empty sequence hands back
    for n, (b, lo, hi) in ((n, w) for n, w in enumerate(where) if w[1] < w[2]):
        (s, y, z, kept), up_n = tape[n], {c: up_final[c][n] for c in STATES}
        go = up[b, lo:hi][:, :, None] if x["reduce"] else up[b, lo:hi].swapaxes(1, 2)
        _, rstd, normed, u, gate = finish(x, y, z)
        g["mimo_out"] += (go * normed * gate).sum(0)
        go = go * x["mimo_out"]
        if z is not None:
            du = go * normed * sigmoid(u) * (1 + u * (1 - sigmoid(u)))
            g["z"][b, lo:hi] = (du * x["mimo_z"]).sum(2)
            g["mimo_z"] += (du * z[:, :, None]).sum(0)
        dy = go * gate
        if x["norm"]:
            g["norm_weight"] += (dy * y * rstd).sum((0, 2))
            e = dy * x["norm_weight"][:, None]
            dy = rstd * (e - y * rstd * (e * y * rstd).mean(-1, keepdims=True))
        r, g["initial_ssm"][n] = scan_adjoint(x, s, kept, dy, up_n["ssm"])
        r["k"][-1] += up_n["k"].swapaxes(0, 1)
        turn = torque(s["k"][-1], up_n["k"].swapaxes(0, 1), s, x).sum(1)
        dtheta = r["theta"] + turn + up_n["angle"]
        g["d"] += (dy * s["v"]).sum((0, 2, 3))
        g["v"][b, lo:hi] = (r["v"] * x["mimo_v"]).sum(2)
        g["v"][b, hi - 1] += up_n["v"]
        g["mimo_v"] += (r["v"] * x["v"][b, lo:hi][:, :, None]).sum(0)
        da = dtheta * s["dt"][:, :, None] * PI * (1 - s["rate"] ** 2)
        g["angles"][b, lo:hi] = da if g["angles"].shape[2] == size["H"] else da.sum(1)[:, None]
        g["initial_angle"][n] = dtheta[0]
        g["adt"][b, :, lo:hi] = r["adt"].T
        ddt = s["lam"] * r["gamma"] + (1 - s["lam"]) * r["b"] + (dtheta * PI * s["rate"]).sum(2)
        g["dt"][b, :, lo:hi] = ddt.T
        g["trap"][b, :, lo:hi] = (s["lam"] * (1 - s["lam"]) * s["dt"] * (r["gamma"] - r["b"])).T
        for c in "qk":  # the bias first, per head; then the sum over the heads of a group
            back = rotate(r[c], np.cos(s["theta"]), -np.sin(s["theta"]), x["pairs"])
            g[c + "_bias"] += back.sum(0)
            back = back.reshape(hi - lo, size["G"], -1, *back.shape[2:]).sum(2)
            g[c][b, lo:hi] = back.swapaxes(1, 2)
        w = g["initial_ssm"][n] * s["b"][0][:, None, None]
        g["initial_k"][n] = np.einsum("hpn,hrp->rhn", w, s["v_in"])
        dv_in = np.einsum("hpn,hrn->hrp", w, s["k_in"])
        g["initial_v"][n] = (dv_in * x["mimo_v"]).sum(1)
        g["mimo_v"] += dv_in * x["initial_v"][n][:, None]
    return g


def autograd(torch, x, up, up_final):
    """backward's result by torch from a third, quadratic form: no state, no loop over tokens."""
    (x, _, size), ein = complete(x), torch.einsum
    p = {c: torch.tensor(x[c], requires_grad=True) for c in SHAPES if x[c] is not None}
    dt, lam, L, v = p["dt"], p["trap"].sigmoid(), p["adt"].cumsum(2), p["v"][:, :, :, None]
    theta = p["initial_angle"][:, None] + (PI * p["angles"].tanh() * dt.mT[..., None]).cumsum(1)
    q, k = (p[c].repeat_interleave(size["H"] // size["G"], 3).transpose(2, 3) for c in "qk")
    q, k, turn = q + p["q_bias"], k + p["k_bias"], (theta.cos(), theta.sin(), x["pairs"])
    q, k = rotate(q, *turn), rotate(k, *turn)
    v, b, tri = v * p["mimo_v"], (1 - lam) * dt, torch.ones(*L.shape, L.shape[2])
    later = torch.nn.functional.pad(b[:, :, 1:], (0, 1))
    weight = (lam * dt)[:, :, None] * tri.tril() + later[:, :, None] * tri.tril(-1)  # [query, key]
    weight = weight * (L[..., None] - L[:, :, None]).tril().exp()
    h = ein("bh,bhp,hrp,brhn->bhpn", b[:, :, 0], p["initial_v"], p["mimo_v"], p["initial_k"])
    h = h + p["initial_ssm"]
    y = ein("bthrn,bhpn,bht->bthrp", q, h, L.exp()) + p["d"][:, None, None] * v
    y = y + ein("bthrn,bjhsn,bhtj,bjhsp->bthrp", q, k, weight, v)
    if x["norm"]:
        y = y * ((y * y).mean(-1, True) + x["eps"]).rsqrt() * p["norm_weight"][:, None]
    if x["z"] is not None:
        y = y * torch.nn.functional.silu(p["z"][..., None, :] * p["mimo_z"])
    y = (y * p["mimo_out"]).sum(3) if x["reduce"] else (y * p["mimo_out"]).transpose(2, 3)
    ssm = h * L[..., -1:, None].exp() + ein("bjhrp,bjhrn,bhj->bhpn", v, k, weight[:, :, -1])
    ends = (y, theta[:, -1], ssm, k[:, -1].transpose(1, 2), p["v"][:, -1])
    sum(
        (e * torch.tensor(w)).sum() for e, w in zip(ends, (up, *up_final.values()), strict=False)
    ).backward()
    return {c: np.zeros_like(x[c]) if t.grad is None else t.grad.numpy() for c, t in p.items()}


if __name__ == "__main__":
    from importlib.util import find_spec

    torch = __import__("torch") if find_spec("torch") else print("no torch: no autograd")
    draw, good = np.random.default_rng(3).normal, []

    def example(without, *sizes, **options):
        size, some = (
            dict(zip("BSHGRNPAn", sizes, strict=False)),
            (c for c in SHAPES if c not in without),
        )
        x = {c: draw(size=[size[i] for i in SHAPES[c]]) for c in some}
        return {**x, "adt": -abs(x["adt"]) / 2, "dt": abs(x["dt"]) / 2, **options}

    def say(what, got, want, bound):
        off = max(np.abs(got[c] - want[c]).max() / np.abs(want[c]).max(initial=1e-3) for c in want)
        good.append(off <= bound)
        print(f"    {what:20}{off:9.1e}", "ok" if good[-1] else "FAILED")

    for what, x in {
        "SISO": example(("mimo_v", "mimo_z", "mimo_out"), 2, 7, 4, 1, 1, 8, 3, 2, 2),
        "MIMO, 1 < G < H": example((), 1, 7, 6, 3, 2, 8, 3, 4, 1, pairs="halves", norm=True),
        "packed, one empty": example((), 1, 9, 4, 2, 4, 8, 2, 2, 4, cu_seqlens=[0, 1, 1, 6, 9]),
        "G = H, unreduced": example(("d", "z", "mimo_out"), 2, 5, 4, 4, 2, 6, 3, 3, 2),
    }.items():
        (out, final, saved), slopes, dots, step = forward(x), {}, {}, 1e-6
        up, to = draw(size=out.shape), {c: draw(size=final[c].shape) for c in STATES}
        g = backward(saved, up, to)
        for c in (c for c in g if c in x):  # along four directions of each tensor
            ways = draw(size=(4, *x[c].shape))
            ends = (forward({**x, c: x[c] + i * w}) for w in ways for i in (-step, step))
            ends = [(o * up).sum() + sum((f[i] * to[i]).sum() for i in STATES) for o, f, _ in ends]
            slopes[c] = np.diff(np.reshape(ends, (4, 2)))[:, 0] / (2 * step)
            dots[c] = np.tensordot(ways, g[c], g[c].ndim)
        by_chunk = forward(x, chunk_scan)
        print(what)
        say("central differences", slopes, dots, 1e-6)
        say("chunks: forward", {"o": by_chunk[0], **by_chunk[1]}, {"o": out, **final}, 1e-12)
        say("chunks: backward", backward(by_chunk[2], up, to, chunk_scan_adjoint), g, 1e-12)
        if torch and "cu_seqlens" not in x:
            say("autograd", autograd(torch, x, up, to), g, 1e-12)
    raise SystemExit(not all(good))
