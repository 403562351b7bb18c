"""Described calls that are kept: the same bits, and never where anything else is different."""

import gc
import threading
import weakref

import mamba3_forms as scans
import pytest
import talea
import torch
from conftest import DEVICES
from kept_forms import (
    CALLS,
    afresh,
    attention,
    drawn,
    forget,
    known,
    moved,
    plain_scan,
    same,
    scan,
    select,
    step,
    strided,
    variations,
    with_gradients,
)
from talea import _fast, _kept

pytestmark = pytest.mark.skipif(
    _fast.tensor_guard(torch.empty(1)) is None, reason="this PyTorch has no such guard"
)


@pytest.fixture(autouse=True)
def _nothing_known():
    forget()


@pytest.fixture
def found(monkeypatch):
    """Of each pass, by its place in a row: whether it was found."""
    passes, again = [], _kept.again

    def counting(key, tensors):
        made = again(key, tensors)
        passes.append(made is not None)
        return made

    monkeypatch.setattr(_kept, "again", counting)
    return passes


PASSES = {scan: 2, attention: 2, select: 1, step: 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_the_third_call_is_found_and_gives_the_same_bits(call, device, found):
    t = drawn(call, device)
    want = known(call, t)
    assert not any(found)
    found.clear()
    for _ in range(3):
        assert same(call(moved(t)), want)
    assert found == [True] * PASSES[call] * 3
    found.clear()
    for n in ("v", "q", "index_k"):  # other numbers
        if n in t:
            other = {**t, n: (t[n].detach() * 2).requires_grad_(t[n].requires_grad)}
            got = call(other)
            assert all(found) and same(got, afresh(call, other))
            break


def wrong(call) -> int:
    """Of how many variations the second call gives something else than by the long way."""
    found = 0
    for (before, given), (t, options) in variations(call):
        forget()
        want = call(t, **options)
        forget()
        known(call, before, **given)
        try:
            found += not same(call(t, **options), want)
        except (RuntimeError, TypeError, KeyError, IndexError):
            found += 1
    return found


@pytest.mark.parametrize("call", CALLS)
def test_what_differs_is_told_apart(call):
    assert wrong(call) == 0


def blind_to(field):
    """A guard that overlooks one thing."""
    looks = {
        "dtype": lambda t: t.dtype, "shape": lambda t: tuple(t.shape), "stride": lambda t: t.stride(),
        "negation": lambda t: t.is_neg(), "requires_grad": lambda t: t.requires_grad,
    }  # fmt: skip

    def seen(tensors):
        return [[look(t) for n, look in looks.items() if n != field] for t in tensors]

    def guard(*tensors):
        want = seen(tensors)
        return lambda *others: seen(others) == want

    return guard


@pytest.mark.parametrize("field", (None, "dtype", "shape", "stride", "negation"))
@pytest.mark.parametrize("call", CALLS)
def test_a_guard_that_overlooks_something_is_noticed(call, field, monkeypatch):
    monkeypatch.setattr(_fast, "tensor_guard", blind_to(field))
    told = call is step and field == "shape"  # by the shape of q, which decides all the others
    assert bool(wrong(call)) == (field is not None and not told)


@pytest.mark.parametrize(
    ("call", "field"),
    [(scan, 1), (scan, 2), (scan, 3), (attention, 1), (attention, 2), (select, 1), (step, 1), (step, 3)],
)  # fmt: skip
def test_a_key_without_a_field_is_noticed(call, field, monkeypatch):
    """Field 1: the settings; 2: the gradients asked for; 3: the names of the tensors."""
    monkeypatch.setattr(_fast, "tensor_guard", blind_to("requires_grad"))
    again, keep = _kept.again, _kept.keep

    def less(key):
        return key[:field] + key[field + 1 :]

    monkeypatch.setattr(_kept, "again", lambda key, tensors: again(less(key), tensors))
    monkeypatch.setattr(_kept, "keep", lambda key, *rest: keep(less(key), *rest))
    assert wrong(call)


@pytest.mark.parametrize("call", CALLS)
def test_modes(call, found):
    t = drawn(call)
    want = known(call, t)
    with torch.no_grad():
        for _ in range(2):
            assert same(call(t)[:1], want[:1])
    with torch.inference_mode():
        inside = [call(moved(t))[0] for _ in range(3)]
        assert all(x.is_inference() and torch.equal(x, want[0]) for x in inside)
    assert not call(t)[0].is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = call(t)
        assert same(call(t), half) and same(afresh(call, t), half)
    assert same(call(t), want)
    found.clear()
    with torch.autocast("cpu", dtype=torch.float16):
        assert same(call(t), afresh(call, t))
    assert same(call(t), want)
    if call is step:
        return
    first = next(iter(t))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t[first].detach(), torch.ones_like(t[first]))
        with pytest.raises(talea.UsageError, match="forward-mode"):
            call({**t, first: dual})
    with pytest.raises(talea.UsageError, match=r"torch\.func"):
        torch.func.grad(lambda x: call({**t, first: x})[0].sum())(t[first].detach())


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), given=None):
        self.seen.append(str(function))
        return function(*arguments, **(given or {}))


