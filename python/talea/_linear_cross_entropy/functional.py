"""talea.linear_cross_entropy: torch.nn.functional.linear_cross_entropy's signature, and more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from .._abi import DataError, Error, UsageError
from .._values import flag, group_name, whole, words
from . import _again, _late, _operator, _tensors
from ._keywords import config_of, of_values
from ._settings import Config

_MOST_TOP_K = 32
OUTPUTS = tuple(n for n in _tensors.RESULTS if not n.startswith("topk"))  # those come with top_k


@dataclass
class LinearCrossEntropyOutput:
    """The loss and what was asked for beside it; per-token tensors are shaped as the targets."""

    loss: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    target_logprob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    accuracy: torch.Tensor | None = None
    topk_values: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    _receipts: list | None = field(default=None, repr=False)
    _gathered: str | None = field(default=None, repr=False)

    def receipt(self) -> dict:
        """What ran in the forward call, what declined and why, and what it cost.

        backward: the same of every call that backward has made since; "products" counts those of
        all calls, in products of the size of the logits'. gathered: beside a DTensor whose ranks
        have tokens of their own, whether "hidden" or "weight" was sent.
        """
        if not self._receipts:
            raise RuntimeError("receipt: not available inside a compiled graph")
        facts, *later = (r.facts() for r in self._receipts)
        products = facts["products"] + sum(f["products"] for f in later)
        moved = {} if self._gathered is None else {"gathered": self._gathered}
        return {**facts, **moved, "products": products, "backward": later}


def _autocast(device: str, *tensors):
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else t
        for t in tensors
    )  # fmt: skip


_LOSS = ("loss",)


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor | None,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    token_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | torch.Tensor = 1.0,
    soft_target_ids: torch.Tensor | None = None,
    vocab: int = 0,
    denominator: str | float = "valid",
    denominator_scope: str = "local",
    on_empty: str = "nan",
    outputs: tuple[str, ...] | None = None,
    top_k: int = 0,
    main_grad: torch.Tensor | None = None,
    tp_group=None,
    batch_group=None,
    vocab_begin: int = 0,
    sequence_parallel: bool | None = None,
    dx_sum: str = "fp32",
    workspace_limit: int | str = "auto",
    grad_scale: float | torch.Tensor | None = None,
    dw_sum: str = "fp32",
    target_check: str = "automatic",
    lane: str = "auto",
):
    """Cross-entropy of linear(input, linear_weight, linear_bias), the logits never in memory.

    input [..., D]; linear_weight [V, D]; target [...] class ids, or probabilities [..., V], or with
    soft_target_ids [..., k] the probabilities of those ids. The first eight arguments mean what
    they mean in torch.nn.functional.linear_cross_entropy; the rest: docs/python.md. Returns the
    loss, or a LinearCrossEntropyOutput when `outputs` names anything ("loss", "lse",
    "target_logprob", "entropy", "argmax", "accuracy") or top_k > 0.

    main_grad: fp32 [V, D]; the weight's gradient is added into it; the weight gets none. With
    grad_scale, the gradient of the loss that backward will bring, forward adds it: a product less.

    linear_weight may be a DTensor cut by Shard(0): this rank's shard of the vocabulary, its group
    and place from the mesh; docs/frameworks.md.

    workspace_limit: bytes, kept; "auto": the smallest room whose plan is within 3 % of the fastest.
    """
    if _late._flags:
        _late.report()
    # Before anything else: a call like one before, with nothing but its three tensors.
    compiling = torch.compiler.is_compiling()
    if compiling or type(top_k) is not int:
        top_k = whole("top_k", top_k)
    plain = outputs is None and top_k == 0
    alone = (
        linear_bias is weight is token_weight is soft_target_ids is main_grad is grad_scale is None
        and tp_group is batch_group is None and plain and type(logit_scale) is float
    )  # fmt: skip
    if alone and not compiling:
        settings = (  # as KEYWORDS names them
            _LOSS, "", "", reduction, denominator, denominator_scope, on_empty, target_check,
            ignore_index, vocab, label_smoothing, z_loss, softcap, logit_scale, workspace_limit,
            lane, 0, vocab_begin, sequence_parallel, dw_sum, dx_sum,
        )  # fmt: skip
        try:
            found = _again.find(settings, input, linear_weight, target)
        except Error as error:
            raise _renamed(error) from None
        except TypeError:
            config_of(settings)  # of what cannot be hashed it says the name
            raise
        if found is not None:
            return found
    if not compiling and not (tp_group is None and batch_group is None):
        from .. import _ranks

        if not _ranks.inside():
            given = {n: v for n, v in locals().items() if n in linear_cross_entropy.__kwdefaults__}
            with _ranks.Telling((tp_group, batch_group), input):
                return linear_cross_entropy(input, linear_weight, target, **given)
    if type(linear_weight).__name__ == "DTensor":
        from . import _dtensor

        given = {n: v for n, v in locals().items() if n in linear_cross_entropy.__kwdefaults__}
        return _dtensor.call(linear_cross_entropy, input, linear_weight, target, given)
    try:
        device = "cpu" if input.is_cpu else "cuda"  # of another, the call itself says so
        floating = target is not None and target.is_floating_point()
        nested = input.is_nested or (target is not None and target.is_nested)
    except AttributeError:
        raise DataError(
            f"input, target: {type(input).__name__}, {type(target).__name__} where tensors of torch "
            "are needed; talea.arrays takes NumPy's"
        ) from None
    if nested:
        _check_tensors(input=input, target=target)
    _check_tensors(
        linear_bias=linear_bias, weight=weight, token_weight=token_weight,
        soft_target_ids=soft_target_ids, main_grad=main_grad,
        logit_scale=logit_scale if isinstance(logit_scale, torch.Tensor) else None,
    )  # fmt: skip
    if main_grad is not None:
        _check_main_grad(main_grad, linear_weight)
    if torch.is_autocast_enabled(device):
        alone = False  # what is described is not what was given
        input, linear_weight, linear_bias = _autocast(device, input, linear_weight, linear_bias)
    targets = ids = probs = token_scale = None
    shares = _shares_of_tokens(tp_group, sequence_parallel)
    if input.dim() == 2:
        hidden, leading = input, None
    elif input.dim() == 0:
        raise DataError("input: shape []; [..., D] is needed")
    else:
        hidden, leading = input.reshape(-1, input.shape[-1]), input.shape[:-1]
        if shares > 1:  # of all ranks' tokens, in rank order
            leading = torch.Size((shares * input.shape[0], *input.shape[1:-1]))
    tokens = shares * hidden.shape[0]
    whole_rows = (tokens,) if leading is None else leading
    if target is None:
        pass
    elif target.layout != torch.strided:
        _check_tensors(target=target)
    elif floating and target.dim() == 0:
        raise DataError("target: shape []; [...] ids or [..., V] probabilities are needed")
    elif floating:
        if target.dim() > 2:
            leading = _alike("target", target.shape[:-1], leading)
        probs = target.reshape(-1, target.shape[-1]).to(_tensors.wide(hidden))
        if soft_target_ids is not None:
            _alike("soft_target_ids", soft_target_ids.shape, target.shape)
            ids = soft_target_ids.reshape(-1, soft_target_ids.shape[-1])
    elif target.dim() == 1:
        targets = target
    else:
        leading = _alike("target", target.shape, leading)
        targets = target.reshape(-1)
    if isinstance(logit_scale, torch.Tensor):
        token_scale, logit_scale = _per_token("logit_scale", logit_scale, leading, tokens), 1.0
    if not 0 <= top_k <= _MOST_TOP_K:
        raise UsageError(f"top_k = {top_k}: must lie in [0, {_MOST_TOP_K}]")
    settings = (  # as KEYWORDS names them
        _LOSS if outputs is None else words("outputs", outputs, OUTPUTS),
        group_name("tp_group", tp_group), group_name("batch_group", batch_group), reduction, denominator, denominator_scope, on_empty,
        target_check, ignore_index, vocab, label_smoothing, z_loss, softcap, logit_scale,
        workspace_limit, lane, top_k, vocab_begin, sequence_parallel, dw_sum, dx_sum,
    )  # fmt: skip
    config = of_values(settings) if compiling else config_of(settings)
    if batch_group is None and denominator_scope == "global":
        _check_scope(settings[1])
    if token_weight is not None:
        token_weight = _per_token("token_weight", token_weight, leading, tokens)
    if weight is not None:
        weight = _widened(weight)
    rest = (targets, weight, token_weight, token_scale, ids, probs)
    plain_rest = weight is token_weight is token_scale is ids is probs is None
    if not plain_rest and torch.is_grad_enabled():
        _refuse_gradients(weight, token_weight, token_scale, probs)
    extras = _operator.NO_EXTRAS
    if not plain or main_grad is not None or grad_scale is not None:
        receipts = None if plain or compiling else []
        extras = _operator.Extras(main_grad, grad_scale, receipts)
    if compiling:
        from . import _compiled

        found = _compiled.apply(config, (hidden, linear_weight, linear_bias, *rest), extras)
    else:
        if plain_rest:
            rest = (targets,)  # what is not there costs time, too
        try:
            found = _operator.apply(config, hidden, linear_weight, linear_bias, rest, extras)
        except Error as error:
            raise _renamed(error) from None
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            tensors = (input, linear_weight, linear_bias, target, main_grad)
            said = _explained(tensors)
            if said is None:
                raise
            raise said from error
        if alone and targets is not None:
            _again.remember(settings, config, input, linear_weight, target, (hidden, targets))
    if plain and reduction != "none":
        return found[0]
    rows = whole_rows if targets is None else target.shape
    return found[0].reshape(rows) if plain else _output(config, found, rows, extras.receipts)


def _check_main_grad(main_grad, weight: torch.Tensor) -> None:
    """Backward alone writes it; what does not fit is said before."""
    wide = main_grad.dtype in (torch.float32, torch.float64)
    if not wide or main_grad.shape != weight.shape:
        raise DataError(
            f"main_grad: {main_grad.dtype} {list(main_grad.shape)} where float32 "
            f"{list(weight.shape)}, as linear_weight, is needed"
        )


def _shares_of_tokens(tp_group, sequence_parallel) -> int:
    """Of how many ranks' tokens a call is, of which this one has its share."""
    if tp_group is None or sequence_parallel is None:
        return 1
    if not flag("sequence_parallel", sequence_parallel):
        return 1
    from ._ranks import size_of

    return size_of(group_name("tp_group", tp_group))


