"""Each integration against the real package. A package that cannot be had is an error, not a skip:
the packages are listed in tests/requirements.txt and requirements-nodeps.txt. Liger's kernels run on
the GPU, or on the CPU under Triton's interpreter (conftest)."""

import inspect

import pytest
import ranks
import talea
import torch
import torch.nn.functional as F
from conftest import DEVICES, close, gradients, problem
from talea.integrations import liger, megatron, verl
from talea.integrations import transformers as hf
from talea.integrations import trl as trl_integration

import transformers  # isort: skip

TINY = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def model_of(name):
    config = {
        "llama": lambda: transformers.LlamaConfig(**TINY),
        "llama_padded": lambda: transformers.LlamaConfig(**TINY),
        "llama_tied": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        "llama_tied_padded": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        "gemma2": lambda: transformers.Gemma2Config(
            **TINY, head_dim=8, final_logit_softcapping=3.0, query_pre_attn_scalar=8
        ),
        "cohere": lambda: transformers.CohereConfig(**TINY, logit_scale=0.3),
        "granite": lambda: transformers.GraniteConfig(**TINY, logits_scaling=2.5),
    }[name]()
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if name.endswith("_padded"):
        model.resize_token_embeddings(pad_to_multiple_of=64)
        assert model.get_output_embeddings().weight.shape[0] == 128
    return model


def batch():
    ids = torch.randint(0, 97, (2, 12))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


MODELS = ("llama", "llama_padded", "llama_tied", "llama_tied_padded", "gemma2", "cohere", "granite")


@pytest.mark.parametrize("name", MODELS)
def test_transformers(name):
    model = model_of(name).train()
    ids, labels = batch()
    dense = model(input_ids=ids, labels=labels)
    dense.loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    hf.patch(model)
    fused = model(input_ids=ids, labels=labels)
    assert fused.logits is None
    assert close(fused.loss, dense.loss, 1e-5)
    fused.loss.backward()
    for n, p in model.named_parameters():
        assert close(p.grad, want[n], 1e-4), n
    items = torch.tensor(7)
    a = model(input_ids=ids, labels=labels, num_items_in_batch=items).loss
    hf.unpatch(model)
    b = model(input_ids=ids, labels=labels, num_items_in_batch=items).loss
    assert close(a, b, 1e-5)


def test_transformers_patch_catches_unknown_logits():
    model = model_of("llama")

    class Odd(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1.5

    model.lm_head.__class__ = Odd
    with pytest.raises(hf.ParityError, match="loss differs"):
        hf.patch(model)
    ids, labels = batch()
    assert model(input_ids=ids, labels=labels).logits is not None


def test_lora_on_the_head():
    import peft

    config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(model_of("llama"), config)
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.lora_B["default"].weight, std=0.1)
    ids, labels = batch()
    dense = model(input_ids=ids, labels=labels).loss
    dense.backward()
    want = head.lora_A["default"].weight.grad.clone()
    model.zero_grad()
    hf.patch(model.base_model.model)
    fused = model(input_ids=ids, labels=labels).loss
    fused.backward()
    assert close(fused, dense, 1e-5)
    assert close(head.lora_A["default"].weight.grad, want, 1e-4)


