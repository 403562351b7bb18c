"""The scan on a GPU through PyTorch: against lane cpu, repeated, captured, stepped. Skipped without one."""

import pytest

torch = pytest.importorskip("torch")
talea = pytest.importorskip("talea")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = ("adt", "dt", "trap")


def draw(batch, tokens, heads, groups, rank, cols, head_dim, dtype):
    g = torch.Generator(device="cuda").manual_seed(5)

    def normal(*shape, scale=1.0, of=dtype):
        return (torch.randn(shape, generator=g, device="cuda") * scale).to(of)

    wide, ranks = torch.float32, (rank,) if rank > 1 else ()
    dt = torch.nn.functional.softplus(normal(batch, heads, tokens, of=wide) - 3)
    t = {
        "q": normal(batch, tokens, *ranks, groups, cols, scale=cols**-0.25),
        "k": normal(batch, tokens, *ranks, groups, cols, scale=cols**-0.25),
        "v": normal(batch, tokens, heads, head_dim), "adt": -dt * 1.5, "dt": dt,
        "trap": normal(batch, heads, tokens, of=wide),
        "angles": normal(batch, tokens, 1, cols // 4, of=wide),
        "q_bias": normal(heads, *ranks, cols, scale=0.3, of=wide),
        "k_bias": normal(heads, *ranks, cols, scale=0.3, of=wide), "d": normal(heads, of=wide),
        "z": normal(batch, tokens, heads, head_dim),
    }  # fmt: skip
    if rank > 1:
        for name in ("mimo_v", "mimo_z", "mimo_out"):
            t[name] = 1 / rank + normal(heads, rank, head_dim, scale=0.3, of=wide)
    return t


def run(t, up):
    t = {n: x.detach().requires_grad_() for n, x in t.items()}
    made = talea.mamba3(**t, return_final=True, head_norm=True)
    state = made.final
    grads = torch.autograd.grad(
        (made.out, state.ssm), list(t.values()), (up, torch.ones_like(state.ssm))
    )
    return [x.detach() for x in (made.out, state.angle, state.ssm, state.k, state.v)] + [*grads]


@pytest.mark.parametrize("dtype, allowed", [("float32", 5e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("rank", [1, 4])
def test_rates_near_their_ends_keep_their_slope(rank, dtype, allowed):
    """1 - tanh^2 as a difference has no digit left there."""
    t = draw(2, 150, 6, 3, rank, 128, 64, getattr(torch, dtype))
    t["angles"] = t["angles"].sign() * 8 + t["angles"] / 8
    up = torch.randn_like(t["v"])

    def d_angles(t, up):
        t = {n: x.detach().requires_grad_() for n, x in t.items()}
        return torch.autograd.grad(talea.mamba3(**t), t["angles"], up)[0].cpu().double()

    ours, truth = d_angles(t, up), d_angles({n: x.cpu() for n, x in t.items()}, up.cpu())
    assert (ours - truth).norm() <= allowed * truth.norm()


SIZES = [(2, 150, 6, 3, 4, 128, 64), (2, 300, 4, 2, 1, 64, 64), (1, 40, 2, 1, 2, 256, 128)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "dtype, allowed", [("float32", 5e-6), ("bfloat16", 2e-2), ("float16", 1e-4)]
)
def test_a_device_is_lane_cpu(sizes, dtype, allowed):
    t = draw(*sizes, getattr(torch, dtype))
    up = torch.randn_like(t["v"])
    device, host = run(t, up), run({n: x.cpu() for n, x in t.items()}, up.cpu())
    for ours, truth in zip(device, host, strict=True):
        ours, truth = ours.cpu().double(), truth.double()
        assert (ours - truth).norm() <= allowed * truth.norm()


def test_the_same_bits_every_time_and_in_a_graph():
    t = draw(2, 200, 8, 2, 4, 64, 32, torch.bfloat16)
    up = torch.randn_like(t["v"])
    first = run(t, up)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(t, up), strict=True))
    fixed = {n: x.detach().clone().requires_grad_() for n, x in t.items()}

    def call(t):
        out = talea.mamba3(**t)
        return [out.detach(), *torch.autograd.grad(out, list(t.values()), up)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(fixed)
    with torch.no_grad():
        for x in fixed.values():
            x.mul_(0.9)
    graph.replay()
    eager = call({n: x.detach().clone().requires_grad_() for n, x in fixed.items()})
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


def test_steps_are_the_scan():
    t = draw(3, 12, 4, 2, 2, 64, 32, torch.float32)
    whole = talea.mamba3(**t, return_final=True)
    state = talea.Mamba3State.zeros(3, 4, 2, 64, 32, 16, device="cuda", dtype=torch.float32)
    for i in range(12):
        one = {n: x[:, i] for n, x in t.items() if n in ("q", "k", "v", "z", "angles")}
        one |= {n: t[n][:, :, i] for n in STEPS}
        one |= {n: x for n, x in t.items() if n not in one}
        out = talea.mamba3_step(state, **one)
        torch.testing.assert_close(out, whole.out[:, i], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.ssm, whole.final.ssm, rtol=1e-4, atol=1e-4)
