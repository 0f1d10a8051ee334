"""ResNet-34 on CIFAR-10, for GPUs."""

import torch

from colossalai.amp import AMP_TYPE
from titans.model import resnet

BATCH_SIZE = 128  # per process
NUM_EPOCHS = 200
WARMUP_EPOCHS = 0
IMG_SIZE = 32

model = dict(type=resnet.resnet34, num_classes=10, small_images=True)
optimizer = dict(type=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)

fp16 = dict(mode=AMP_TYPE.TORCH)
