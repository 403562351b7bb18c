"""Gradients formed in the forward call that wait for what backward brings.

Formed with an upstream of 1: kept in fp32, or for a 16-bit weight as the returned number and what
its rounding left, so that the factor comes before the one rounding. Formed with the upstream that
the caller announced (grad_scale): only compared with it, without waiting for a device.
"""

from __future__ import annotations

import ctypes as c
import math
from functools import lru_cache

import torch

from .. import _abi
from .._abi import UsageError
from .._call import least_of
from .._torch import _fill
from .._values import number
from . import _c
from ._settings import Config
from ._tensors import (
    GRADIENTS,
    NO_GRADIENT,
    PER_TOKEN,
    Described,
    _key_of,
    give_back,
    keep,
    kept_under,
    wide,
)
from ._tensors import run as run_described

_SMALL_BYTES = 32 << 20
_MOST_FP32 = torch.finfo(torch.float32).max
_FEW_ROWS = 256  # 64 of 4096 x 128256 took 3.7 ms with fp32 sums on an H200, 2.5 without
RESTS = ("dx_rest", "dw_rest")


def forward(config: Config, inputs, need, receipts=None):
    """The described forward call, and what it made, by name.

    The gradients that `need` names are formed where nothing but a factor can come later and where
    the workspace limit has room for what has to be kept; else the row states that backward needs.
    """
    key, addresses, bits = _key_of(config, inputs, (need, "forward"))
    if config.group or config.batch_group:
        from ._ranks import Meeting

        with Meeting(config, inputs, (need, "forward")) as meeting:
            ways = kept_under(key, bits)
            if ways is None:
                ways = _Ways(config, inputs, need)
                keep(key, bits, ways)
            described = ways.at(meeting.choose(ways.fits()), config, inputs, need)
            made = meeting.run(described, inputs, None, addresses, receipts)
    else:
        described = kept_under(key, bits)
        if described is None:
            described = _describe(config, inputs, need)
            keep(key, bits, described)
        made = run_described(described, inputs, None, addresses, receipts)
    return described, dict(zip(described.names, made, strict=True))


def factor_of(config: Config, need) -> str | None:
    """What alone can multiply the gradients later: "scalar", "rows" (of dx), or None."""
    per_token = [n for n in PER_TOKEN if n in config.outputs]
    if config.reduction != "none":
        return None if per_token else "scalar"
    plain = not (config.label_smoothing or config.z_loss)
    rows = config.outputs == ("loss",) or (config.outputs == ("target_logprob",) and plain)
    return "rows" if rows and need == (True, False, False) else None


def _describe(config: Config, inputs, need) -> Described:
    refused = []  # no room, or an error that the call without gradients has as well
    if factor_of(config, need) is not None:
        for way in _ways_to_wait(config, inputs, need):
            try:
                return Described(_unweighted(config), inputs, need, waits=way)
            except UsageError as error:
                refused.append(error)
    return _describe_late(config, inputs, need, refused)


def _describe_late(config: Config, inputs, need, refused) -> Described:
    """Without gradients: they are formed when backward comes."""
    try:
        require_room(config, inputs, need)
        return Described(with_states(config, inputs), inputs, NO_GRADIENT)
    except UsageError as error:
        raise min((error, *refused), key=lambda e: least_of(e) or math.inf) from None


@lru_cache(maxsize=1024)
def gradients_only(config: Config) -> Config:
    """The backward call: no outputs but gradients."""
    return Config(**{**config.__dict__, "outputs": (), "top_k": 0})


def require_room(config: Config, inputs, need, given=None) -> None:
    """A limit in bytes that the backward call on this host could not keep is an error of forward."""
    if config.workspace_limit_bytes == _abi.AUTO or config.group or not inputs[0].is_cpu:
        return
    if not any(need) and given is None:
        return
    inputs = (*inputs, *(None,) * (_c.INPUT_NAMES.index("upstream") - len(inputs)))
    key, _, bits = _key_of(config, inputs, (need, given is None, "room"))
    if kept_under(key, bits) is not None:
        return
    rows = inputs[0].new_empty(inputs[0].shape[:1], dtype=wide(inputs[0]))
    upstream = [rows if name in config.outputs else None for name in ("lse", "entropy")]
    loss = rows if config.reduction == "none" else rows.new_empty(())
    upstream = (None if inputs[3] is inputs[8] is None else loss, *upstream)
    late = gradients_only(config)
    keep(key, bits, Described(late, (*inputs, *upstream), need, given, given is not None))


