"""Tables and heads that are whole along the vocabulary or the classes are cut along their features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.mesh import CommunicationLog, Layout, Mesh, count_communication
from colossalai.nn.modes import mode_1d
from colossalai.testing import fake_world, spawn
from tests.nn.layer.world import BATCH, HIDDEN, SEQUENCE, MODES, compare, copy_to_serial, size, start

WORD = 4
