"""Random graphs of strategies."""

from __future__ import annotations

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver import StrategyGraph


def random_graph(
    seed: int, nodes: int, strategies: int, edges: float = 0.35, forbidden: float = 0.0
) -> StrategyGraph:
    """A graph whose nodes are joined with the probability ``edges``; some need the same memory always."""
    rng = np.random.default_rng(seed)
    graph = StrategyGraph()
    for i in range(nodes):
        k = int(rng.integers(1, strategies + 1))
        memory = rng.integers(0, 100, k) if rng.random() < 0.7 else np.full(k, 7)
        graph.add_node(f"node{i}", rng.random(k) * 10, memory)
    for i in range(nodes):
        for j in range(i + 1, nodes):
            if rng.random() < edges:
                u, v = (i, j) if rng.random() < 0.5 else (j, i)
                cost = rng.random((len(graph.nodes[u]), len(graph.nodes[v]))) * 6
                graph.add_edge(u, v, np.where(rng.random(cost.shape) < forbidden, np.inf, cost))
    return graph


def random_layers(seed: int, layers: int, jitter: float = 0.0, strategies: int = 5) -> StrategyGraph:
    """A chain of blocks with a residual stream, as a transformer has; equal ones where ``jitter`` is zero."""
    rng = np.random.default_rng(seed)
    block = [(rng.random(strategies) * 10, rng.integers(0, 100, strategies)) for _ in range(4)]
    links = [rng.random((strategies, strategies)) * 6 for _ in range(6)]
    graph = StrategyGraph()
    stream = graph.add_node("input", rng.random(strategies), rng.integers(0, 100, strategies))
    for layer in range(layers):
        norm, one, two, add = (
            graph.add_node(f"{layer}.{name}", cost * (1 + jitter * rng.random(strategies)), memory)
            for name, (cost, memory) in zip(("norm", "one", "two", "add"), block, strict=True)
        )
        ends = ((stream, norm), (norm, one), (norm, two), (one, two), (two, add), (stream, add))
        for (u, v), link in zip(ends, links, strict=True):
            graph.add_edge(u, v, link)
        stream = add
    return graph


def middle(graph: StrategyGraph, part: float, memory: float) -> float:
    """A budget between the smallest plan (if no pair is forbidden) and a plan of ``memory`` bytes."""
    least = sum(float(n.memory.min()) for n in graph.nodes)
    return float(int(least + part * (memory - least)))
