"""How a model computes: log-probs with gradient, plain anywhere, in few kernels on a GPU."""
