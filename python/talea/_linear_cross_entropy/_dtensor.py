"""An output layer held as a DTensor: a rank's rows are its shard of the vocabulary.

One dimension of the mesh cuts the rows, and its group is the group of the exchanges. Hidden states
are whole on every rank, or each rank has its own tokens: then what is smaller is gathered, the
tokens or the weight's rows. The loss is one number, of all tokens, on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._abi import UsageError

HIDDEN, WEIGHT = "hidden", "weight"
_counted: dict = {}  # group and tokens a rank, compared once -> the group, so that no id comes back


def is_one(t) -> bool:
    return type(t).__name__ == "DTensor"


def _cut_by(name: str, t) -> tuple:
    """The one dimension of the mesh that cuts the tensor, and how; without one: (None, None)."""
    cuts = [
        (i, p) for i, p in enumerate(t.placements)
        if not p.is_replicate() and t.device_mesh.size(i) > 1
    ]  # fmt: skip
    whole = [i for i, p in enumerate(t.placements)
             if p.is_replicate() and t.device_mesh.size(i) > 1]  # fmt: skip
    if len(cuts) > 1 or (cuts and whole):
        raise UsageError(
            f"{name}: a DTensor over {t.device_mesh.ndim} dimensions of a mesh, {t.placements}; "
            "one that cuts it is taken: redistribute or pass the local tensor with tp_group"
        )
    return cuts[0] if cuts else (None, None)


def _begin(words: int, size: int, rank: int) -> int:
    """Where a rank's share begins: as torch.chunk cuts."""
    return min(rank * -(-words // size), words)


def _counts(words: int, size: int) -> list[int]:
    return [_begin(words, size, r + 1) - _begin(words, size, r) for r in range(size)]


def _same_count(count: int, device, group) -> list[int]:
    """Tokens of every rank, where each says its own: they must be as many.

    Asked once for each number on a device, so that a step waits for no host; on a host always.
    """
    size = dist.get_world_size(group)
    if device.type == "cpu" or (id(group), count) not in _counted:
        said = [None] * size
        dist.all_gather_object(said, count, group=group)
        if len(set(said)) > 1:
            raise UsageError(
                f"input: {said} tokens on the ranks; a plain tensor beside a DTensor has as many on "
                "each (a DTensor may be cut unevenly)"
            )
        _counted[id(group), count] = group
    return [count] * size


def _gathered(t: torch.Tensor, counts: list[int], group) -> torch.Tensor:
    """All ranks' rows in rank order."""
    most = max(counts)
    mine = t.contiguous()
    if len(mine) < most:
        mine = torch.cat((mine, mine.new_zeros(most - len(mine), *mine.shape[1:])))
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([p[:n] for p, n in zip(parts, counts, strict=True)])


class _Sum(torch.autograd.Function):
    """The sum of the ranks' shares of one number; each share's gradient is the sum's."""

    @staticmethod
    def forward(ctx, share, group):
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, up):
        return up, None


def call(operator, input, linear_weight, target, options: dict):
    """operator: linear_cross_entropy; options: all its keywords."""
    for name in ("tp_group", "batch_group", "vocab_begin"):
        if options[name]:
            raise UsageError(f"{name}: comes from the mesh of linear_weight, a DTensor")
    dim, placement = _cut_by("linear_weight", linear_weight)
    if dim is None:
        raise UsageError(
            "linear_weight: a DTensor that nothing cuts; pass linear_weight.to_local()"
        )
    if not placement.is_shard(0):
        raise UsageError(f"linear_weight: a DTensor placed {placement}; Shard(0) is needed")
    mesh = linear_weight.device_mesh
    group, size, rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
    hidden, counts, shape, cut = _tokens(input, linear_weight, dim, options, group)
    options = {**options, "sequence_parallel": counts is not None}
    bias = options["linear_bias"]
    if bias is not None and not (is_one(bias) and bias.placements == linear_weight.placements):
        raise UsageError("linear_bias: must be a DTensor cut as linear_weight is")
    words = linear_weight.shape[0]
    if counts is not None and _moves_weight(options, sum(counts), words):
        return _with_whole_weight(operator, hidden, linear_weight, target, options, group, cut)
    if counts is not None:
        target = _of_all(target, counts, shape, hidden, cut, group)
        for name in _per_token_arguments(options):
            options[name] = _of_all(options[name], counts, shape, hidden, cut, group)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if len(set(counts)) > 1:
            hidden, target = _evened(hidden, target, counts, options)
    options |= {"tp_group": group, "vocab": options["vocab"] or words,
                "vocab_begin": _begin(words, size, rank)}  # fmt: skip
    if bias is not None:
        options["linear_bias"] = bias.to_local()
    if is_one(target):
        target = target.to_local()
    found = operator(hidden, linear_weight.to_local(), target, **options)
    return found if counts is None else _of_tokens(_say(found, HIDDEN), counts)


def _tokens(input, linear_weight, dim, options, group) -> tuple:
    """Hidden states as this rank has them; where each rank has its own tokens, how many each has,
    the shape of them all, and the dimension that is cut."""
    told = options["sequence_parallel"]
    if not is_one(input):
        if told is None:
            raise UsageError(
                "input: a plain tensor beside linear_weight, a DTensor; say "
                "sequence_parallel=False where every rank has the same tokens, True where each has "
                "its own, or pass a DTensor"
            )
        if not told:
            return input, None, None, 0
        count = input.shape[:-1].numel()
        return input, _same_count(count, input.device, group), None, 0
    if input.device_mesh != linear_weight.device_mesh:
        raise UsageError("input: a DTensor of another mesh than linear_weight's")
    if told is not None:
        raise UsageError("sequence_parallel: the placement of input, a DTensor, says it")
    placement = input.placements[dim]
    _cut_by("input", input)
    if placement.is_replicate():
        return input.to_local(), None, None, 0
    cut = getattr(placement, "dim", None)
    if not placement.is_shard() or cut % input.ndim == input.ndim - 1:
        raise UsageError(
            f"input: a DTensor placed {placement}; Replicate, or Shard of a dimension of tokens"
        )
    size = linear_weight.device_mesh.size(dim)
    each = input.shape[:-1].numel() // max(1, input.shape[cut])
    counts = [n * each for n in _counts(input.shape[cut], size)]
    return input.to_local(), counts, input.shape[:-1], cut


def _moves_weight(options, tokens: int, words: int) -> bool:
    """A row of either is as long. A result a token is of all tokens, and needs them here."""
    names = options["outputs"]
    alone = options["top_k"] == 0 and (names is None or tuple(names) == ("loss",))
    free = options["main_grad"] is None and options["grad_scale"] is None
    return words < tokens and alone and free and options["reduction"] != "none"


def _per_token_arguments(options) -> list[str]:
    names = [n for n in ("token_weight", "soft_target_ids") if options[n] is not None]
    scale = options["logit_scale"]
    if isinstance(scale, torch.Tensor) and scale.dim() > 0:
        names.append("logit_scale")
    return names


def _of_all(t, counts, shape, hidden, cut, group):
    """Values a token, of all ranks' tokens in rank order: of mine, or of the whole batch as it is."""
    if t is None:
        return None
    if is_one(t):
        t = t.to_local()
    mine = hidden.shape[:-1]
    if t.shape[: len(mine)] == mine:
        return _gathered(t.reshape(mine.numel(), *t.shape[len(mine) :]), counts, group)
    if shape is not None and t.shape[: len(shape)] == shape:
        size = len(counts)
        parts = [t.narrow(cut, _begin(shape[cut], size, r), n)
                 for r, n in enumerate(_counts(shape[cut], size))]  # fmt: skip
        return torch.cat([p.reshape(-1, *t.shape[len(shape) :]) for p in parts])
    raise UsageError(
        f"target, or what is given a token: shape {list(t.shape)}; this rank has tokens "
        f"{list(mine)}" + ("" if shape is None else f", all have {list(shape)}")
    )


def _mine(t, hidden, cut, group):
    """Values of this rank's tokens, of mine or of the whole batch."""
    if t is None or is_one(t):
        return t if t is None else t.to_local()
    if t.shape[: hidden.dim() - 1] == hidden.shape[:-1]:
        return t
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return t.narrow(cut, _begin(t.shape[cut], size, rank), hidden.shape[cut])


def _evened(hidden, target, counts, options) -> tuple:
    """As many rows on every rank: ignored ones behind each rank's own."""
    if target is None or target.is_floating_point():
        raise UsageError(f"input: {counts} tokens on the ranks; with this target, as many on each")
    most = max(counts)
    hidden = torch.nn.functional.pad(hidden, (0, 0, 0, most - len(hidden)))
    ignored = -100 if options["ignore_index"] is None else options["ignore_index"]
    target = _spread(target, counts, ignored)
    for name in _per_token_arguments(options):
        options[name] = _spread(options[name], counts, 1)
    return hidden, target


def _spread(t, counts, filling):
    pad = torch.nn.functional.pad
    return torch.cat([pad(p, (0, max(counts) - len(p)), value=filling) for p in t.split(counts)])


def _of_tokens(result, counts):
    """Results a token without those of the rows that _evened added."""
    most = max(counts)
    if min(counts) == most:
        return result
    rows = [r * most + i for r, n in enumerate(counts) for i in range(n)]

    def picked(t):
        if t is None or t.dim() == 0:
            return t
        return t[torch.tensor(rows, device=t.device)]

    if isinstance(result, torch.Tensor):
        return picked(result)
    for name, value in list(vars(result).items()):
        if isinstance(value, torch.Tensor):
            setattr(result, name, picked(value))
    return result


def _with_whole_weight(operator, hidden, linear_weight, target, options, group, cut):
    from torch.distributed.tensor import Partial

    options = {**options, "sequence_parallel": False, "batch_group": group,
               "denominator_scope": "global"}  # fmt: skip
    share = [Partial()] * linear_weight.device_mesh.ndim
    if options["linear_bias"] is not None:
        options["linear_bias"] = options["linear_bias"].full_tensor(grad_placements=share)
    for name in _per_token_arguments(options):
        options[name] = _mine(options[name], hidden, cut, group)
    whole = linear_weight.full_tensor(grad_placements=share)
    found = operator(hidden, whole, _mine(target, hidden, cut, group), **options)
    if options["outputs"] is None:
        return _Sum.apply(found, group)
    found.loss = _Sum.apply(found.loss, group)
    return _say(found, WEIGHT)


def _say(found, what: str):
    if not isinstance(found, torch.Tensor):
        found._gathered = what
    return found
