"""Tensors on a disk: written and read asynchronously, past the page cache, in files that vanish with the process."""

from colossalai.utils.disk.buffers import Buffers, Memory
from colossalai.utils.disk.memory import ALIGNMENT, aligned_empty
from colossalai.utils.disk.requests import Pending
from colossalai.utils.disk.shelf import Shelf
from colossalai.utils.disk.store import DiskStore

__all__ = ["ALIGNMENT", "Buffers", "DiskStore", "Memory", "Pending", "Shelf", "aligned_empty"]
