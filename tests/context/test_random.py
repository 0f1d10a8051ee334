from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from colossalai.context import ParallelMode
from colossalai.context.random import (
    SeedManager,
    add_seed,
    get_current_mode,
    get_seeds,
    get_states,
    moe_set_seed,
    reset_seeds,
    seed,
    set_mode,
    set_seed_states,
    sync_states,
    with_seed,
)

DATA, TENSOR = ParallelMode.DATA, ParallelMode.TENSOR
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw() -> float:
    return torch.rand((), device=DEVICE, dtype=torch.float64).item()


def stream(seed: int, count: int) -> list[float]:
    """What a generator of its own draws from ``seed``."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [
        torch.rand((), generator=generator, device=DEVICE, dtype=torch.float64).item() for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def _no_seeds_afterwards() -> Iterator[None]:
    yield
    reset_seeds()


@pytest.fixture
def two_streams() -> None:
    add_seed(DATA, 5)
    add_seed(TENSOR, 7)
    set_mode(DATA)


@pytest.mark.usefixtures("two_streams")
def test_each_mode_goes_on_where_it_stopped() -> None:
    five, seven = stream(5, 4), stream(7, 3)
    assert draw() == five[0]
    with seed(TENSOR):
        assert get_current_mode() is TENSOR
        assert [draw(), draw()] == seven[:2]
    assert get_current_mode() is DATA
    assert [draw(), draw()] == five[1:3]
    set_mode(TENSOR)
    assert draw() == seven[2]
    set_mode(DATA)
    assert draw() == five[3]


@pytest.mark.usefixtures("two_streams")
def test_blocks_nest_and_restore_after_an_error() -> None:
    def nested() -> None:
        with seed(TENSOR), seed(DATA), seed(TENSOR):
            assert draw() == stream(7, 1)[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nested()
    assert get_current_mode() is DATA
    assert draw() == stream(5, 1)[0]


@pytest.mark.usefixtures("two_streams")
def test_with_seed_wraps_a_function() -> None:
    def pair(scale: float, *, shift: float = 0.0) -> float:
        """Doc."""
        return draw() * scale + shift

    wrapped = with_seed(pair, TENSOR)
    assert wrapped.__name__ == "pair"
    assert wrapped(2.0, shift=1.0) == stream(7, 1)[0] * 2.0 + 1.0
    assert draw() == stream(5, 1)[0]


@pytest.mark.usefixtures("two_streams")
def test_states_can_be_noted_and_put_back() -> None:
    draw()
    sync_states()
    noted = get_states(copy=True)
    ahead = [draw(), draw()]
    with seed(TENSOR):
        tensor_ahead = draw()
    for mode, state in noted.items():
        set_seed_states(mode, state)
    assert [draw(), draw()] == ahead
    with seed(TENSOR):
        assert draw() == tensor_ahead


@pytest.mark.usefixtures("two_streams")
def test_copies_of_states_share_nothing() -> None:
    copied, live = get_states(copy=True), get_states()
    assert set(copied) == set(live) == {DATA, TENSOR}
    copied[DATA].zero_()
    assert not torch.equal(copied[DATA], get_states()[DATA])


def test_a_block_before_any_mode_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    add_seed(TENSOR, 7)
    with seed(TENSOR):
        assert draw() == stream(7, 1)[0]
    assert get_current_mode() is None
    assert draw() == stream(3, 1)[0]


def test_adding_a_seed_does_not_disturb_the_generator() -> None:
    torch.manual_seed(3)
    add_seed(DATA, 5)
    assert draw() == stream(3, 1)[0]


@pytest.mark.usefixtures("two_streams")
def test_a_seed_is_replaced_only_on_demand() -> None:
    with pytest.raises(ValueError, match=r"ParallelMode\.DATA already has the seed 5; pass overwrite=True"):
        add_seed(DATA, 6)
    draw()
    add_seed(DATA, 6, overwrite=True)  # of the current mode: takes effect at once
    assert get_seeds() == {DATA: 6, TENSOR: 7}
    assert draw() == stream(6, 1)[0]


@pytest.mark.usefixtures("two_streams")
def test_moe_seeds_replace_the_tensor_stream() -> None:
    moe_set_seed(42)
    assert get_seeds() == {DATA: 5, TENSOR: 42}
    with seed(TENSOR):
        assert draw() == stream(42, 1)[0]


@pytest.mark.usefixtures("two_streams")
def test_reset_forgets_all() -> None:
    reset_seeds()
    assert get_seeds() == {}
    assert get_states() == {}
    assert get_current_mode() is None


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"ParallelMode\.DATA has no seed; .*colossalai\.launch adds DATA and TENSOR"
    ):
        set_mode(DATA)
    add_seed(TENSOR, 1)
    with (
        pytest.raises(ValueError, match=r"has no seed; .* Modes with a seed: ParallelMode\.TENSOR"),
        seed(DATA),
    ):
        pass
    with pytest.raises(ValueError, match=r"ParallelMode\.DATA has no seed"):
        set_seed_states(DATA, torch.get_rng_state())
    with pytest.raises(TypeError, match="belongs to a ParallelMode, got 'data'"):
        add_seed("data", 1)  # type: ignore[arg-type]
    for wrong in (-1, True, 1.5):
        with pytest.raises(
            ValueError, match=r"seed of ParallelMode\.DATA must be an integer that is not negative"
        ):
            add_seed(DATA, wrong)  # type: ignore[arg-type]


def test_managers_are_independent() -> None:
    add_seed(DATA, 5)
    assert SeedManager().seeds == {}
