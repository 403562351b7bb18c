"""talea.mamba3, talea.mamba3_step and their states."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .._abi import DataError, UsageError
from .._call import Receipt
from .._torch import kept_by_values, tells
from .._values import flag, group_name, shown, whole, word
from . import _operator, _tensors
from ._c import INITIAL, PARAMETERS, SCANNED, STATES
from ._settings import make

_settings = kept_by_values(make)


@dataclass
class Mamba3State:
    """What a sequence hands on: angle [n, H, A], ssm [n, H, P, N], k [n, R, H, N], v [n, H, P].

    k is the last token's key, biased and rotated, not scaled; v its v, not projected. With R = 1, k
    may be [n, H, N]. Each alone may be None: zeros.
    """

    angle: torch.Tensor | None = None
    ssm: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @staticmethod
    def zeros(
        batch: int, heads: int, rank: int, state_dim: int, head_dim: int, pairs: int, device=None,
        dtype=None,
    ) -> Mamba3State:  # fmt: skip
        """Of a sequence that has not begun. dtype: of k and v (fp32); angle and ssm are fp32, or fp64
        with dtype fp64."""
        sizes = {"batch": batch, "heads": heads, "rank": rank, "state_dim": state_dim}
        sizes |= {"head_dim": head_dim, "pairs": pairs}
        batch, heads, rank, state_dim, head_dim, pairs = (whole(n, s, 0) for n, s in sizes.items())
        dtype = torch.float32 if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"dtype = {shown(dtype)}: a floating torch.dtype is needed")
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Mamba3State(
            torch.zeros(batch, heads, pairs, device=device, dtype=wide),
            torch.zeros(batch, heads, head_dim, state_dim, device=device, dtype=wide),
            torch.zeros(batch, rank, heads, state_dim, device=device, dtype=dtype),
            torch.zeros(batch, heads, head_dim, device=device, dtype=dtype),
        )


@dataclass
class Mamba3Output:
    out: torch.Tensor
    final: Mamba3State
    _receipt: Receipt | None = field(default=None, repr=False)

    def receipt(self) -> dict:
        """What ran in the forward call, what declined and why, and what it cost."""
        if self._receipt is None:
            raise RuntimeError("receipt: not available inside a compiled graph")
        return self._receipt.facts()


def _autocast(t: dict) -> dict:
    """q, k, v, z in autocast's type, and parameters that are neither in it nor in fp32.

    adt, dt, trap and angles stay as they are: a step's length in 16 bits is refused by name.
    """
    device = "cuda" if t["q"].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return t
    dtype = torch.get_autocast_dtype(device)
    sixteen = (torch.float16, torch.bfloat16)
    made = dict(t)
    for name in ("q", "k", "v", "z"):
        if t[name] is not None and t[name].dtype in (torch.float32, *sixteen):
            made[name] = t[name].to(dtype)
    for name in PARAMETERS:
        if t[name] is not None and t[name].dtype in sixteen:
            made[name] = t[name].to(dtype)
    return made


def _main_grads(main_grads, t: dict) -> dict | None:
    if main_grads is not None and not isinstance(main_grads, dict):
        raise UsageError(f"main_grads = {shown(main_grads)}: a dict of tensors by name is needed")
    for name, total in (main_grads or {}).items():
        if name not in PARAMETERS:
            raise UsageError(f"main_grads: {name!r} is none of {', '.join(PARAMETERS)}")
        if t.get(name) is None:
            raise UsageError(f"main_grads: {name!r}: that tensor is not given")
        kind = _tensors.wide(t["q"])
        _tensors.check_kinds({f"main_grads: {name!r}": total})
        if total.dtype != kind or total.shape != t[name].shape:
            raise DataError(
                f"main_grads: {name!r}: {total.dtype} {list(total.shape)}; "
                f"{'fp64' if kind == torch.float64 else 'fp32'} {list(t[name].shape)} is needed"
            )
    return dict(main_grads) if main_grads else None


def _compiling() -> bool:
    return torch.compiler.is_compiling()


@tells("heads_group", "sequence_group", always="sequence_group")
def mamba3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    adt: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor | None = None,
    *,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    mimo_v: torch.Tensor | None = None,
    mimo_z: torch.Tensor | None = None,
    mimo_out: torch.Tensor | None = None,
    head_norm: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    initial: Mamba3State | None = None,
    return_final: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    rotary_pairs: str = "automatic",
    chunk: int = 0,
    schedule: str = "automatic",
    save_states: bool = False,
    main_grads: dict[str, torch.Tensor] | None = None,
    heads_group=None,
    sequence_group=None,
    workspace_limit: int = 256 << 20,
    lane: str = "auto",
    total_groups: int = 0,
    shared_angles: bool = False,
):
    """The Mamba-3 scan over S tokens: out [B, S, H, P], or a Mamba3Output with return_final.

    q (C), k (B) [B, S, R, G, N], or [B, S, G, N] with R = 1; v (x), z [B, S, H, P]; adt, dt fp32 and
    trap [B, H, S]; angles [B, S, H, A] or [B, S, 1, A]; biases [H, R, N]; d [H]; mimo_* [H, R, P];
    norm_weight [H, P]. R > 1 without mimo_out gives out [B, S, R, H, P]. Every floating tensor is
    differentiable, initial and final states too. docs/mamba3.md says what each means.

    save_states: forward keeps checkpoints for backward, and what the ranks of sequence_group told each
    other, where all of them ask for it. main_grads: fp32 sums by parameter name, that
    backward adds to; those parameters get no gradient of their own. heads_group, sequence_group:
    ranks that share heads or tokens, pieces of any size, in rank order. total_groups: where ranks
    read the same groups, how many there are on all of them; d_q and d_k are then summed. shared_angles:
    with one head a rank, angles [B, S, 1, A] are those of all ranks' heads.
    """
    if not isinstance(initial, Mamba3State | None):
        raise UsageError(f"initial: {type(initial).__name__} where a talea.Mamba3State is needed")
    states = initial or Mamba3State()
    t = {
        "q": q, "k": k, "v": v, "z": z, "adt": adt, "dt": dt, "trap": trap, "angles": angles,
        "q_bias": q_bias, "k_bias": k_bias, "d": d, "mimo_v": mimo_v, "mimo_z": mimo_z,
        "mimo_out": mimo_out, "norm_weight": norm_weight, "initial_angle": states.angle,
        "initial_ssm": states.ssm, "initial_k": states.k, "initial_v": states.v,
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    _tensors.check_shapes(t)
    return_final = flag("return_final", return_final)
    total_groups = whole("total_groups", total_groups)
    if heads_group is None and total_groups not in (0, q.shape[-2]):
        raise UsageError(
            f"total_groups = {total_groups}: without heads_group, G = {q.shape[-2]} of q are all"
        )
    t, compiling = _autocast(t), _compiling()
    settings = _settings(
        rotary_pairs=rotary_pairs, schedule=schedule, head_norm=head_norm, norm_eps=norm_eps,
        chunk=chunk, workspace_limit_bytes=workspace_limit, lane=lane, final=return_final,
        save=flag("save_states", save_states), heads_group=group_name("heads_group", heads_group),
        sequence_group=group_name("sequence_group", sequence_group),
        total_groups=total_groups, shared_angles=flag("shared_angles", shared_angles),
        receipt=return_final and not compiling,
    )  # fmt: skip
    if compiling:
        from ._compiled import apply
    else:
        apply = _operator.apply
    out, *final = apply(settings, t, _main_grads(main_grads, t))
    if not return_final:
        return out
    receipt = None if compiling else _tensors.latest.receipt
    return Mamba3Output(out, Mamba3State(*final), receipt)


def mamba3_step(
    state: Mamba3State,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    adt: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor | None = None,
    *,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    mimo_v: torch.Tensor | None = None,
    mimo_z: torch.Tensor | None = None,
    mimo_out: torch.Tensor | None = None,
    head_norm: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    rotary_pairs: str = "automatic",
    chunk: int = 0,
    schedule: str = "automatic",
    workspace_limit: int = 256 << 20,
    slots: torch.Tensor | None = None,
    lane: str = "auto",
) -> torch.Tensor:
    """One token an entry; `state` is updated in place. Returns out [B, H, P].

    Shapes are those of mamba3 without S: q, k [B, R, G, N] or [B, G, N]; v, z [B, H, P]; adt, dt, trap
    [B, H]; angles [B, H, A] or [B, 1, A]. slots [B] int32: rows of larger state caches; -1 skips the
    entry. No gradient is formed. chunk and schedule are those of mamba3; a token is a chunk whatever
    they are, and a lane without chunks declines one.
    """
    if not isinstance(state, Mamba3State):
        raise UsageError(f"state: {type(state).__name__} where a talea.Mamba3State is needed")
    t = {
        "q": q, "k": k, "v": v, "z": z, "adt": adt, "dt": dt, "trap": trap, "angles": angles,
        "q_bias": q_bias, "k_bias": k_bias, "d": d, "mimo_v": mimo_v, "mimo_z": mimo_z,
        "mimo_out": mimo_out, "norm_weight": norm_weight,
    }  # fmt: skip
    caches = {n: getattr(state, n) for n in STATES}
    _tensors.check_kinds({**t, **{"state_" + n: s for n, s in caches.items()}, "slots": slots})
    if torch.is_grad_enabled():
        for name, tensor in {**t, **caches}.items():
            if tensor is not None and tensor.requires_grad:
                raise UsageError(
                    f"mamba3_step: {name} requires grad, and gets none here; call it under "
                    "torch.no_grad(), or mamba3 on a sequence of one token"
                )
    if q.dim() not in (3, 4):
        raise DataError(f"q: shape {list(q.shape)}; [B, R, G, N] or [B, G, N] is needed")
    t, settings = _autocast(t), _settings(
        rotary_pairs=rotary_pairs, head_norm=head_norm, norm_eps=norm_eps, lane=lane,
        chunk=chunk, schedule=schedule, workspace_limit_bytes=workspace_limit,
    )  # fmt: skip
    if _compiling():
        from ._compiled import apply_step

        return apply_step(settings, t, caches, slots)
    _operator.refuse_transforms(t)
    out = _tensors.step(settings, t, caches, slots)
    _tensors.written(caches.values())
    return out


def group_rows(
    order: str, rank: int, groups: int, state_dim: int, ranks: int, index: int
) -> torch.Tensor:
    """Rows of a projection to q or k that rank `index` of `ranks` needs, in its own order.

    order: how the rows run, "rgn" or "grn" (slowest first). Rows (g, r, n) of a rank are one piece;
    rows (r, g, n) are not, and cut as if they were they are right at one rank only.
    """
    word("order", order, ("rgn", "grn"))
    rank, groups = whole("rank", rank, 0), whole("groups", groups, 0)
    state_dim, ranks, index = (
        whole("state_dim", state_dim, 0), whole("ranks", ranks, 1), whole("index", index, 0)
    )  # fmt: skip
    if groups % ranks or not 0 <= index < ranks:
        raise UsageError(
            f"groups = {groups}, ranks = {ranks}, index = {index}: groups must divide over the ranks"
        )
    sizes = {"r": rank, "g": groups, "n": state_dim}
    rows = torch.arange(rank * groups * state_dim).reshape([sizes[a] for a in order])
    mine = slice(index * groups // ranks, (index + 1) * groups // ranks)
    return (rows[mine] if order[0] == "g" else rows[:, mine]).reshape(-1)


def lanes() -> list[str]:
    """Names of the lanes of this build, best first."""
    from .._abi import lib

    return lib.talea_mamba3_lanes().decode().split(",")


__all__ = ["INITIAL", "SCANNED", "Mamba3Output", "Mamba3State", "lanes", "mamba3", "mamba3_step"]