_MOST_WAYS = 3  # of _ways_to_wait(): the last alone depends on a rank's shard


class _Ways:
    """All the ways in which this rank can make a call: ranks go one way, so that each has as many
    exchanges as the others, whatever its shard has room for."""

    def __init__(self, *call) -> None:
        self._late, self._early, self._refused = None, [None] * _MOST_WAYS, []
        config, inputs, need = call
        if factor_of(config, need) is not None:
            for i, way in enumerate(_ways_to_wait(config, inputs, need)):
                try:
                    self._early[i] = Described(_unweighted(config), inputs, need, waits=way)
                except UsageError as error:
                    self._refused.append(error)
        known = [d for d in self._early if d is not None] or [self.at(None, *call)]
        self.ranks = known[0].ranks

    def fits(self) -> list[bool]:
        return [d is not None for d in self._early]

    def at(self, way: int | None, *call) -> Described:
        if way is None and self._late is None:
            self._late = _describe_late(*call, self._refused)
        found = self._late if way is None else self._early[way]
        if found is None:  # agreed on for tensors that lay otherwise
            raise self._refused[-1]
        return found


def _unweighted(config: Config) -> Config:
    """Of a target's log-probability: the gradient of its negative, the plain loss."""
    if config.reduction != "none" or config.outputs != ("target_logprob",):
        return config
    return Config(**{**config.__dict__, "outputs": ("loss", "target_logprob")})


def _ways_to_wait(config: Config, inputs, need):
    """(gradients in fp32, rests that are kept), those that take the least first."""
    x, w = inputs[:2]
    rests = ("dx_rest",) if need[0] and x.dtype == torch.bfloat16 and x.is_cuda else ()
    if not need[1] or w.element_size() >= 4:
        ways = [()]
    elif w.dtype == torch.bfloat16 and w.is_cuda:
        ways = [("dw_rest",) if config.dw_sum == "fp32" else ()]
    else:
        ways = []
    for kept in ways:
        if rests:
            yield ("db",), (*kept, *rests)
        yield ("dx", "db"), kept
    if ways == [()]:
        return
    # Of few rows on a device all waits for memory: large fp32 sums take more of it than a product.
    if x.is_cuda and x.shape[0] <= _FEW_ROWS and 2 * w.numel() > _SMALL_BYTES:
        return
    room = max(2 * x.shape[0] * w.shape[0], _SMALL_BYTES)
    if config.workspace_limit_bytes != _abi.AUTO or 2 * w.numel() <= room:
        yield ("dx", "dw", "db"), ()


def with_states(config: Config, inputs) -> Config:
    """Row states cost the forward call nothing, and save backward a product."""
    if not inputs[0].is_cuda or inputs[3] is None or config.group:
        return config
    return _and_states(config)


@lru_cache(maxsize=1024)
def _and_states(config: Config) -> Config:
    outputs = (*config.outputs, *(n for n in PER_TOKEN[:2] if n not in config.outputs))
    return Config(**{**config.__dict__, "outputs": outputs})


class _LateCall:
    """The struct of talea_linear_cross_entropy_late(), filled once for a described call."""

    __slots__ = ("slots", "struct")

    def __init__(self, tensors: dict) -> None:
        self.struct = _c.Late()
        self.struct.struct_bytes = c.sizeof(self.struct)
        self.slots = [getattr(self.struct, name) for name in tensors]
        for slot, (name, tensor) in zip(self.slots, tensors.items(), strict=True):
            _fill(slot, tensor, name)

    def __call__(self, tensors, stream) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.data = tensor.data_ptr()
        self.struct.stream = stream
        _abi.check(_abi.lib.talea_linear_cross_entropy_late(c.byref(self.struct)))


_calls: dict = {}  # one entry a shape; its struct is filled and used under the interpreter's lock


def _late(tensors: dict, stream) -> _LateCall:
    key = tuple((n, t.shape, t.stride(), t.dtype, t.get_device()) for n, t in tensors.items())
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= 256:
            _calls.clear()
        call = _calls[key] = _LateCall(tensors)
    call(tensors.values(), stream)
    return call


