# What: what README's Python lines take as there: a model's tensors under the names used in them.
# Why: the lines run as they stand; they name a reader's own variables.
# Never: hides a name that a line should have made itself.
import torch

torch.manual_seed(0)
hidden = torch.randn(2, 16, 64, requires_grad=True)
lm_head = torch.nn.Linear(64, 1000, bias=False)
labels = torch.randint(0, 1000, (2, 16))
