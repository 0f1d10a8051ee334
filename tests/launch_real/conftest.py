"""Services that live as long as the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.launch_real import services


@pytest.fixture(scope="package")
def ssh() -> Iterator[dict[str, str]]:
    if reason := services.missing("ssh", "ssh-keygen", "sshd"):
        pytest.skip(reason)
    with services.sshd() as environment:
        yield environment


@pytest.fixture(scope="package")
def slurm() -> Iterator[dict[str, str]]:
    if reason := services.missing("munged", "slurmctld", "slurmd", "srun", "scontrol"):
        pytest.skip(reason)
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root here")
    with services.slurm() as environment:
        yield environment
