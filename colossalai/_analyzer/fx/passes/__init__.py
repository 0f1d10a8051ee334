from colossalai.fx.meta_info import shape_prop_pass

__all__ = ["shape_prop_pass"]
