"""Passes over recorded graphs: cutting them into pipeline stages, and cutting linear layers over ranks."""

from colossalai.fx.passes.shard import (
    column_shard_linear_pass,
    row_shard_linear_pass,
    transformer_mlp_pass,
)
from colossalai.fx.passes.split import (
    avgcompute_split_pass,
    avgnode_split_pass,
    balanced_split_pass,
    balanced_split_pass_v2,
    gpipe_dp_split_pass,
    pipe_split,
    split_with_split_nodes_pass,
    uniform_split_pass,
)

__all__ = [
    "avgcompute_split_pass",
    "avgnode_split_pass",
    "balanced_split_pass",
    "balanced_split_pass_v2",
    "column_shard_linear_pass",
    "gpipe_dp_split_pass",
    "pipe_split",
    "row_shard_linear_pass",
    "split_with_split_nodes_pass",
    "transformer_mlp_pass",
    "uniform_split_pass",
]