def test_trl_fused_head():
    from trl.trainer.utils import add_fused_lm_head

    theirs_signature = inspect.signature(add_fused_lm_head).parameters
    ours_signature = inspect.signature(trl_integration.add_fused_lm_head).parameters
    assert [n for n in theirs_signature if n not in ours_signature] == []
    ids, labels = batch()
    for temperature in (1.0, 0.7):
        for name in ("llama", "gemma2"):
            theirs, ours = model_of(name).train(), model_of(name).train()
            add_fused_lm_head(theirs, temperature, outputs=("log_probs", "entropy"))
            trl_integration.add_fused_lm_head(ours, temperature, outputs=("log_probs", "entropy"))
            a = theirs(input_ids=ids, labels=labels, fused_lm_head=True)
            b = ours(input_ids=ids, labels=labels, fused_lm_head=True)
            for field in ("loss", "log_probs", "entropy"):
                assert close(getattr(b, field), getattr(a, field), 2e-5), (name, field)
            up = torch.randn_like(a.log_probs)
            for out in (a, b):
                ((out.log_probs * up).sum() + (out.entropy * up.abs()).sum()).backward()
            for (n, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
                assert close(q.grad, p.grad, 2e-4), (name, n)


def _trained_by_sft(folder):
    """Parameters after three steps of TRL's own trainer on a tiny model."""
    import datasets
    import tokenizers
    import trl

    words = {f"w{i}": i for i in range(97)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        eos_token="w0", pad_token="w0",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in range(6, 18)]
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to="none",
        gradient_accumulation_steps=2, learning_rate=1e-2, save_strategy="no", seed=1,
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model_of("llama"), args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, [p.detach().clone() for p in trainer.model.parameters()]


def test_trl_sft_trainer(tmp_path, monkeypatch):
    """The trainer itself, with and without Talea: losses and parameters after three updates."""
    import trl.trainer.sft_trainer as sft
    import trl.trainer.utils as utils

    want_losses, want = _trained_by_sft(tmp_path / "theirs")
    calls = []

    def counted(*arguments, **options):
        calls.append(options["reduction"])
        return talea.linear_cross_entropy(*arguments, **options)

    monkeypatch.setattr(trl_integration, "linear_cross_entropy", counted)
    monkeypatch.setattr(sft, "add_fused_lm_head", sft.add_fused_lm_head)  # put back at the end
    monkeypatch.setattr(utils, "add_fused_lm_head", utils.add_fused_lm_head)
    trl_integration.patch()
    losses, found = _trained_by_sft(tmp_path / "ours")
    assert len(calls) == 6  # three updates of two micro-batches
    assert len(losses) == len(want_losses) == 3
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(losses, want_losses, strict=True))
    for a, b in zip(found, want, strict=True):
        assert close(a, b, 1e-3)


def _parameters(function):
    return [(n, p.default) for n, p in inspect.signature(function).parameters.items()]


def test_liger_signature():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Theirs

    ours = liger.LigerFusedLinearCrossEntropyLoss
    assert _parameters(ours.__init__) == _parameters(Theirs.__init__)
    assert _parameters(ours.forward) == _parameters(Theirs.forward)


LIGER = {
    "plain": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "z": {"lse_square_scale": 1e-3, "return_z_loss": True},
    "z, sum": {"lse_square_scale": 1e-3, "return_z_loss": True, "reduction": "sum"},
    "z, none": {"lse_square_scale": 1e-3, "return_z_loss": True, "reduction": "none"},
    "weights": {"ce_weight": True},
    "weights, sum": {"ce_weight": True, "reduction": "sum"},
    "other index": {"ignore_index": 5},
    "tokens": {"use_token_scaling": True},
    "accuracy": {"return_token_accuracy": True, "return_predicted_tokens": True},
    "softcap": {"softcap": 5.0, "lse_square_scale": 1e-3},
}