def test_a_mode_that_looks_at_operators_sees_the_selection(found):
    t = drawn(select)
    want = known(select, t)
    with Watching() as mode:
        assert same(select(t), want)
    assert "talea.sparse_select.default" in mode.seen
    assert same(select(t), want) and found[-1]


class Marked(torch.Tensor):
    """A class without a dispatch of its own."""


@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_are_not_plain_go_the_long_way(call, found):
    t = drawn(call)
    want = known(call, t)
    found.clear()
    first = next(iter(t))
    for _ in range(2):
        marked = {
            **t,
            first: t[first].detach().as_subclass(Marked).requires_grad_(t[first].requires_grad),
        }
        assert torch.equal(torch.Tensor(call(marked)[0]), want[0])  # fmt: skip
    assert not any(found)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {n: mode.from_tensor(x.detach()) for n, x in t.items()}
        try:
            assert isinstance(call(fake)[0], torch._subclasses.FakeTensor)
        except talea.DataError as error:
            assert "without memory" in str(error)
    meta = {n: x.detach().to("meta") for n, x in t.items()}
    if call is select:  # an operator of torch's, which knows the shapes
        assert call(meta)[0].is_meta
    else:
        with pytest.raises(talea.DataError, match="meta"):
            call(meta)
    assert not any(found)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises((talea.DataError, RuntimeError)):
        call({**t, first: nested})
    with pytest.raises((talea.DataError, RuntimeError)):
        call({**t, first: t[first].detach().to_sparse()})
    assert same(call(t), want)


@pytest.mark.parametrize("call", (scan, attention))
def test_saved_tensors_that_come_back_otherwise(call):
    """Hooks may hand backward other tensors than forward saved: of other strides, say."""
    t = drawn(call)
    want = known(call, t)
    pack = lambda x: x.detach().clone()  # noqa: E731
    unpack = lambda x: strided(x) if x.dim() > 1 and x.is_floating_point() else x  # noqa: E731
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            got = call(t)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))

    def again(x):
        u = {**t, next(iter(t)): x}
        return scans.scan(u) if call is scan else talea.sparse_attention(**u, value_dim=16)

    first = t[next(iter(t))]
    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(again, first, use_reentrant=False)
        assert same(with_gradients(t, out), want)
    with pytest.raises(RuntimeError, match="double backward"):
        (g,) = torch.autograd.grad(again(first).sum(), first, create_graph=True)
        g.sum().backward()


@pytest.mark.parametrize("call", CALLS)
def test_threads_have_calls_of_their_own(call):
    t = drawn(call)
    want, bad = known(call, t), []

    def work():
        for _ in range(40):
            u = moved(t)
            bad.extend(() if same(call(u), want) else (u,))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not bad


