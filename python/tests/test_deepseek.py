"""Sparse attention inside a real model class: DeepSeek V3.2 of transformers, patched and not."""

import copy
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32Config"):
    pytest.skip(
        f"transformers {transformers.__version__} has no DeepSeek V3.2", allow_module_level=True
    )

import talea  # noqa: E402
from talea.integrations import deepseek  # noqa: E402

VOCAB = 97


def model_of(dtype=torch.float32, **more):
    """Small random weights; heads enough that no two scores of an indexer are equal."""
    torch.manual_seed(3)
    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=24, v_head_dim=20, index_n_heads=16, index_head_dim=32, index_topk=12, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, max_position_embeddings=256,
    )  # fmt: skip
    config = transformers.DeepseekV32Config(**(sizes | more))
    return transformers.DeepseekV32ForCausalLM(config).to(dtype).eval()


def glm():
    """Its indexer turns neighbours, and every second layer takes the selection of the one before."""
    torch.manual_seed(4)
    config = transformers.GlmMoeDsaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=24, v_head_dim=20, index_n_heads=16, index_head_dim=32, index_topk=12, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, max_position_embeddings=256,
        indexer_types=["full", "shared", "full", "shared"],
    )  # fmt: skip
    return transformers.GlmMoeDsaForCausalLM(config).eval()


def ids_of(batch=2, length=50):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(5))


