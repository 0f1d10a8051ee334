"""What can go wrong in a service, as its users see it."""

from __future__ import annotations


class ServiceError(RuntimeError):
    """The service, not the request, is at fault: a rank died or hung, or the service has ended."""


class StartError(ServiceError):
    """The ranks did not start; the message says which one, and why."""


class QueueFullError(RuntimeError):
    """There are as many requests as the service takes; ask again later."""
