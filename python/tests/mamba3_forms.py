"""What the Mamba-3 tests compare with: the scan as a quadratic form, and drawn problems.

Shares no code with the library: no state, no chunk, no loop over tokens; gradients by autograd.
"""

import math

import torch

INPUTS = (
    "q", "k", "v", "z", "adt", "dt", "trap", "angles", "q_bias", "k_bias", "d", "mimo_v", "mimo_z",
    "mimo_out", "norm_weight",
)  # fmt: skip
STATES = ("angle", "ssm", "k", "v")
INITIAL = tuple("initial_" + s for s in STATES)


def rotate(x, theta, pairs):
    """x [..., N] by theta [..., A]: columns in no pair pass."""
    a, n = theta.shape[-1], x.shape[-1]
    first = torch.arange(0, 2 * a, 2) if pairs == "interleaved" else torch.arange(a)
    second = first + 1 if pairs == "interleaved" else first + n // 2
    u, w, out = x[..., first], x[..., second], x.clone()
    out[..., first] = u * theta.cos() - w * theta.sin()
    out[..., second] = u * theta.sin() + w * theta.cos()
    return out


def _sequence(t, b, lo, hi, n, pairs, head_norm, eps):
    """One sequence: out [T, R, H, P] before the sum over R, and its four final states."""
    heads, p = t["v"].shape[2:]
    q5 = t["q"] if t["q"].dim() == 5 else t["q"].unsqueeze(2)
    k5 = t["k"] if t["k"].dim() == 5 else t["k"].unsqueeze(2)
    rank, groups, cols = q5.shape[2:]
    like = {"dtype": t["v"].dtype}
    v1, z1 = t["v"][b, lo:hi], None if t.get("z") is None else t["z"][b, lo:hi]
    adt, dt, trap = (t[x][b, :, lo:hi] for x in ("adt", "dt", "trap"))

    def parameter(name, neutral, *shape):
        x = t.get(name)
        return torch.full(shape, neutral, **like) if x is None else x.reshape(shape)

    def initial(name, *shape):
        x = t.get("initial_" + name)
        return torch.zeros(shape, **like) if x is None else x[n].reshape(shape)

    angles = t.get("angles")
    if angles is None:
        a = 0 if t.get("initial_angle") is None else t["initial_angle"].shape[-1]
        rate = torch.zeros(hi - lo, heads, a, **like)
    else:
        rate = angles[b, lo:hi].tanh().expand(hi - lo, heads, angles.shape[-1])
    theta0 = initial("angle", heads, rate.shape[-1])
    theta = theta0 + (math.pi * rate * dt.T[..., None]).cumsum(0)
    of = torch.arange(heads) // (heads // max(groups, 1))
    rows = {}
    for name, x in (("q", q5), ("k", k5)):
        bias = parameter(name + "_bias", 0.0, heads, rank, cols)
        x = x[b, lo:hi][:, :, of].transpose(1, 2) + bias
        rows[name] = rotate(x, theta[:, :, None].expand(-1, -1, rank, -1), pairs)
    mv = parameter("mimo_v", 1.0, heads, rank, p)
    v = v1[:, :, None] * mv
    lam = trap.sigmoid()
    gamma, bt = lam * dt, (1 - lam) * dt
    h = initial("ssm", heads, p, cols)
    if hi > lo:
        kin, vin = initial("k", rank, heads, cols), initial("v", heads, p)
        h = h + torch.einsum("h,hp,hrp,rhn->hpn", bt[:, 0], vin, mv, kin)
    length = adt.cumsum(1)
    later = torch.nn.functional.pad(bt[:, 1:], (0, 1)) if hi > lo else bt
    ones = torch.ones(hi - lo, hi - lo, **like)
    strict = ones.tril(-1).bool()
    gap = (length[:, :, None] - length[:, None]).masked_fill(~(strict | strict.T.logical_not()), 0)
    decay = torch.where(ones.tril().bool(), gap, gap.new_tensor(-math.inf)).exp()
    weight = decay * (gamma[:, None] * ones.tril() + later[:, None] * ones.tril(-1))
    y = torch.einsum("thrn,jhsn,htj,jhsp->thrp", rows["q"], rows["k"], weight, v)
    y = y + torch.einsum("thrn,hpn,ht->thrp", rows["q"], h, length.exp())
    y = y + parameter("d", 0.0, heads)[:, None, None] * v
    if head_norm:
        y = y * ((y * y).mean(-1, True) + eps).rsqrt()
        y = y * parameter("norm_weight", 1.0, heads, p)[:, None]
    if z1 is not None:
        u = z1[:, :, None] * parameter("mimo_z", 1.0, heads, rank, p)
        y = y * u * u.sigmoid()
    y = y * parameter("mimo_out", 1.0, heads, rank, p)
    if hi == lo:
        final = (theta0 % (2 * math.pi), h, initial("k", rank, heads, cols), initial("v", heads, p))
        return y.transpose(1, 2), final
    ssm = h * length[:, -1].exp()[:, None, None]
    ssm = ssm + torch.einsum("jhrp,jhrn,hj->hpn", v, rows["k"], weight[:, -1])
    turned = theta[-1] % (2 * math.pi)
    return y.transpose(1, 2), (turned, ssm, rows["k"][-1].transpose(0, 1), v1[-1])


