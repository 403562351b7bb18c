"""mamba_ssm: its four Mamba-3 functions with the same signatures, and patch(), which puts them in.

`chunk_size`, `tile_D`, `num_warps` and `dtype` are advice here: the lane chooses, and receipts say what
ran. What upstream computes differently at the edges is listed in docs/mamba3.md, not imitated.
"""

from __future__ import annotations

import importlib
import inspect

import torch

from .._abi import DataError, UsageError
from .._mamba3.functional import Mamba3State, mamba3, mamba3_step

_SISO = "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined"
_MIMO = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo"
_SISO_STEP = "mamba_ssm.ops.triton.mamba3.mamba3_siso_step"
_STEP_FN = "mamba_ssm.ops.cute.mamba3.mamba3_step_fn"
_MODULE = "mamba_ssm.modules.mamba3"
SIXTEEN = (torch.float16, torch.bfloat16)


def _steps(name: str, **tensors) -> None:
    """adt and dt in 16 bits come from a parameter that a whole-module cast took along."""
    for tensor_name, t in tensors.items():
        if t.dtype in SIXTEEN:
            raise DataError(
                f"{name}: {tensor_name} is {t.dtype}: steps and decays lose their digits in 16 bits. "
                "Keep dt_bias, A and D in fp32: cast the model by its projections, not by "
                "model.bfloat16(), or restore those parameters behind it (fp32_parameters)"
            )


def fp32_parameters(model: torch.nn.Module) -> list[str]:
    """Puts dt_bias, D and the biases of every Mamba-3 block back into fp32; names what it changed.

    The digits that a cast has dropped do not come back: call it before loading a checkpoint, or load
    the checkpoint again.
    """
    changed = []
    for name, module in model.named_modules():
        if type(module).__name__ != "Mamba3":
            continue
        for short, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in SIXTEEN:
                parameter.data = parameter.data.float()
                changed.append(f"{name}.{short}" if name else short)
    return changed


def _check_model(module: torch.nn.Module) -> None:
    bias = getattr(module, "dt_bias", None)
    if bias is not None and bias.dtype in SIXTEEN:
        raise DataError(
            f"dt_bias: {bias.dtype}: a cast of the whole module took it along; keep it in fp32 "
            "(talea.integrations.mamba_ssm.fp32_parameters(model) before the checkpoint is loaded)"
        )


