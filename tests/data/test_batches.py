import json
from collections import Counter
from dataclasses import replace

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from burnish.data.batches import EpochPlan, Shard, TrainBatches, efficiency, evaluation_batches, row_length
from burnish.data.config import DataConfig
from burnish.data.examples import Encoded, Examples
from burnish.data.packing import Piece
from burnish.errors import InputError

CONFIG = DataConfig(max_length=32, seed=3)
PACKINGS = ("best_fit", "first_fit", "concat", "none")


def make_examples(count: int = 23, seed: int = 0, sources: int = 1) -> Examples:
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        length = int(rng.integers(2, 20))
        weights = rng.choice([0, 0.5, 1], length).astype(np.float32)
        weights[0] = 0
        tokens = rng.integers(0, 50, length).astype(np.int32)
        examples.append(Encoded(10 * i, tokens, weights, source=i * sources // count))
    return Examples.of(examples)


def with_options(**options) -> DataConfig:
    return CONFIG.model_copy(update=options)


def ids(batch) -> list[int]:
    return [
        int(batch["example_ids"][r][row == segment][0])
        for r, row in enumerate(batch["segment_ids"])
        for segment in range(1, row.max() + 1)
    ]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def epochs_of(batches: TrainBatches, number: int) -> list[list[int]]:
    """The examples of so many epochs, in order."""
    found = []
    for epoch in range(number):
        found.append([i for _ in range(batches.steps_per_epoch(epoch)) for i in ids(next(batches))])
    return found


# Order


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_shows_every_example_once_and_no_other_order_twice(packing):
    examples = make_examples()
    batches = TrainBatches(examples, 4, with_options(packing=packing))
    orders = []
    for epoch in range(3):
        seen = [next(batches) for _ in range(batches.steps_per_epoch(epoch))]
        assert all(len(batch["tokens"]) == 4 for batch in seen)
        order = [i for batch in seen for i in ids(batch)]
        if packing == "concat":  # an example that is cut comes in two rows
            assert set(order) == set(examples.ids.tolist())
        else:
            assert sorted(order) == examples.ids.tolist()
        assert sum(batch["weights"].sum() for batch in seen) == examples.weights.sum()
        orders.append(tuple(order))
    assert len(set(orders)) == 3
    if packing == "none":
        assert batches.steps_per_epoch() == 6 and batches.plan(0).batch_rows(5)[-1] == []


def test_the_order_depends_on_the_seed_alone():
    first, again = (TrainBatches(make_examples(), 4, CONFIG) for _ in range(2))
    for _ in range(8):
        assert_same(next(first), next(again))
    other = TrainBatches(make_examples(), 4, with_options(seed=4))
    assert ids(next(other)) != ids(next(TrainBatches(make_examples(), 4, CONFIG)))


def test_asking_for_a_plan_moves_nothing():
    quiet, asked = (TrainBatches(make_examples(), 4, CONFIG) for _ in range(2))
    for step in range(12):
        asked.steps_per_epoch(step % 3)
        asked.plan(7)
        assert 0 < asked.efficiency <= 1 and asked.longest == 32
        assert_same(next(quiet), next(asked))


# Mixtures


@pytest.mark.parametrize(
    ("options", "weights", "expected"),
    [
        # 20 examples of the first source, 10 of the second.
        ({}, (None, None), [20, 10]),
        ({}, (1, 1), [20, 20]),
        ({"repeat": False}, (1, 1), [10, 10]),
        ({}, (4, 1), [40, 10]),
        ({"repeat": False}, (4, 1), [20, 5]),
        ({"temperature": 1}, (None, None), [20, 10]),
        ({"temperature": 1, "repeat": False}, (None, None), [20, 10]),
        ({"temperature": 2}, (None, None), [20, 14]),  # 20 / sqrt 2
        ({"temperature": 1000}, (None, None), [20, 20]),
        ({"temperature": 1000, "repeat": False}, (None, None), [10, 10]),
    ],
)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_epoch_has_the_shares_and_no_example_is_ahead(packing, options, weights, expected):
    examples = Examples.of(replace(e, source=int(e.example_id >= 200)) for e in make_examples(30))
    source_of = dict(zip(examples.ids.tolist(), examples.sources.tolist(), strict=True))
    batches = TrainBatches(examples, 4, with_options(packing=packing, **options), weights=weights)
    times = Counter(dict.fromkeys(source_of, 0))
    for order in epochs_of(batches, 5):
        assert [sum(source_of[i] == source for i in order) for source in (0, 1)] == expected
        times.update(order)
        for source in (0, 1):
            of_source = [n for i, n in times.items() if source_of[i] == source]
            assert max(of_source) - min(of_source) <= 1
    assert sum(times.values()) == 5 * sum(expected)


def test_source_ids_say_where_a_token_came_from():
    examples = make_examples(sources=3)
    source_of = dict(zip(examples.ids.tolist(), examples.sources.tolist(), strict=True))
    batch = next(TrainBatches(examples, 4, CONFIG, weights=(1, 2, 3)))
    real = batch["segment_ids"] > 0
    assert [source_of[i] for i in batch["example_ids"][real].tolist()] == batch["source_ids"][real].tolist()
    assert set(batch["source_ids"][real].tolist()) == {0, 1, 2}


def test_a_mixture_that_says_too_much_or_too_little_is_refused():
    examples = make_examples(sources=2)
    with pytest.raises(InputError, match="some have a weight and others none"):
        TrainBatches(examples, 4, CONFIG, weights=(1, None))
    with pytest.raises(InputError, match="take one of them away"):
        TrainBatches(examples, 4, with_options(temperature=2), weights=(1, 1))


# State


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("weights", [(None, None), (1, 3)])
def test_a_restored_iterator_continues_exactly(packing, weights):
    config = with_options(packing=packing)
    straight = TrainBatches(make_examples(sources=2), 4, config, weights=weights)
    total = sum(straight.steps_per_epoch(epoch) for epoch in range(3))
    states, batches = [], []
    for _ in range(total):
        states.append(json.loads(json.dumps(straight.get_state())))
        batches.append(next(straight))
    for stop in range(total):
        resumed = TrainBatches(make_examples(sources=2), 4, config, weights=weights)
        for _ in range(stop % 3):  # wherever it stood before
            next(resumed)
        resumed.set_state(states[stop])
        assert resumed.get_state() == states[stop]
        for expected in batches[stop : stop + 6]:
            assert_same(next(resumed), expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_size", {"batch_size": 2}),
        ("max_length", {"config": with_options(max_length=64)}),
        ("packing", {"config": with_options(packing="none")}),
        ("max_segments", {"config": with_options(max_segments=2)}),
        ("lookahead", {"config": with_options(lookahead=2)}),
        ("seed", {"config": with_options(seed=4)}),
        ("mixture", {"weights": (1, 2)}),
        ("mixture", {"weights": (None, None)}),
        ("mixture", {"config": with_options(repeat=False)}),
        ("data", {"examples": make_examples(seed=1, sources=2)}),
        ("data", {"examples": Examples.of(replace(e, tokens=e.tokens + 1) for e in make_examples(sources=2))}),
        ("data", {"examples": Examples.of(replace(e, weights=e.weights * 2) for e in make_examples(sources=2))}),
        ("data", {"examples": Examples.of(replace(e, example_id=1) for e in make_examples(sources=2))}),
        ("data", {"examples": Examples.of(replace(e, source=1 - e.source) for e in make_examples(24, sources=2))}),
    ],
)
def test_a_state_of_other_data_or_options_is_refused(name, change):
    count = 24 if "examples" in change and len(change["examples"]) == 24 else 23
    arguments = {
        "examples": make_examples(count, sources=2),
        "batch_size": 4,
        "config": CONFIG,
        "weights": (1, 1),
    }
    state = TrainBatches(**arguments).get_state()
    with pytest.raises(InputError, match=f"cannot continue the data: {name} was"):
        TrainBatches(**{**arguments, **change}).set_state(state)


def test_orbax_stores_and_restores_the_iterator(tmp_path):
    batches = TrainBatches(make_examples(), 4, CONFIG)
    with ocp.CheckpointManager(tmp_path) as manager:
        for _ in range(3):
            next(batches)
        manager.save(3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches)))
        manager.wait_until_finished()
        restored = TrainBatches(make_examples(), 4, CONFIG)
        manager.restore(3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(restored)))
    for _ in range(5):
        assert_same(next(restored), next(batches))


