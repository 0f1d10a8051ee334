"""torchrun for one node, with its ranks started through ``_rank.py`` and its report written to a file.

It is torch's own launcher (``torch.distributed.run``), called instead of executed: only so do we learn the
exit code of every rank, and only so is its report of many lines not printed over the user's output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossalai.cli import _rank, failure

# ``--max-restarts``: what torchrun's agent needs besides starting the ranks again.
#
# It would say nothing about why it does so, would not hear an order to stop that comes meanwhile, and with
# fixed hosts the agents of the others would not learn of it: their ranks might wait in a collective for
# ranks that are gone.

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Restarts:
    """Follows torchrun's agent of one node through its failures."""

    def __init__(self, notes: Path, exits: Callable[[Any], list[dict[str, Any]]]) -> None:
        self._notes, self._exits = notes, exits
        self._failed: Any = None  # the result of the attempt that has just failed
        self._pending: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}  # torch's, while an attempt is ending
        self._said = ""

    def install(self) -> None:
        """Have torch's agent call us."""
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

        restart, monitor = LocalElasticAgent._restart_workers, LocalElasticAgent._monitor_workers

        def restart_and_tell(agent: Any, group: Any) -> None:
            most = group.spec.max_restarts
            self._said = f"restart {most - agent._remaining_restarts} of {most}: all processes start again"
            restart(agent, group)

        def monitor_all(agent: Any, group: Any) -> Any:
            return self._with_other_hosts(agent, group, monitor(agent, group))

        LocalElasticAgent._restart_workers = restart_and_tell  # type: ignore[method-assign]
        LocalElasticAgent._monitor_workers = monitor_all  # type: ignore[method-assign]

    def _with_other_hosts(self, agent: Any, group: Any, result: Any) -> Any:
        """The state of this host's ranks; failed, if those of another host have failed and all start
        again.
        """
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        ours = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if ours:
            self._failed = result
        if group.group_world_size > 1 and agent._remaining_restarts > 0:
            key = f"colossalai/failed/{group.spec.max_restarts - agent._remaining_restarts}"
            with contextlib.suppress(
                RuntimeError
            ):  # the first host, which has the store, is gone: the launcher knows
                if ours:
                    group.store.set(key, "1")
                elif result.state is WorkerState.HEALTHY and group.store.check([key]):
                    self._failed = None
                    return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def closing(self, close: Callable[[], None]) -> None:
        """Run ``close``, which ends the ranks.

        An order to stop would only interrupt it and lose their exit codes.  If the ranks are to start again
        it is obeyed afterwards; else all is ending anyway.  Torch closes a failed attempt twice: when it sees
        the failure, and before it starts the ranks again.
        """
        self._handlers = self._handlers or {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, lambda received, _: self._pending.append(received))
        close()
        if not self._said:
            return
        said, self._said = self._said, ""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in self._pending[:1]:
            os.kill(os.getpid(), received)
        self._tell(said)

    def _tell(self, said: str) -> None:
        exits = self._exits(self._failed) if self._failed is not None else []
        failures = failure.collect(exits, failure.read_notes(self._notes)) if exits else []
        ended = failure.early_ends(self._notes)
        text = failure.describe(failures, ended) if failures else "processes on another host failed"
        print(f"{text}\n{said}", file=sys.stderr, flush=True)


REPORT = "torchrun.json"


def main() -> None:
    parent, grace, count, *arguments = sys.argv[1:]
    _rank.die_with_parent(int(parent), signal.SIGTERM)
    # until torch installs its own handlers there are no ranks to end, so a signal may end us at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    notes = Path(os.environ[_rank.FAILURE_DIR])
    closing = Closing()
    restarts = Restarts(notes, lambda failed: _exits(failed, closing))
    restarts.install()
    _limit_closing(float(grace), closing, restarts)
    if "LOGLEVEL" not in os.environ:  # torch's variable: a user who sets it wants to read the messages
        logging.disable(logging.ERROR)
    options = _options(arguments[: int(count)], *arguments[int(count) :])
    _warn_about_shared_gpus(options)
    _start_ranks_through_our_runner(options)
    report = notes / REPORT
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        report.write_text(json.dumps({"exits": _exits(error, closing)}))
        sys.exit(1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except Exception as error:
        report.write_text(json.dumps({"message": f"torchrun: {type(error).__name__}: {error}"}))
        sys.exit(1)


def _options(arguments: list[str], script: str, *script_arguments: str) -> Namespace:
    """What torchrun is told.  Its parser never sees what is meant for the script.

    It would look at those words too, and take ``--n`` for an abbreviation of several of its own options, or
    drop a ``--``.
    """
    from torch.distributed import run as torchrun

    options: Namespace = torchrun.parse_args([*arguments, "--", script])
    options.training_script_args = list(script_arguments)
    return options


@dataclass
class Closing:
    """The moment at which torch began to close the ranks of an attempt."""

    stopped: set[int] = field(default_factory=set)  # the local ranks which still ran
    time: float = 0.0


def _limit_closing(grace: float, closing: Closing, restarts: Restarts) -> None:
    """Ranks that ignore SIGTERM are killed after ``grace`` seconds, after a failure too (torch: always
    30).
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    original = PContext.close

    def close(self: PContext, death_sig: signal.Signals | None = None, timeout: float = grace) -> None:
        if running := {local_rank for local_rank, pid in self.pids().items() if _runs(pid)}:
            closing.stopped, closing.time = running, time.time()
        restarts.closing(lambda: original(self, death_sig, grace))  # type: ignore[arg-type]

    PContext.close = close  # type: ignore[method-assign]


def _runs(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # it has ended and torch has seen it
        return False


def _warn_about_shared_gpus(options: Namespace) -> None:
    import torch

    gpus, ranks = torch.cuda.device_count(), int(options.nproc_per_node)
    if 0 < gpus < ranks:
        print(
            f"Warning: {ranks} processes share {gpus} GPU{'s' * (gpus > 1)}; NCCL refuses this, "
            "use backend='gloo' or a smaller --nproc_per_node",
            file=sys.stderr,
        )


def _start_ranks_through_our_runner(options: Namespace) -> None:
    if options.no_python or options.run_path:
        return
    marker = [str(os.getpid()), *(["-m"] if options.module else [])]
    options.training_script_args = [*marker, options.training_script, *options.training_script_args]
    options.training_script = _rank.__file__
    options.module = False


def _exits(error: Any, closing: Closing) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "local_rank": failure.local_rank,
            "exitcode": failure.exitcode,
            "kind": "stopped" if failure.local_rank in closing.stopped else "died",
            "time": closing.time or time.time(),
        }
        for rank, failure in error.failures.items()
    ]
