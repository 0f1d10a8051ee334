"""The limits of a server, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What a server allows; every limit is refused with a 4xx, before any rank hears of the request.

    Attributes:
        api_key: what clients must send as ``Authorization: Bearer KEY``; None lets everybody in.
        max_body: bytes of a request.
        max_bodies: so many of the largest bodies may be in memory; further ones get a 429.
        body_timeout: seconds in which a request must have arrived, head and body.
        request_timeout: seconds that an answer may take; a client has ``body_timeout`` more to read it.
        max_choices: answers to one request (prompts times ``n``).
        drain: seconds that answers under way get after SIGTERM.
        allow_origins: pages of other hosts that may call this server (CORS).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    max_body: int = 1 << 20
    max_bodies: int = 64
    body_timeout: float = 20.0
    request_timeout: float = 600.0
    max_choices: int = 64
    drain: float = 30.0
    keep_alive: float = 15.0  # longer than the 5 s of httpx, so that the client is the one who hangs up
    allow_origins: tuple[str, ...] = ()
    log_level: str = "error"  # of uvicorn, which warns of every request that is none

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535, got {self.port!r}")
        for name in (
            "max_body",
            "max_bodies",
            "body_timeout",
            "request_timeout",
            "max_choices",
            "keep_alive",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if not self.drain >= 0:
            raise ValueError(f"drain must be 0 s or more, got {self.drain!r}")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError(
                "api_key must be a text of ASCII characters that is not empty, without spaces at its ends"
                " and without line breaks, which no client could send"
            )