def step(model, ids, **more):
    model.zero_grad()
    made = model(input_ids=ids, labels=ids, use_cache=False, **more)
    made.loss.backward()
    return made.logits.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def far(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def assert_near(found, right, most):
    (logits, grads), (plain, plain_grads) = found, right
    assert far(logits, plain) <= most
    assert grads.keys() == plain_grads.keys() and len(grads) > 20
    apart = {n: far(g, plain_grads[n]) for n, g in grads.items() if plain_grads[n].norm() > 0}
    assert all(gap <= most for gap in apart.values()), apart


@pytest.mark.parametrize("indexer", ["talea", "model"])
@pytest.mark.parametrize("length", [1, 12, 50, 131])
@pytest.mark.parametrize("made", [model_of, glm])
def test_forward_and_every_gradient(indexer, length, made):
    model, ids = made(), ids_of(length=length)
    right = step(model, ids)
    deepseek.patch(model, indexer=indexer)
    assert_near(step(model, ids), right, 3e-6)
    deepseek.unpatch(model)
    again = step(model, ids)
    assert torch.equal(again[0], right[0])


def test_sixteen_bits():
    """The two forms round elsewhere: both are beside the model in fp32."""
    model, ids = model_of(), ids_of()
    right, _ = step(model, ids)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    plain, _ = step(narrow, ids)
    deepseek.patch(narrow, indexer="model")
    ours, _ = step(narrow, ids)
    assert far(ours, right) <= 1.5 * far(plain, right) < 0.1


@pytest.mark.parametrize("indexer", ["talea", "model"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(indexer, attention, side):
    model, ids = model_of(attn_implementation=attention), ids_of(3, 40)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    mask = mask if side == "left" else mask.flip(1)
    right = model(input_ids=ids, attention_mask=mask).logits
    deepseek.patch(model, indexer=indexer)
    made = model(input_ids=ids, attention_mask=mask).logits
    for row in range(3):
        seen = mask[row].bool()
        assert far(made[row, seen], right[row, seen]) <= 3e-6


@pytest.mark.parametrize("made", [model_of, glm])
def test_generation_with_its_cache(made):
    model, ids = made(), ids_of(2, 20)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True,
           "return_dict_in_generate": True}  # fmt: skip
    right = model.generate(ids, **how)
    deepseek.patch(model)
    found = model.generate(ids, **how)
    assert torch.equal(found.sequences, right.sequences) and len(found.logits) == 12
    assert all(far(a, b) <= 3e-6 for a, b in zip(found.logits, right.logits, strict=True))


def test_nothing_meets_every_key(monkeypatch):
    model = deepseek.patch(model_of())
    module = sys.modules[type(model.model.layers[0].self_attn).__module__]

    def dense(*_, **__):
        raise AssertionError("attention over all keys")

    monkeypatch.setattr(module.ALL_ATTENTION_FUNCTIONS, "get_interface", dense)
    monkeypatch.setattr(module.DeepseekV32Attention, "expand_kv", dense)
    monkeypatch.setattr(module.DeepseekV32Indexer, "forward", dense)
    step(model, ids_of())


def test_the_host_waits_once_for_a_mask(monkeypatch):
    asked = []
    right = deepseek._span_of
    monkeypatch.setattr(deepseek, "_span_of", lambda seen: asked.append(1) or right(seen))
    model, ids = deepseek.patch(model_of(), check=False), ids_of()
    with torch.inference_mode():
        model(input_ids=ids)
    assert len(asked) == 1
    step(model, ids)
    assert len(asked) == 2  # of three layers


def test_a_copy_has_its_own_weights():
    model, ids = deepseek.patch(model_of()), ids_of()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.kv_b_proj.weight.zero_()
    assert not torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)


def test_options_reach_the_operator():
    model, ids = model_of(), ids_of()
    with pytest.raises(TypeError, match="workspace: no keyword"):
        deepseek.patch(model, workspace=3)
    with pytest.raises(talea.UnavailableError, match="sm90"):  # no host lane: the check says so
        deepseek.patch(model, lane="sm90")
    plain = model(input_ids=ids).logits
    deepseek.patch(deepseek.patch(model, lane="unfused"), workspace_limit=1, check=False)
    with pytest.raises(talea.UsageError, match="workspace_limit"):
        model(input_ids=ids)
    assert torch.equal(deepseek.unpatch(model)(input_ids=ids).logits, plain)


def test_a_mask_that_changes_is_asked_again():
    model, ids = model_of(), ids_of()
    mask = torch.ones(50, 50, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    given = {model.config.layer_types[0]: mask}
    deepseek.patch(model)
    model(input_ids=ids, attention_mask=given)
    mask[1, :, :, :9] = False
    made = model(input_ids=ids, attention_mask=given).logits
    right = deepseek.unpatch(model)(input_ids=ids, attention_mask=given).logits
    assert far(made[0], right[0]) <= 3e-6 and far(made[1, 9:], right[1, 9:]) <= 3e-6


class Adapter(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_refused():
    with pytest.raises(
        ValueError, match="Linear has no DeepseekV32Attention and no GlmMoeDsaAttention"
    ):
        deepseek.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="indexer='dense' is none of"):
        deepseek.patch(model_of(), indexer="dense")
    model = model_of()
    model.model.layers[1].self_attn.kv_b_proj = Adapter(32, 4 * 44, bias=False)
    with pytest.raises(ValueError, match="kv_b_proj is Adapter"):
        deepseek.patch(model)
    assert "forward" not in model.model.layers[0].self_attn.__dict__  # nothing half done
    model = deepseek.patch(model_of())
    model.config._attn_implementation = "flash-mla"
    with pytest.raises(ValueError, match="attn_implementation='flash-mla'"):
        model(input_ids=ids_of())
    model = deepseek.patch(model_of(attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match="attention_dropout = 0.1"):
        model(input_ids=ids_of())
    mask = torch.ones(2, 50, dtype=torch.int64)
    mask[:, 20] = 0
    model = deepseek.patch(model_of())
    with pytest.raises(ValueError, match="leaves out keys between others"):
        model(input_ids=ids_of(), attention_mask=mask)
    right = model_of()(input_ids=ids_of(), attention_mask=mask).logits
    deepseek.patch(model, indexer="model")
    assert far(model(input_ids=ids_of(), attention_mask=mask).logits, right) <= 3e-6


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sparse_attention", lambda right, *a, **k: right(*a, **{**k, "scale": 1.05 * k["scale"]})),
        ("_rotated", lambda right, q, k, c, s: right(q, k, c, -s)),
        ("_known", lambda right, chosen, seen: right(chosen, seen).roll(1, 1)),
        ("sparse_select", lambda right, q, *a, **k: right(-q, *a, **k)),
    ],
)
def test_a_wrong_layer_is_not_left_patched(monkeypatch, name, wrong):
    right = getattr(deepseek, name)
    monkeypatch.setattr(deepseek, name, lambda *a, **k: wrong(right, *a, **k))
    model, ids = model_of(), ids_of()
    plain = model(input_ids=ids).logits
    with pytest.raises(deepseek.ParityError, match="DeepseekV32ForCausalLM"):
        deepseek.patch(model)
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_checkpointing_has_the_same_bits():
    model, ids = deepseek.patch(model_of()), ids_of()
    right = step(model, ids)
    model.train()  # only then layers are checkpointed
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = step(model, ids)
    assert torch.equal(found[0], right[0])
    assert all(torch.equal(g, right[1][n]) for n, g in found[1].items())


def test_compiled():
    model, ids = deepseek.patch(model_of(), indexer="model"), ids_of()
    right = step(model, ids)
    layer = model.model.layers[0].self_attn
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    assert_near(step(model, ids), right, 3e-6)


def _sharded(rank):
    model, ids = model_of(), ids_of(4, 30)
    part = ids[2 * rank : 2 * rank + 2]
    right = step(model, ids)
    deepseek.patch(model)
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.zero_grad()
    model(input_ids=part, labels=part, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None and right[1][name].norm() > 0:
            assert far(p.grad.full_tensor(), right[1][name]) <= 3e-6, name


def test_sharded_parameters(tmp_path):
    """FSDP2 over two ranks, each with half of the batch, has the gradients of one."""
    ranks.spawn(_sharded, 2, tmp_path)
