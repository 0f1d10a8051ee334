from colossalai.fx.tracer import ColoTracer

__all__ = ["ColoTracer"]
