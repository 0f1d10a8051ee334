"""The same in float32, with smaller batches: convolutions in fp16 are some 70 times slower than in float32 on
a CPU.
"""

from config import LEARNING_RATE, NUM_EPOCHS, WARMUP_STEPS, WEIGHT_DECAY, clip_grad_norm

__all__ = ["LEARNING_RATE", "NUM_EPOCHS", "WARMUP_STEPS", "WEIGHT_DECAY", "clip_grad_norm"]

BATCH_SIZE = 64
