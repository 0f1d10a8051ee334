"""One host as the launcher sees it: its agent, started here or by ssh, and the pipes to and from it."""

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
from collections import deque
from queue import SimpleQueue
from typing import IO, Any

from click import ClickException

from colossalai.cli import failure, hosts, wire
from colossalai.cli.job import LaunchJob
from colossalai.cli.node_agent import module_command
from colossalai.cli.wire import Order

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
        except BrokenPipeError:  # whoever read our output has left; the rest of it goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self._events.put((None, signal.SIGPIPE))
