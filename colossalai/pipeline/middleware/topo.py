"""``Topo``: the parts of a cut model as a graph of the values that they hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PartitionInputVal:
    """A value that a part takes: the output number ``offset`` of the part ``partition_id``."""

    partition_id: int
    offset: int


@dataclass
class PartitionOutputVal:
    """A value that a part gives: for each part that takes it, that part and the number of its input."""

    takers: list[tuple[int, int]] = field(default_factory=list)

    def add(self, partition_id: int, offset: int) -> None:
        """Note that the part ``partition_id`` takes this value as its input number ``offset``."""
        self.takers.append((partition_id, offset))

    def get(self) -> list[tuple[int, int]]:
        return list(self.takers)


@dataclass
class Partition:
    """A part of a cut model: where its inputs come from, and where its outputs go."""

    input_vals: list[PartitionInputVal] = field(default_factory=list)
    output_vals: list[PartitionOutputVal] = field(default_factory=list)

    def add_input_val(self, value: PartitionInputVal) -> None:
        self.input_vals.append(value)

    def add_output_val(self, value: PartitionOutputVal) -> None:
        self.output_vals.append(value)

    def get_input_vals(self) -> list[PartitionInputVal]:
        return list(self.input_vals)

    def get_output_vals(self) -> list[PartitionOutputVal]:
        return list(self.output_vals)

    def get_input_partition_ids(self) -> list[int]:
        """The parts from which it takes values, each once, in the order of its inputs."""
        return list(dict.fromkeys(value.partition_id for value in self.input_vals))

    def get_output_partition_ids(self) -> list[int]:
        """The parts that take its values, each once."""
        return list(dict.fromkeys(part for value in self.output_vals for part, _ in value.takers))

    def get_output_offsets(self, dst_partition_id: int) -> list[int]:
        """The numbers of its outputs that the part ``dst_partition_id`` takes."""
        return [
            offset
            for offset, value in enumerate(self.output_vals)
            if any(part == dst_partition_id for part, _ in value.takers)
        ]


class Topo:
    """The parts of a cut model.  The first gives the model's inputs, the last takes its outputs, and those
    between compute.
    """

    def __init__(self, input_partition_id: int | None = None, output_partition_id: int | None = None) -> None:
        self._input_id, self._output_id = input_partition_id, output_partition_id
        self._partitions: dict[int, Partition] = {}

    def set_partitions(self, partition_id: int, partition: Partition) -> None:
        self._partitions[partition_id] = partition

    def set_input_partition_id(self, partition_id: int) -> None:
        self._input_id = partition_id

    def set_output_partition_id(self, partition_id: int) -> None:
        self._output_id = partition_id

    def get_input_partition_id(self) -> int | None:
        return self._input_id

    def get_output_partition_id(self) -> int | None:
        return self._output_id

    def get_partition_by_id(self, partition_id: int) -> Partition:
        if partition_id not in self._partitions:
            raise KeyError(f"there is no part {partition_id}, only {sorted(self._partitions)}")
        return self._partitions[partition_id]

    def get_input_partition(self) -> Partition | None:
        return None if self._input_id is None else self._partitions.get(self._input_id)

    def get_output_partition(self) -> Partition | None:
        return None if self._output_id is None else self._partitions.get(self._output_id)

    def get_mid_partitions(self) -> dict[int, Partition]:
        """The parts that compute."""
        ends = (self._input_id, self._output_id)
        return {number: part for number, part in self._partitions.items() if number not in ends}

    def get_mid_partition_ids(self) -> list[int]:
        return list(self.get_mid_partitions())

    def __str__(self) -> str:
        names = {self._input_id: "inputs", self._output_id: "outputs"}
        lines = []
        for number, part in self._partitions.items():
            taken = ", ".join(f"{v.partition_id}.{v.offset}" for v in part.input_vals)
            name = names.get(number, "part")
            lines.append(f"{number} ({name}): takes {taken or 'nothing'}, gives {len(part.output_vals)}")
        return "\n".join(lines)
