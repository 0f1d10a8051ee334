"""The agent: on each host it starts torchrun, watches the launcher, and leaves no process behind.

It says hello, gets the job, checks what only this host can know (is the script here, is the port free), and
waits until every host is ready.  Then it runs torchrun.  When the launcher says so, or is gone (its pipe
ends, whether it was killed or the ssh connection broke), the ranks get a signal and, after the grace period,
SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from colossalai.cli import _rank, _torchrun, failure, wire
from colossalai.cli.wire import AgentEvent, Order

# ---- Output of ranks as whole lines, so that several hosts can share one terminal ----

PROGRESS_INTERVAL = 5.0
LONGEST_LINE = 1 << 16


class LineAssembler:
    """Turns chunks of bytes into lines without their end.

    A progress bar rewrites its line with carriage returns.  On a terminal shared by several hosts each
    rewrite would become a line of its own, so of these only the newest is shown, at most every
    ``PROGRESS_INTERVAL``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._next_progress = clock()

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(_last_rewrite, lines)
        if b"\r" in self._rest:
            newest = _last_rewrite(self._rest)
            # some bars write the return before the text and some after it; what follows must still fit
            self._rest = newest + b"\r" if self._rest.endswith(b"\r") else b"\r" + newest
            if self._clock() >= self._next_progress:
                self._next_progress = self._clock() + PROGRESS_INTERVAL
                yield newest
        elif len(self._rest) > LONGEST_LINE:
            yield self._rest
            self._rest = b""

    def finish(self) -> Iterator[bytes]:
        """What is left when the stream ends without a newline."""
        if self._rest.strip():
            yield _last_rewrite(self._rest)
        self._rest = b""


def _last_rewrite(line: bytes) -> bytes:
    rewrites = [part for part in line.split(b"\r") if part]
    return rewrites[-1] if rewrites else b""


