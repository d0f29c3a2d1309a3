"""The ring of input sets: values change with every call, and the same address holds other values
after a turn.
"""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.judge.benchmark.rotating_inputs import (
    RotatingCalls,
    RotatingInputs,
    plan_rotation,
)


def two_sets() -> list[list[torch.Tensor]]:
    """A parameter and an input, twice."""
    return [[torch.full((4,), 10.0 * n), torch.full((2, 3), float(n)).t()] for n in (1, 2)]


def test_neighbours_differ_and_the_parameter_is_the_first_sets() -> None:
    sets = two_sets()
    ring = RotatingInputs(sets, {0})
    assert len(ring.entries) == 8
    assert [float(entry[1][0, 0]) for entry in ring.entries] == [1.0, 2.0] * 4
    assert all(entry[0] is sets[0][0] for entry in ring.entries)
    assert len({entry[1].data_ptr() for entry in ring.entries}) == 8
    assert all(entry[1].stride() == sets[0][1].stride() for entry in ring.entries)


def test_a_turn_puts_other_values_at_the_same_addresses_and_leaves_the_given_sets_alone() -> None:
    sets = two_sets()
    ring = RotatingInputs(sets, {0})
    before = [entry[1].data_ptr() for entry in ring.entries]
    ring.rotate(1)
    assert [float(entry[1][0, 0]) for entry in ring.entries] == [2.0, 1.0] * 4
    assert [entry[1].data_ptr() for entry in ring.entries] == before
    assert float(sets[0][1][0, 0]) == 1.0
    ring.rotate(0)
    assert [float(entry[1][0, 0]) for entry in ring.entries] == [1.0, 2.0] * 4


def test_a_result_cached_by_address_is_wrong_after_a_turn() -> None:
    ring, results = RotatingInputs(two_sets(), {0}), {}

    def lazy(inputs: list[torch.Tensor]) -> torch.Tensor:
        return results.setdefault(inputs[1].data_ptr(), inputs[1] * 2)

    run = RotatingCalls(lazy, ring)
    for _ in range(8):
        run()
    ring.rotate(1)
    run.position = 3
    assert not torch.equal(run(), ring.entries[3][1] * 2)


def test_turns_take_the_entries_in_order_from_a_place() -> None:
    ring = RotatingInputs(two_sets(), ())
    run = RotatingCalls(lambda inputs: inputs, ring, 13)
    assert run.position == 5
    assert [run() is ring.entries[index] for index in (5, 6, 7, 0)] == [True] * 4
    assert run.position == 1


def test_sets_too_large_for_copies_are_used_as_they_are_and_do_not_turn() -> None:
    large = [[torch.empty(1, dtype=torch.uint8).expand(400 << 20)] for _ in range(2)]
    assert plan_rotation(large[0], (), 2) == (2, False)
    ring = RotatingInputs(large, ())
    assert [
        entry[0] is original[0] for entry, original in zip(ring.entries, large, strict=True)
    ] == [
        True,
        True,
    ]
    ring.rotate(1)
    assert ring.entries[0][0] is large[0][0]
    assert ring.shift == 0


def test_parameters_do_not_count_towards_the_size_of_a_ring() -> None:
    weights = torch.empty(1, dtype=torch.uint8).expand(4 << 30)
    assert plan_rotation([weights, torch.empty(16)], {0}, 2) == (8, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unseen_values_differ_in_every_entry_and_are_undone(dtype: torch.dtype) -> None:
    sets = [[torch.randn(2048).to(dtype), torch.arange(4), torch.ones(3)] for _ in range(2)]
    ring = RotatingInputs(sets, static=[2])
    ring.rotate(1)
    before = [[tensor.clone() for tensor in entry] for entry in ring.entries]
    seen = {entry[0].float().numpy().tobytes() for entry in before}
    # One factor a tensor gave numbers of bfloat16 the values of an earlier round here.
    for _ in range(40):
        ring.restore()
        assert ring.make_unseen()
        for entry, old in zip(ring.entries, before, strict=True):
            content = entry[0].float().numpy().tobytes()
            assert content not in seen
            seen.add(content)
            # In another order, and none of them larger: a function may end where its inputs do.
            assert not torch.equal(entry[0].sign(), old[0].sign())
            sizes, old_sizes = entry[0].abs().sort().values, old[0].abs().sort().values
            assert bool((sizes <= old_sizes).all())
            torch.testing.assert_close(sizes, old_sizes, rtol=0.15, atol=0)
            assert torch.equal(entry[1], old[1])
            assert torch.equal(entry[2], old[2])
    ring.restore()
    for entry, old in zip(ring.entries, before, strict=True):
        assert all(map(torch.equal, entry, old))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_of_float8_change_too(dtype: torch.dtype) -> None:
    ring = RotatingInputs([[torch.randn(100).to(dtype)] for _ in range(2)], static=[])
    before = ring.entries[0][0].float()
    assert ring.make_unseen()
    assert not torch.equal(ring.entries[0][0].float(), before)
    sizes = ring.entries[0][0].float().abs().sort().values
    assert bool((sizes <= before.abs().sort().values).all())


def test_rows_of_unseen_values_are_those_of_the_set_in_another_order() -> None:
    columns = 10.0 ** torch.arange(5)
    for shape in ((40, 5), (1, 40, 5)):
        values = (torch.randn(40, 5).sign() * columns).reshape(shape)
        ring = RotatingInputs([[values], [values]], static=[])
        assert ring.make_unseen()
        changed = ring.entries[0][0]
        assert changed.shape == values.shape
        # Each value stays in its column.
        assert bool((changed.abs() > 0.8 * columns).all() & (changed.abs() < columns).all())
        rows, old_rows = (sorted(t.sign().reshape(40, 5).tolist()) for t in (changed, values))
        assert rows == old_rows


def test_an_expanded_tensor_stays_expanded() -> None:
    ring = RotatingInputs([[torch.randn(4).expand(3, 4)] for _ in range(2)], static=[])
    assert ring.make_unseen()
    assert ring.entries[0][0].stride() == (0, 1)
    assert torch.equal(ring.entries[0][0][0], ring.entries[0][0][2])


def test_integers_alone_are_left_as_they_are() -> None:
    ring = RotatingInputs([[torch.arange(4)], [torch.arange(4) + 1]], static=[])
    assert not ring.make_unseen()
    assert torch.equal(ring.entries[0][0], torch.arange(4))
