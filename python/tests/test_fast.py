"""What: the names of PyTorch's own that the package is faster by are there.
Why: tests of what they are for are skipped where one is missing, which would look like a pass.
Never: calls the package.
"""

import torch
from talea import _fast


def test_the_guard_of_tensors_is_there():
    check = _fast.tensor_guard(torch.empty(2, 3))
    assert check is not None
    assert check(torch.empty(2, 3)) and not check(torch.empty(3, 2))


def test_new_tensors_of_a_host_are_made_by_it():
    made = _fast.empty_strided()["cpu"]((2, 3), (3, 1), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)
