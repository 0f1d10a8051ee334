"""Configuration, process groups and random streams of a job."""

from colossalai.context import process_group_initializer
from colossalai.context.config import Config, ConfigException
from colossalai.context.initializer import GroupInfo, ProcessGroupInitializer
from colossalai.context.parallel_config import ParallelConfig, format_rank_table, rank_table
from colossalai.context.parallel_context import ParallelContext
from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.rendezvous import RendezvousError
from colossalai.context.singleton_meta import SingletonMeta

__all__ = [
    "Config",
    "ConfigException",
    "GroupInfo",
    "ParallelConfig",
    "ParallelContext",
    "ParallelMode",
    "ProcessGroupInitializer",
    "RendezvousError",
    "SingletonMeta",
    "format_rank_table",
    "process_group_initializer",
    "rank_table",
]
