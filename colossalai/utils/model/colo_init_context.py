"""The documented place of ``ColoInitContext``."""

from colossalai.tensor import ColoInitContext, post_process_colo_init_ctx

__all__ = ["ColoInitContext", "post_process_colo_init_ctx"]
