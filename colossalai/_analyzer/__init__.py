"""Names under which newer scripts find the tracer; it lives in ``colossalai.fx``."""
