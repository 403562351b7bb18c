"""The Python blocks of the pages that say how to come from another library: each is run as it stands."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"^## (?P<title>[^\n]*)|^```python\n(?P<code>.*?)^```", re.M | re.S)


def snippets(page: str):
    title = page
    for match in FENCE.finditer((DOCS / page).read_text()):
        if match["title"]:
            title, number = match["title"], 0
        else:
            number += 1
            yield pytest.param(match["code"], id=f"{title} {number}")


FOUND = list(snippets("coming_from.md"))


@pytest.fixture
def patched_libraries():
    """Undoes what a snippet patches, in every module that holds the name."""
    import trl.trainer.sft_trainer  # noqa: F401
    import verl.utils.kernel.linear_cross_entropy  # noqa: F401

    names = ("linear_cross_entropy", "add_fused_lm_head")
    before = [
        (module, name, vars(module)[name])
        for module in list(sys.modules.values())
        for name in names
        if module.__name__.split(".")[0] in ("trl", "verl") and name in vars(module)
    ]
    yield
    for module, name, value in before:
        setattr(module, name, value)


@pytest.mark.parametrize("code", FOUND)
def test_a_snippet_runs(code, patched_libraries):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    labels = torch.randint(0, 97, (2, 6))
    labels[0, :2] = -100
    names = {
        "hidden": torch.randn(2, 6, 32, requires_grad=True), "labels": labels,
        "lm_head": model.lm_head, "model": model,
    }  # fmt: skip
    exec(compile(code, "snippet", "exec"), names)
    if "loss" in names:
        assert torch.isfinite(names["loss"])


def test_the_page_has_snippets():
    assert len(FOUND) >= 11
