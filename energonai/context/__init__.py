"""What a service is started with."""

from energonai.context.config import DEFAULTS, ServiceConfig

__all__ = ["DEFAULTS", "ServiceConfig"]
