"""PyTorch tensors for the scan: shapes of what a call returns, allocation, streams, the three calls.

Tensors go by their flat names (see _c); absent ones are None.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch

from .. import _kept
from .._abi import DataError
from .._call import require_room
from .._torch import _DTYPES, _fill, settled
from . import _c
from ._call import Call
from ._settings import Settings

latest = threading.local()  # .receipt: of this thread's latest call that kept one


def wide(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def code_of(tensor: torch.Tensor, name: str) -> int:
    """The C interface's number of a tensor's dtype."""
    if tensor.dtype not in _DTYPES:
        raise DataError(f"{name}: dtype {tensor.dtype} is not supported")
    return _DTYPES[tensor.dtype]


def rank_of(q: torch.Tensor, lead: int = 2) -> int:
    return q.shape[lead] if q.dim() == lead + 3 else 1


def out_shape(t: dict, tokens: bool = True) -> tuple:
    """[B, S, H, P], with the rank axis where nothing sums over it; a step has no S."""
    lead = 2 if tokens else 1
    q, v = t["q"], t["v"]
    rank = rank_of(q, lead)
    front, back = tuple(v.shape[:lead]), tuple(v.shape[lead:])
    return front + ((rank,) if rank > 1 and t.get("mimo_out") is None else ()) + back


def final_shapes(t: dict) -> dict:
    q, v, cu = t["q"], t["v"], t.get("cu_seqlens")
    n = v.shape[0] if cu is None else cu.shape[0] - 1
    heads, p, state = v.shape[2], v.shape[3], q.shape[-1]
    k = t.get("initial_k")  # where R = 1, it says whether k has the rank axis, as q does without it
    rank = () if (q.dim() == 4 if k is None else k.dim() == 3) else (rank_of(q),)
    angle = t.get("initial_angle") if t.get("angles") is None else t["angles"]
    pairs = 0 if angle is None else angle.shape[-1]
    return {
        "final_angle": (n, heads, pairs),
        "final_ssm": (n, heads, p, state),
        "final_k": (n, *rank, heads, state),
        "final_v": (n, heads, p),
    }


def final_tensors(t: dict) -> dict:
    """fp32, but as the initial state where there is one."""
    made = {}
    for name, shape in final_shapes(t).items():
        given = t.get("initial_" + name[6:])
        dtype = wide(t["q"]) if given is None else given.dtype
        made[name] = t["q"].new_empty(shape, dtype=dtype)
    return made


def check_kinds(t: dict) -> None:
    for name, tensor in t.items():
        if tensor is None and name not in _c.SHAPING:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise DataError(
                f"{name}: {type(tensor).__name__} where a torch.Tensor is needed; talea.arrays "
                "takes NumPy's"
            )
        if tensor.layout != torch.strided:
            raise DataError(f"{name}: a tensor of layout {tensor.layout}; torch.strided is needed")


def check_shapes(t: dict) -> None:
    """What must hold before a shape can be formed; all else the library says."""
    check_kinds(t)
    if t["q"].dim() not in (4, 5):
        raise DataError(f"q: shape {list(t['q'].shape)}; [B, S, R, G, N] or [B, S, G, N] is needed")
    if t["v"].dim() != 4:
        raise DataError(f"v: shape {list(t['v'].shape)}; [B, S, H, P] is needed")
    cu = t.get("cu_seqlens")
    if cu is not None and (cu.dim() != 1 or cu.shape[0] < 1):
        raise DataError(f"cu_seqlens: shape {list(cu.shape)}; [n + 1] is needed")


def _run(settings: Settings, call: Call, like: torch.Tensor) -> None:
    # Lives until the call is queued: enough, in stream order.
    workspace = torch.empty(call.workspace_bytes(), dtype=torch.uint8, device=like.device)
    stream = None
    if like.is_cuda:
        stream = torch.cuda.current_stream(like.device).cuda_stream
    call.place(workspace.data_ptr(), stream)
    done = (
        call.groups.run_call(call, settings.receipt)
        if call.groups is not None
        else call.run(settings.receipt)
    )
    if done is not None:
        latest.receipt = done


def written(tensors) -> None:
    """The library writes by address; autograd must know, where one was kept for a backward."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _meeting(settings: Settings, t: dict, *more):
    """Around a call: its errors are told to the other ranks, where there are some."""
    if not settings.heads_group and not settings.sequence_group:
        return nullcontext()
    from ._ranks import ScanMeeting

    kinds = (None if x is None else (tuple(x.shape), x.dtype) for x in t.values())
    return ScanMeeting(settings, t["v"].device, (*t, *kinds, *more))


