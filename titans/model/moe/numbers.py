"""How many experts each block of a model has."""

from __future__ import annotations

from collections.abc import Sequence


def experts_of_blocks(num_experts: int | Sequence[int], depth: int) -> list[int]:
    """The number of experts of each of ``depth`` blocks; 0 where a block has an MLP.

    One number is that of every second block, beginning with the second; a sequence has one for each block.
    """
    if isinstance(num_experts, int):
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if depth < 2:
            raise ValueError(
                f"num_experts={num_experts} gives experts to every second block, but depth={depth};"
                f" use more blocks, or num_experts=[{num_experts}]"
            )
        return [num_experts if number % 2 else 0 for number in range(depth)]
    numbers = list(num_experts)
    if len(numbers) != depth or any(not isinstance(n, int) or n < 0 for n in numbers) or not any(numbers):
        raise ValueError(
            f"num_experts is one number, or one for each of the {depth} blocks, 0 for those without experts;"
            f" got {numbers}"
        )
    return numbers
