"""What: numbers that change from call to call, in compiled graphs of every operator.
Why: the second value makes Dynamo a symbol of the number, which str, isfinite and hasattr do not take.
Never: looks at speed, or at what is compiled.
"""

import pytest
import talea
import torch


def loss(number, **options):
    w = torch.linspace(-1, 1, 50 * 16).reshape(50, 16)
    made = {name: scale * number for name, scale in options.items()}
    return lambda x: talea.linear_cross_entropy(x, w, torch.arange(len(x)), **made)


def attend(number, **options):
    kv = torch.linspace(-1, 1, 20 * 16).reshape(20, 16)
    made = {"value_dim": 8} | {name: scale * number for name, scale in options.items()}
    return lambda x: talea.sparse_attention(x[:, None], kv, torch.arange(len(x))[:, None], **made)


def scan(number, **options):
    made = {name: scale * number for name, scale in options.items()}

    def of(x):
        q, steps = x[None, :, None], torch.ones(1, 1, len(x))
        return talea.mamba3(q, q, q, -steps, steps, steps, head_norm=True, **made)

    return of


CASES = {
    "loss": (loss, (0.1, 0.2, 0.3), {"label_smoothing": 1, "z_loss": 0.01, "softcap": 50, "logit_scale": 3}),
    "denominator": (loss, (4.0, 5.0, 6.0), {"denominator": 1}),
    "top-k": (loss, (3, 4, 5), {"top_k": 1, "ignore_index": -1}),
    "attention": (attend, (0.1, 0.2, 0.3), {"scale": 1}),
    "value_dim": (attend, (4, 5, 6), {"value_dim": 1}),
    "norm_eps": (scan, (1e-5, 2e-5, 3e-5), {"norm_eps": 1}),
    "chunk": (scan, (16, 32, 48), {"chunk": 1}),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("case", CASES)
def test_a_number_may_change(case, dynamic):
    call, numbers, options = CASES[case]
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def compiled(x, number):
        found = call(number, **options)(x)
        return found.topk_values if case == "top-k" else found

    for number in numbers:
        x = torch.randn(6, 16)
        found = call(number, **options)(x)
        found = found.topk_values if case == "top-k" else found
        assert torch.equal(compiled(x, number), found)