def _join(call: Call, settings: Settings, t: dict, meeting) -> None:
    if meeting is not None:
        from ._ranks import ScanGroups

        call.join(ScanGroups(settings, meeting, t["v"].shape[2], t["v"].shape[1]))


def _settled(t: dict) -> dict:
    return {name: settled(tensor) for name, tensor in t.items()}


def _given(t: dict) -> dict:
    return {name: tensor for name, tensor in t.items() if tensor is not None}


def _key(which: int, settings: Settings, given: dict, need=()) -> tuple | None:
    """What a description reads beside the tensors; None: it is for this one call, as of ranks."""
    if settings.heads_group or settings.sequence_group:
        return None
    return which, settings, tuple(need), tuple(given), torch.get_num_threads()


def _keep(key, settings: Settings, given: dict, call: Call, made: dict) -> None:
    if key is not None:
        slots = [call.slots[n] for n in (*given, *made)]
        receipts = latest if settings.receipt else None
        _kept.keep(key, given.values(), slots, made, call.args, call.function, receipts)


def forward(settings: Settings, t: dict, need=()) -> dict:
    """out, the final states where asked for, and `saved` where it is to be kept.

    need: gradients that backward will be asked for; a limit that it could not keep is refused here.
    """
    given = _given(t)
    key = _key(_c.FORWARD, settings, given, need)
    if (made := _kept.again(key, given.values())) is not None:
        return made
    made = {"out": t["q"].new_empty(out_shape(t))}
    if settings.final:
        made.update(final_tensors(t))
    with _meeting(settings, t, tuple(need)) as meeting:
        call = Call(_c.FORWARD, settings, _settled(t), made, _fill)
        _join(call, settings, t, meeting)

        def ahead():
            if settings.save:
                made["saved"] = t["q"].new_empty((call.saved_bytes(),), dtype=torch.uint8)
                call.add_output("saved", made["saved"])
            call.workspace_bytes()

        def behind():
            ups = {"d_out": made["out"], "saved": made.get("saved")}
            ups |= {"d_" + n: made[n] for n in _c.FINAL if n in made}
            gradients = {"d_" + n: gradient_like(n, t[n], False) for n in need}
            Call(_c.BACKWARD, settings, _settled({**t, **ups}), gradients, _fill).workspace_bytes()

        if need and t["q"].is_cpu and call.groups is None:
            require_room(ahead, behind)
        else:
            ahead()
        _run(settings, call, t["q"])
    _keep(key, settings, given, call, made)
    return made


def gradient_like(name: str, tensor: torch.Tensor, summed: bool) -> torch.Tensor:
    """Dense: an expanded input's gradient is a tensor of its own."""
    if summed and name in _c.PARAMETERS:
        return torch.zeros(tensor.shape, dtype=wide(tensor), device=tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def backward(settings: Settings, t: dict, upstream: dict, need, main_grads=None) -> dict:
    """Gradients by input name for the names in `need`; those of main_grads are added there."""
    main_grads, given = main_grads or {}, _given({**t, **upstream})
    key = None if main_grads else _key(_c.BACKWARD, settings, given, need)
    if (made := _kept.again(key, given.values())) is not None:
        return {name: made["d_" + name] for name in need}
    made = {
        name: main_grads.get(name, None) if name in main_grads
        else gradient_like(name, t[name], bool(main_grads))
        for name in need
    }  # fmt: skip
    if not made:
        return {}
    outputs = {"d_" + name: tensor for name, tensor in made.items()}
    with _meeting(settings, {**t, **upstream}, tuple(need), tuple(main_grads)) as meeting:
        inputs = _settled({**t, **upstream})
        call = Call(_c.BACKWARD, settings, inputs, outputs, _fill, accumulate=bool(main_grads))
        _join(call, settings, t, meeting)
        _run(settings, call, t["q"])
    _keep(key, settings, given, call, outputs)
    written(main_grads.values())
    return {
        name: tensor.to(t[name].dtype) for name, tensor in made.items() if name not in main_grads
    }


def step(settings: Settings, t: dict, state: dict, slots) -> torch.Tensor:
    """One token an entry; `state` is written in place."""
    updated = {"slots": slots, **{"state_" + n: s for n, s in state.items()}}
    given = _given({**t, **updated})
    key = _key(_c.STEP, settings, given)
    if (made := _kept.again(key, given.values())) is not None:
        return made["out"]
    out = t["q"].new_empty(out_shape(t, tokens=False))
    call = Call(_c.STEP, settings, _settled(t), {**updated, "out": out}, _fill)
    _run(settings, call, t["q"])
    _keep(key, settings, given, call, {"out": out})
    return out