def _check_scope(tp_group: str) -> None:
    """Without a group `global` is this call alone, which among ranks with tokens of their own is wrong."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from ._ranks import size_of

    world = torch.distributed.get_world_size()
    if world > (size_of(tp_group) if tp_group else 1):
        raise UsageError(
            f"denominator_scope = 'global': needs batch_group, the ranks of this world of {world} that "
            "share the batch"
        )


def _alike(name: str, shape, leading):
    """Tokens stand in the same places everywhere: [S, B] beside [B, S] has as many, and is wrong."""
    if leading is not None and len(leading) > 1 and len(shape) > 1 and shape != leading:
        raise DataError(f"{name}: shape {list(shape)} beside {list(leading)} of the tokens")
    return shape if leading is None or len(leading) < 2 else leading


def _per_token(name: str, t: torch.Tensor, leading, tokens: int) -> torch.Tensor:
    """A value a token, or one for all."""
    t = _widened(t)
    if t.dim() == 1:
        return t
    if t.dim() == 0:
        return t.expand(tokens)
    _alike(name, t.shape, leading)
    return t.reshape(-1)


def _widened(t: torch.Tensor) -> torch.Tensor:
    """16-bit weights as fp32, exactly: beside 16-bit logits PyTorch wants them in 16 bits."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _refuse_gradients(weight, token_weight, logit_scale, target) -> None:
    """No gradient is formed for these: better said than left out."""
    for name, t in (
        ("weight", weight), ("token_weight", token_weight), ("logit_scale", logit_scale),
        ("target", target),
    ):  # fmt: skip
        if t is not None and t.requires_grad:
            raise UsageError(f"{name}: requires grad, and gets none here; pass {name}.detach()")


