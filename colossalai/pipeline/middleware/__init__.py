"""Which part of a cut model takes which values from which other part."""

from colossalai.pipeline.middleware.topo import Partition, PartitionInputVal, PartitionOutputVal, Topo

__all__ = ["Partition", "PartitionInputVal", "PartitionOutputVal", "Topo"]
