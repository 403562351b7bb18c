"""DeepSeek V3.2 and GLM MoE DSA of transformers on a GPU, patched and not. Skipped without one."""

import copy

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from test_deepseek import assert_near, deepseek, far, glm, ids_of, model_of, step  # noqa: E402

# What a checkpoint's layers have: 512 columns of the latent and 64 that are turned.
OF_A_CHECKPOINT = {
    "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "index_head_dim": 128, "index_topk": 256, "max_position_embeddings": 2048,
}  # fmt: skip


def on_device(made, **more):
    return made(**more).cuda()


@pytest.mark.parametrize("indexer", ["talea", "model"])
@pytest.mark.parametrize("made", [model_of, glm])
def test_forward_and_every_gradient_in_fp32(indexer, made):
    model, ids = on_device(made), ids_of(length=131).cuda()
    right = step(model, ids)
    assert_near(step(deepseek.patch(model, indexer=indexer), ids), right, 3e-6)


@pytest.mark.parametrize("lane", ["cuda", "sm90"])
def test_sixteen_bits_at_the_columns_of_a_checkpoint(lane):
    """The two forms round elsewhere: outputs and every gradient are beside the model in fp32, whose indexer chose
    the same keys."""
    if lane == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("lane sm90 is of compute capability 9.0")
    narrow = on_device(model_of, dtype=torch.bfloat16, **OF_A_CHECKPOINT)
    ids = ids_of(length=700).cuda()
    model = copy.deepcopy(narrow).float()  # the same weights
    plain, plain_grads = step(narrow, ids)
    deepseek.patch(narrow, indexer="model", lane=lane)
    ours, our_grads = step(narrow, ids)
    again, again_grads = step(narrow, ids)
    assert torch.equal(ours, again)
    assert all(torch.equal(g, again_grads[n]) for n, g in our_grads.items())
    right, grads = step(model, ids)
    assert far(ours, right) <= 1.5 * far(plain, right) < 0.3
    assert our_grads.keys() == plain_grads.keys() == grads.keys() and len(grads) > 20
    for name, g in grads.items():
        if g.norm() > 0:
            found, known = far(our_grads[name], g), far(plain_grads[name], g)
            assert found <= 1.5 * known, (name, found, known)


def test_both_indexers_choose_alike_at_the_columns_of_a_checkpoint():
    """In bf16 scores of two keys are seldom equal: nearly every key is chosen by both."""
    model, ids = (
        on_device(model_of, dtype=torch.bfloat16, **OF_A_CHECKPOINT),
        ids_of(length=700).cuda(),
    )
    made = [model(input_ids=ids).logits]
    for indexer in ("model", "talea"):
        made.append(deepseek.patch(model, indexer=indexer)(input_ids=ids).logits)
        deepseek.unpatch(model)
    assert far(made[2], made[0]) <= 1.5 * far(made[1], made[0]) + 0.02


@pytest.mark.parametrize("made", [model_of, glm])
def test_generation_with_its_cache(made):
    model, ids = on_device(made), ids_of(2, 20).cuda()
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True,
           "return_dict_in_generate": True}  # fmt: skip
    right = model.generate(ids, **how)
    found = deepseek.patch(model).generate(ids, **how)
    assert torch.equal(found.sequences, right.sequences) and len(found.logits) == 12
    assert all(far(a, b) <= 3e-6 for a, b in zip(found.logits, right.logits, strict=True))


def test_captured_in_a_graph():
    """A layer's pass with other tokens, replayed, has the bits of a call."""
    model = deepseek.patch(
        on_device(model_of, dtype=torch.bfloat16, **OF_A_CHECKPOINT), check=False
    )
    ids, others = ids_of(1, 300).cuda(), ids_of(2, 300)[1:].cuda()
    attention = model.model.layers[0].self_attn
    hidden = [model.model.embed_tokens(x).detach() for x in (ids, others)]
    position = torch.arange(300, device="cuda")[None]
    turns = model.model.rotary_emb(hidden[0], position)
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda").tril()
    given = hidden[0].clone()

    def call():
        with torch.no_grad():
            return attention(given, turns, mask, position_ids=position)[0]

    right = []
    for x in hidden:
        given.copy_(x)
        right.append(call().clone())
    given.copy_(hidden[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for x, wanted in zip(hidden, right, strict=True):
        given.copy_(x)
        graph.replay()
        assert torch.equal(made, wanted)
    assert not torch.equal(right[0], right[1])