# What the C interface calls the arguments of linear_cross_entropy, whose `weight` is of the classes.
_NAMES = {
    "hidden": "input", "weight": "linear_weight", "bias": "linear_bias", "targets": "target",
    "class_weight": "weight", "token_scale": "logit_scale", "soft_target_probs": "target",
    "dw": "main_grad",
}  # fmt: skip
_NAMED = re.compile(rf"({'|'.join(_NAMES)})(?=[:\[])")


def _renamed(error: Error) -> Error:
    """By the arguments of this function, where the message begins with a tensor's name."""
    found = _NAMED.match(str(error))
    if found is None:
        return error
    return type(error)(_NAMES[found[1]] + str(error)[found.end() :])


def _check_tensors(**given) -> None:
    for name, t in given.items():
        said = None if t is None else _no_dense_tensor(name, t)
        if said is not None:
            raise said


def _no_dense_tensor(name: str, t) -> DataError | None:
    if not isinstance(t, torch.Tensor):
        return DataError(f"{name}: {type(t).__name__} where a tensor of torch is needed")
    if t.layout != torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        return DataError(f"{name}: {kind} is not supported; a dense tensor is")
    return None


_GIVEN = ("input", "linear_weight", "linear_bias", "target", "main_grad")


def _explained(tensors) -> DataError | None:
    """What PyTorch says of an argument that is no dense tensor does not name it."""
    for name, t in zip(_GIVEN, tensors, strict=True):
        said = _no_dense_tensor(name, t) if t is not None or name in _GIVEN[:2] else None
        if said is not None:
            return said
    return None


