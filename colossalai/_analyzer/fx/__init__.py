from colossalai.fx.meta_info import symbolic_profile
from colossalai.fx.tracer import symbolic_trace

__all__ = ["symbolic_profile", "symbolic_trace"]
