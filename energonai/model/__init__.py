"""Models for engines: functions that each rank calls, and that return its part."""

from energonai.model.bert import bert_8B, bert_175B, bert_base, bert_large, bert_small
from energonai.model.generating import GeneratingModel
from energonai.model.gpt import gpt2_8B, gpt2_large, gpt2_small, gpt3, hf_gpt2
from energonai.model.opt import opt_6B, opt_30B, opt_66B, opt_125M, opt_175B

__all__ = [
    "GeneratingModel",
    "bert_8B",
    "bert_175B",
    "bert_base",
    "bert_large",
    "bert_small",
    "gpt2_8B",
    "gpt2_large",
    "gpt2_small",
    "gpt3",
    "hf_gpt2",
    "opt_6B",
    "opt_30B",
    "opt_66B",
    "opt_125M",
    "opt_175B",
]