# ---- Finding and ending every process below this one (Linux; elsewhere torchrun's own cleaning must do) ----


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child instead of init's, so none gets away."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The living processes below ``root``, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # after the command's name, which is in parentheses and may hold anything: state, parent
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def kill_descendants(root: int, timeout: float = 5.0) -> list[int]:
    """Kill until none is left, since a dying process may have started another; the unkillable are
    returned.
    """
    deadline = time.monotonic() + timeout
    while (left := descendants(root)) and time.monotonic() < deadline:
        kill(left)
        reap()
        time.sleep(0.02)
    return left


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(keep: int | None = None) -> None:
    """Collect adopted children that have ended, so that no zombies pile up; ``keep`` has its own waiter."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == keep:
                return
            os.waitpid(ended.si_pid, 0)


_POLL = 0.1
# torchrun kills its ranks itself after the grace period; then it needs a moment to report
_TORCHRUN_MARGIN = 5.0
_PROBE_TIMEOUT = 10.0


class State(Enum):
    """The state of an agent."""

    WAITING = "no rank has been started"
    RUNNING = "torchrun runs"
    STOPPING = "the ranks were told to end"
    DONE = "no rank is left"


class Refusal(Exception):
    """The job cannot start on this host."""


def main() -> None:
    control, reports = int(sys.argv[1]), int(sys.argv[2])
    adopt_orphans()
    agent = Agent(control, reports)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: agent.stop(received))
    agent.run()


class Agent:
    """One host's part of the job.  ``control`` and ``reports`` are the pipes from and to the launcher."""

    def __init__(self, control: int, reports: int) -> None:
        self._control, self._reports = control, reports
        self._orders = wire.LineBuffer()
        self._selector = selectors.DefaultSelector()
        self._state = State.WAITING
        self._job: dict[str, Any] | None = None
        self._listener: socket.socket | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._notes = Path()  # where the ranks and torchrun write how they ended
        self._kill_at = float("inf")

    def run(self) -> None:
        self._send(wire.GREETING + b"\n")
        self._selector.register(self._control, selectors.EVENT_READ, self._read_orders)
        while self._state is not State.DONE:
            for key, _ in self._selector.select(_POLL):
                key.data()
            self._tick()

    def stop(self, number: int) -> None:
        """Tell the ranks to end; a second call does not start the grace period again."""
        if self._state is State.WAITING:
            self._state = State.DONE
        elif self._state is State.RUNNING:
            assert self._torchrun
            assert self._job
            self._state = State.STOPPING
            self._kill_at = time.monotonic() + self._job["stop_timeout"] + _TORCHRUN_MARGIN
            self._torchrun.send_signal(number)

    # orders

    def _read_orders(self) -> None:
        data = os.read(self._control, 1 << 16)
        if not data:
            self._selector.unregister(self._control)
            self.stop(signal.SIGTERM)
        for line in self._orders.feed(data):
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        try:
            if self._job is None:
                self._prepare(json.loads(line))
                return
            word, *rest = line.decode().split()
            order = Order(word)
            if order is Order.PROBE:
                self._probe()
            elif order is Order.GO:
                self._start()
            elif order is Order.STOP:
                self.stop(int(rest[0]))
            else:
                self.stop(signal.SIGTERM)
                self._kill_at = time.monotonic()
        except Refusal as refusal:
            self._send(wire.report(AgentEvent.REFUSED, message=str(refusal)))
            self._state = State.DONE

    def _prepare(self, job: dict[str, Any]) -> None:
        self._job = job
        try:
            os.chdir(job["cwd"])
        except OSError as error:
            raise Refusal(f"cannot enter the working directory {job['cwd']}: {error.strerror}") from None
        if job["script"] is not None and not Path(job["script"]).is_file():
            raise Refusal(f"no such script: {job['script']} (looked in {job['cwd']})")
        job["nproc"] = processes_here(job)
        if job["is_master"]:
            self._listener = listen(job["master_port"])
        self._send(wire.report(AgentEvent.READY))

    def _probe(self) -> None:
        assert self._job
        address = (self._job["master_addr"], self._job["master_port"])
        try:
            socket.create_connection(address, timeout=_PROBE_TIMEOUT).close()
        except OSError as error:
            raise Refusal(
                f"cannot reach {address[0]} port {address[1]}: {error.strerror or error}; --master_addr must"
                " be an address of the first host that all hosts can reach, and no firewall may block"
                " --master_port"
            ) from None
        self._send(wire.report(AgentEvent.REACHED))

    # the ranks

    def _start(self) -> None:
        assert self._job
        if self._listener:
            self._listener.close()
        self._notes = Path(tempfile.mkdtemp(prefix="colossalai_run_"))
        capture = self._job["capture"]
        self._torchrun = subprocess.Popen(
            torchrun_command(self._job, self._notes),
            stdin=subprocess.DEVNULL if capture else None,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            env=rank_environment(self._job, self._notes),
            start_new_session=True,  # Ctrl-C in a terminal is for the launcher, which tells every host
        )
        self._state = State.RUNNING
        for kind, pipe in ((wire.OUT, self._torchrun.stdout), (wire.ERR, self._torchrun.stderr)):
            if pipe:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, self._forwarder(kind, pipe.fileno()))

    def _forwarder(self, kind: bytes, source: int) -> Callable[[], bool]:
        lines = LineAssembler()

        def forward() -> bool:
            try:
                data = os.read(source, 1 << 16)
            except BlockingIOError:  # the other end is still open, but there is nothing to read
                return False
            if not data:
                self._selector.unregister(source)
            for line in lines.feed(data) if data else lines.finish():
                self._send(wire.frame(kind, line))
            return bool(data)

        return forward

    def _tick(self) -> None:
        if not self._torchrun:
            return
        reap(keep=self._torchrun.pid)
        if self._torchrun.poll() is not None:
            self._finish()
        elif time.monotonic() > self._kill_at:
            kill_descendants(os.getpid())
        elif self._state is State.RUNNING:
            self._end_lingering()

    def _end_lingering(self) -> None:
        """End a rank that has raised but whose process does not end, for example for a thread that still
        runs.
        """
        assert self._job
        old = time.time() - self._job["stop_timeout"]
        pids = {note["pid"] for note in failure.read_notes(self._notes) if note["time"] < old}
        lingering = pids.intersection(descendants(os.getpid())) if pids else set()
        if lingering and not self._job["max_restarts"]:
            self.stop(signal.SIGTERM)
        else:
            kill(lingering)  # torchrun sees it and starts all of them again

    def _finish(self) -> None:
        assert self._torchrun
        if self._torchrun.returncode != 0:
            kill_descendants(os.getpid())
        for key in list(self._selector.get_map().values()):
            while key.fd != self._control and key.data():
                pass  # what is still in the pipe
        self._send(wire.report(AgentEvent.DONE, **self._outcome(self._torchrun.returncode)))
        shutil.rmtree(self._notes, ignore_errors=True)
        self._state = State.DONE

    def _outcome(self, returncode: int) -> dict[str, Any]:
        file = self._notes / _torchrun.REPORT
        report = json.loads(file.read_text()) if file.exists() else {}
        failures = (
            failure.collect(report.get("exits", []), failure.read_notes(self._notes)) if returncode else []
        )
        message = report.get("message")
        if returncode != 0 and not failures and not message and self._state is State.RUNNING:
            message = f"torchrun ended with {failure.exit_text(returncode)} and left no report"
        return {
            "ok": returncode == 0,
            "failures": list(map(asdict, failures)),
            "ended": list(map(asdict, failure.early_ends(self._notes))),
            "message": message,
        }

    def _send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._reports, data) :]
            except OSError:  # the launcher is gone; the end of the other pipe tells us to stop
                return


