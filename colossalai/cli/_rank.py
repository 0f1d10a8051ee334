"""Runs the user's script as ``python script.py`` would, and notes how it ended.

torchrun starts this file by its path: it needs nothing but the standard library, so the script sees the same
modules and the same ``sys.path`` as without us.  An uncaught exception goes into a file instead of
onto the screen; ``colossalai run`` shows the one that stopped the job, once, after all ranks have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

FAILURE_DIR = "COLOSSALAI_FAILURE_DIR"


def main() -> None:
    die_with_parent(int(sys.argv.pop(1)), signal.SIGKILL)
    started = time.time()
    folder, rank = os.environ.pop(FAILURE_DIR), os.environ["RANK"]
    record, ended = (os.path.join(folder, f"{kind}_{rank}.json") for kind in ("rank", "ended"))
    for earlier in (record, ended):
        if os.path.exists(earlier):  # torchrun restarted this rank: the earlier failure was survived
            os.unlink(earlier)
    for stream in (sys.stdout, sys.stderr):
        # torchrun's `python -u` writes the text and the end of a line apart, and the ranks' lines would mix
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    as_module = sys.argv[1] == "-m"
    target, arguments = (sys.argv[2], sys.argv[3:]) if as_module else (sys.argv[1], sys.argv[2:])
    try:
        _run_module(target, arguments) if as_module else _run_script(target, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            code = error.code & 0xFF if isinstance(error.code, int) else 1
            _note(record, kind="exit", exitcode=code, summary=f"the script called sys.exit({error.code!r})")
        else:
            _note(ended, seconds=time.time() - started)
        raise
    except KeyboardInterrupt as error:
        _note(record, kind="stopped", exitcode=-signal.SIGINT, summary="interrupted")
        _raise_quietly(error)
    except BaseException as error:
        _note(record, kind="raised", exitcode=1, summary=_summary(error), traceback=_format(error))
        _raise_quietly(error)
    else:
        _note(ended, seconds=time.time() - started)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send us this signal when our parent ends, whatever ended it (Linux only)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)


def _run_script(name: str, arguments: list[str]) -> None:
    path = os.path.abspath(name)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    # it stays there: pickle and multiprocessing look for the script's classes under this name
    sys.modules["__main__"] = module
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # not our `from __future__`
    exec(code, module.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    import runpy

    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _note(record: str, **fields: Any) -> None:
    partial = f"{record}.{os.getpid()}"
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    with open(partial, "w") as file:
        json.dump(
            {"rank": rank, "local_rank": local_rank, "pid": os.getpid(), "time": time.time(), **fields}, file
        )
    os.replace(partial, record)  # the agent never sees half a file


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _without_our_frames(error.__traceback__)))


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    ours = (__file__, "<frozen runpy>", "runpy.py")
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(ours):
        trace = trace.tb_next
    return trace


def _raise_quietly(error: BaseException) -> NoReturn:
    """End as Python ends on this exception, exit code and exit handlers included, but print no traceback.

    A hook of the user runs as it would.  torch wraps whatever hook it finds when a process group is made, to
    put the rank before each line; that one runs too, since a hook of the user may be inside, but unheard.
    """
    hook = sys.excepthook
    if hook is sys.__excepthook__:
        sys.excepthook = lambda kind, value, trace: None
    elif getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":

        def unheard(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            with contextlib.redirect_stderr(io.StringIO()):
                hook(kind, value, trace)

        sys.excepthook = unheard
    raise error


if __name__ == "__main__":
    main()
