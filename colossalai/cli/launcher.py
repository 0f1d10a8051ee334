"""The launcher: brings all hosts to the same point, starts them together, and ends them together."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, Any

from click import ClickException

from colossalai.cli import failure, hosts, wire
from colossalai.cli.job import LaunchJob
from colossalai.cli.node_agent import module_command
from colossalai.cli.wire import AgentEvent, Order

# ---- One host as the launcher sees it: its agent, started here or by ssh, and the pipes to and from it ----

SSH_OPTIONS = "COLOSSALAI_SSH_OPTIONS"
_AGENT = "colossalai.cli.node_agent"
# ssh takes the first value it is given for an option, so the user's own options come before these
_SSH_DEFAULTS = [
    *("-o", "BatchMode=yes"),  # a password prompt would be a hang
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15"),  # notice a host that vanished without a word
    *("-o", "ControlMaster=no"),  # a shared connection is welcome, but ours must end with us
    *("-o", "LogLevel=ERROR"),
]
_screen = threading.Lock()


class Node:
    """Starts an agent, shows the output it sends, and puts its reports into ``events``.

    An event is ``(node, report)``, ``(node, None)`` at the agent's end, or ``(None, signal)``.
    """

    def __init__(self, job: LaunchJob, rank: int, events: SimpleQueue[Any]) -> None:
        self._job, self._rank, self._events = job, rank, events
        self.host = job.hosts[rank] if job.hosts else "localhost"
        self.remote = not hosts.is_this_machine(self.host)
        self._capture = self.remote or len(job.hosts) > 1
        self._prefix = f"{self.host}: ".encode() if len(job.hosts) > 1 else b""
        self._errors: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: IO[bytes] | None = None
        self._error_reader: threading.Thread | None = None
        self.greeted = False

    def start(self) -> None:
        reports = self._start_captured() if self._capture else self._start_on_this_terminal()
        self._send(json.dumps(self._job.order(self._rank, remote=self.remote, capture=self._capture)))
        threading.Thread(target=self._listen, args=(reports,), daemon=True).start()

    def order(self, order: Order, *words: object) -> None:
        self._send(" ".join([order.value, *map(str, words)]))

    def hang_up(self) -> None:
        """Close the pipe: an agent that does not answer orders still notices this."""
        if self._control:
            with contextlib.suppress(BrokenPipeError):
                self._control.close()

    def wait_or_abandon(self, timeout: float) -> None:
        """Let the agent end; one that does not is cut off."""
        if self._process:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.abandon()

    def abandon(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def why_it_ended(self) -> str:
        """What ssh or the agent's interpreter said last, for an agent that ended without a report."""
        assert self._process
        code = self._process.wait()
        if self._error_reader:
            self._error_reader.join(timeout=2.0)
        said = f": {text}" if (text := "\n".join(self._errors)) else ""
        if self.remote and not self.greeted and code == 255:  # ssh's own exit code
            return f"cannot reach host {self.host} by ssh{said}"
        if self.remote and self.greeted:
            return f"lost the connection to host {self.host}, ssh ended with {failure.exit_text(code)}{said}"
        return f"the node agent on {self.host} ended with {failure.exit_text(code)}{said}"

    def _start_captured(self) -> IO[bytes]:
        command = module_command(_AGENT, ["0", "1"])
        if self.remote:
            if shutil.which("ssh") is None:
                raise ClickException(
                    f"host {self.host} needs ssh, which is not here: apt-get install openssh-client"
                )
            command = self.ssh_command(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not cut the connection over which we stop the ranks
        )
        assert self._process.stdout
        assert self._process.stderr
        self._control = self._process.stdin
        self._error_reader = threading.Thread(
            target=self._watch_errors, args=(self._process.stderr,), daemon=True
        )
        self._error_reader.start()
        return self._process.stdout

    def _start_on_this_terminal(self) -> IO[bytes]:
        """One local node: its ranks write to the user's terminal themselves and may read from it."""
        orders_end, control = os.pipe()
        reports, reports_end = os.pipe()
        self._process = subprocess.Popen(
            module_command(_AGENT, [str(orders_end), str(reports_end)]),
            pass_fds=(orders_end, reports_end),
            start_new_session=True,
        )
        os.close(orders_end)
        os.close(reports_end)
        self._control = open(control, "wb", buffering=0)  # noqa: SIM115
        return open(reports, "rb")

    def ssh_command(self, command: list[str]) -> list[str]:
        port = ["-p", str(self._job.ssh_port)] if self._job.ssh_port else []
        # the interpreter itself may need this to start; everything else travels with the job, not in `ps`
        libraries = os.environ.get("LD_LIBRARY_PATH")
        setting = ["env", f"LD_LIBRARY_PATH={libraries}"] if libraries else []
        text = shlex.join(["exec", *setting, *command])
        return [
            "ssh",
            *shlex.split(os.environ.get(SSH_OPTIONS, "")),
            *_SSH_DEFAULTS,
            *port,
            "-T",
            self.host,
            text,
        ]

    def _send(self, line: str) -> None:
        assert self._control
        with contextlib.suppress(BrokenPipeError, ValueError):  # gone, which the end of its reports tells
            self._control.write(line.encode() + b"\n")
            self._control.flush()

    def _listen(self, reports: IO[bytes]) -> None:
        for raw in reports:
            line = raw.rstrip(b"\n")
            if not self.greeted:
                self.greeted = line == wire.GREETING
                if not self.greeted:
                    self._show(sys.stderr, line)  # a login shell's words of welcome
            elif line[:1] == wire.REPORT:
                self._events.put((self, json.loads(line[1:])))
            else:
                self._show(sys.stdout if line[:1] == wire.OUT else sys.stderr, line[1:])
        self._events.put((self, None))

    def _watch_errors(self, pipe: IO[bytes]) -> None:
        for raw in pipe:
            self._errors.append(raw.decode(errors="replace").rstrip())

    def _show(self, stream: Any, line: bytes) -> None:
        try:
            with _screen:
                stream.buffer.write(self._prefix + line + b"\n")
                stream.buffer.flush()
        except BrokenPipeError:  # the reader of our output is gone, and so is the rest of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self._events.put((None, signal.SIGPIPE))


