"""The user's model, its hidden states on his text, and what its head does to the logits.

A folder with weights is loaded as it is; a config gets random weights. Never reaches the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .._abi import DataError, UsageError
from ..integrations import transformers as patching
from ..integrations._head import head_options, head_tensors, scaled_bias

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Head:
    """One head and what it is to be tried on. hidden [N, D], weight [V, D], labels [N]."""

    architecture: str
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None = None
    options: dict = field(default_factory=dict)  # softcap, logit_scale
    tied: bool = False
    notes: list[str] = field(default_factory=list)
    patch_errors: dict | None = None  # of the model's own forward, dense against fused
    declined: str = ""  # why patch() would not take this model


def load(source: str, device: str, dtype: str | None):
    """The model on the device, and where its weights come from."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"transformers is needed to load a model: {error}") from None
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{source}: no such folder or file (a local one is needed)")
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise DataError(f"{source}: no config.json in it")
    try:
        config = AutoConfig.from_pretrained(str(config_file), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{config_file}: not understood by transformers: {error}") from None
    wanted = DTYPES[dtype] if dtype else getattr(config, "dtype", None) or torch.float32
    weights = path.is_dir() and any((*path.glob("*.safetensors"), *path.glob("*.bin")))
    if weights:
        model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=wanted)
        origin = "weights of the folder"
    else:
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=wanted)
        except ValueError as error:
            raise DataError(f"{config_file}: no causal language model: {error}") from None
        origin = "random weights (seed 0)"
    return model.to(device).eval(), origin


def token_ids(source: str, text: str | None, tokens: int, vocab: int) -> tuple[torch.Tensor, str]:
    """[tokens + 1] ids of the text, and how they were made."""
    if text is None:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, vocab, (tokens + 1,), generator=generator), "random ids (no --text)"
    raw = Path(text).read_bytes()
    ids, how = None, ""
    if Path(source).is_dir() and any(Path(source).glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        ids = tokenizer(raw.decode("utf-8", "replace"))["input_ids"]
        how = f"{text} by the model's own tokenizer"
    else:
        ids = [b % vocab for b in raw]
        how = f"bytes of {text} (no tokenizer in the folder)"
    if len(ids) < 2:
        raise DataError(f"--text {text}: {len(ids)} tokens; at least 2 are needed")
    if len(ids) < tokens + 1:
        how += f", {len(ids) - 1} tokens in all"
    return torch.tensor(ids[: tokens + 1], dtype=torch.long), how


def take_head(source: str, model, origin: str, text: str | None, tokens: int) -> Head:
    """Hidden states of the text and the output layer; runs patch()'s own check on a copy of neither:
    the model is patched, compared and left as it was."""
    try:
        layer = patching._language_model(model).get_output_embeddings()
        weight, bias = head_tensors(layer)
    except (ValueError, AttributeError) as error:
        raise DataError(f"{type(model).__name__}: its head is not understood: {error}") from None
    vocab = model.config.get_text_config().vocab_size
    ids, how = token_ids(source, text, tokens, vocab)
    ids = ids.to(weight.device)
    with torch.no_grad():
        body = model.base_model(input_ids=ids[None, :-1], use_cache=False, return_dict=True)
    options = head_options(model.config)
    head = Head(
        architecture=type(model).__name__,
        hidden=body.last_hidden_state[0].detach().to(weight.dtype).contiguous(),
        weight=weight.detach(),
        bias=None if bias is None else scaled_bias(bias, options["logit_scale"]).detach(),
        labels=ids[1:],
        options=options,
        tied=model.get_input_embeddings().weight is layer.weight,
        notes=[origin, how],
    )
    if weight.shape[0] != vocab:
        head.notes.append(f"weight has {weight.shape[0]} rows for a vocabulary of {vocab}")
    try:
        patching.patch(model, check=False)
        head.patch_errors = patching.check_parity(model)
    except (ValueError, patching.ParityError) as error:
        head.declined = str(error)
    finally:
        if "_talea_original_forward" in patching._language_model(model).__dict__:
            patching.unpatch(model)
    return head
