"""What the operator does not do is an error with the argument's name, never a silent something else."""

import copy
import pickle
import subprocess
import sys

import pytest
import talea
import torch
from conftest import close, eager, gradients, problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad


@pytest.mark.parametrize("name", ("target", "weight", "token_weight", "logit_scale"))
def test_gradients_that_are_not_formed(name):
    """A learned temperature, or a weight that depends on the model, would stay as it is, unsaid."""
    x, w, y, _ = problem()
    shapes = {"target": (33, 101), "weight": (101,), "token_weight": (33,), "logit_scale": ()}
    learned = torch.rand(shapes[name]).add_(0.5).requires_grad_()
    options = {} if name == "target" else {name: learned}
    target = learned if name == "target" else y
    with pytest.raises(talea.UsageError, match=f"{name}: requires grad"):
        talea.linear_cross_entropy(x, w, target, **options)
    with torch.no_grad():
        talea.linear_cross_entropy(x, w, target, **options)
    talea.linear_cross_entropy(x, w, target.detach(), **{k: v.detach() for k, v in options.items()})


def test_one_scale_for_all_may_be_a_tensor():
    x, w, y, _ = problem()
    ours = talea.linear_cross_entropy(x, w, y, logit_scale=torch.tensor(0.5))
    theirs = eager(x * 0.5, w, y)
    assert close(ours, theirs)
    for a, b in zip(gradients(ours, x, w), gradients(theirs, x, w), strict=True):
        assert close(a, b, 5e-6)


def test_weights_in_16_bits_beside_16_bit_logits():
    """There PyTorch takes class weights in no other type."""
    x, w, y, _ = problem(dtype=torch.bfloat16)
    c = torch.rand(101).bfloat16()
    t = torch.rand(33).bfloat16()
    ours = talea.linear_cross_entropy(x, w, y, weight=c, token_weight=t)
    theirs = talea.linear_cross_entropy(x, w, y, weight=c.float(), token_weight=t.float())
    assert torch.equal(ours, theirs)
    eager_loss = eager(x, w, y, weight=c)
    assert close(talea.linear_cross_entropy(x, w, y, weight=c), eager_loss.float(), 2e-2)


@pytest.mark.parametrize("name", ("target", "token_weight", "logit_scale", "probabilities"))
def test_tokens_in_other_places(name):
    """[S, B] beside [B, S] holds as many values, each of another token."""
    x, w, y, _ = problem(n=12)
    x, y = x.reshape(3, 4, 24), y.reshape(3, 4)
    options = {}
    if name == "target":
        y = y.t()
    elif name == "probabilities":
        y = torch.rand(4, 3, 101)
    else:
        options[name] = torch.ones(4, 3)
    with pytest.raises(talea.DataError, match=r"shape \[4, 3\] beside \[3, 4\] of the tokens"):
        talea.linear_cross_entropy(x, w, y, **options)
    with pytest.raises(talea.DataError, match="target: shape"):
        talea.linear_cross_entropy(x, w, torch.rand(101, 12))


def test_what_is_no_tensor_is_named():
    x, w, y, _ = problem()
    for wrong in ((x.detach().numpy(), w, y), (x, w, y.tolist())):
        with pytest.raises(talea.DataError, match="where tensors of torch are needed"):
            talea.linear_cross_entropy(*wrong)


def test_a_nested_tensor_is_named_however_often_others_were_met():
    """The way of a call that was made before looks at strides, which ended the process."""
    x, w, y, _ = problem(n=12)
    rows, ids = torch.nested.nested_tensor([x[:5], x[5:]]), torch.nested.nested_tensor([y, y])
    for _ in range(3):
        with pytest.raises(talea.DataError, match="input: a nested tensor"):
            talea.linear_cross_entropy(rows, w, y)
        with pytest.raises(talea.DataError, match="target: a nested tensor"):
            talea.linear_cross_entropy(x, w, ids)
        talea.linear_cross_entropy(x, w, y)


