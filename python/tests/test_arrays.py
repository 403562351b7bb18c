"""NumPy and DLPack arrays: the operator without PyTorch's autograd."""

import numpy as np
import pytest
import talea
import torch
from conftest import close, eager, problem
from talea import arrays


def test_numpy_and_dlpack():
    x, w, y, b = problem(bias=True)
    want = eager(x, w, y, bias=b)
    dx, dw, db = torch.autograd.grad(want, (x, w, b))
    plain = [t.detach() for t in (x, w, y, b)]
    for convert in (torch.Tensor.numpy, lambda t: t):  # the second by DLPack
        hidden, weight, targets, bias = (convert(t) for t in plain)
        got = arrays.linear_cross_entropy(
            hidden, weight, targets, bias=bias, outputs=("loss", "lse", "dx", "dw", "db")
        )
        assert close(torch.from_numpy(got["loss"]), want)
        for name, other in (("dx", dx), ("dw", dw), ("db", db)):
            assert close(torch.from_numpy(got[name]), other, 5e-6), name
        assert got["receipt"]["lane"]


def test_strides_and_outputs():
    x, w, y, _ = problem(n=32)
    x, w, y = x.detach().numpy(), w.detach().numpy(), y.numpy()
    turned = np.asfortranarray(x)
    a = arrays.linear_cross_entropy(x, w, y, outputs=("loss", "entropy", "topk"), top_k=3)
    b = arrays.linear_cross_entropy(turned, w, y, outputs=("loss", "entropy", "topk"), top_k=3)
    assert a["loss"] == b["loss"] and np.array_equal(a["topk_ids"], b["topk_ids"])
    with pytest.raises(ValueError, match="outputs"):
        arrays.linear_cross_entropy(x, w, y, outputs=("logits",))


def test_arrays_that_lie_otherwise_are_named():
    """Their bytes would be read as other numbers."""
    x, w, y, _ = problem(n=32)
    x, w, y = x.detach().numpy(), w.detach().numpy(), y.numpy()
    with pytest.raises(talea.DataError, match="hidden: dtype >f4: bytes in another order"):
        arrays.linear_cross_entropy(x.astype(">f4"), w, y)
    packed = np.zeros(32, dtype=[("target", "<i8"), ("flag", "i1")])
    packed["target"] = y
    with pytest.raises(talea.DataError, match="targets: strides of"):
        arrays.linear_cross_entropy(x, w, packed["target"])
    with pytest.raises(talea.DataError, match="weight: a masked array"):
        arrays.linear_cross_entropy(x, np.ma.masked_array(w, mask=w > 0), y)
    for name in ("ignore_index", "vocab", "workspace_limit_bytes"):
        with pytest.raises(talea.UsageError, match=f"{name} = {1 << 64}: does not fit"):
            arrays.linear_cross_entropy(x, w, y, **{name: 1 << 64})


REFUSED = (
    ({"softcap": 0.0}, "softcap = 0.0"),
    ({"softcap": "x"}, "softcap = 'x'"),
    ({"threads": 1 << 40}, "threads = 1099511627776: does not fit"),
    ({"label_smoothing": "a"}, "label_smoothing = 'a'"),
    ({"lane": None}, "lane = None"),
    ({"frob": 1}, "frob: no such argument"),
    ({"vocab_begin": 2}, "vocab_begin: ranks"),
    ({"denominator_value": 3.0}, "denominator_value: needs"),
    ({"workspace_limit": "64MiB"}, "workspace_limit = '64MiB'"),
    ({"workspace_limit": 0}, "workspace_limit = 0 bytes.* at least"),
    ({"top_k": 3}, "topk"),
    ({"outputs": ("topk",)}, "topk"),
)


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_is_given_counts_or_is_refused(given, said):
    x, w = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    with pytest.raises(talea.UsageError, match=said):
        arrays.linear_cross_entropy(x, w, np.arange(3), **given)


def test_options_are_those_of_the_pages():
    x, w = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    options = {"softcap": None, "denominator": 6, "workspace_limit": "auto"}
    got = arrays.linear_cross_entropy(x, w, np.arange(3), **options)["loss"]
    assert abs(got - np.log(5) / 2) < 1e-6