@pytest.mark.parametrize("name", LIGER)
def test_liger_numbers(name):
    """Liger's own class and ours: loss, gradients and outputs. Two options need it on a GPU."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Theirs

    device, options = DEVICES[-1], dict(LIGER[name])
    x, w, y, b = problem(device=device, bias=True)
    y[::7] = -100
    if options.pop("ce_weight", None):
        options["ce_weight"] = torch.rand(w.shape[0], device=device) + 0.5
    if options.get("ignore_index"):
        y[::7] = options["ignore_index"]
    ours = liger.LigerFusedLinearCrossEntropyLoss(**options)(w, x, y, b)
    if device == "cpu" and ("softcap" in options or "ce_weight" in options):
        # Triton's interpreter hands these two to Liger's kernel as Python floats: it fails there.
        theirs = _liger_formula(x, w, y, b, **options)
    else:
        theirs = Theirs(**options)(w, x, y, b)
    for field in ("z_loss", "token_accuracy", "predicted_tokens"):
        mine, other = (getattr(out, field, None) for out in (ours, theirs))
        assert (mine is None) == (other is None), field
        if other is not None:
            valid = y != -100 if field == "predicted_tokens" else ...
            assert close(mine[valid].double(), other[valid].double(), 5e-6), field
    mine, other = (getattr(out, "loss", out) for out in (ours, theirs))
    assert close(mine, other, 5e-6)
    upstream = torch.rand_like(mine)
    found = torch.autograd.grad(mine, (x, w, b), upstream)
    want = torch.autograd.grad(other, (x, w, b), upstream)
    for a, c in zip(found, want, strict=True):
        assert close(a, c, 2e-5)


def _liger_formula(x, w, y, b, softcap=None, lse_square_scale=0.0, ce_weight=None, **options):
    z = F.linear(x, w, b)
    z = softcap * torch.tanh(z / softcap) if softcap else z
    penalty = lse_square_scale * (torch.logsumexp(z, -1)[y != -100] ** 2).mean()
    return F.cross_entropy(z, y, weight=ce_weight, **options) + penalty


def test_verl_pair():
    x, w, y, _ = problem()
    logp, entropy = verl.linear_cross_entropy(x, w, y, 0.7, "none", None)
    z = (F.linear(x, w) / 0.7).log_softmax(-1)
    want = z.gather(1, y[:, None])[:, 0]
    assert close(logp, want, 5e-6)
    assert close(entropy, -(z.exp() * z).sum(-1), 5e-6)
    up = torch.randn_like(want)
    ours = (logp * up).sum() + (entropy * up.abs()).sum()
    theirs = (want * up).sum() + (-(z.exp() * z).sum(-1) * up.abs()).sum()
    for a, b in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(a, b, 1e-5)


def test_verl_own_signature_and_model_forward():
    """verl's own module, and its forward of a Hugging Face model through the replaced kernel."""
    import verl.utils.kernel.linear_cross_entropy as theirs
    from verl.models.transformers import dense_common

    names = list(inspect.signature(theirs.LinearCrossEntropy.forward).parameters)[1:]
    assert names == list(inspect.signature(verl.linear_cross_entropy).parameters)
    original = theirs.linear_cross_entropy
    verl.patch()
    try:
        assert theirs.linear_cross_entropy is verl.linear_cross_entropy
        model = model_of("llama")
        ids, _ = batch()
        out = dense_common.forward_with_triton_backend(
            model, input_ids=ids, temperature=0.7, return_dict=True, use_cache=False
        )
        z = (model(input_ids=ids).logits / 0.7).log_softmax(-1)
        want = z.gather(2, ids.roll(-1, 1)[..., None])[..., 0]
        assert close(out.log_probs.reshape(want.shape), want, 2e-5)
        assert close(out.entropy.reshape(want.shape), -(z.exp() * z).sum(-1), 2e-5)
    finally:
        theirs.linear_cross_entropy = original


MEGATRON = dict(tokens=6, batch=3, width=24, stored=112, vocab=101)


