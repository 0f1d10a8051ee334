"""Existing models, such as those of Hugging Face, made tensor-parallel by small tables.

Read in this order: ``tables`` (which module of which architecture is cut how), ``rules`` (what can be done to a module),
``adapt`` (what happens around a forward), ``parallelize``, ``trace`` and ``flow`` (a plan is tried on the meta device); for the stages of pipelines ``depth`` and ``stage``.  Nothing here imports transformers.
"""

from colossalai.nn.policies.depth import Depth
from colossalai.nn.policies.parallelize import parallelize
from colossalai.nn.policies.policy import Policy
from colossalai.nn.policies.rules import (
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
from colossalai.nn.policies.tables import POLICIES

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
