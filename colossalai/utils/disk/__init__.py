"""Tensors on a disk: written and read asynchronously, past the page cache, in
files that vanish with the process.
"""

from colossalai.utils.disk.buffers import ALIGNMENT, Buffers, Memory, aligned_empty, padded
from colossalai.utils.disk.scratch import Pending, ScratchFile
from colossalai.utils.disk.store import DiskStore, Regions, Shelf

__all__ = [
    "ALIGNMENT",
    "Buffers",
    "DiskStore",
    "Memory",
    "Pending",
    "Regions",
    "ScratchFile",
    "Shelf",
    "aligned_empty",
    "padded",
]
