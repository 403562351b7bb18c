"""python -m talea.prove on three architectures with random weights, and on what it cannot take."""

import json

import pytest
import torch
import transformers
from talea.prove.__main__ import main
from talea.prove.measure import Contender, distances
from talea.prove.model import Head

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(vocab_size=301, **SMALL),
    "gemma2 (softcap)": lambda: transformers.Gemma2Config(
        vocab_size=300, final_logit_softcapping=3.0, **SMALL
    ),
    "qwen2 (tied, padded)": lambda: transformers.Qwen2Config(
        vocab_size=320, tie_word_embeddings=True, **SMALL
    ),
}


def prove(tmp_path, config, *words) -> tuple[int, dict, str]:
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    receipt, page = tmp_path / "proof.json", tmp_path / "proof.html"
    status = main([str(folder), "--tokens", "24", "--seconds", "0", "--device", "cpu", "--quiet",
                   "--receipt", str(receipt), "--report", str(page), *words])  # fmt: skip
    return status, json.loads(receipt.read_text()), page.read_text()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_architecture_is_proved(tmp_path, name, dtype):
    status, receipt, page = prove(tmp_path, CONFIGS[name](), "--dtype", dtype)
    assert status == 0, receipt["notes"]
    assert receipt["verdict"] == "passed"
    assert {e["tensor"] for e in receipt["errors"]} == {"loss", "dx", "dw"}
    assert all(e["rel_l2"] <= e["tolerance"] for e in receipt["errors"])
    assert [r["name"] for r in receipt["bench"]["runs"]] == ["dense", "fused"]
    assert "http" not in page and "<script" not in page
    assert "random weights" in page and "patch(model)" in page


def test_text_and_weights_of_a_folder_are_used(tmp_path, capsys):
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]())
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("which words does this model know? " * 4)
    status, receipt, _ = prove(tmp_path, CONFIGS["llama"](), "--text", str(text))
    assert status == 0
    assert "weights of the folder" in receipt["notes"]
    assert any("bytes of" in note for note in receipt["notes"])
    assert "use it: from talea.integrations" in capsys.readouterr().out


def test_a_head_that_is_not_understood_is_said(tmp_path):
    """A model that does something else to its logits must not be recommended a patch line."""
    config = CONFIGS["llama"]()
    original = transformers.LlamaForCausalLM.forward

    def squared(self, *args, labels=None, **kwargs):
        out = original(self, *args, **kwargs)
        if labels is not None:
            out.loss = self.loss_function(out.logits**2, labels, self.config.vocab_size)
        return out

    transformers.LlamaForCausalLM.forward = squared
    try:
        status, receipt, page = prove(tmp_path, config)
    finally:
        transformers.LlamaForCausalLM.forward = original
    assert status == 1 and receipt["verdict"] == "failed"
    assert not receipt["gates"][0]["passed"]
    assert "does something to its logits" in page and "patch(model)" not in page


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda p: p / "nowhere", 2, "no such folder"),
        (lambda p: p, 5, "no config.json"),
        (lambda p: (p / "config.json").write_text('{"model_type": "none"}') and p, 5,
         "not understood"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, capsys, make, status, words):
    assert main([str(make(tmp_path)), "--device", "cpu", "--quiet"]) == status
    assert words in capsys.readouterr().err


def test_truth_is_the_gradient_of_fp64_autograd():
    torch.manual_seed(1)
    options = {"softcap": 2.0, "logit_scale": 0.5}
    head = Head("test", torch.randn(7, 5), torch.randn(9000, 5), torch.arange(7) * 1200,
                bias=torch.randn(9000), options=options)  # fmt: skip
    leaves = [t.double().requires_grad_() for t in (head.hidden, head.weight, head.bias)]
    z = 0.5 * leaves[0] @ leaves[1].T + leaves[2]
    loss = torch.nn.functional.cross_entropy(2 * torch.tanh(z / 2), head.labels)
    gradients = torch.autograd.grad(loss, leaves)
    found = Contender(
        "fp64", dict(zip(("loss", "dx", "dw", "db"), (loss, *gradients), strict=True))
    )
    marks = distances(head, [found])["fp64"]
    assert all(mark.relative < 1e-13 for mark in marks.values()), marks
    found.results["dw"] = found.results["dw"].clone()
    found.results["dw"][8999, 4] = float("nan")
    assert not distances(head, [found])["fp64"]["dw"].relative <= 1.0
