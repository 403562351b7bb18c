"""linear_cross_entropy: C structs, settings, tensors, autograd, ranks; its front is functional.py."""
