"""ResNet-18 in fp16 with large batches, for GPUs."""

from colossalai.amp import AMP_TYPE

BATCH_SIZE = 512  # per process
NUM_EPOCHS = 2
WARMUP_STEPS = 5
LEARNING_RATE = dict(lars=10.0, lamb=0.01)
WEIGHT_DECAY = 1e-4

fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
