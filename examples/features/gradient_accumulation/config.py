"""One step of the optimizer every 4 iterations."""

BATCH_SIZE = 128

gradient_accumulation = 4
