"""The launcher: brings all hosts to the same point, starts them together, and ends them together."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from click import ClickException

from colossalai.cli import failure
from colossalai.cli.job import LaunchJob
from colossalai.cli.node import Node
from colossalai.cli.wire import AgentEvent, Order

_READY_TIMEOUT = 60.0  # an interpreter on a slow network file system takes its time
_STOP_MARGIN = 15.0  # beyond the grace period: the agent's own margin and the way back


class Stopped(Exception):
    """A signal told us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class LaunchOutcome:
    """How the job went, one report after the other."""

    done: dict[str, bool] = field(default_factory=dict)
    failures: list[failure.RankFailure] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    stopped_by: int | None = None
    unconfirmed: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return self.stopped_by is not None or not all(self.done.values())

    def lose(self, node: Node, why: str) -> None:
        self.done[node.host] = False
        self.unconfirmed.add(node.host)
        self.messages.append(why)

    def add(self, node: Node, report: dict[str, Any], *, shown_host: str) -> None:
        self.done[node.host] = report["ok"]
        self.failures += [failure.RankFailure(**{**one, "host": shown_host}) for one in report["failures"]]
        if report["message"]:
            self.messages.append(f"{node.host}: {report['message']}")

    def exit_code(self) -> int:
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.failures:
            return failure.first(self.failures).shell_code
        return 1 if self.failed else 0


class Launcher:
    """Runs one job; ``run`` returns the exit code."""

    def __init__(self, job: LaunchJob) -> None:
        self._job = job
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._nodes = [Node(job, rank, self._events) for rank in range(max(1, len(job.hosts)))]

    def run(self) -> int:
        with self._signals():
            try:
                self._bring_up()
            except Stopped as stopped:
                return 128 + stopped.number
            outcome = self._watch()
        self._tell(outcome)
        return outcome.exit_code()

    # before the start: whatever is wrong is said here, and no rank has run

    def _bring_up(self) -> None:
        try:
            for node in self._nodes:
                node.start()
            self._await_all(AgentEvent.READY)
            for node in self._nodes:
                node.order(Order.PROBE)
            self._await_all(AgentEvent.REACHED)
            for node in self._nodes:
                node.order(Order.GO)
        except BaseException:
            self._give_up()
            raise

    def _await_all(self, event: AgentEvent) -> None:
        missing = list(self._nodes)
        deadline = time.monotonic() + _READY_TIMEOUT
        while missing:
            try:
                node, report = self._next_event(deadline)
            except Empty:
                names = ", ".join(node.host for node in missing)
                raise ClickException(f"no answer from {names} within {_READY_TIMEOUT:.0f} s") from None
            if report is None:
                raise ClickException(node.why_it_ended())
            if report["event"] == AgentEvent.REFUSED.value:
                where = f"{node.host}: " if self._job.hosts else ""
                raise ClickException(where + report["message"])
            if report["event"] == event.value:
                missing.remove(node)

    def _give_up(self) -> None:
        for node in self._nodes:
            node.hang_up()
        for node in self._nodes:
            node.wait_or_abandon(_STOP_MARGIN if node.greeted else 0.0)

    # while it runs

    def _watch(self) -> LaunchOutcome:
        outcome = LaunchOutcome()
        deadline = float("inf")
        while len(outcome.done) < len(self._nodes):
            try:
                node, report = self._next_event(deadline)
            except Stopped as stopped:
                self._stop(outcome, stopped.number)
            except Empty:
                self._abandon(outcome)
            else:
                self._take(outcome, node, report)
            if outcome.failed and deadline == float("inf"):
                deadline = time.monotonic() + self._job.stop_timeout + _STOP_MARGIN
                if outcome.stopped_by is None:
                    self._order_the_living(outcome, Order.STOP, int(signal.SIGTERM))
        for node in self._nodes:
            node.wait_or_abandon(_STOP_MARGIN)
        return outcome

    def _take(self, outcome: LaunchOutcome, node: Node, report: dict[str, Any] | None) -> None:
        if report is None:
            if node.host not in outcome.done:
                outcome.lose(node, node.why_it_ended())
        elif report["event"] == AgentEvent.DONE.value:
            outcome.add(node, report, shown_host=node.host if self._job.hosts else "")

    def _stop(self, outcome: LaunchOutcome, number: int) -> None:
        if outcome.stopped_by is not None:
            self._order_the_living(outcome, Order.KILL)
            return
        outcome.stopped_by = number
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
            print(f"\n{name}: stopping all processes (Ctrl-C again kills them at once)", file=sys.stderr)
        self._order_the_living(outcome, Order.STOP, _passed_on(number))

    def _abandon(self, outcome: LaunchOutcome) -> None:
        for node in self._nodes:
            if node.host not in outcome.done:
                node.abandon()
                outcome.lose(
                    node, f"{node.host} did not confirm that it stopped; look there for processes left"
                )

    def _order_the_living(self, outcome: LaunchOutcome, order: Order, *words: object) -> None:
        for node in self._nodes:
            if node.host not in outcome.done:
                node.order(order, *words)

    # after it

    def _tell(self, outcome: LaunchOutcome) -> None:
        if len(self._nodes) > 1:
            print("\n====== Training on All Nodes =====")
            for node in self._nodes:
                print(f"{node.host}: {'success' if outcome.done[node.host] else 'failure'}")
            print("\n====== Stopping All Nodes =====")
            for node in self._nodes:
                print(f"{node.host}: {'no answer' if node.host in outcome.unconfirmed else 'finish'}")
        sys.stdout.flush()
        # after Ctrl-C most ranks only say that others ended; but one that failed to save its state must be heard
        failures = outcome.failures
        if outcome.stopped_by is not None:
            failures = [f for f in failures if not failure.obeyed(f, _passed_on(outcome.stopped_by))]
        if any(map(failure.is_own_fault, failures)) or (failures and outcome.stopped_by is None):
            print(failure.describe(failures), file=sys.stderr)
        for message in outcome.messages:
            print(f"Error: {message}", file=sys.stderr)

    # events and signals

    def _next_event(self, deadline: float) -> tuple[Node, dict[str, Any] | None]:
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        node, report = self._events.get(timeout=timeout)
        if node is None:
            raise Stopped(report)
        return node, report

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals become events, so that they arrive between two steps and never inside one."""
        previous = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks us to ignore the terminal's end
                previous[number] = signal.signal(number, lambda got, _: self._events.put((None, got)))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _passed_on(number: int) -> int:
    """The signal that the ranks get when the launcher gets ``number``."""
    return int(number if number == signal.SIGINT else signal.SIGTERM)