def _megatron_layer(**settings):
    """Megatron-Core's own ColumnParallelLinear, and the loss that Megatron computes from it."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        use_cpu_initialization=True, params_dtype=torch.float32, **settings,
    )  # fmt: skip
    model = torch.nn.Module()
    model.output_layer = ColumnParallelLinear(
        MEGATRON["width"], MEGATRON["stored"], config=config, bias=False,
        init_method=torch.nn.init.normal_,
    )  # fmt: skip
    return model


def _megatron_checks(rank, world):
    s, b, d, v = (MEGATRON[k] for k in ("tokens", "batch", "width", "vocab"))
    for sequence in (False, True) if world > 1 else (False,):
        model = _megatron_layer(sequence_parallel=sequence)
        plain_class = type(model.output_layer)
        megatron.fuse_output_layer(model, vocab=v)
        layer = model.output_layer
        assert isinstance(layer, plain_class) and type(layer) is not plain_class
        torch.manual_seed(5)
        whole = torch.randn(s, b, d)
        labels, mask = torch.randint(0, v, (b, s)), torch.rand(s, b)
        part = slice(rank * s // world, (rank + 1) * s // world) if sequence else slice(0, s)
        # Megatron's own collectives need CUDA: the dense side gathers the weight instead.
        shards = [torch.empty_like(layer.weight) for _ in range(world)]
        torch.distributed.all_gather(shards, layer.weight.detach())
        dense, full = whole.clone().requires_grad_(), torch.cat(shards).requires_grad_()
        logits = F.linear(dense, full)[..., :v].flatten(0, 1)
        want = F.cross_entropy(logits, labels.t().reshape(-1), reduction="none").view(s, b)
        (want * mask).sum().backward()
        rows = slice(rank * layer.weight.shape[0], (rank + 1) * layer.weight.shape[0])
        hidden = whole[part].clone().requires_grad_()
        loss = layer(hidden, labels=labels)
        (loss * mask).sum().backward()
        assert close(loss, want, 1e-5), (world, sequence)
        assert close(hidden.grad, dense.grad[part], 1e-5), (world, sequence)
        assert close(layer.weight.grad, full.grad[rows], 1e-5), (world, sequence)
        layer.gradient_accumulation_fusion = True
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        layer.weight.grad = None
        (layer(whole[part], labels=labels) * mask).sum().backward()
        assert layer.weight.grad is None
        assert close(layer.weight.main_grad, full.grad[rows], 1e-5), (world, sequence)


def _megatron_world(rank, world):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    _megatron_checks(rank, world)


@pytest.mark.parametrize("world", (1, 2))
def test_megatron_core(world, tmp_path):
    """Megatron-Core's own layer: swapped, checked, compared, with its own sequence parallelism."""
    ranks.spawn(_megatron_world, world, tmp_path, world)


class PlainColumnParallel(torch.nn.Module):
    """The attributes of megatron.core.tensor_parallel.ColumnParallelLinear that the mixin uses."""

    def __init__(self, rows, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, width) / width**0.5)
        self.bias, self.skip_bias_add = None, False
        self.sequence_parallel, self.gradient_accumulation_fusion = False, False
        self.tp_group = None

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return F.linear(input_, self.weight if weight is None else weight, self.bias), None


def test_megatron_swap():
    model = torch.nn.Module()
    model.output_layer = PlainColumnParallel(112, 24)
    megatron.fuse_output_layer(model, vocab=101)
    layer = model.output_layer
    hidden = torch.randn(6, 3, 24, requires_grad=True)
    labels = torch.randint(0, 101, (3, 6))
    loss = layer(hidden, labels=labels)
    z = F.linear(hidden, layer.weight[:101])
    want = F.cross_entropy(z.flatten(0, 1), labels.t().reshape(-1), reduction="none").view(6, 3)
    assert loss.shape == (6, 3) and close(loss, want, 5e-6)
    layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    mask = torch.rand(6, 3)
    (layer(hidden, labels=labels) * mask).sum().backward()
    dw = torch.autograd.grad((want * mask).sum(), layer.weight)[0]
    assert close(layer.weight.main_grad, dw, 1e-5)
    assert layer(hidden)[0].shape == (6, 3, 112)  # without labels: the plain layer


def test_megatron_swap_is_checked(monkeypatch):
    model = torch.nn.Module()
    model.output_layer = PlainColumnParallel(101, 24)
    wrong = lambda *a, **k: talea.linear_cross_entropy(*a, **{**k, "logit_scale": 1.2})  # noqa: E731
    monkeypatch.setattr(megatron, "linear_cross_entropy", wrong)
    with pytest.raises(RuntimeError, match="swap"):
        megatron.fuse_output_layer(model)
    assert type(model.output_layer) is PlainColumnParallel