def test_a_main_gradient_that_does_not_fit_is_said_by_forward():
    x, w, y, _ = problem()
    for sums in (torch.zeros(5, 24), torch.zeros(101, 24).bfloat16()):
        for options in ({}, {"grad_scale": 1.0}):
            with pytest.raises(talea.DataError, match=r"main_grad: .* where float32 \[101, 24\]"):
                talea.linear_cross_entropy(x, w, y, main_grad=sums, **options)


def test_tensors_without_memory_are_named():
    for mode, said in ((FakeTensorMode(), "a FakeTensor of shape"), (torch.device("meta"), "meta")):
        with mode:
            q, kv, i = torch.rand(5, 2, 8), torch.rand(9, 8), torch.zeros(5, 3, dtype=torch.int64)
            c, v, dt = torch.rand(1, 5, 1, 8), torch.rand(1, 5, 2, 4), torch.rand(1, 2, 5)
            y = torch.zeros(5, dtype=torch.int64)
            for name, call in (
                ("input", lambda: talea.linear_cross_entropy(kv[:5], kv, y)),  # noqa: B023
                ("q", lambda: talea.sparse_attention(q, kv, i, value_dim=4)),  # noqa: B023
                ("q", lambda: talea.mamba3(c, c, v, dt, dt, dt)),  # noqa: B023
            ):
                with pytest.raises(talea.DataError, match=f"{name}: .*{said}"):
                    call()


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_options_of_a_mean_are_noted_beside_another_reduction(reduction):
    x, w, y, _ = problem()
    options = {"denominator": 7.0, "on_empty": "zero", "reduction": reduction}
    made = talea.linear_cross_entropy(x, w, y, outputs=("loss",), **options)
    found = [
        n for n in made.receipt()["notes"] if n.endswith(f"of a mean; reduction = {reduction}")
    ]
    assert [n.split(" = ")[0] for n in found] == (
        [] if reduction == "mean" else ["denominator", "on_empty"]
    )


def test_flat_tokens_stay_welcome():
    x, w, y, _ = problem(n=12)
    want = talea.linear_cross_entropy(x, w, y)
    assert torch.equal(want, talea.linear_cross_entropy(x.reshape(3, 4, 24), w, y))
    assert torch.equal(want, talea.linear_cross_entropy(x, w, y.reshape(3, 4)))
    one = talea.linear_cross_entropy(x[0], w, y[0])
    assert close(one, eager(x[0], w, y[0]))


@pytest.mark.parametrize("name", ("denominator", "label_smoothing", "z_loss", "softcap"))
def test_a_number_that_may_change_is_refused(name):
    """Equal settings are found again by their identity; a tensor keeps its own and changes."""
    x, w, y, _ = problem()
    with pytest.raises(talea.UsageError, match=f"{name}: a tensor"):
        talea.linear_cross_entropy(x, w, y, **{name: torch.tensor(0.5)})


@pytest.mark.parametrize("softcap", (0, 0.0, -1.0, float("nan")))
def test_a_softcap_that_is_none_is_said_by_none(softcap):
    x, w, y, _ = problem()
    with pytest.raises(talea.UsageError, match="softcap = .*None"):
        talea.linear_cross_entropy(x, w, y, softcap=softcap)


def test_a_workspace_limit_that_cannot_be_kept_names_the_least():
    x, w, y, _ = problem()
    with pytest.raises(talea.UsageError, match="workspace_limit = 64 bytes.* at least") as said:
        talea.linear_cross_entropy(x, w, y, workspace_limit=64)
    least = int(str(said.value).split("at least ")[1].split()[0])
    talea.linear_cross_entropy(x, w, y, workspace_limit=least)


@pytest.mark.parametrize("name", ("ignore_index", "vocab", "workspace_limit", "top_k"))
@pytest.mark.parametrize("value", (1 << 64, 2.5, "3"))
def test_integers_are_taken_as_written_or_not_at_all(name, value):
    x, w, y, _ = problem()
    with pytest.raises(talea.UsageError, match=f"{name} = "):
        talea.linear_cross_entropy(x, w, y, **{name: value})


