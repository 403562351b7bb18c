"""Packed sequences of the scan on a GPU: each is bit for bit what it is alone, whatever lies beside it, under any
limit of the workspace. Skipped without a GPU."""

import re

import pytest

torch = pytest.importorskip("torch")
talea = pytest.importorskip("talea")

from test_mamba3_device import STEPS, draw  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS = 700
# Lengths: one token, none, one that is nearly all, primes, whole chunks; where the first begins.
MIXES = {
    "mixed": (0, [1, 0, 0, 64, 65, 63, 128, 0, 1, 16, 17, 15, 97, 101, 0]),
    "one of all": (0, [TOKENS]),
    "a giant": (3, [1, 2, 600, 1, 0, 31]),
    "a giant last": (0, [0, 5, 640]),
    "many of one token": (7, [1] * 300),
    "many": (0, [3 + i % 11 for i in range(80)]),
    "none": (10, [0, 0, 0]),
    "primes": (1, [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67]),
}
FORMS = {"MIMO": (4, 4, 4), "rank 2": (4, 4, 2), "SISO": (4, 4, 1), "SISO, many heads": (70, 70, 1)}
OF_TOKENS = {n: 1 for n in ("q", "k", "v", "angles", "z")} | {n: 2 for n in STEPS}


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def ends_of(mix):
    first, lengths = MIXES[mix]
    ends = [first]
    for n in lengths:
        ends.append(ends[-1] + n)
    assert ends[-1] <= TOKENS
    return ends


def passes(t, up, **more):
    """out and the gradient of each tensor, by name."""
    t = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in t.items()}
    out = talea.mamba3(**t, lane="sm90", **more)
    named = [n for n, x in t.items() if x.requires_grad]
    grads = torch.autograd.grad(out, [t[n] for n in named], up)
    return {"out": out.detach()} | dict(zip(named, grads, strict=True))


def cut(x, axis, begin, end):
    return x.narrow(axis, begin, end - begin).contiguous()


def packed(form, mix):
    t = draw(1, TOKENS, FORMS[form][0], FORMS[form][1], FORMS[form][2], 128, 64, torch.bfloat16)
    up = torch.randn(t["v"].shape, generator=torch.Generator(device="cuda").manual_seed(3),
                     device="cuda").to(torch.bfloat16)  # fmt: skip
    ends = ends_of(mix)
    for name, axis in OF_TOKENS.items():  # padding is never read
        t[name].narrow(axis, 0, ends[0]).fill_(float("nan"))
        t[name].narrow(axis, ends[-1], TOKENS - ends[-1]).fill_(float("nan"))
    return t, up, ends, torch.tensor(ends, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("form", FORMS)
def test_each_sequence_is_what_it_is_alone(form, mix):
    on_hopper()
    t, up, ends, cu = packed(form, mix)
    all_ = passes(t | {"cu_seqlens": cu}, up)
    axes = OF_TOKENS | {"out": 1}
    sums = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in all_.items() if n not in axes}
    for begin, end in zip(ends, ends[1:], strict=False):
        if begin == end:
            continue
        one = {n: cut(x, axes[n], begin, end) if n in axes else x for n, x in t.items()}
        alone = passes(one, cut(up, 1, begin, end))
        for name, x in alone.items():
            if name in axes:
                assert torch.equal(cut(all_[name], axes[name], begin, end), x), (name, begin, end)
            else:
                sums[name] += x.double()
    for name, x in sums.items():
        assert (all_[name].double() - x).norm() <= 1e-5 * x.norm() + 1e-30, name
    for name, axis in axes.items():
        assert not all_[name].narrow(axis, 0, ends[0]).any(), name
        assert not all_[name].narrow(axis, ends[-1], TOKENS - ends[-1]).any(), name


SHARED = {"MIMO": (32, 1, 4), "14 heads a group": (28, 2, 4), "rank 2": (16, 1, 2),
          "SISO": (64, 1, 1)}  # fmt: skip


@pytest.mark.parametrize("form", SHARED)
def test_heads_of_a_group_are_summed_alike_in_any_batch(form):
    """d_q and d_k, and d_angles that heads share: in an order of heads, groups and rank alone."""
    on_hopper()
    heads, groups, rank = SHARED[form]
    t = draw(6, 300, heads, groups, rank, 128, 64, torch.bfloat16)
    up = torch.randn(t["v"].shape, generator=torch.Generator(device="cuda").manual_seed(3),
                     device="cuda").to(torch.bfloat16)  # fmt: skip
    axes = {n: 0 for n in OF_TOKENS}
    many = passes(t, up)
    one = {n: x[2:3].contiguous() if n in axes else x for n, x in t.items()}
    alone = passes(one, up[2:3].contiguous())
    ends = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
    in_pack = passes(one | {"cu_seqlens": ends}, up[2:3].contiguous())
    for name in ("out", *axes):
        assert torch.equal(many[name][2:3], alone[name]), name
        assert torch.equal(in_pack[name], alone[name]), name


