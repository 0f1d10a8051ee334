"""ResNet-18 in float32, a few epochs: a minute on two CPU cores.

Convolutions in fp16 are some 70 times slower than in float32 on a CPU, and without ``small_images`` the first
layers shrink the images to an eighth.
"""

import torch

from titans.model import resnet

BATCH_SIZE = 64  # per process
NUM_EPOCHS = 4
WARMUP_EPOCHS = 0
IMG_SIZE = 32

model = dict(type=resnet.resnet18, num_classes=10)
optimizer = dict(type=torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)

clip_grad_norm = 1.0
