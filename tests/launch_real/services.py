"""A real sshd and a real SLURM for the tests, each on its own ports with its own keys, gone afterwards.

Nothing outside a temporary folder is read or written: neither ~/.ssh nor /etc/slurm nor /etc/munge.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cli.tools import MARKER, free_port, wait_until

INSTALL = "apt-get install openmpi-bin openssh-client openssh-server slurm-wlm munge"
SSH_HOSTS = ("127.0.0.2", "127.0.0.3")


def missing(*programs: str) -> str | None:
    """Why a test must be skipped, or None."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
    absent = [program for program in programs if not shutil.which(program, path=path)]
    return f"{', '.join(absent)} not found; install with: {INSTALL}" if absent else None


def _sbin(program: str) -> str:
    return shutil.which(program, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"])) or program


@contextmanager
def _folder() -> Iterator[Path]:
    # not pytest's: munge refuses a socket below a folder that only root may enter
    with tempfile.TemporaryDirectory(prefix="colossalai_test_") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def _daemon(command: list[str], folder: Path, ready: Callable[[], bool], **options: object) -> Iterator[None]:
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, **options
        )
    try:
        wait_until(lambda: ready() or process.poll() is not None, seconds=20, what=f"{command[0]} to answer")
        assert process.poll() is None, f"{command[0]} ended: {log.read_text()}"
        yield
    except TimeoutError as error:
        raise AssertionError(f"{error}: {log.read_text()}") from None
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def sshd() -> Iterator[dict[str, str]]:
    """The environment under which `colossalai run` reaches SSH_HOSTS; the port is in it too."""
    with _folder() as folder:
        folder.chmod(0o700)
        port = free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"[{host}]:{port} {host_key}" for host in SSH_HOSTS))
        config = folder / "sshd_config"
        config.write_text(
            f"Port {port}\n"
            + "".join(f"ListenAddress {host}\n" for host in SSH_HOSTS)
            + f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
            f"AcceptEnv {MARKER}\n"
            "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            "StrictModes no\n"  # the folder is ours alone, but /tmp above it is everybody's
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # a fresh machine has none until its own sshd starts
        command = [_sbin("sshd"), "-D", "-e", "-f", str(config)]
        with _daemon(command, folder, lambda: all(_answers(host, port) for host in SSH_HOSTS)):
            options = [
                *("-F", "/dev/null", "-i", str(folder / "user_key"), "-l", getpass.getuser()),
                *("-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"),
                *("-o", f"UserKnownHostsFile={folder}/known_hosts"),
            ]
            yield {"COLOSSALAI_SSH_OPTIONS": shlex.join(options), "TEST_SSH_PORT": str(port)}


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The environment under which `srun` finds a cluster of this one machine.

    slurmctld and slurmd stay in the foreground; without cgroups and task plugins they need no configured
    system.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_folder())
        munge = folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        munge_socket = munge / "socket"
        command = [_sbin("munged"), "--foreground", f"--socket={munge_socket}", f"--key-file={munge}/key"]
        command += [f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log"]
        stack.enter_context(_daemon(command, folder, munge_socket.exists, user="munge", group="munge"))

        config = folder / "slurm.conf"
        config.write_text(_slurm_conf(folder, munge_socket, free_port(), free_port()))
        environment = {"SLURM_CONF": str(config)}
        daemons = {**os.environ, **environment}
        stack.enter_context(
            _daemon(
                [_sbin("slurmctld"), "-D"], folder, lambda: _slurm_says("UP", daemons, "ping"), env=daemons
            )
        )
        stack.enter_context(
            _daemon(
                [_sbin("slurmd"), "-D", "-N", "here"],
                folder,
                lambda: _slurm_says("State=IDLE", daemons, "show", "node", "here"),
                env=daemons,
            )
        )
        yield environment


def _slurm_says(word: str, environment: dict[str, str], *question: str) -> bool:
    answer = subprocess.run(["scontrol", *question], env=environment, capture_output=True, text=True)
    return word in answer.stdout


def _slurm_conf(folder: Path, munge_socket: Path, controller_port: int, node_port: int) -> str:
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    host = socket.gethostname()
    return "\n".join(
        [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            f"SlurmdPort={node_port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge_socket}",
            "CredType=cred/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.pid",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "MpiDefault=none",
            "ReturnToService=2",
            "SwitchType=switch/none",
            f"NodeName=here NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
            "PartitionName=all Nodes=here Default=YES State=UP",
            "",
        ]
    )