def test_backward_in_another_thread():
    t = drawn(scan)
    want = scan(t)[1:]
    outs, got = [scans.scan(t) for _ in range(20)], []
    leaves = [x for x in t.values() if x.requires_grad]

    def work(mine):
        for out in mine:
            got.append(torch.autograd.grad(out, leaves, torch.ones_like(out).cos()))

    threads = [threading.Thread(target=work, args=(outs[i::2],)) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(got) == 20 and all(same(g, want) for g in got)


def refusal(call, t, **options):
    with pytest.raises(talea.Error) as error:
        call(t, **options)
    return type(error.value), str(error.value)


def test_refusals_are_those_of_the_long_way(found):
    packed = {n: x.detach() for n, x in plain_scan(batch=1, n=2, dtype=torch.float32).items()}
    packed["cu_seqlens"] = torch.tensor([0, 2, 5], dtype=torch.int32)
    a = {n: x.detach() for n, x in drawn(attention).items()}
    gone = packed["q"].clone()
    gone.untyped_storage().resize_(0)
    turned = torch.tensor([0, 9, 5], dtype=torch.int32)
    far, checked = torch.full_like(a["indices"], 99), {"index_check": "checked"}
    for call, t, options, bad in (
        (scan, packed, {}, {"cu_seqlens": turned}),
        (scan, packed, {}, {"q": gone}),
        (attention, a, checked, {"indices": far}),
        (attention, a, {}, {"kv": a["q"][:, :0]}),
    ):
        want = known(call, t, **options)
        found.clear()
        said = refusal(call, {**t, **bad}, **options)
        assert not any(found)
        assert said == afresh(refusal, call, {**t, **bad}, **options)
        assert same(call(t, **options), want)


@pytest.mark.parametrize("call", CALLS)
def test_a_plan_that_needs_more_is_asked_for_anew(call, found):
    """As where the threads or the addresses change what a plan takes."""
    t = drawn(call)
    want = known(call, t)
    for entries in _kept._calls.by_place.values():
        for kept in entries:
            kept.args.workspace_bytes = 0
    planned = any(k.workspace.args[0][0] for e in _kept._calls.by_place.values() for k in e)
    found.clear()
    assert same(call(t), want)
    assert not planned or not all(found)
    found.clear()
    assert same(call(t), want) and all(found)


def test_another_number_of_threads_is_planned_anew(found):
    """A limit that backward cannot keep is said by forward: of threads, too."""
    threads, t = torch.get_num_threads(), drawn(attention)
    try:
        torch.set_num_threads(1)
        known(attention, t)
        found.clear()
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            attention(t)
    finally:
        torch.set_num_threads(threads)
    assert found == [True, True, False, False, True, True]


def test_arguments_of_another_kind_are_named_still():
    t, a = drawn(scan), drawn(attention)
    for _ in range(2):
        scan(t, chunk=4, workspace_limit=1 << 28)
        attention(a, scale=1)
    with pytest.raises(talea.UsageError, match="chunk"):
        scan(t, chunk=4.0)
    with pytest.raises(talea.UsageError, match="chunk"):
        scan(t, chunk=[4])
    with pytest.raises(talea.UsageError, match="head_norm"):
        scan(t, head_norm="no")
    with pytest.raises(talea.UsageError, match="value_dim"):
        attention(a, value_dim=16.0)
    assert same(attention(a, scale=1.0), attention(a, scale=1))


def test_a_found_call_has_a_receipt_of_its_own(found):
    t = {n: x.detach() for n, x in drawn(scan).items()}
    _, first, second = (scans.scan(t, return_final=True) for _ in range(3))
    assert found == [False, False, True]
    assert first._receipt is not second._receipt
    assert second.receipt()["lane"] == first.receipt()["lane"]
    assert all(torch.equal(getattr(first.final, n), getattr(second.final, n)) for n in scans.STATES)
    a = {n: x.detach() for n, x in drawn(attention).items()}
    many = [talea.sparse_attention(**a, value_dim=16, outputs=("lse",)) for _ in range(3)]
    assert found[3:] == [False, False, True] and torch.equal(many[0].lse, many[2].lse)
    assert many[1]._receipt is not many[2]._receipt and many[2].receipt()["lane"]
    counted = [
        talea.sparse_attention(**a, value_dim=16, outputs=("status",), index_check="report").status
        for _ in range(3)
    ]
    assert all(torch.equal(s, counted[0]) for s in counted) and not any(found[6:])


@pytest.mark.parametrize("call", CALLS)
def test_no_tensor_is_kept_alive(call):
    t = moved(drawn(call))
    known(call, t)
    watched = [weakref.ref(x) for x in t.values()]
    t.clear()
    gc.collect()
    assert not any(w() is not None for w in watched)


def test_many_shapes_keep_few(found):
    for _ in range(3):
        for more in range(12):
            t = drawn(scan, more=more)
            assert same(scan(t), afresh(scan, t))
    assert all(len(e) <= _kept._MOST_OF_A_PLACE for e in _kept._calls.by_place.values())
    a = drawn(attention)
    usual = known(attention, a)
    for i in range(_kept._MOST_PLACES + 2):  # each once: what is in use stays
        attention(a, scale=1.0 + i)
        assert len(_kept._calls.by_place) <= _kept._MOST_PLACES
    found.clear()
    assert same(attention(a), usual) and all(found)
    for i in range(_kept._MOST_PLACES + 2):
        known(attention, a, scale=1.0 + i)
        assert len(_kept._calls.by_place) <= _kept._MOST_PLACES
    found.clear()
    attention(a, scale=1.0 + i)
    assert all(found)


def test_without_private_names(monkeypatch):
    """Everything goes the long way."""
    monkeypatch.setattr(_fast, "tensor_guard", lambda *tensors: None)
    for call in CALLS:
        t = drawn(call)
        assert same(known(call, t), call(t))
    monkeypatch.undo()
    monkeypatch.setattr(_kept, "_NEW", {})
    for call in CALLS:
        t = drawn(call)
        assert same(known(call, t), call(t))
    assert not any(_kept._calls.by_place.values())