def test_a_pack_of_thousands_of_short_sequences():
    """A warp has the turns of each; those of one that is longer are a block's."""
    on_hopper()
    lengths = [3] * 2000 + [3000] + [3] * 2096
    tokens = sum(lengths)
    t = draw(1, tokens, 2, 1, 4, 128, 64, torch.bfloat16)
    up = torch.ones_like(t["v"])
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    all_ = passes(t | {"cu_seqlens": ends}, up)
    axes = OF_TOKENS | {"out": 1}
    for begin, end in ((0, 3), (6000, 9000), (tokens - 3, tokens)):
        one = {n: cut(x, axes[n], begin, end) if n in axes else x for n, x in t.items()}
        alone = passes(one, cut(up, 1, begin, end))
        for name, axis in axes.items():
            assert torch.equal(cut(all_[name], axis, begin, end), alone[name]), (name, begin)


@pytest.mark.parametrize("mix", ["mixed", "a giant", "many"])
@pytest.mark.parametrize("form", FORMS)
def test_no_limit_and_no_saved_state_changes_a_bit(form, mix):
    on_hopper()
    t, up, _, cu = packed(form, mix)
    t["cu_seqlens"] = cu
    right = passes(t, up)
    for limit in (1 << 30, 40 << 20, 24 << 20, 16 << 20, 12 << 20):
        for save in (False, True):
            try:
                made = passes(t, up, workspace_limit=limit, save_states=save)
            except talea.UsageError as error:
                assert "needs at least" in str(error) and limit < 64 << 20
                continue
            for name, x in right.items():
                assert torch.equal(made[name], x), (name, limit, save)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ends", [None, [0, 4000], [0, 1, 30, 30, 2500, 2517, 3900]])
@pytest.mark.parametrize("rank", [4, 1])
def test_limits_down_to_the_least_change_no_bit(rank, ends, save):
    """The least limits have rounds in groups, or the turns of one segment at a time."""
    on_hopper()
    t = draw(1, 4000, 8, 2, rank, 128, 64, torch.bfloat16)
    up = torch.randn_like(t["v"])
    if ends:
        t["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device="cuda")
    right = passes(t, up, workspace_limit=1 << 30, save_states=save)
    with pytest.raises(talea.UsageError) as refused:
        passes(t, up, workspace_limit=1, save_states=save)
    least, again = int(re.search(r"at least (\d+) bytes", str(refused.value))[1]), 0
    for step in range(12):  # of forward, then of backward
        try:
            made = passes(
                t, up, workspace_limit=least + (least * step * step) // 24, save_states=save
            )
        except talea.UsageError as error:
            least, again = int(re.search(r"at least (\d+) bytes", str(error))[1]), again + 1
            continue
        for name, x in right.items():
            assert torch.equal(made[name], x), (name, least, step)
    assert again <= 11


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("form", FORMS)
def test_states_are_handed_to_each_and_on(form, mix):
    on_hopper()
    t, _, ends, cu = packed(form, mix)
    heads, _, rank = FORMS[form]
    n = len(ends) - 1
    g = torch.Generator(device="cuda").manual_seed(9)

    def normal(*shape):
        return torch.randn(shape, generator=g, device="cuda")

    state = talea.Mamba3State(normal(n, heads, 32), normal(n, heads, 64, 128),
                              normal(n, rank, heads, 128), normal(n, heads, 64))  # fmt: skip
    names = ("angle", "ssm", "k", "v")
    with torch.no_grad():
        all_ = talea.mamba3(**t, cu_seqlens=cu, initial=state, return_final=True, lane="sm90")
        few = talea.mamba3(**t, cu_seqlens=cu, initial=state, return_final=True, lane="sm90",
                           workspace_limit=8 << 20)  # fmt: skip
        assert torch.equal(all_.out, few.out)
        for name in names:
            assert torch.equal(getattr(all_.final, name), getattr(few.final, name)), name
        for row, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if row % 7 and n > 20:
                continue
            one = {
                m: cut(x, OF_TOKENS[m], begin, end) if m in OF_TOKENS else x for m, x in t.items()
            }
            own = talea.Mamba3State(*(getattr(state, m)[row : row + 1] for m in names))
            alone = talea.mamba3(**one, initial=own, return_final=True, lane="sm90")
            assert torch.equal(all_.out[:, begin:end], alone.out), row
            for name in names:
                got = getattr(all_.final, name)[row : row + 1]
                assert torch.equal(got, getattr(alone.final, name)), (row, name)
