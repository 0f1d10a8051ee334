from colossalai.fx.joint import trace_step
from colossalai.fx.trace import trace_model
