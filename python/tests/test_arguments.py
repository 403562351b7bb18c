"""Every keyword of every public function, given what it is not: it works where that is legal, else it
is a TypeError or ValueError with the argument's name (and the value, of one that is no tensor)."""

import inspect
import math
import warnings

import numpy as np
import pytest
import talea
import torch
from talea import arrays
from talea._linear_cross_entropy import _c as loss_c
from talea._linear_cross_entropy import _settings as loss_settings
from talea._mamba3 import _c as scan_c
from talea._mamba3 import arrays as scan_arrays
from talea._sparse_attention import _c as attention_c

VALUES = {
    "a word": "a", "an empty word": "", "None": None, "a list": [], "a dict": {}, "True": True,
    "False": False, "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1, "-0.5": -0.5,
    "huge": 2**70, "1e300": 1e300, "0": 0, "5": 5, "np 0.5": np.float32(0.5), "np 1": np.int64(1),
    "np True": np.bool_(True), "np nan": np.float64("nan"), "an array": np.array([1.0]),
    "a matrix": np.ones((2, 2)), "complex": 1j, "a scalar": torch.tensor(1.0), "bytes": b"x",
    "an int scalar": torch.tensor(1), "bools": torch.ones(2, dtype=torch.bool), "a function": len,
    "complex numbers": torch.ones(3, dtype=torch.complex64), "names": ("x",), "object": object(),
    "int8": torch.ones(4, dtype=torch.int8), "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
}  # fmt: skip
torch.manual_seed(0)
X, W, Y = torch.randn(6, 16), torch.randn(20, 16), torch.randint(0, 20, (6,))
Q, KV = torch.randn(1, 4, 2, 32), torch.randn(1, 9, 1, 32)
INDICES = torch.arange(12, dtype=torch.int32).view(1, 4, 1, 3) % 9
INDEX = {
    "index_q": torch.randn(1, 4, 2, 16),
    "index_k": torch.randn(1, 9, 16),
    "index_weights": torch.randn(1, 4, 2),
}
ROWS = torch.rand(1, 1, 4)
SCAN = {
    "q": torch.randn(1, 4, 1, 8), "k": torch.randn(1, 4, 1, 8), "v": torch.randn(1, 4, 1, 4),
    "adt": -ROWS, "dt": ROWS, "trap": ROWS,
}  # fmt: skip
TOKEN = {n: t.squeeze(2 if t.dim() == 3 else 1)[..., :1] if t.dim() == 3 else t[:, 0]
         for n, t in SCAN.items()}  # fmt: skip
TOKEN |= {n: SCAN[n][..., 0] for n in ("adt", "dt", "trap")}


def _state():
    return talea.Mamba3State.zeros(1, 1, 1, 8, 4, 0)


def _arrays(**tensors):
    return {n: t.numpy() for n, t in tensors.items()}


def _options(which, *more):
    door = attention_c.DOORS[which]
    fields = [n for struct in (door.inputs, door.options) for n, _ in struct._fields_]
    return [n for n in fields if n not in ("struct_bytes", "reserved")] + list(more)


def _module(**given):
    return talea.LinearCrossEntropy(**given)(X, Y)


def _fp8(**given):
    return talea.sparse_attention(Q.bfloat16(), talea.Fp8(**given), INDICES, value_dim=16)


def _packed(**given):
    return talea.sparse_attention(
        torch.randn(4, 2, 576).bfloat16(), talea.PackedKV(**given), INDICES[0], value_dim=512
    )


def _numpy_state():
    return {n: t.numpy() for n, t in vars(_state()).items()}


