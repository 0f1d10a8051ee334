"""A free port, for a test that must name one.  Ranks of ``spawn`` are handed one that is already open."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port nobody listens on now.  Another process may take it before you do: bind port 0 where you can."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