def multiply_again(described: Described, kept: dict, factor: torch.Tensor, stream) -> bool:
    """What multiply() does, where it did so before for such a call; else False.

    Backward runs in a thread whose caches are cold: the less it does there, the better.
    """
    call, dtype = described.again
    if factor.dtype is not dtype or factor.dim() or factor.get_device() != described.device_index:
        return False
    call((factor, *kept.values()), stream)
    return True


def multiply(described, kept: dict, inputs, factor: torch.Tensor, stream=None) -> dict:
    """Every kept gradient times the factor, in the dtype of its input, rounded once.

    factor: a scalar, or a value a row where dx alone is kept. Scales in place: once.
    """
    made, tensors = {}, {"factor": factor}
    for name, like in zip(GRADIENTS, inputs[:3], strict=True):
        sums = kept.get(name)
        if sums is None:
            continue
        narrow = sums.dtype != like.dtype
        made[name] = (
            torch.empty(like.shape, dtype=like.dtype, device=like.device) if narrow else sums
        )
        if name == "db":
            continue
        tensors[name] = made[name]
        if narrow:
            tensors[f"{name}_sum"] = sums
    if not factor.is_cuda:
        return _multiply_on_host(kept, made, factor)
    tensors.update((n, kept[n]) for n in RESTS if n in kept)
    if "dx" in made or "dw" in made:
        call = _late(tensors, stream)
        in_place = all(made[n] is kept[n] for n in made) and "db" not in made
        if described is not None and not factor.dim() and in_place:
            described.again = call, factor.dtype  # in the order of what is kept
    if "db" in made:
        made["db"].copy_(kept["db"] * factor)
    return made


_PIECE_BYTES = 2 << 20


def _multiply_on_host(kept: dict, made: dict, factor) -> dict:
    """In place and by pieces: a second tensor of that size has no room in the workspace limit.

    What is kept is handed out once: where a 16-bit gradient is made of it, its memory goes back to
    the kernel as fast as the gradient's is touched.
    """
    value = factor.item() if factor.dim() == 0 else None
    finite = math.isfinite(value) if value is not None else bool(factor.isfinite().all())
    for name, to in made.items():
        sums, at = kept[name], 0
        rows = max(1, _PIECE_BYTES // max(sums[:1].nbytes, 1))
        for piece, out in zip(sums.split(rows), to.split(rows), strict=True):
            by = factor[at : at + rows, None].to(sums.dtype) if value is None else value
            at += rows
            if not finite:
                nothing = piece == 0  # an ignored row has no gradient
                piece.mul_(by).masked_fill_(nothing, 0)
            elif value != 1.0:
                piece.mul_(by)
            if sums is not to:
                out.copy_(piece)
                give_back(piece)
    return made


# ---- an upstream that was announced -------------------------------------------------------------

_constants: dict = {}
_flags: dict = {}


def announced(scale, hidden: torch.Tensor) -> torch.Tensor:
    """grad_scale as an fp32 scalar on the device of `hidden`."""
    if isinstance(scale, torch.Tensor):
        if scale.dim() or scale.dtype != torch.float32 or scale.device != hidden.device:
            raise UsageError(
                f"grad_scale: {scale.dtype} of shape {list(scale.shape)} on {scale.device}; an fp32 "
                f"scalar on {hidden.device} is needed"
            )
        return scale.detach()
    key = (number("grad_scale", scale), hidden.device)
    if key not in _constants:
        if not abs(key[0]) <= _MOST_FP32:
            raise UsageError(f"grad_scale = {scale}: must be finite, in fp32")
        if len(_constants) >= 256:
            _constants.clear()
        _constants[key] = torch.full((), key[0], dtype=torch.float32, device=hidden.device)
    return _constants[key]


def compare(expected: torch.Tensor, got: torch.Tensor, dx, stream=None) -> None:
    """Poisons dx and raises the fault where backward brought something else."""
    if dx is None:
        dx = torch.empty((0, 0), device=got.device)
    _late({"factor": got, "expected": expected, "dx": dx}, stream)
    address = _abi.lib.talea_fault_flag()
    if address not in _flags:
        _flags[address] = c.c_int32.from_address(address)


def require_clean() -> None:
    """Raises what backward has found wrong since: an upstream that was not grad_scale.

    Without a synchronisation: what a device has not run yet is not seen.
    """
    _abi.check(_abi.lib.talea_require_clean())


def report() -> None:
    """At the next call, where there is something to report."""
    for flag in _flags.values():
        if flag.value:
            require_clean()