def _wide(t: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """What is in another 16-bit type than q's, or in less than fp64 beside it, is widened, exactly."""
    if t is None or t.dtype == like.dtype:
        return t
    if like.dtype == torch.float64:
        return t.double()
    return t if t.dtype == torch.float32 else t.float()


def _scanned(q: torch.Tensor, *tensors):
    """ADT, DT, Trap, Angles: of any type that fits, but beside fp64, in which a model is checked."""
    return tuple(_wide(t, q) for t in tensors) if q.dtype == torch.float64 else tensors


def _lengths(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """int32, as upstream makes them: torch.cumsum gives int64."""
    return cu_seqlens if cu_seqlens is None else cu_seqlens.to(torch.int32)


def _rows(*tensors):
    """One dtype for q, k, v and z: upstream casts each; here they must agree, widened exactly."""
    kinds = {t.dtype for t in tensors if t is not None}
    if len(kinds) == 1:
        return tensors
    wide = torch.float64 if torch.float64 in kinds else torch.float32
    return tuple(t if t is None else t.to(wide) for t in tensors)


def mamba3_siso_combined(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, Input_States=None,
    chunk_size=64, return_final_states=False, cu_seqlens=None,
):  # fmt: skip
    """As upstream's; inputs keep their dtype (upstream casts them to bf16)."""
    _steps("mamba3_siso_combined", ADT=ADT, DT=DT)
    states = tuple(Input_States) if Input_States is not None else (None,) * 4
    if len(states) != 4:
        raise DataError(f"Input_States: {len(states)} tensors; angle, ssm, k, v are needed")
    Q, K, V, Z = _rows(Q, K, V, Z)
    ADT, DT, Trap, Angles = _scanned(Q, ADT, DT, Trap, Angles)
    made = mamba3(
        Q, K, V, ADT, DT, Trap, Angles, q_bias=_wide(Q_bias, Q), k_bias=_wide(K_bias, Q),
        d=_wide(D, Q), z=Z, initial=Mamba3State(*states), return_final=return_final_states,
        cu_seqlens=_lengths(cu_seqlens),
    )  # fmt: skip
    if not return_final_states:
        return made
    f = made.final
    return made.out, f.angle, f.ssm, f.k, f.v


def mamba3_mimo(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z, chunk_size,
    rotary_dim_divisor, dtype, return_state=False, cu_seqlens=None,
    fuse_pregate_headwise_rms_norm=False, outproj_norm_weight=None, outproj_norm_eps=1e-5,
):  # fmt: skip
    """As upstream's; the norm is main's, which its Mamba3 module always names. final_k, final_v come in q's dtype, as there; here they have gradients, too."""
    _steps("mamba3_mimo", ADT=ADT, DT=DT)
    if rotary_dim_divisor not in (2, 4) or Angles.shape[-1] * rotary_dim_divisor != Q.shape[-1]:
        raise UsageError(
            f"rotary_dim_divisor = {rotary_dim_divisor} beside {Angles.shape[-1]} angles and "
            f"{Q.shape[-1]} columns: columns over angles, 2 or 4, is needed"
        )
    Q, K, V, Z = _rows(Q, K, V, Z)
    ADT, DT, Trap, Angles = _scanned(Q, ADT, DT, Trap, Angles)
    norm_weight = outproj_norm_weight if fuse_pregate_headwise_rms_norm else None
    if norm_weight is not None:
        if norm_weight.numel() != V.shape[2] * V.shape[3]:
            raise DataError(
                f"outproj_norm_weight: shape {list(norm_weight.shape)} where {list(V.shape[2:])}, or "
                "that flattened, is needed"
            )
        norm_weight = _wide(norm_weight.reshape(V.shape[2:]), Q)
    made = mamba3(
        Q, K, V, ADT, DT, Trap, Angles, q_bias=_wide(Q_bias, Q), k_bias=_wide(K_bias, Q),
        d=_wide(D, Q), z=Z, mimo_v=_wide(MIMO_V, Q), mimo_z=_wide(MIMO_Z, Q) if Z is not None else None,
        mimo_out=_wide(MIMO_Out, Q), return_final=return_state, cu_seqlens=_lengths(cu_seqlens),
        rotary_pairs="halves", head_norm=fuse_pregate_headwise_rms_norm, norm_weight=norm_weight,
        norm_eps=outproj_norm_eps,
    )  # fmt: skip
    if not return_state:
        return made
    f = made.final
    return made.out, f.angle, f.ssm, f.k.to(Q.dtype), f.v.to(Q.dtype)


def mamba3_siso_step(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, Input_States=None
):
    """As upstream's: (out, (angle, ssm, k, v)) of the next token; Input_States stay as they are."""
    _steps("mamba3_siso_step", ADT=ADT, DT=DT)
    Q, K, V, Z = _rows(Q, K, V, Z)
    ADT, DT, Trap, Angles = _scanned(Q, ADT, DT, Trap, Angles)
    batch, heads, head_dim = V.shape
    if Input_States is None:
        state = Mamba3State.zeros(
            batch, heads, 1, Q.shape[-1], head_dim, Angles.shape[-1], V.device,
            torch.float64 if V.dtype == torch.float64 else torch.float32,
        )  # fmt: skip
        state.k = state.k[:, 0]
    else:
        angle, ssm, k, v = Input_States
        wide = torch.float64 if V.dtype == torch.float64 else torch.float32
        state = Mamba3State(angle.to(wide, copy=True), ssm.to(wide, copy=True),
                            k.to(wide, copy=True), v.to(wide, copy=True))  # fmt: skip
    with torch.no_grad():
        out = mamba3_step(
            state, Q, K, V, ADT, DT, Trap, Angles, q_bias=_wide(Q_bias, Q),
            k_bias=_wide(K_bias, Q), d=_wide(D, Q), z=Z, rotary_pairs="interleaved",
        )  # fmt: skip
    return out, (state.angle, state.ssm, state.k, V)


def mamba3_step_fn(
    state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj=None, state_out=None, out=None,
    z=None, zproj=None, tile_D=64, num_warps=2,
) -> None:  # fmt: skip
    """As upstream's: sigmoid(trap) and rows already biased and rotated; writes `out` and the state.

    Bstate and Xstate are read; the caller replaces them, as upstream's module does.
    """
    batch, heads, head_dim, columns = state.shape
    if out is None:
        raise UsageError(
            "out: None; a tensor [B, H, P], or [B, R, H, P] without outproj, is needed"
        )
    if z is not None and zproj is None:
        raise UsageError("zproj: None beside z; [R, H, P] is needed")
    wide = torch.float64 if torch.float64 in (state.dtype, x.dtype) else torch.float32

    def w(t):
        return None if t is None else t.to(wide)

    target = state if state_out is None else state_out
    in_place = target.dtype == wide and target.is_contiguous()
    ssm = target if in_place else torch.empty(state.shape, dtype=wide, device=state.device)
    if ssm is not state:
        ssm.copy_(state)
    # A constant rotation by nothing, and the logit whose sigmoid is trap: 0 and 1 are infinite ones.
    caches = Mamba3State(None, ssm, w(Bstate).clone(), w(Xstate).clone())
    dt_wide = w(dt)

    def heads_first(t):
        return None if t is None else w(t).transpose(0, 1)

    with torch.no_grad():
        made = mamba3_step(
            caches, w(C), w(B), w(x), w(A) * dt_wide, dt_wide, torch.logit(w(trap)), d=w(D),
            z=w(z), mimo_v=heads_first(xproj), mimo_z=heads_first(zproj) if z is not None else None,
            mimo_out=heads_first(outproj), rotary_pairs="halves",
        )  # fmt: skip
        if made.shape != out.shape:  # R = 1 without outproj: upstream keeps the rank axis
            made = made.reshape(out.shape)
        out.copy_(made)
        if not in_place:
            target.copy_(ssm)


OURS = {
    "mamba3_siso_combined": (_SISO, mamba3_siso_combined),
    "mamba3_mimo": (_MIMO, mamba3_mimo),
    "mamba3_siso_step": (_SISO_STEP, mamba3_siso_step),
    "mamba3_step_fn": (_STEP_FN, mamba3_step_fn),
}
# What mamba_ssm.modules.mamba3 calls them.
_ALIASES = {"mamba3_mimo": "mamba3_mimo_combined"}


def compare(name: str, theirs, ours, tolerance: float) -> float:
    """Largest distance of what two functions returned, over the largest magnitude; raises above."""
    theirs = theirs if isinstance(theirs, tuple | list) else (theirs,)
    ours = ours if isinstance(ours, tuple | list) else (ours,)
    worst = 0.0
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if isinstance(a, tuple | list):
            worst = max(worst, compare(f"{name}[{i}]", a, b, tolerance))
            continue
        if a is None and b is None:
            continue
        if a.shape != b.shape:
            raise RuntimeError(f"{name}[{i}]: shape {list(b.shape)} beside {list(a.shape)}")
        if not a.numel():
            continue
        gap = (a.double() - b.double()).abs()
        if i == 1 and len(theirs) == 5:  # an angle: compared on the circle
            gap = torch.minimum(gap, (2 * torch.pi - gap).abs())
        off = float(gap.max() / a.double().abs().max().clamp_min(1e-3))
        if not off <= tolerance:
            raise RuntimeError(
                f"{name}[{i}]: {off:.2e} apart from mamba_ssm's, {tolerance:.1e} is allowed"
            )
        worst = max(worst, off)
    return worst


def _written(step: dict) -> tuple:
    """What mamba3_step_fn has written, by its arguments: out, the state."""
    state = step.get("state_out")
    return step["out"], step["state"] if state is None else state


def _checked_once(name: str, theirs, ours, tolerance: float):
    """Ours; its first batch runs both ways, and a difference raises."""
    state = {"checked": False}

    def both(*arguments, **keywords):
        # A compiled graph holds one of them: it is the first call outside that is compared.
        if state["checked"] or theirs is None or torch.compiler.is_compiling():
            return ours(*arguments, **keywords)

        def copy(x):
            if isinstance(x, tuple | list):
                return type(x)(copy(i) for i in x)
            return x.detach().clone() if isinstance(x, torch.Tensor) else x

        first = [copy(a) for a in arguments], {n: copy(a) for n, a in keywords.items()}
        with torch.no_grad():
            wanted = theirs(*first[0], **first[1])
        made = ours(*arguments, **keywords)
        if wanted is None:  # mamba3_step_fn writes into `out` and the state
            bound = inspect.signature(ours).bind
            compare(name, _written(bound(*first[0], **first[1]).arguments),
                    _written(bound(*arguments, **keywords).arguments), tolerance)  # fmt: skip
        else:
            compare(name, wanted, made, tolerance)
        state["checked"] = True
        return made

    both.__name__ = name
    both.__doc__ = ours.__doc__
    return both


def patch(*, check: bool = True, tolerance: float = 0.1) -> list[str]:
    """Puts the four functions into mamba_ssm, and into its Mamba3 module; names what was replaced.

    check: the first call of each runs upstream's, too, and a difference above `tolerance` of the
    largest magnitude raises (upstream works in bf16 and is off by up to 7.5 % itself). Calls inside a
    compiled graph are not compared.
    """
    done = []
    try:  # here, so that a later import finds nothing unpatched
        user = importlib.import_module(_MODULE)
    except ImportError:
        user = None
    for name, (module_name, ours) in OURS.items():
        try:
            module = importlib.import_module(module_name)
            theirs = getattr(module, name)
        except ImportError:  # its kernels need what is not here
            module = theirs = None
        new = _checked_once(name, theirs, ours, tolerance) if check else ours
        if module is not None:
            setattr(module, name, new)
            done.append(f"{module_name}.{name}")
        alias = _ALIASES.get(name, name)
        if user is not None and hasattr(user, alias):
            setattr(user, alias, new)
            done.append(f"{_MODULE}.{alias}")
    if user is not None and hasattr(user, "Mamba3"):
        _guard(user.Mamba3)
    if not done:
        raise UsageError(
            "patch: mamba_ssm is not installed, or none of its Mamba-3 modules imports"
        )
    return done


def _guard(cls) -> None:
    """A model whose cast put dt_bias into 16 bits is told by name, before it computes anything."""
    for method in ("forward", "step"):
        original = getattr(cls, method)
        if getattr(original, "_talea", False):
            continue

        def guarded(self, *arguments, _original=original, **keywords):
            _check_model(self)
            return _original(self, *arguments, **keywords)

        guarded._talea = True
        setattr(cls, method, guarded)