def quadratic(t, *, rotary_pairs=None, head_norm=False, norm_eps=1e-5):
    """out and the final states (a dict by name), differentiable, in the dtype of the inputs."""
    pairs = rotary_pairs or ("halves" if t["q"].dim() == 5 else "interleaved")
    batch, tokens, heads, p = t["v"].shape
    rank = t["q"].shape[2] if t["q"].dim() == 5 else 1
    cu = t.get("cu_seqlens")
    where = (
        [(b, 0, tokens) for b in range(batch)]
        if cu is None
        else [(0, lo, hi) for lo, hi in zip(cu.tolist(), cu.tolist()[1:], strict=False)]
    )
    parts, finals = [], []
    for n, (b, lo, hi) in enumerate(where):
        o, final = _sequence(t, b, lo, hi, n, pairs, head_norm, norm_eps)
        parts.append(o)
        finals.append(final)
    if cu is None:
        o = torch.stack(parts) if parts else t["v"].new_zeros(0, tokens, rank, heads, p)
    else:
        edges = cu.tolist()
        front = t["v"].new_zeros(edges[0], rank, heads, p)
        back = t["v"].new_zeros(tokens - edges[-1], rank, heads, p)
        o = torch.cat([front, *parts, back])[None]
    reduce = rank == 1 or t.get("mimo_out") is not None
    final = {}
    for i, s in enumerate(STATES):
        if finals:
            final[s] = torch.stack([f[i] for f in finals])
    if finals and t["q"].dim() == 4:
        final["k"] = final["k"].squeeze(1)
    return (o.sum(2) if reduce else o), final


def draw(batch=2, tokens=7, heads=4, groups=2, rank=2, cols=8, head_dim=3, pairs=3, *, n=None,
         without=(), dtype=torch.float64, axis=True, shared=False, seed=0, grad=True):  # fmt: skip
    """A problem by the flat names; `without` leaves tensors out."""
    g = torch.Generator().manual_seed(seed)
    n = batch if n is None else n
    shapes = {
        "q": (batch, tokens, rank, groups, cols), "k": (batch, tokens, rank, groups, cols),
        "v": (batch, tokens, heads, head_dim), "z": (batch, tokens, heads, head_dim),
        "adt": (batch, heads, tokens), "dt": (batch, heads, tokens), "trap": (batch, heads, tokens),
        "angles": (batch, tokens, 1 if shared else heads, pairs),
        "q_bias": (heads, rank, cols), "k_bias": (heads, rank, cols), "d": (heads,),
        "mimo_v": (heads, rank, head_dim), "mimo_z": (heads, rank, head_dim),
        "mimo_out": (heads, rank, head_dim), "norm_weight": (heads, head_dim),
        "initial_angle": (n, heads, pairs), "initial_ssm": (n, heads, head_dim, cols),
        "initial_k": (n, rank, heads, cols), "initial_v": (n, heads, head_dim),
    }  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    t = {}
    for name, shape in shapes.items():
        if name in without:
            continue
        if not axis and name in ("q", "k", "q_bias", "k_bias", "initial_k"):
            at = 2 if name in ("q", "k") else 1
            shape = shape[:at] + shape[at + 1 :]
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        if name == "adt":
            x = -x.abs() / 2
        if name == "dt":
            x = x.abs() / 2
        kept = wide if name in ("adt", "dt") or name.startswith("initial_") else dtype
        t[name] = x.to(kept).requires_grad_(grad)
    return t


def doubled(t):
    """The same values in fp64, as leaves of their own."""
    return {
        n: x if not x.is_floating_point() else x.detach().double().requires_grad_()
        for n, x in t.items()
    }


def relative_l2(ours, truth):
    """NaN fails: the caller compares with <=."""
    if ours.shape != truth.shape:
        raise AssertionError(f"shape {list(ours.shape)} beside {list(truth.shape)}")
    gap = (ours.detach().double() - truth.detach().double()).norm()
    size = truth.detach().double().norm()
    return float(gap / size) if size > 0 else float(gap)


def scan(t, **options):
    """talea.mamba3 on a drawn problem, by its flat names."""
    import talea

    more = {n: x for n, x in t.items() if n in INPUTS[7:] or n in ("z", "cu_seqlens")}
    if not options.get("head_norm"):
        more.pop("norm_weight", None)
    states = talea.Mamba3State(*(t.get(n) for n in INITIAL))
    given = any(t.get(n) is not None for n in INITIAL)
    return talea.mamba3(
        t["q"], t["k"], t["v"], t["adt"], t["dt"], t["trap"], initial=states if given else None,
        **more, **options,
    )  # fmt: skip


def upstreams(out, final, seed=1):
    """A gradient of out and of each final state."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in (out, *final)
    ]


def leaves(t):
    return {n: x for n, x in t.items() if x.is_floating_point() and x.requires_grad}


def gradients_of(t, out, final, ups):
    """By name, of sum(out * up) + sum(final * up); a tensor that enters nothing has zeros."""
    found = leaves(t)
    pairs = [(x, u) for x, u in zip((out, *final), ups, strict=True) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for x, _ in pairs], list(found.values()), [u for _, u in pairs], allow_unused=True,
        retain_graph=True,
    )  # fmt: skip
    return {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(found.items(), grads, strict=True)
    }
