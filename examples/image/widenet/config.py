"""A small WideNet, its 4 experts shared out over all processes (up to 4)."""

import os

import torch

from model_zoo.moe.models import Widenet

NUM_EXPERTS = 4
MOE_MODEL_PARALLEL_SIZE = min(NUM_EXPERTS, int(os.environ.get("WORLD_SIZE", "1")))
parallel = dict(moe=dict(size=MOE_MODEL_PARALLEL_SIZE))

IMG_SIZE = 32
model = dict(
    type=Widenet,
    num_experts=NUM_EXPERTS,
    capacity_factor=1.2,
    img_size=IMG_SIZE,
    patch_size=16,
    num_classes=10,
    hidden_size=64,
    num_heads=4,
    depth=4,
    mlp_ratio=2,
    dropout=0.0,
)
optimizer = dict(type=torch.optim.AdamW, lr=3e-3, weight_decay=0.05)
AUX_WEIGHT = 0.01  # of the loss that keeps the experts equally busy

# Sums in another order round differently, and by that a token may go to another expert: in float32, curves
# of different plans part after some epochs.
DTYPE = torch.float64
BATCH_SIZE = 64  # of all processes together
NUM_EPOCHS = 15
WARMUP_EPOCHS = 2
SEED = 42