def _output(config: Config, found: tuple, rows, receipts) -> LinearCrossEntropyOutput:
    result = LinearCrossEntropyOutput(_receipts=receipts)
    scalars = ("accuracy",) if config.reduction == "none" else ("accuracy", "loss")
    found = iter(found)
    for name in _tensors.RESULTS:
        top = name[:4] == "topk" and config.top_k > 0
        if name not in config.outputs and not top:
            continue
        value = next(found)
        if name not in scalars:
            value = value.reshape(*rows, config.top_k) if top else value.reshape(rows)
        setattr(result, name, value)
    return result


class LinearCrossEntropy(torch.nn.Module):
    """An output layer and its loss: holds the weight (and bias), keeps the options.

    Every keyword of `linear_cross_entropy` that is not a tensor may be given here and becomes the
    default of forward().
    """

    def __init__(
        self, in_features: int, vocab: int, bias: bool = False, device=None, dtype=None, **options
    ) -> None:
        super().__init__()
        unknown = set(options) - set(linear_cross_entropy.__kwdefaults__)
        if unknown:
            raise UsageError(f"options: {', '.join(sorted(unknown))}: no such keyword")
        tensors = [n for n, value in options.items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise UsageError(f"options: {', '.join(tensors)}: a tensor; forward() takes those")
        in_features, vocab = whole("in_features", in_features, 1), whole("vocab", vocab, 1)
        like = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(vocab, in_features, **like))
        self.bias = torch.nn.Parameter(torch.empty(vocab, **like)) if bias else None
        self.options = options
        bound = in_features**-0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if bias:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor, target: torch.Tensor | None = None, **options):
        return linear_cross_entropy(
            input, self.weight, target, linear_bias=self.bias, **{**self.options, **options}
        )

    def extra_repr(self) -> str:
        v, d = self.weight.shape
        return f"in_features={d}, vocab={v}, bias={self.bias is not None}, {self.options}"