def listen(port: int) -> socket.socket:
    """Take the port as torch will, to see that it is free and to let the other hosts try to reach it."""
    dual = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=1024,
        )
    except OSError as error:
        raise Refusal(
            f"port {port} cannot be used for the rendezvous: {error.strerror}; "
            f"choose another with --master_port, for example --master_port {port % 65535 + 1}"
        ) from None


def torchrun_command(job: dict[str, Any], notes: Path) -> list[str]:
    # torch would leave a folder in /tmp after every run; a --log_dir of the user comes later and wins
    options = [
        f"--log_dir={notes / 'torchrun'}",
        f"--nproc_per_node={job['nproc']}",
        *job["torchrun_options"],
    ]
    ours = [str(os.getpid()), str(job["stop_timeout"]), str(len(options))]
    return module_command("colossalai.cli._torchrun", [*ours, *options, *job["command"]])


def module_command(module: str, arguments: list[str]) -> list[str]:
    """Run ``main`` of one of our modules, also where this package is not installed but only checked out.

    ``-m`` would put the working directory first on the path, where any file of the user may shadow a module.
    """
    root = str(Path(__file__).resolve().parents[2])
    boot = (
        "import sys; sys.path = [p for p in sys.path if p] + [sys.argv.pop(1)]; "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-c", boot, root, *arguments]


def processes_here(job: dict[str, Any]) -> int:
    """How many processes this host starts: the number that was given, or what a word stands for here."""
    wanted = job["nproc"]
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return cores()
    gpus = count_gpus({**os.environ, **(job["env"] or {})})
    if gpus == 0 and wanted == "gpu":
        raise Refusal(
            "--nproc_per_node gpu: there is no GPU here that PyTorch can use (colossalai check -i says why);"
            " use auto, cpu or a number"
        )
    return max(1, gpus)


def count_gpus(environment: dict[str, str]) -> int:
    """The GPUs that ranks with this environment see.

    Another process asks, since ``CUDA_VISIBLE_DEVICES`` of the user may differ from ours, and this one stays
    small.
    """
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(ask, env=environment, capture_output=True, text=True, check=False)
    try:
        return int(answer.stdout.split()[-1])
    except (IndexError, ValueError):
        said = answer.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Refusal(f"the GPUs could not be counted: {said[0]}; give --nproc_per_node a number") from None


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(job: dict[str, Any], notes: Path) -> dict[str, str]:
    environment = {**os.environ, **(job["env"] or {}), _rank.FAILURE_DIR: str(notes)}
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // job["nproc"]))
    return environment
