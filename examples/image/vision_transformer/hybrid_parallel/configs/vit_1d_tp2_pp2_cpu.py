"""The same plan for four processes on two CPU cores: 0.4 million parameters, float32, images of 32x32."""

import torch

from titans.model import pipeline_vit

BATCH_SIZE = 32  # per data-parallel rank
NUM_EPOCHS = 12
WARMUP_EPOCHS = 1
IMG_SIZE = 32

model = dict(
    type=pipeline_vit.build_pipeline_vit,
    num_layers=2,
    img_size=IMG_SIZE,
    patch_size=8,
    hidden_size=128,
    num_heads=4,
    num_classes=10,
    dropout=0.0,
)
optimizer = dict(type=torch.optim.AdamW, lr=1e-3, weight_decay=0.05)

parallel = dict(pipeline=2, tensor=dict(mode="1d", size=2))
NUM_MICRO_BATCHES = 4

clip_grad_norm = 1.0