# By name: the function, what it is called with, and keywords that its signature does not say.
FUNCTIONS = {
    "linear_cross_entropy": (
        talea.linear_cross_entropy, lambda: {"input": X, "linear_weight": W, "target": Y}, (),
    ),
    "LinearCrossEntropy": (
        _module, lambda: {"in_features": 16, "vocab": 20},
        [n for n in talea.linear_cross_entropy.__kwdefaults__ if n not in ("linear_bias", "vocab")],
    ),
    "sparse_attention": (
        talea.sparse_attention, lambda: {"q": Q, "kv": KV, "indices": INDICES, "value_dim": 16}, (),
    ),
    "sparse_select": (talea.sparse_select, lambda: {**INDEX, "top_k": 3}, ()),
    "sparse_index_loss": (
        talea.sparse_index_loss, lambda: {**INDEX, "q": Q, "kv": KV, "value_dim": 16}, (),
    ),
    "index_mask": (
        talea.index_mask, lambda: {"mask": torch.full((1, 4, 9), -1.0), "indices": INDICES}, (),
    ),
    "pack_rows": (talea.pack_rows, lambda: {"kv": torch.randn(3, 576)}, ()),
    "Fp8": (
        _fp8, lambda: {"data": KV.to(torch.float8_e4m3fn), "scale": torch.tensor(1.0)}, (),
    ),
    "PackedKV": (_packed, lambda: {"rows": talea.pack_rows(torch.randn(9, 576))}, ()),
    "require_clean": (talea.require_clean, lambda: {"status": torch.tensor([0, -1, 0, 0])}, ()),
    "mamba3": (talea.mamba3, lambda: dict(SCAN), ()),
    "mamba3_step": (talea.mamba3_step, lambda: {"state": _state(), **TOKEN}, ()),
    "Mamba3State.zeros": (
        talea.Mamba3State.zeros,
        lambda: {"batch": 1, "heads": 1, "rank": 1, "state_dim": 8, "head_dim": 4, "pairs": 0}, (),
    ),
    "mamba3_group_rows": (
        talea.mamba3_group_rows,
        lambda: {
            "order": "rgn", "rank": 2, "groups": 4, "state_dim": 8, "ranks": 2, "index": 1
        }, (),
    ),
    "arrays.linear_cross_entropy": (
        arrays.linear_cross_entropy, lambda: _arrays(hidden=X, weight=W, targets=Y),
        [*loss_c.INPUT_NAMES, "workspace_limit",
         *(n for n in loss_settings._PLAIN if n not in loss_settings._OF_RANKS)],
    ),
    "arrays.sparse_attention": (
        arrays.sparse_attention,
        lambda: {**_arrays(q=Q, kv=KV, indices=INDICES), "value_dim": 16}, _options("forward"),
    ),
    "arrays.sparse_select": (
        arrays.sparse_select, lambda: {**_arrays(**INDEX), "top_k": 3}, _options("select"),
    ),
    "arrays.sparse_index_loss": (
        arrays.sparse_index_loss, lambda: _arrays(**INDEX, q=Q, kv=KV), _options("index_loss"),
    ),
    "arrays.index_mask": (
        arrays.index_mask, lambda: _arrays(mask=torch.full((1, 4, 9), -1.0), indices=INDICES),
        ["q_positions", "causal", "index_space", "index_check", "q_position_base"],
    ),
    "arrays.pack_rows": (arrays.pack_rows, lambda: _arrays(kv=torch.randn(3, 576)), ()),
    "arrays.mamba3": (
        arrays.mamba3, lambda: _arrays(**SCAN),
        [*scan_arrays._INPUTS, *scan_arrays._UPSTREAM, *scan_arrays._OPTIONS],
    ),
    "arrays.mamba3_step": (
        arrays.mamba3_step, lambda: {"state": _numpy_state(), **_arrays(**TOKEN)},
        [*scan_c.SCANNED, *scan_arrays._OPTIONS],
    ),
}  # fmt: skip
TORCH_SAYS = {("LinearCrossEntropy", "device"), ("LinearCrossEntropy", "dtype"),
              ("LinearCrossEntropy", "bias"), ("Mamba3State.zeros", "device")}  # fmt: skip
# What is legal by itself, and wrong beside another argument, is said of the other.
BESIDE = {
    ("linear_cross_entropy", "vocab"): "target", ("LinearCrossEntropy", "vocab"): "target",
    ("LinearCrossEntropy", "in_features"): "linear_weight", ("arrays.sparse_attention", "o_dtype"): "o:",
    ("arrays.linear_cross_entropy", "vocab"): "targets",
    ("arrays.linear_cross_entropy", "hidden"): "weight",
}  # fmt: skip


def _names(function, given, more):
    signed = [p for p in inspect.signature(function).parameters.values()
              if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]  # fmt: skip
    return dict.fromkeys([*given, *(p.name for p in signed), *more])


def _wrong(name, value, error, beside) -> str:
    """What is wrong with an error; empty: it names the argument."""
    text = str(error)
    if isinstance(error, talea.UnavailableError):
        return "" if value == 0.5 or name in text else text
    if not isinstance(error, TypeError | ValueError):
        return f"{type(error).__name__}: {text}"
    said = (name, name.removesuffix("_bytes"), beside or name)
    if not any(text.startswith(n) or f" {n}" in text or f".{n}" in text for n in said):
        return text
    lies = isinstance(value, str | int | float) and f"{name} = " in text
    return f"{text} (of {value!r})" if lies and not _says(text, value) else ""


def _says(text, value) -> bool:
    if isinstance(value, float | int):
        if not abs(value) < 2**60:  # NaN, or digits that may be written in several ways
            return True
        if f" = {value:g}" in text:
            return True
    return f" = {value}" in text or f" = {value!r}" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_another_kind_are_named(name):
    function, given, more = FUNCTIONS[name]
    wrong, tried = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(**given())
        for argument in _names(function, given(), more):
            if (name, argument) in TORCH_SAYS:
                continue
            for what, value in VALUES.items():
                tried += 1
                try:
                    function(**{**given(), argument: value})
                except Exception as error:
                    said = _wrong(argument, value, error, BESIDE.get((name, argument)))
                    if said:
                        wrong.append(f"{argument}, {what}: {said[:160]}")
    assert tried >= len(VALUES)
    assert not wrong, f"{len(wrong)} of {tried}:\n" + "\n".join(wrong)


def test_a_word_is_no_flag():
    """Every word but the empty one is true to Python."""
    for call in (
        lambda: talea.linear_cross_entropy(X, W, Y, sequence_parallel="no"),
        lambda: talea.mamba3(**SCAN, head_norm="no"),
        lambda: talea.mamba3(**SCAN, return_final="no"),
        lambda: talea.mamba3(**SCAN, save_states="no"),
        lambda: talea.sparse_select(**INDEX, top_k=3, return_scores="no"),
        lambda: arrays.mamba3(**_arrays(**SCAN), head_norm="no"),
    ):
        with pytest.raises(talea.UsageError, match=" = 'no': True or False is needed"):
            call()
