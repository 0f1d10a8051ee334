"""Existing models, such as those of Hugging Face, made tensor-parallel by small tables.

``parallelize`` is the door, and ``wrap_forward`` the code around a forward, which all of them use.
``cutting``: which module is cut how, and what is done to it.  ``trials``: a plan is tried before a model is
cut, and derived by trying where there is no table.  ``sequences``: sequences that are cut.  ``stages``:
pipelines.  Nothing here imports transformers.
"""

from colossalai.nn.policies.cutting.hugging_face import POLICIES
from colossalai.nn.policies.cutting.policy import Policy
from colossalai.nn.policies.cutting.rules import (
    Cut,
    Gathered,
    Head,
    Heads,
    InnerDropout,
    Norm,
    Pieces,
    Rule,
    Stream,
    StreamDropout,
    Table,
)
from colossalai.nn.policies.parallelize import parallelize
from colossalai.nn.policies.stages.depth import Depth

__all__ = [
    "POLICIES",
    "Cut",
    "Depth",
    "Gathered",
    "Head",
    "Heads",
    "InnerDropout",
    "Norm",
    "Pieces",
    "Policy",
    "Rule",
    "Stream",
    "StreamDropout",
    "Table",
    "parallelize",
]
