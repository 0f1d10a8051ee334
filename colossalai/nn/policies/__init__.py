"""Existing models, such as those of Hugging Face, made tensor-parallel by small tables.

Read in this order: ``hugging_face`` (which module of which architecture is cut how), ``rules`` (what can be
done to a module), ``wrap_forward`` (code around a forward), ``parallelize``, ``trace`` (a dry run of the plan
on the meta device); for models without a table ``branches``, ``branch_trial`` and ``derive``; for the stages
of pipelines ``depth``, ``derive_depth``, ``stand_ins`` and ``stage``; for sequences that are cut
``sequence_probe``, ``sequence_inputs`` and ``sequence``; for mixtures of experts ``experts``,
``balance_loss`` and ``latent_attention``.  Nothing here imports transformers.
"""

from colossalai.nn.policies.depth import Depth
from colossalai.nn.policies.hugging_face import POLICIES
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