_READY_TIMEOUT = 60.0  # an interpreter on a slow network file system takes its time
_STOP_MARGIN = 15.0  # beyond the grace period: the agent's own margin and the way back


class Stopped(Exception):
    """A signal told us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class LaunchOutcome:
    """The outcome of a job, collected from the reports of its agents."""

    done: dict[str, bool] = field(default_factory=dict)
    failures: list[failure.RankFailure] = field(default_factory=list)
    ended: list[failure.EarlyEnd] = field(default_factory=list)  # ranks with exit code 0
    messages: list[str] = field(default_factory=list)
    stopped_by: int | None = None
    stopped_at: float = float("inf")
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
        self.ended += [failure.EarlyEnd(**{**one, "host": shown_host}) for one in report["ended"]]
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
        outcome.stopped_by, outcome.stopped_at = number, time.time()
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
        # after Ctrl-C most ranks only say that others ended; but one that failed to save its state must be
        # heard
        failures = outcome.failures
        if outcome.stopped_by is not None:
            failures = [f for f in failures if not failure.obeyed(f, _passed_on(outcome.stopped_by))]
        early = [end for end in outcome.ended if end.time < outcome.stopped_at]
        if any(map(failure.is_own_fault, failures)) or (failures and outcome.stopped_by is None):
            print(failure.describe(failures, early), file=sys.stderr)
        elif outcome.stopped_by is not None and early:  # what was interrupted may have waited for these
            print("\n".join(failure.describe_early(early)), file=sys.stderr)
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
