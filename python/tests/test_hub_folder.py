"""The folder for Hugging Face's `kernels`: loaded from disk by that library, run under torch.compile."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import talea

TOOL = Path(__file__).resolve().parents[2] / "tools/hub_folder"


def tool():
    loader = importlib.machinery.SourceFileLoader("hub_folder", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("hub_folder", loader))
    loader.exec_module(module)
    return module


def lay_out(tmp_path) -> Path:
    variant = tool().lay_out(Path(talea.__file__).parent, "0.1.0", tmp_path)
    # The test runs on a machine without a GPU whatever lanes the library was built with.
    return (
        variant.rename(variant.with_name("torch-cpu")) if variant.name != "torch-cpu" else variant
    )


def test_the_digests_are_those_of_the_files(tmp_path):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = lay_out(tmp_path)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert metadata.license == "Apache-2.0" and metadata.name.python_name == "talea"


def test_it_is_loaded_and_compiled(tmp_path):
    """In a process of its own: the operators of this one are registered already."""
    lay_out(tmp_path)
    code = """
        import sys
        from pathlib import Path
        import torch
        from kernels import get_local_kernel

        talea = get_local_kernel(Path(sys.argv[1]), backend="cpu")
        assert sys.argv[1] in talea.__file__
        x = torch.randn(5, 8, requires_grad=True)
        w = torch.randn(11, 8, requires_grad=True)
        y = torch.tensor([1, 2, 3, 4, -100])
        loss = torch.compile(talea.linear_cross_entropy, fullgraph=True)(x, w, y)
        loss.backward()
        wanted = torch.nn.functional.cross_entropy(x @ w.T, y)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(x.grad, torch.autograd.grad(wanted, x)[0])
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
