"""Tensors on a disk: written and read asynchronously, past the page cache, in files that vanish with the process."""

from colossalai.utils.disk.memory import ALIGNMENT, aligned_empty
from colossalai.utils.disk.requests import Pending
from colossalai.utils.disk.store import DiskStore

__all__ = ["ALIGNMENT", "DiskStore", "Pending", "aligned_empty"]
