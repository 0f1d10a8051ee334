from colossalai.pipeline.middleware.adaptor.fx import get_fx_topology

__all__ = ["get_fx_topology"]
