"""Learning-rate schedules: a warmup, then one of four shapes.

    step       0 ....... w - 1 ............................ total_steps - 1        w: steps of warmup
    constant   lr / w -> lr -------------------------------> lr
    linear     lr / w -> lr -- falling all the way --------> end_lr
    cosine     lr / w -> lr -- falling all the way --------> end_lr
    wsd        lr / w -> lr -- level, then falling at last -> end_lr

The first step already learns (its rate is lr / w, never 0) and the last one has exactly `end_lr`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from burnish.errors import InputError
from burnish.train.optimizer_config import ScheduleConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def make_schedule(config: ScheduleConfig, lr: float, total_steps: int) -> Schedule:
    """The learning rate as a function of the step: int (or int32 array) in 0 .. total_steps - 1 -> float32.

    Warmup step k of w has lr (k + 1) / w. After it, with x going from 0 at the peak to 1 at the last step:

        lr h + end_lr (1 - h), where

        constant   h = 1
        linear     h = 1 - x
        cosine     h = (1 + cos(pi x)) / 2     (Loshchilov and Hutter 2016, arXiv 1608.03983)
        wsd        h = 1 until the last `decay_ratio` of the run, then 1 - x with x from 0 to 1 over that part
                   (warmup-stable-decay; Hu et al. 2024, arXiv 2404.06395)

    Steps past the end keep the last rate. A run of one step has lr.

    Raises InputError when lr is not above 0, `end_lr` lies above it, total_steps is below 1, or warmup and
    decay do not fit in the run.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise InputError(f"optimizer.lr: {lr} is no learning rate; give a number above 0")
    if total_steps < 1:
        raise InputError(f"total steps: {total_steps}; a run needs at least 1")
    end_lr = lr / 10 if config.end_lr is None else config.end_lr
    if end_lr > lr:
        raise InputError(f"optimizer.schedule.end_lr: {end_lr} is above optimizer.lr={lr}; give {lr} or less")

    warmup = warmup_steps(config, total_steps)
    peak = max(warmup - 1, 0)
    decay_start = _decay_start(config, peak, total_steps)
    decay_steps = max(total_steps - 1 - decay_start, 1)

    def schedule(step: jax.Array | int) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        x = jnp.clip((t - decay_start) / decay_steps, 0.0, 1.0)
        height = _height(config.name, x)
        after = lr * height + end_lr * (1 - height)
        return jnp.where(t < peak, lr * ((t + 1) / (peak + 1)), after)

    return schedule


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """How many steps the rate rises for; raises InputError when it is more than the run has."""
    if config.warmup_steps is None:
        return _share(config.warmup_ratio, total_steps)
    if config.warmup_steps > total_steps:
        raise InputError(
            f"optimizer.schedule.warmup_steps: {config.warmup_steps} is more than the run's {total_steps} "
            f"steps; give {total_steps} or less, or warmup_ratio"
        )
    return config.warmup_steps


def _decay_start(config: ScheduleConfig, peak: int, total_steps: int) -> int:
    """The last step that has the full rate before it falls."""
    if config.decay_ratio is None:
        return peak
    decay = _share(config.decay_ratio, total_steps)
    if peak + decay > total_steps:  # one more than fits, since both shares are rounded up
        raise InputError(
            f"optimizer.schedule: {peak + 1} steps of warmup and {decay} of decay do not fit in a run of "
            f"{total_steps}; lower warmup_ratio, warmup_steps or decay_ratio"
        )
    return max(total_steps - 1 - decay, peak)


def _share(ratio: float, total_steps: int) -> int:
    """A share of the run in whole steps, rounded up; 0.07 of 100 is 7, not the 8 of its binary digits."""
    return math.ceil(round(ratio * total_steps, 6))


def _height(name: str, x: jax.Array) -> jax.Array:
    """Where the rate is between its end (0) and its peak (1), at a fraction x of the decay."""
    if name == "constant":
        return jnp.ones_like(x)
    if name == "cosine":
        return (1 + jnp.cos(jnp.pi * x)) / 2
    return 1 - x
