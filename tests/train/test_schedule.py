"""Schedules against numbers worked out by hand, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from burnish.errors import InputError
from burnish.train.optimizer_config import ScheduleConfig
from burnish.train.schedule import make_schedule, warmup_steps


def rates(total: int, lr: float = 1.0, **options: object) -> np.ndarray:
    """The rate of every step of a run, from the jitted schedule."""
    schedule = jax.jit(make_schedule(ScheduleConfig(**options), lr, total))
    return np.asarray(schedule(jnp.arange(total, dtype=jnp.int32)))


def test_constant_is_level_after_the_warmup():
    np.testing.assert_allclose(
        rates(8, 2.0, name="constant", warmup_steps=4), [0.5, 1.0, 1.5, 2, 2, 2, 2, 2], rtol=1e-6
    )


def test_linear_falls_evenly_to_end_lr():
    # The peak is step 1; five equal drops of (1 - 0.5) / 5 follow.
    np.testing.assert_allclose(
        rates(7, name="linear", warmup_steps=2, end_lr=0.5), [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5], rtol=1e-6
    )


def test_cosine_follows_the_half_wave():
    # x = 0, 1/4, 1/2, 3/4, 1: (1 + cos(pi x)) / 2 = 1, (2 + sqrt 2) / 4, 1/2, (2 - sqrt 2) / 4, 0.
    wave = np.array([1, 0.853553391, 0.5, 0.146446609, 0])
    np.testing.assert_allclose(
        rates(7, 10.0, name="cosine", warmup_steps=3, end_lr=2.0),
        [10 / 3, 20 / 3, *(2 + 8 * wave)],
        rtol=1e-6,
    )


def test_wsd_is_level_and_then_falls_linearly():
    # 4 of 16 steps decay: step 11 is the last with the full rate, step 15 has end_lr.
    np.testing.assert_allclose(
        rates(16, name="wsd", warmup_steps=2, decay_ratio=0.25, end_lr=0.2),
        [0.5, *[1.0] * 11, 0.8, 0.6, 0.4, 0.2],
        rtol=1e-6,
    )


def test_end_lr_is_a_tenth_by_default_and_may_be_zero():
    assert rates(50, 3e-4)[-1] == pytest.approx(3e-5, rel=1e-6)
    assert rates(50, 3e-4, end_lr=0.0)[-1] == 0.0


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3, 10, 33, 1000])
def test_first_step_learns_the_peak_is_reached_and_the_last_step_ends(name: str, total: int):
    found = rates(total, 2e-4, name=name)
    warmup = {1: 1, 2: 1, 3: 1, 10: 1, 33: 1, 1000: 30}[total]
    end = 2e-4 if name == "constant" or total == 1 else 2e-5
    assert found[0] == pytest.approx(2e-4 / warmup, rel=1e-6)
    assert found[warmup - 1] == pytest.approx(2e-4, rel=1e-6)
    assert found[-1] == pytest.approx(end, rel=1e-6)
    assert np.all(np.diff(found[warmup - 1 :]) <= 0)


def test_no_warmup_starts_at_the_peak():
    np.testing.assert_allclose(rates(3, name="linear", warmup_steps=0, end_lr=0.0), [1, 0.5, 0], atol=1e-7)


def test_steps_past_the_end_keep_the_last_rate():
    schedule = make_schedule(ScheduleConfig(), 1.0, 10)
    assert float(schedule(9)) == float(schedule(10)) == float(schedule(1000))


def test_warmup_ratio_is_rounded_up_without_binary_noise():
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.07), 100) == 7  # 0.07 * 100 = 7.000000000000001
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.03), 200) == 6
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.03), 201) == 7
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.5, warmup_steps=3), 100) == 3
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.0), 100) == 0


def test_a_whole_run_of_warmup_is_allowed():
    np.testing.assert_allclose(rates(4, name="cosine", warmup_steps=4), [0.25, 0.5, 0.75, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "lr", "total", "said"),
    [
        ({"warmup_steps": 11}, 1.0, 10, "schedule.warmup_steps: 11"),
        ({"end_lr": 2.0}, 1.0, 10, "schedule.end_lr: 2.0"),
        ({"name": "wsd", "warmup_steps": 6, "decay_ratio": 0.6}, 1.0, 10, "decay_ratio"),
        ({}, float("nan"), 10, "optimizer.lr: nan"),
        ({}, -1.0, 10, "optimizer.lr: -1.0"),
        ({}, 1.0, 0, "total steps: 0"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_the_key(options: dict, lr: float, total: int, said: str):
    with pytest.raises(InputError, match=said) as caught:
        make_schedule(ScheduleConfig(**options), lr, total)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"name": "cosin"}, "name", "did you mean 'cosine'"),
        ({"warmup_ratio": float("nan")}, "warmup_ratio", "finite"),
        ({"warmup_ratio": 1.5}, "warmup_ratio", "less than or equal to 1"),
        ({"warmup_steps": -1}, "warmup_steps", "greater than or equal to 0"),
        ({"end_lr": -1e-5}, "end_lr", "greater than or equal to 0"),
        ({"name": "wsd", "decay_ratio": 0.0}, "decay_ratio", "greater than 0"),
        ({"name": "cosine", "decay_ratio": 0.2}, "decay_ratio", "cosine does not take it"),
        ({"name": "constant", "end_lr": 0.1}, "end_lr", "constant does not take it"),
        ({"warmup": 3}, "warmup", "not permitted"),
    ],
)
def test_bad_values_are_refused_where_they_stand(options: dict, key: str, said: str):
    with pytest.raises(ValidationError) as caught:
        ScheduleConfig(**options)
    (error,) = caught.value.errors()
    assert error["loc"] == (key,)
    assert said in error["msg"]
