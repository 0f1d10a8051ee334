"""The service over HTTP: ``make_app`` and ``serve``.  It needs the extra: ``pip install
colossalai[serve]``.
"""

from __future__ import annotations

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"serving over HTTP needs {error.name}, which is not installed: pip install 'colossalai[serve]'",
        name=error.name,
    ) from error

from colossalai.serving.http.app import make_app
from colossalai.serving.http.server import serve
from colossalai.serving.http.settings import Settings

__all__ = ["Settings", "make_app", "serve"]
