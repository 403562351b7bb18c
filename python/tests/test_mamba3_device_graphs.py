"""The scan on a GPU as training and serving loops run it: in CUDA graphs, on several streams, a thousand times,
far apart in memory, with more blocks than a grid has on its small axes. Skipped without a GPU."""

import pytest

torch = pytest.importorskip("torch")
talea = pytest.importorskip("talea")

from test_mamba3_device import STEPS, draw  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LANES = ("sm90", "cuda")
SIZES = {"MIMO": (2, 200, 8, 2, 4, 128, 64), "SISO": (2, 300, 8, 2, 1, 128, 64)}
PACKED = {"MIMO": (1, 320, 8, 2, 4, 128, 64), "SISO": (1, 320, 8, 2, 1, 128, 64)}
REPEATS = 1000


def takes(lane):
    if lane == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return lane


def leaves(t):
    return {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in t.items()}


def called(t, up, **more):
    """out, and every gradient."""
    out = talea.mamba3(**t, **more)
    floating = [x for x in t.values() if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, floating, up)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def captured(run):
    """A graph of run, which ran before on another stream, and what it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


def anew(t, seed):
    """Other numbers in the same tensors; a decay stays one."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for name, x in t.items():
            if name == "dt":
                x.uniform_(0.01, 0.2, generator=g)
            elif name == "adt":
                x.uniform_(-0.4, -0.01, generator=g)
            elif x.is_floating_point():
                x.normal_(0, 0.5, generator=g)


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("save", [False, True])
def test_forward_and_backward_replayed_with_other_numbers(lane, form, save):
    t = leaves(draw(*SIZES[form], torch.bfloat16))
    up = torch.randn_like(t["v"]).detach()
    run = lambda: called(t, up, lane=takes(lane), save_states=save)  # noqa: E731
    graph, made = captured(run)
    for seed in range(100):
        anew(t, seed)
        graph.replay()
        if seed % 10 == 0:
            replayed = [x.clone() for x in made]
            assert same(replayed, run()), seed


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("lane", LANES)
def test_packed_sequences_replayed_with_other_ends(lane, form):
    t = leaves(draw(*PACKED[form], torch.bfloat16))
    ends = [[0, 100, 100, 201, 320], [0, 1, 65, 66, 320], [5, 64, 128, 250, 300], [0, 0, 0, 0, 0]]
    t["cu_seqlens"] = torch.tensor(ends[0], dtype=torch.int32, device="cuda")
    up = torch.randn_like(t["v"]).detach()
    run = lambda: called(t, up, lane=takes(lane))  # noqa: E731
    graph, made = captured(run)
    for seed, one in enumerate(ends * 5):
        anew(t, seed)
        t["cu_seqlens"].copy_(torch.tensor(one, dtype=torch.int32))
        graph.replay()
        replayed = [x.clone() for x in made]
        assert same(replayed, run()), one


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("lane", LANES)
def test_steps_replayed_with_other_slots(lane, rank):
    entries, cache, heads = 5, 9, 8
    t = draw(entries, 1, heads, 2, rank, 128, 64, torch.bfloat16)
    one = {n: x[:, 0].contiguous() for n, x in t.items() if n in ("q", "k", "v", "z", "angles")}
    one |= {n: t[n][:, :, 0].contiguous() for n in STEPS}
    one |= {n: x for n, x in t.items() if n not in one}
    slots = torch.arange(entries, dtype=torch.int32, device="cuda")
    state = talea.Mamba3State.zeros(cache, heads, rank, 128, 64, 32, device="cuda")
    eager = talea.Mamba3State.zeros(cache, heads, rank, 128, 64, 32, device="cuda")
    names = ("angle", "ssm", "k", "v")
    graph, made = captured(lambda: talea.mamba3_step(state, **one, slots=slots, lane=takes(lane)))
    for name in names:
        getattr(state, name).zero_()
    for seed in range(100):
        anew(one, seed)
        kept = torch.randperm(cache, generator=torch.Generator().manual_seed(seed))[:entries]
        kept[seed % entries] = -1
        slots.copy_(kept.int())
        graph.replay()
        out = talea.mamba3_step(eager, **one, slots=slots, lane=lane)
        assert torch.equal(made, out), seed
    assert same([getattr(state, n) for n in names], [getattr(eager, n) for n in names])


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("lane", LANES)
def test_the_same_bits_a_thousand_times_beside_a_busy_stream(lane, form):
    t = leaves(draw(*SIZES[form], torch.bfloat16))
    up = torch.randn_like(t["v"]).detach()
    right = called(t, up, lane=takes(lane))
    other = leaves(draw(1, 900, 16, 1, 4, 128, 64, torch.bfloat16))
    other_up, busy = torch.randn_like(other["v"]).detach(), torch.cuda.Stream()
    busy.wait_stream(torch.cuda.current_stream())
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(REPEATS):
        if i % 4 == 0:
            with torch.cuda.stream(busy):
                called(other, other_up, lane=lane)
        for a, b in zip(called(t, up, lane=lane), right, strict=True):
            differ += (a != b).any() | a.isnan().any()
    busy.synchronize()
    assert int(differ) == 0


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("lane", LANES)
def test_streams_side_by_side(lane, form):
    """Each stream has a problem of its own, all of them queued before any is waited for."""
    problems = [leaves(draw(*SIZES[form], torch.bfloat16)) for _ in range(4)]
    for seed, t in enumerate(problems):
        anew(t, seed)
    up = torch.randn_like(problems[0]["v"]).detach()
    alone = [called(t, up, lane=takes(lane)) for t in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    made = [None] * len(problems)
    for _ in range(20):
        for i, (t, stream) in enumerate(zip(problems, streams, strict=True)):
            with torch.cuda.stream(stream):
                made[i] = called(t, up, lane=lane)
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(made, alone, strict=True))


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("lane", LANES)
def test_tokens_further_apart_than_32_bits_can_say(lane, rank):
    """Tokens of v and z lie 2^26 elements apart, the last of them 2^32 and more behind the first."""
    tokens, heads, apart = 66, 2, 1 << 26
    bytes_needed = 2 * (tokens * apart + heads * 64)
    if torch.cuda.mem_get_info()[0] < bytes_needed + (1 << 30):
        pytest.skip(f"needs {bytes_needed >> 20} MiB of free memory")
    assert (tokens - 1) * apart > 1 << 32
    t = draw(1, tokens, heads, 1, rank, 128, 64, torch.bfloat16)
    up = torch.randn_like(t["v"])
    near = called(leaves(t), up, lane=takes(lane))
    room = torch.empty(tokens * apart + heads * 64, dtype=torch.bfloat16, device="cuda")
    for name, at in (("v", 0), ("z", heads * 64)):
        far = room.as_strided((1, tokens, heads, 64), (0, apart, 64, 1), at)
        t[name] = far.copy_(t[name])
    far = {n: x.detach().requires_grad_() for n, x in t.items()}
    assert far["v"].stride(1) == apart
    assert same(near, called(far, up, lane=lane))


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("lane", LANES)
def test_more_sequences_and_heads_than_a_grid_axis_has(lane, form):
    """65600 sequences, then 65600 heads, of three tokens: the last ones are what they are alone."""
    rank, many = SIZES[form][4], 65600
    for sizes in ((many, 3, 1, 1, rank, 128, 64), (1, 3, many, 1, rank, 128, 64)):
        t = draw(*sizes, torch.bfloat16)
        axis = 0 if sizes[0] == many else 2
        up = torch.randn_like(t["v"])
        room = {"workspace_limit": 32 << 30}  # states of all heads of a sequence go side by side
        whole = called(leaves(t), up, lane=takes(lane), **room)
        of_token = {"v": axis, "z": axis, "adt": axis // 2, "dt": axis // 2, "trap": axis // 2}
        if axis == 0:
            of_token |= {"q": 0, "k": 0, "angles": 0}
        else:
            of_token |= {n: 0 for n in t if n.endswith("_bias") or n == "d" or n.startswith("mimo")}
        few = {n: x.narrow(of_token[n], many - 2, 2) if n in of_token else x for n, x in t.items()}
        alone = called(leaves(few), up.narrow(axis, many - 2, 2), lane=lane)
        names = ["out", *t]
        for name, a, b in zip(names, whole, alone, strict=True):
            at = axis if name == "out" else of_token.get(name)
            if at is not None:
                assert torch.equal(a.narrow(at, many - 2, 2), b), name


def test_more_entries_of_a_step_than_a_grid_axis_has():
    many = 65600
    t = draw(many, 1, 1, 1, 1, 64, 64, torch.bfloat16)
    one = {n: x[:, 0] for n, x in t.items() if n in ("q", "k", "v", "z", "angles")}
    one |= {n: t[n][:, :, 0] for n in STEPS}
    one |= {n: x for n, x in t.items() if n not in one}
    state = talea.Mamba3State.zeros(many, 1, 1, 64, 64, 16, device="cuda")
    out = talea.mamba3_step(state, **one)
    entry = ("q", "k", "v", "z", "angles", *STEPS)
    last = {n: x[-2:].contiguous() if n in entry else x for n, x in one.items()}
    alone = talea.Mamba3State.zeros(2, 1, 1, 64, 64, 16, device="cuda")
    assert torch.equal(out[-2:], talea.mamba3_step(alone, **last))
    assert torch.equal(state.ssm[-2:], alone.ssm)
