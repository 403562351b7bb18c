"""Integrations as people use them beside the plain call: copies, wrappers, tuples, retries, hooks."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import close
from talea.integrations import megatron
from talea.integrations import transformers as talea_hf
from talea.integrations import trl as talea_trl
from talea.integrations import verl as talea_verl
from test_integrations import PlainColumnParallel

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
IDS = torch.arange(24).remainder(7).mul(11).reshape(2, 12)
LABELS = IDS.masked_fill(IDS < 22, -100)


def _llama(**more):
    config = transformers.LlamaConfig(**SIZE, num_attention_heads=4, **more)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_tuple_where_a_tuple_is_asked_for():
    plain = _llama()
    fused = talea_hf.patch(copy.deepcopy(plain))
    ours = fused(input_ids=IDS, labels=LABELS, return_dict=False)
    assert type(ours) is tuple
    assert close(ours[0], plain(input_ids=IDS, labels=LABELS, return_dict=False)[0])


def test_the_ignore_index_of_a_call():
    plain, labels = _llama(), IDS.clone()
    fused = talea_hf.patch(copy.deepcopy(plain))
    for index in (-100, 0, 33):
        call = {"input_ids": IDS, "labels": labels, "ignore_index": index}
        assert close(fused(**call).loss, plain(**call).loss), index


def test_a_copy_answers_with_its_own_weights():
    """A reference model is a copy; its logits came from the first model's weights."""
    model = talea_hf.patch(_llama())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    want = talea_hf.unpatch(copy.deepcopy(other))
    assert torch.equal(other(input_ids=IDS).logits, want(input_ids=IDS).logits)
    call = {"input_ids": IDS, "labels": LABELS}
    assert close(other(**call).loss, want(**call).loss)
    assert not torch.equal(other(**call).loss, model(**call).loss)


def test_patch_again_and_undo_once():
    model = _llama()
    for _ in range(2):
        talea_hf.patch(model, workspace_limit=1 << 20)
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    assert talea_hf.unpatch(model)(input_ids=IDS, labels=LABELS).logits is not None
    assert "forward" not in model.__dict__


def test_a_penalty_is_no_disparity():
    plain = _llama()
    fused = talea_hf.patch(copy.deepcopy(plain), label_smoothing=0.1)
    hidden = plain.model(input_ids=IDS).last_hidden_state
    shifted = F.pad(LABELS, (0, 1), value=-100)[:, 1:].flatten()
    logits = plain.lm_head(hidden).flatten(0, 1)
    want = F.cross_entropy(logits, shifted, label_smoothing=0.1)
    assert close(fused(input_ids=IDS, labels=LABELS).loss, want)


def test_a_patch_that_fails_leaves_the_model():
    model = _llama()
    with pytest.raises(TypeError, match="smothing: no keyword"):
        talea_hf.patch(model, label_smothing=0.1)
    with pytest.raises(RuntimeError, match="lane = none"):
        talea_hf.patch(model, lane="none")
    assert "forward" not in model.__dict__
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        talea_hf.patch(model.model)


@pytest.mark.parametrize("targets", (["q_proj"], ["q_proj", "lm_head"]))
def test_peft_wraps_the_model(targets):
    import peft

    config = peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False)
    model = peft.get_peft_model(_llama(), config)
    call = {"input_ids": IDS, "labels": LABELS}
    want = model(**call).loss
    assert talea_hf.patch(model) is model
    out = model(**call)
    assert out.logits is None and close(out.loss, want)
    assert talea_hf.unpatch(model)(**call).logits is not None


def test_temperature_divides_a_bias_too():
    config = transformers.PhiConfig(**SIZE, num_attention_heads=4)
    model = transformers.PhiForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    mask = torch.ones_like(IDS)
    ours, entropy = talea_trl.completion_logps(model, IDS, mask, 5, temperature=0.7)
    logps = (model(input_ids=IDS).logits[:, :-1] / 0.7).log_softmax(-1)[:, -5:]
    assert close(ours, logps.gather(-1, IDS[:, -5:, None])[..., 0])
    assert close(entropy, -(logps.exp() * logps).sum(-1))
    with pytest.raises(ValueError, match="temperature = 0"):
        talea_trl.completion_logps(model, IDS, mask, 5, temperature=0)
    talea_trl.add_fused_lm_head(model, temperature=0.7)
    fused = model(input_ids=IDS, labels=IDS, fused_lm_head=True)
    assert close(fused.log_probs[:, -5:], ours)


