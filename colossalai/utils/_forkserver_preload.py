"""Imported once by the fork server, so that a rank that is forked from it starts with everything loaded.

Each module here costs a second or more to import; a rank that imported it by itself would pay that again.
"""

import gc

import torch
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.tensor
import torch.nn.parallel
import torch.testing
import torch.utils.data

# Forked ranks share the machine's few cores: one thread each.
torch.set_num_threads(1)

# Nothing that the server imports becomes garbage.  Ranks turn the collector on again.
gc.disable()
