import json
from dataclasses import replace

import numpy as np
import pytest

from burnish.data.batches import EpochPlan, TrainBatches, evaluation_batches
from burnish.data.config import DataConfig
from burnish.data.encode import Encoded
from burnish.errors import InputError

CONFIG = DataConfig(max_length=32, seed=3)


def make_examples(count: int = 23, seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        length = int(rng.integers(2, 20))
        mask = rng.random(length) < 0.5
        mask[0] = False
        examples.append(Encoded(10 * i, rng.integers(0, 50, length).astype(np.int32), mask))
    return examples


def ids(batch) -> list[int]:
    return [i for row in batch["example_ids"] for i in dict.fromkeys(row.tolist()) if i != -1]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_shows_every_example_once_and_no_other_order_twice(packing):
    examples = make_examples()
    config = CONFIG.model_copy(update={"packing": packing})
    batches = TrainBatches(examples, 4, config)
    orders = []
    for epoch in range(3):
        steps = batches.steps_per_epoch(epoch)
        seen = [next(batches) for _ in range(steps)]
        assert all(batch["tokens"].shape == (4, 32) for batch in seen)
        order = [i for batch in seen for i in ids(batch)]
        assert sorted(order) == [example.example_id for example in examples]
        trained = sum(batch["weights"].sum() for batch in seen)
        assert trained == sum(example.loss_mask.sum() for example in examples)
        empty = sum(int((~(batch["segment_ids"] > 0).any(axis=1)).sum()) for batch in seen)
        assert empty == batches.plan(epoch).filler_rows
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 3
    if not packing:
        assert batches.steps_per_epoch() == 6 and batches.plan(0).filler_rows == 1


def test_the_order_depends_on_the_seed_alone():
    examples = make_examples()
    first, again = (TrainBatches(examples, 4, CONFIG) for _ in range(2))
    for _ in range(8):
        assert_same(next(first), next(again))
    other = TrainBatches(examples, 4, CONFIG.model_copy(update={"seed": 4}))
    assert ids(next(other)) != ids(next(TrainBatches(examples, 4, CONFIG)))


@pytest.mark.parametrize("packing", [True, False])
def test_a_restored_iterator_continues_exactly(packing):
    examples = make_examples()
    config = CONFIG.model_copy(update={"packing": packing})
    straight = TrainBatches(examples, 4, config)
    total = sum(straight.steps_per_epoch(epoch) for epoch in range(3))
    states, batches = [], []
    for _ in range(total):
        states.append(json.loads(json.dumps(straight.get_state())))
        batches.append(next(straight))
    for stop in range(total):
        resumed = TrainBatches(make_examples(), 4, config)
        for _ in range(stop % 3):  # wherever it stood before
            next(resumed)
        resumed.set_state(states[stop])
        assert resumed.get_state() == states[stop]
        for expected in batches[stop : stop + 6]:
            assert_same(next(resumed), expected)


def test_asking_for_a_plan_moves_nothing():
    quiet, asked = (TrainBatches(make_examples(), 4, CONFIG) for _ in range(2))
    for step in range(12):
        asked.steps_per_epoch(step % 3)
        asked.plan(7)
        assert_same(next(quiet), next(asked))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_size", {"batch_size": 2}),
        ("max_length", {"config": CONFIG.model_copy(update={"max_length": 64})}),
        ("packing", {"config": CONFIG.model_copy(update={"packing": False})}),
        ("seed", {"config": CONFIG.model_copy(update={"seed": 4})}),
        ("data", {"examples": make_examples(seed=1)}),
        ("data", {"examples": make_examples(count=22)}),
        ("data", {"examples": [replace(e, loss_mask=np.arange(len(e.tokens)) > 0) for e in make_examples()]}),
    ],
)
def test_a_state_of_other_data_or_options_is_refused(name, change):
    arguments = {"examples": make_examples(), "batch_size": 4, "config": CONFIG}
    state = TrainBatches(**arguments).get_state()
    with pytest.raises(InputError, match=f"cannot continue the data: {name} was"):
        TrainBatches(**{**arguments, **change}).set_state(state)


def test_epochs_end_the_iterator():
    batches = TrainBatches(make_examples(), 4, CONFIG, epochs=2)
    expected = batches.steps_per_epoch(0) + batches.steps_per_epoch(1)
    assert len(list(batches)) == expected
    with pytest.raises(StopIteration):
        next(batches)


def test_orbax_stores_and_restores_the_iterator(tmp_path):
    import grain
    import orbax.checkpoint as ocp

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


def test_unusable_arguments():
    with pytest.raises(InputError, match="no examples"):
        TrainBatches([], 4, CONFIG)
    with pytest.raises(InputError, match="batch_size=0"):
        TrainBatches(make_examples(), 0, CONFIG)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_evaluation_shows_every_example_once_in_one_order(packing, batch_size):
    examples = make_examples()
    config = CONFIG.model_copy(update={"packing": packing})
    first = list(evaluation_batches(examples, batch_size, config))
    again = list(evaluation_batches(examples, batch_size, config.model_copy(update={"seed": 9})))
    for left, right in zip(first, again, strict=True):
        assert_same(left, right)
        assert left["tokens"].shape == (batch_size, 32)
    assert sorted(i for batch in first for i in ids(batch)) == [example.example_id for example in examples]
    full = np.concatenate([(batch["segment_ids"] > 0).any(axis=1) for batch in first])
    assert (np.diff(full.astype(int)) <= 0).all(), "rows of padding come last"


def test_plan_arithmetic():
    plan = EpochPlan([[0], [1, 2], [3]], batch_size=2)
    assert (plan.steps, plan.filler_rows) == (2, 1)
    assert plan.batch_rows(1) == [[3], []]
