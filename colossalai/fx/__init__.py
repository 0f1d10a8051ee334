"""Graphs of models: what they compute, in which module, and what it costs, found without computing it."""

from colossalai.fx._compatibility import compatibility, is_compatible_with_meta
from colossalai.fx.capture import InputError
from colossalai.fx.graph_module import ColoGraphModule
from colossalai.fx.joint import StepGraph, trace_step
from colossalai.fx.kernels import OpWork
from colossalai.fx.leaves import LeafModule
from colossalai.fx.meta_info import MetaInfoProp, metainfo_trace
from colossalai.fx.op_graph import OpGraph, OpNode, TensorInfo
from colossalai.fx.trace import trace_model
from colossalai.fx.tracer import ColoTracer, meta_trace, symbolic_trace

__all__ = [
    "ColoGraphModule",
    "ColoTracer",
    "InputError",
    "LeafModule",
    "MetaInfoProp",
    "OpGraph",
    "OpNode",
    "OpWork",
    "StepGraph",
    "TensorInfo",
    "compatibility",
    "is_compatible_with_meta",
    "meta_trace",
    "metainfo_trace",
    "symbolic_trace",
    "trace_model",
    "trace_step",
]
