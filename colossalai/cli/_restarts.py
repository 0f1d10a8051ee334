"""``--max-restarts``: what torchrun's agent needs besides starting the ranks again.

It would say nothing about why it does so, would not hear an order to stop that comes meanwhile, and with fixed hosts the agents
of the others would not learn of it: their ranks might wait in a collective for ranks that are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossalai.cli import failure

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Restarts:
    """Follows torchrun's agent of one node through its failures."""

    def __init__(self, notes: Path, exits: Callable[[Any], list[dict[str, Any]]]) -> None:
        self._notes, self._exits = notes, exits
        self._failed: Any = None  # the result of the attempt that has just failed
        self._pending: list[int] = []
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
        """The state of this host's ranks; failed, if those of another host have failed and all start again."""
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
        """Run ``close``, which ends the ranks.  An order to stop would only interrupt it and lose their exit codes.

        If they are to start again it is obeyed afterwards; else all is ending anyway.
        """
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, lambda received, _: self._pending.append(received))
        close()
        if not self._said:
            return
        said, self._said = self._said, ""
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in self._pending[:1]:
            os.kill(os.getpid(), received)
        self._tell(said)

    def _tell(self, said: str) -> None:
        exits = self._exits(self._failed) if self._failed is not None else []
        failures = failure.collect(exits, failure.read_notes(self._notes)) if exits else []
        text = failure.describe(failures) if failures else "processes on another host failed"
        print(f"{text}\n{said}", file=sys.stderr, flush=True)