# Processes


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_rows_of_all_processes_are_the_batch(packing, count):
    config = with_options(packing=packing)
    alone = TrainBatches(make_examples(), 4, config)
    shards = [TrainBatches(make_examples(), 4, config, shard=Shard(i, count)) for i in range(count)]
    for _ in range(2 * alone.steps_per_epoch()):
        whole, parts = next(alone), [next(shard) for shard in shards]
        assert all(len(part["tokens"]) == 4 // count for part in parts)
        assert_same(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})
        assert all(shard.get_state() == alone.get_state() for shard in shards)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_a_state_goes_on_on_any_number_of_processes(before, after):
    straight = TrainBatches(make_examples(), 4, CONFIG)
    first = TrainBatches(make_examples(), 4, CONFIG, shard=Shard(before - 1, before))
    for _ in range(3):
        next(straight), next(first)
    second = [TrainBatches(make_examples(), 4, CONFIG, shard=Shard(i, after)) for i in range(after)]
    for shard in second:
        shard.set_state(first.get_state())
    for _ in range(4):
        parts = [next(shard) for shard in second]
        assert_same(next(straight), {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def test_rows_that_cannot_be_shared_are_refused():
    with pytest.raises(InputError, match=r"train\.batch_size: 4 rows cannot be shared by 3 processes; use a multiple"):
        TrainBatches(make_examples(), 4, CONFIG, shard=Shard(0, 3))


# Shapes


@pytest.mark.parametrize(
    ("max_length", "longest", "slots"),
    [(1024, 1, 128), (1024, 128, 128), (1024, 129, 256), (1024, 1024, 1024), (20, 4, 6), (20, 19, 20), (2, 1, 1)],
)
def test_rows_are_as_long_as_the_longest_rounded_up(max_length, longest, slots):
    rows = [[Piece(0, 0, 1)], [Piece(1, 3, 3 + longest)], []]
    config = DataConfig(max_length=max_length, packing="none")
    assert row_length(rows, config) == slots
    assert row_length(rows, DataConfig(max_length=max_length)) == max_length
    assert len({row_length([[Piece(0, 0, n + 1)]], config) for n in range(max_length)}) <= 8


def test_without_packing_a_batch_is_no_longer_than_it_must_be():
    examples = make_examples()
    batches = TrainBatches(examples, 4, with_options(packing="none"))
    shapes = set()
    for _ in range(batches.steps_per_epoch()):
        batch = next(batches)
        longest = (batch["segment_ids"] > 0).sum(axis=1).max()
        assert batch["tokens"].shape[1] == -(-longest // 4) * 4
        shapes.add(batch["tokens"].shape[1])
    assert batches.longest == max(shapes) < 32


def test_plan_arithmetic():
    rows = [[Piece(0, 0, 3)], [Piece(1, 0, 4), Piece(2, 1, 3)], [Piece(3, 0, 1)]]
    plan = EpochPlan(rows, batch_size=2)
    assert plan.steps == 2
    assert plan.batch_rows(1) == [[Piece(3, 0, 1)], []]
    assert efficiency(plan, DataConfig(max_length=8)) == pytest.approx(10 / 32)
    # Without packing rows have the longest one's slots: 6, and then 1.
    alone = EpochPlan([[Piece(0, 0, 3)], [Piece(1, 0, 6)], [Piece(2, 0, 1)]], batch_size=2)
    assert efficiency(alone, DataConfig(max_length=8, packing="none")) == pytest.approx(10 / (12 + 2))
    assert efficiency(EpochPlan([], 2), CONFIG) == 0


# Evaluation


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_evaluation_shows_every_example_once_in_one_order(packing, batch_size):
    examples = make_examples()
    first = list(evaluation_batches(examples, batch_size, with_options(packing=packing)))
    again = list(evaluation_batches(examples, batch_size, with_options(packing=packing, seed=9)))
    for left, right in zip(first, again, strict=True):
        assert_same(left, right)
        assert len(left["tokens"]) == batch_size
    seen = [i for batch in first for i in ids(batch)]
    if packing == "concat":
        assert list(dict.fromkeys(seen)) == examples.ids.tolist()
    else:
        assert sorted(seen) == examples.ids.tolist()
    assert sum(batch["weights"].sum() for batch in first) == examples.weights.sum()
    full = np.concatenate([(batch["segment_ids"] > 0).any(axis=1) for batch in first])
    assert (np.diff(full.astype(int)) <= 0).all(), "rows of padding come last"
    assert not list(evaluation_batches(Examples.of([]), batch_size, CONFIG))


# Edges


def test_unusable_arguments():
    with pytest.raises(InputError, match="no examples"):
        TrainBatches(Examples.of([]), 4, CONFIG)
    with pytest.raises(InputError, match="batch_size=0"):
        TrainBatches(make_examples(), 0, CONFIG)


@pytest.mark.parametrize("packing", PACKINGS)
def test_one_example_and_a_batch_larger_than_the_data(packing):
    one = Examples.of([Encoded(5, np.array([3, 4], np.int32), np.array([0, 1], np.float32))])
    batches = TrainBatches(one, 8, DataConfig(max_length=2, packing=packing, lookahead=1))
    assert [batches.steps_per_epoch(epoch) for epoch in range(3)] == [1, 1, 1]
    for _ in range(3):
        batch = next(batches)
        assert batch["tokens"].tolist() == [[3, 4]] + [[0, 0]] * 7
        assert batch["weights"].tolist() == [[1, 0]] + [[0, 0]] * 7
    assert batches.get_state()["epoch"] == 3


@pytest.mark.parametrize("packing", ["best_fit", "first_fit"])
@pytest.mark.parametrize("options", [{"lookahead": 1}, {"max_segments": 1}])
def test_narrow_packing_still_shows_all(packing, options):
    batches = TrainBatches(make_examples(), 4, with_options(packing=packing, **options))
    assert all(sorted(order) == make_examples().ids.tolist() for order in epochs_of(batches, 2))
