"""How often each source is drawn from, and in which order examples come.

An epoch of a mixture is a list of examples that is known before it begins: so many of each source, taken from that
source's endless shuffled order, where every example comes once before any comes again.
"""

from collections.abc import Sequence

import numpy as np

from burnish.errors import InputError

MOST_EXAMPLES = 10**8  # of an epoch, whose order is held in memory


def shares(sizes: Sequence[int], weights: Sequence[float | None], temperature: float | None) -> np.ndarray | None:
    """Each source's share of the examples, summing to 1; None where all examples come once, as without a mixture.

    Weights win. A temperature T mixes by size ** (1 / T): 1 is by size, and more evens the sources out (Raffel et al.
    2020, section 3.5.2, arXiv 1910.10683).

    Raises:
        InputError: some sources have a weight and others have none, or there are weights and a temperature.
    """
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise InputError("data.sources: some have a weight and others none; give each one, or none")
    if given and temperature is not None:
        raise InputError("data.temperature goes by size, but data.sources have weights; take one of them away")
    if not given and temperature is None:
        return None
    raw = np.array(given, np.float64) if given else np.array(sizes, np.float64) ** (1 / (temperature or 1.0))
    return raw / raw.sum()


def epoch_counts(sizes: Sequence[int], share: np.ndarray, repeat: bool) -> list[int]:
    """Examples of each source in an epoch.

    With `repeat`, the source that lasts longest is gone through once, and others come again; without, the epoch ends
    with the source that is used up first, and what is left of others comes in later epochs. Raises InputError where an
    epoch would not fit in memory.
    """
    lasts = np.array(sizes) / share
    total = lasts.max() if repeat else lasts.min()
    if total > MOST_EXAMPLES:
        raise InputError(
            f"data.sources: an epoch of this mixture has {total:.3g} examples, as its smallest weight is so small; "
            "even the weights out, or set data.repeat=false"
        )
    return [max(1, round(total * part)) for part in share]


def epoch_order(sizes: Sequence[int], counts: Sequence[int] | None, seed: int, epoch: int) -> np.ndarray:
    """The examples of an epoch, in order, numbered over all sources.

    Args:
        sizes: examples of each source.
        counts: examples of each source in an epoch; None for all of them.
    """
    rng = np.random.default_rng((seed, epoch))
    if counts is None:
        return rng.permutation(sum(sizes))
    first = np.cumsum(sizes) - sizes
    drawn = [
        _draw(size, (seed, source), epoch * count, count) + start
        for source, (size, count, start) in enumerate(zip(sizes, counts, first, strict=True))
    ]
    return rng.permutation(np.concatenate(drawn))


def _draw(size: int, seed: tuple[int, int], start: int, count: int) -> np.ndarray:
    """Places `start` to `start + count` of an endless order: one permutation after another."""
    rounds = range(start // size, (start + count - 1) // size + 1)
    order = np.concatenate([np.random.default_rng((*seed, number, 1)).permutation(size) for number in rounds])
    at = start - rounds.start * size
    return order[at : at + count]
