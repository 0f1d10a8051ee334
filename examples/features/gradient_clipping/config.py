"""The norm of all gradients is at most 1."""

BATCH_SIZE = 128

clip_grad_norm = 1.0
