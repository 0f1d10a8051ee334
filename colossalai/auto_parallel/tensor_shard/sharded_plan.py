"""``ShardedPlan``: how every operation of a traced model runs on a mesh; what a runtime needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from colossalai.mesh import Layout, Links
from colossalai.mesh.collectives import Transfer


@dataclass(frozen=True)
class NodePlan:
    """How one operation runs.

    The runtime brings each operand to its layout in ``inputs``, runs the operation on the pieces, which
    leaves its tensors in ``computed``, and moves them from there to ``outputs``.

    Args:
        strategy: the documented name: layouts of the output and of the operands (``S01R = S01R X RR``).
        inputs: for each tensor operand, in the order of the tensor arguments of its ``fx`` node (lists are
            flattened), the layout in which it is taken; parameters and buffers are among the operands.  State
            R says that ranks use it differently, so that its gradient is a sum over that axis.
        computed: for each of its tensors the layout in which pieces of the operands give it: partial over
            an axis that cuts a dim that is summed.
        outputs: for each of its tensors the layout in which it is handed on; never partial, never in state R
            unless the node is a share (an identity in front of several equal operations).
    """

    strategy: str
    inputs: tuple[Layout, ...]
    computed: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class PredictedStep:
    """What a step of a plan is expected to take, on one rank.

    Args:
        compute: seconds of the operations, forward and backward.
        communication: seconds of the collectives, as if nothing overlapped.
        memory: bytes of parameters, gradients, states of the optimizer and kept activations.
        forward: the collectives of the forward pass, in its order.
        backward: those of the backward pass, in the order of the forward pass.
    """

    compute: float = 0.0
    communication: float = 0.0
    memory: int = 0
    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()


@dataclass
class ShardedPlan:
    """A layout for every tensor of a traced model.

    Args:
        axes: the axes of the device mesh with their sizes, as sharding specs call them: ``{"0": 2, "1": 2}``.
        nodes: the plans of the operations, by the names of their ``fx`` nodes.  Nodes that only pick
            (``getitem``) or switch modes have none.
        parameters: where each parameter and buffer rests, by its name in ``state_dict`` (tied ones by their
            first): cut, or alike on all ranks of an axis.
        inputs: where each placeholder comes in.
        outputs: where each result is handed out, by the name of the node that makes it.
        links: the costs of the axes, which choose the routes between layouts.
        fingerprint: of the graph that the plan is for.
        recomputed: groups of operations, by name and in order, whose tensors are not kept for the backward
            pass: each group runs once more there, from what comes in, with the same random numbers.
    """

    axes: dict[str, int]
    nodes: dict[str, NodePlan]
    parameters: dict[str, Layout]
    inputs: dict[str, Layout]
    outputs: dict[str, Layout]
    links: Links
    predicted: PredictedStep = field(default_factory=PredictedStep)
    fingerprint: str = ""
    recomputed: tuple[tuple[str, ...], ...] = ()
