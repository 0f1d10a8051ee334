"""``python -m tests.serving.serve_stand_in OPTIONS``: the server of the tests."""

from __future__ import annotations

import argparse

from colossalai.serving import Generation, Job, Service, TextModel
from colossalai.serving.http import Settings, serve
from colossalai.serving.http.server import bind
from tests.serving.servers import CHAT, Bytes
from tests.serving.stand_in import stand_in


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--max-body", type=int, default=1 << 16)
    parser.add_argument("--body-timeout", type=float, default=20.0)
    parser.add_argument("--request-timeout", type=float, default=60.0)
    parser.add_argument("--drain", type=float, default=10.0)
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--api-key")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    settings = Settings(
        port=args.port,
        api_key=args.api_key,
        max_body=args.max_body,
        body_timeout=args.body_timeout,
        request_timeout=args.request_timeout,
        drain=args.drain,
    )
    sock = bind(settings)
    options = {"delay": args.delay, "max_requests": args.slots}
    job = Job(Generation, {"build": stand_in, "options": options}, tp=args.tp)
    service = Service(job, limit=args.limit, patience=args.patience, restarts=args.restarts)
    service.start()
    model = TextModel(service, Bytes(), max_length=args.max_length, name="stand-in", chat_template=CHAT)
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serve(model, settings, sock, announce=lambda: print(f"listening on {url}", flush=True))
    finally:
        service.close()


if __name__ == "__main__":
    main()
