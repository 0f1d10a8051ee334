from colossalai.fx.trace import trace_model
