"""The scan on NumPy arrays; talea.arrays shows these functions."""

from __future__ import annotations

import numpy as np

from .. import _abi
from .._values import shown, words
from . import _c
from ._call import Call
from ._settings import make

_INPUTS = (*_c.SCANNED, "cu_seqlens", *_c.INITIAL)
_UPSTREAM = ("d_out", *("d_" + n for n in _c.FINAL))
_OPTIONS = (*_c.ENUMS, "head_norm", "norm_eps", "chunk", "workspace_limit_bytes", "threads", "lane")
_GRADIENTS = tuple("d_" + n for n in (*_c.SCANNED, *_c.INITIAL))


def _split(arguments: dict, names) -> tuple[dict, dict]:
    """Arrays by their names, and the options: what is left."""
    from ..arrays import _as_array

    arrays = {n: _as_array(arguments.pop(n), n) for n in names if n in arguments}
    return arrays, arguments


def _settings(given: dict):
    """Options that these functions have: what else a Settings holds would be left aside in silence."""
    for name in given:
        if name not in _OPTIONS:
            raise TypeError(f"{name!r} is no option here: {', '.join(_OPTIONS)}")
    return make(**given)


def _wide(array: np.ndarray):
    return np.float64 if array.dtype == np.float64 else np.float32


def _run(which: int, settings, inputs: dict, outputs: dict) -> dict:
    from ..arrays import _fill

    call = Call(which, settings, inputs, outputs, _fill)
    workspace = np.empty(max(call.workspace_bytes(), 1), dtype=np.uint8)
    call.place(workspace.ctypes.data)
    return call.run(receipt=True).facts()


def _new_output(name: str, t: dict) -> np.ndarray:
    q, v = t["q"], t["v"]
    ranked = q.ndim == 5
    if name == "out":
        rank = q.shape[2:3] if ranked and q.shape[2] > 1 and t.get("mimo_out") is None else ()
        return np.empty((*v.shape[:2], *rank, *v.shape[2:]), q.dtype)
    cu, angle = t.get("cu_seqlens"), t.get("angles")
    angle = t.get("initial_angle") if angle is None else angle
    k = t.get("initial_k")  # where R = 1, it says whether k has the rank axis, as q does without it
    axis = ranked if k is None else k.ndim != 3
    n, heads, p = v.shape[0] if cu is None else cu.shape[0] - 1, *v.shape[2:]
    shape = {
        "final_angle": (n, heads, 0 if angle is None else angle.shape[-1]),
        "final_ssm": (n, heads, p, q.shape[-1]),
        "final_k": (n, *((q.shape[2] if ranked else 1,) if axis else ()), heads, q.shape[-1]),
        "final_v": (n, heads, p),
    }[name]
    return np.empty(shape, _wide(q))


def _of_rank(*array_of) -> None:
    from ..arrays import _of_rank as check

    check(*array_of)


def mamba3(q, k, v, adt, dt, trap, angles=None, *, outputs=("out",), **arguments):
    """What `outputs` names, as a dict of arrays plus "receipt" (and "backward_receipt").

    outputs: any of out, final_angle, final_ssm, final_k, final_v, and "d_" with the name of any
    floating input; those need d_out, d_final_angle, d_final_ssm, d_final_k or d_final_v (which are
    refused without any of them). Tensor
    arguments: those of talea.mamba3, and initial_angle, initial_ssm, initial_k, initial_v;
    everything else is an option (rotary_pairs, chunk, head_norm, lane, ..).
    """
    given = {"q": q, "k": k, "v": v, "adt": adt, "dt": dt, "trap": trap, "angles": angles}
    t, _ = _split(given, _INPUTS)
    more, arguments = _split(arguments, _INPUTS)
    t.update(more)
    upstream, arguments = _split(arguments, _UPSTREAM)
    upstream = {n: a for n, a in upstream.items() if a is not None}
    _of_rank(t, "q", 4, 5)
    _of_rank(t, "v", 4)
    if t.get("cu_seqlens") is not None:
        _of_rank(t, "cu_seqlens", 1)
    outputs = words("outputs", outputs, ("out", *_c.FINAL, *_GRADIENTS))
    settings = _settings(arguments)
    forward, backward = {}, {}
    for name in outputs:
        if name == "out" or name in _c.FINAL:
            forward[name] = _new_output(name, t)
        else:
            like = t.get(name[2:])
            if like is None:
                raise _abi.UsageError(f"{name}: {name[2:]} is not given")
            if not upstream:
                raise _abi.UsageError(f"{name}: needs d_out, or a d_final_*")
            backward[name] = np.empty(like.shape, like.dtype)
    if upstream and not backward:
        raise _abi.UsageError(f"{next(iter(upstream))}: needs a d_* among outputs")
    made = {**forward, **backward}
    if forward:
        made["receipt"] = _run(_c.FORWARD, settings, t, forward)
    if backward:
        made["backward_receipt"] = _run(_c.BACKWARD, settings, {**t, **upstream}, backward)
    return made


def mamba3_step(state, q, k, v, adt, dt, trap, angles=None, *, slots=None, **arguments):
    """One token an entry: {"out", "receipt"}. state: a dict of angle, ssm, k, v, updated in place."""
    from ..arrays import _as_array

    given = {"q": q, "k": k, "v": v, "adt": adt, "dt": dt, "trap": trap, "angles": angles}
    t, _ = _split(given, _c.SCANNED)
    more, arguments = _split(arguments, _c.SCANNED)
    t.update(more)
    _of_rank(t, "q", 3, 4)
    _of_rank(t, "v", 3)
    if not isinstance(state, dict):
        raise _abi.UsageError(f"state = {shown(state)}: a dict of arrays by name is needed")
    q = t["q"]
    rank = q.shape[1:2] if q.ndim == 4 and q.shape[1] > 1 and t.get("mimo_out") is None else ()
    out = np.empty((t["v"].shape[0], *rank, *t["v"].shape[1:]), q.dtype)
    for name, array in state.items():
        if name not in _c.STATES:
            raise _abi.UsageError(f"state: {name!r} is none of {', '.join(_c.STATES)}")
        if array is not None and not isinstance(array, np.ndarray):
            raise _abi.DataError(
                f"state_{name}: {type(array).__name__}; it is written in place: an ndarray is needed"
            )
        if array is not None and not array.flags.writeable:
            raise _abi.DataError(f"state_{name}: a read-only array; it is written in place")
    slots = None if slots is None else _as_array(slots, "slots")
    written = {"slots": slots, "out": out, **{"state_" + n: a for n, a in state.items()}}
    receipt = _run(_c.STEP, _settings(arguments), t, written)
    return {"out": out, "receipt": receipt}
