"""The settings among the keywords of talea.linear_cross_entropy, checked, as a Config."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._abi import UsageError
from .._values import flag, number, shown, whole, word
from ._settings import DX_SUMS, WORDS, Config, limit_of, softcap_of


def _config(
    *, outputs, denominator, denominator_scope, ignore_index, vocab, label_smoothing, z_loss, softcap, logit_scale,
    workspace_limit, top_k, vocab_begin, sequence_parallel, group, batch_group, dx_sum, **options,
) -> Config:  # fmt: skip
    """options: words, and the name of a lane."""
    # A tensor would be found again by its identity, whatever it holds by then.
    for name, value in (
        ("denominator", denominator), ("label_smoothing", label_smoothing), ("z_loss", z_loss),
        ("softcap", softcap), ("logit_scale", logit_scale),
    ):  # fmt: skip
        if isinstance(value, torch.Tensor):
            raise UsageError(f"{name}: a tensor; a number is needed (float() waits for a device)")
    ignore_index = whole("ignore_index", -100 if ignore_index is None else ignore_index)
    vocab, vocab_begin = whole("vocab", vocab), whole("vocab_begin", vocab_begin)
    workspace_limit = limit_of(workspace_limit)
    if vocab_begin and not group:
        raise UsageError(
            f"vocab_begin = {vocab_begin}: needs tp_group, the ranks of the other rows"
        )
    sequence_parallel = sequence_parallel is not None and flag(
        "sequence_parallel", sequence_parallel
    )
    if sequence_parallel and not group:
        raise UsageError("sequence_parallel = True: needs tp_group, the ranks of the other tokens")
    given = not isinstance(denominator, str)
    for name, value in {"denominator_scope": denominator_scope, **options}.items():
        if name in WORDS:
            word(name, value, WORDS[name])
        elif not isinstance(value, str):
            raise UsageError(f"{name} = {shown(value)}: the name of a lane is needed")
    word("dx_sum", dx_sum, DX_SUMS)
    if dx_sum != "fp32" and not group:
        raise UsageError(f"dx_sum = {dx_sum!r}: needs tp_group, the ranks whose shares are summed")
    return Config(
        denominator="given" if given else denominator,
        denominator_value=number("denominator", denominator) if given else 0.0,
        ignore_index=ignore_index,
        vocab=vocab,
        label_smoothing=number("label_smoothing", label_smoothing),
        z_loss=number("z_loss", z_loss),
        softcap=softcap_of(softcap),
        logit_scale=number("logit_scale", logit_scale),
        workspace_limit_bytes=workspace_limit,
        outputs=outputs,
        top_k=top_k,
        vocab_begin=vocab_begin,
        sequence_parallel=sequence_parallel,
        group=group or "",
        batch_group=batch_group or "",
        dx_sum=dx_sum,
        denominator_scope=denominator_scope,
        **options,
    )


KEYWORDS = (
    "outputs", "group", "batch_group", "reduction", "denominator", "denominator_scope", "on_empty",
    "target_check", "ignore_index", "vocab", "label_smoothing", "z_loss", "softcap", "logit_scale",
    "workspace_limit", "lane", "top_k", "vocab_begin", "sequence_parallel", "dw_sum", "dx_sum",
)  # fmt: skip


def of_values(values: tuple) -> Config:
    return _config(**dict(zip(KEYWORDS, values, strict=True)))


# One object for equal settings: plans are found by it. A tuple is hashed faster than twenty names.
_kept = lru_cache(maxsize=512)(of_values)


def config_of(values: tuple) -> Config:
    try:
        hash(values)
    except TypeError:  # a list where a number is needed: said by its name
        return of_values(values)
    return _kept(values)