def test_verl_takes_its_words_and_no_other_order():
    hidden, weight = torch.randn(3, 4, 8), torch.randn(11, 8)
    labels = torch.randint(0, 11, (3, 4))
    logps, _ = talea_verl.linear_cross_entropy(hidden, weight, labels, 0.5, "NONE")
    want = (hidden @ weight.t() / 0.5).log_softmax(-1).gather(-1, labels[..., None]).flatten()
    assert close(logps, want)
    mean, _ = talea_verl.linear_cross_entropy(hidden, weight, labels, 0.5, "Mean")
    assert close(mean, want.mean())
    with pytest.raises(ValueError, match=r"labels: shape \[4, 3\]"):
        talea_verl.linear_cross_entropy(hidden, weight, labels.t())
    with pytest.raises(ValueError, match="temperature = 0"):
        talea_verl.linear_cross_entropy(hidden, weight, labels, 0.0)


def _output_layer(**more):
    model = torch.nn.Module()
    model.output_layer = PlainColumnParallel(112, 24)
    for name, value in more.items():
        setattr(model.output_layer, name, value)
    return model


def _per_token(weight, hidden, labels):
    z = F.linear(hidden, weight[:101]).flatten(0, 1)
    return F.cross_entropy(z, labels.t().reshape(-1), reduction="none").view(labels.t().shape)


def test_megatron_shares_the_embeddings_weight():
    """With tied embeddings the layer has no weight; the model hands it in, call by call."""
    model = _output_layer()
    shared = torch.nn.Parameter(model.output_layer.weight.detach().clone())
    model.output_layer.weight = None
    with pytest.raises(RuntimeError, match="needs its model"):
        megatron.fuse_output_layer(model, vocab=101)
    assert type(model.output_layer) is PlainColumnParallel
    model.shared_embedding_or_output_weight = lambda: shared
    layer = megatron.fuse_output_layer(model, vocab=101).output_layer
    hidden, labels = torch.randn(6, 3, 24), torch.randint(0, 101, (3, 6))
    assert close(layer(hidden, shared, labels=labels), _per_token(shared, hidden, labels), 5e-6)


def test_megatron_calls_its_own_way():
    """As GPTModel of newer releases calls a LinearCrossEntropyModule: the loss as [b, s], or one."""
    layer = megatron.fuse_output_layer(_output_layer(), vocab=101).output_layer
    hidden, labels = torch.randn(6, 3, 24), torch.randint(0, 101, (3, 6))
    want = _per_token(layer.weight, hidden, labels).t()
    ours = layer(hidden, None, None, True, labels)
    assert ours.shape == (3, 6) and close(ours, want, 5e-6)
    labels[1, 2:] = 7
    kept = _per_token(layer.weight, hidden, labels).t()[labels != 7].mean()
    call = {"output_cross_entropy_loss": True, "reduction": "mean", "ignore_index": 7}
    assert close(layer(hidden, labels=labels, **call), kept, 5e-6)
    with pytest.raises(ValueError, match="needs labels"):
        layer(hidden, output_cross_entropy_loss=True)
    with pytest.raises(ValueError, match=r"shape \[6, 3\] where \[b, s\] = \[3, 6\]"):
        layer(hidden, labels=labels.t())


def test_megatron_swaps_before_main_grad_is_there():
    """The data-parallel wrapper makes main_grad later; a loss without gradients needs none."""
    model = _output_layer(gradient_accumulation_fusion=True)
    layer = megatron.fuse_output_layer(model, vocab=101).output_layer
    hidden, labels = torch.randn(6, 3, 24), torch.randint(0, 101, (3, 6))
    with pytest.raises(RuntimeError, match="main_grad is missing"):
        layer(hidden, labels=labels)


def test_megatron_data_parallelism_is_told():
    """Its hook waits for weight.grad, and adds it to main_grad unless told that it is there."""
    layer = megatron.fuse_output_layer(_output_layer(), vocab=101).output_layer
    weight, seen = layer.weight, []
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False

    def ready(*unused):
        assert weight.grad is not None
        seen.append(weight.grad_added_to_main_grad)
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(ready)
    layer.gradient_accumulation_fusion = True
    hidden, labels = torch.randn(6, 3, 24), torch.randint(0, 101, (3, 6))
    layer(hidden, labels=labels).sum().backward()
    want = torch.autograd.grad(_per_token(weight, hidden, labels).sum(), weight)[0]
    assert seen == [True] and close(weight.main_grad, want, 1e-5)
