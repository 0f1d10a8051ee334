"""Which dims hold several equal blocks: q, k and v in one product, which are split afterwards.

A split asks that each block is cut, not their row.  The wish goes from tensor to tensor along the letters, up
to the weight, so that the product before the split has strategies that are cut so.
"""

from __future__ import annotations

from collections import defaultdict

from colossalai.auto_parallel.tensor_shard.strategies.graph import PlanGraph, PlanNode, Source

_MOST_BLOCKS, _MOST_CHOICES = 8, 3

Place = tuple[str, str, int, int]


def _place(source: Source, dim: int) -> Place:
    return source.kind, source.name, source.index, dim


def wanted_blocks(graph: PlanGraph) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each operation the numbers of blocks that are looked at, by letter; only letters with a choice."""
    wanted: dict[Place, set[int]] = defaultdict(lambda: {1})
    users: dict[tuple[str, str], list[PlanNode]] = defaultdict(list)
    for node in graph.nodes.values():
        for source in node.operands:
            users[source.kind, source.name].append(node)
    pending = [n for n in graph.nodes.values() if n.letters is not None and n.letters.blocks]
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(lambda: {1}))
    while pending:
        node = pending.pop()
        for place in _spread_wishes(node, wanted, found[node.name]):
            kind, name = place[:2]
            changed = users[kind, name] + ([graph.nodes[name]] if kind == "node" else [])
            pending += [n for n in changed if n is not node and n.letters is not None and n not in pending]
    return {
        name: {letter: tuple(sorted(numbers)) for letter, numbers in letters.items() if len(numbers) > 1}
        for name, letters in found.items()
    }


def _spread_wishes(node: PlanNode, wanted: dict[Place, set[int]], found: dict[str, set[int]]) -> list[Place]:
    """Bring the wishes of a node's tensors together; the dims whose wishes have grown."""
    assert node.letters is not None
    tensors = [*node.operands, *(Source("node", node.name, i) for i in range(len(node.call.outputs)))]
    grown = []
    for letter in node.letters.letters:
        places = list(node.letters.places(letter))
        factor = {place: node.letters.blocks.get(place, 1) for place in places}
        own = set(found[letter])
        for number, dim in places:
            own |= {
                n // factor[number, dim]
                for n in wanted[_place(tensors[number], dim)]
                if n % factor[number, dim] == 0
            }
        own = set(sorted(n for n in own if n <= _MOST_BLOCKS)[:_MOST_CHOICES])
        found[letter] |= own
        for number, dim in places:
            place = _place(tensors[number], dim)
            before = len(wanted[place])
            wanted[place] |= {n * factor[number, dim] for n in own}
            if len(wanted[place]) > before:
                grown.append(place)
    return grown