def test_transforms_of_torch_func():
    x, w, y, _ = problem()
    x, w = x.detach(), w.detach()

    def loss(x):
        return talea.linear_cross_entropy(x, w, y)

    for transformed in (
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vmap(lambda a: loss(a))(x.expand(2, 33, 24)),
        lambda: torch.func.jvp(loss, (x,), (x,)),
    ):
        with pytest.raises(talea.UsageError, match="torch.func"):
            transformed()


@pytest.mark.parametrize("requires_grad", (False, True))
def test_forward_mode(requires_grad):
    x, w, y, _ = problem()
    w = w.detach().requires_grad_(requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(talea.UsageError, match="forward-mode"):
            talea.linear_cross_entropy(dual, w, y)
        assert talea.linear_cross_entropy(x.detach(), w, y).isfinite()
        given = {"linear_weight": w, "linear_bias": torch.zeros(101), "weight": torch.ones(101),
                 "token_weight": torch.ones(33)}  # fmt: skip
        for name, tensor in given.items():
            dual = forward_ad.make_dual(tensor.detach(), torch.ones_like(tensor))
            with pytest.raises(talea.UsageError, match="forward-mode"):
                talea.linear_cross_entropy(x.detach(), target=y, **{**given, name: dual})


def test_a_module_knows_its_keywords():
    with pytest.raises(talea.UsageError, match="label_smothing: no such keyword"):
        talea.LinearCrossEntropy(24, 101, label_smothing=0.1)
    with pytest.raises(talea.UsageError, match="weight: a tensor"):  # .to() would not move it
        talea.LinearCrossEntropy(24, 101, weight=torch.ones(101))


def test_a_result_may_be_copied_and_sent(tmp_path):
    """A copy of the receipt has the facts, and frees nothing of the first."""
    x, w, y, _ = problem()
    out = talea.linear_cross_entropy(x.detach(), w.detach(), y, outputs=("loss", "lse"))
    facts = out.receipt()
    for other in (copy.deepcopy(out), pickle.loads(pickle.dumps(out)), copy.copy(out)):
        assert other.receipt() == facts and torch.equal(other.lse, out.lse)
    (tmp_path / "out").write_bytes(pickle.dumps(out))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'out')!r}, 'rb')).receipt())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(facts), done.stderr


def test_double_backward_is_refused():
    x, w, y, _ = problem()
    loss = talea.linear_cross_entropy(x, w, y)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="talea.*double backward"):
        dx.sum().backward()
    # A penalty on the gradient has another way to the leaves: what cannot be formed is not left out.
    loss = talea.linear_cross_entropy(x, w, y)
    dx, dw = torch.autograd.grad(loss, (x, w), create_graph=True)
    with pytest.raises(RuntimeError, match="talea.*double backward"):
        (loss + dx.square().sum() + dw.sum()).backward()
    with pytest.raises(RuntimeError, match="talea.*double backward"):
        torch.autograd.functional.hessian(lambda a: talea.linear_cross_entropy(a, w, y), x)


def test_errors_name_the_arguments_of_this_function():
    """The C interface calls the head's weight what PyTorch calls the weight of the classes."""
    x, w, y, _ = problem()
    call = talea.linear_cross_entropy
    for grad in (False, True):
        x = x.detach().requires_grad_(grad)
        for given, said in (
            ((x, w[0], y), "^linear_weight: needed"),
            ((x, w.half(), y), "^linear_weight: dtype"),
            ((x, w.detach().numpy(), y), "^linear_weight: ndarray"),
            ((x.to_sparse(), w, y), "^input: layout"),
            ((x, w, y[:-1]), "^target: shape"),
        ):
            with pytest.raises(talea.DataError, match=said):
                call(*given)
        for name, value, said in (
            ("weight", torch.ones(3), "^weight: shape"),
            ("linear_bias", torch.ones(3), "^linear_bias: shape"),
            ("logit_scale", torch.zeros(len(x)), r"^logit_scale\[0\] = 0"),
        ):
            with pytest.raises(talea.DataError, match=said):
                call(x, w, y, **{name: value})
    for _ in range(4):  # found again, too
        call(x, w, y)
    with pytest.raises(talea.DataError, match=r"^target\[1\] = 1000"):
        call(x, w, torch.where(torch.arange(len(y)) == 1, 1000, y))
