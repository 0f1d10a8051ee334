"""The other name of `opt_fastapi.py`: the same options, routes and lines.

Older scripts had it beside `opt_fastapi.py`, with Sanic in place of FastAPI.  No client sees which of them
answers, so there is one server.
"""

from __future__ import annotations

from opt_fastapi import main

if __name__ == "__main__":
    main("opt_server.py")
