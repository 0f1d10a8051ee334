"""Draws sequence_parallel.png: who computes what in a ring, in zig-zag order, and with Ulysses.

python -m benchmarks.sequence_picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
RANKS, CHUNKS = 4, 8


def box(ax: Any, x: float, y: float, w: float, h: float, rank: int, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=COLOURS[rank], edgecolor="white", linewidth=1))
    if text:
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", color="white", fontsize=8)


def arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    shape = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=shape, arrowstyle="-|>", mutation_scale=12, color="#444444"
        )
    )


def frame(ax: Any, title: str, width: float, height: float) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlim(-0.5, width)
    ax.set_ylim(height, -0.5)
    ax.axis("off")


def work(ax: Any, owner: list[int], title: str, note: str) -> None:
    """Causal attention: rows are queries, columns keys; colours say which rank computes."""
    frame(ax, title, CHUNKS + 0.5, CHUNKS + 2.4)
    for query in range(CHUNKS):
        for key in range(query + 1):
            box(ax, key, query, 1, 1, owner[query])
    for chunk in range(CHUNKS):
        box(ax, chunk, CHUNKS + 0.3, 1, 0.6, owner[chunk], str(chunk))
    squares = [sum(q + 1 for q in range(CHUNKS) if owner[q] == rank) for rank in range(RANKS)]
    ax.text(
        0,
        CHUNKS + 1.5,
        f"{note}\nsquares of ranks 0 to 3: {', '.join(map(str, squares))}",
        fontsize=8,
        va="top",
    )


def ring(ax: Any) -> None:
    frame(ax, "Ring: keys and values go round", 9.2, 10.4)
    places = [(1, 1), (5.5, 1), (5.5, 5.5), (1, 5.5)]
    for rank, (x, y) in enumerate(places):
        box(ax, x, y, 2.2, 0.9, rank, f"q of {rank}")
        box(ax, x, y + 1, 2.2, 0.9, rank, f"k, v of {rank}")
    arrow(ax, (3.4, 2.4), (5.3, 2.4))
    arrow(ax, (6.6, 3.2), (6.6, 5.3))
    arrow(ax, (5.3, 6.9), (3.4, 6.9))
    arrow(ax, (2.1, 5.3), (2.1, 3.2))
    text = (
        "queries stay; in each of n steps a rank attends\nto the keys it has and hands them on;"
        "\nblocks are merged by their log-sum-exp"
    )
    ax.text(0, 8.4, text, fontsize=8, va="top")


def ulysses(ax: Any) -> None:
    frame(ax, "Ulysses: tokens for heads, and back", 9.5, 10.4)
    for rank in range(RANKS):
        box(ax, 0.6, 1 + rank * 1.5, 3.2, 1.4, rank, "")
        box(ax, 5.8 + rank * 0.8, 1, 0.7, 5.9, rank, "")
    ax.text(2.2, 0.6, "heads", ha="center", fontsize=8)
    ax.text(7.35, 0.6, "heads", ha="center", fontsize=8)
    ax.text(0.3, 4, "tokens", va="center", ha="center", rotation=90, fontsize=8)
    arrow(ax, (4.0, 3.3), (5.6, 3.3), -0.2)
    arrow(ax, (5.6, 4.6), (4.0, 4.6), -0.2)
    ax.text(4.8, 2.6, "q, k, v", ha="center", fontsize=8)
    ax.text(4.8, 5.5, "output", ha="center", fontsize=8)
    text = (
        "an all-to-all gives each rank all tokens of some\nheads, for any kernel; a second one brings"
        "\nthe output back. Heads must divide."
    )
    ax.text(0, 8.0, text, fontsize=8, va="top")


def main() -> None:
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.3))
    ring(axes[0])
    work(
        axes[1],
        [c // 2 for c in range(CHUNKS)],
        "Causal, cut in order",
        "the last rank has most of the work;",
    )
    zigzag = [min(c, CHUNKS - 1 - c) for c in range(CHUNKS)]
    work(axes[2], zigzag, "Causal, zig-zag: chunks i and 2n-1-i", "all ranks have the same work;")
    ulysses(axes[3])
    figure.tight_layout()
    figure.savefig(Path(__file__).parents[1] / "docs/source/en" / "sequence_parallel.png", dpi=90)


if __name__ == "__main__":
    main()
