"""The few shapes that batches are padded to, so that few programs are compiled."""

from collections.abc import Sequence

import numpy as np

CHUNK = 32
"""The most tokens a row gets before the host looks at them."""

# A cache of fewer tokens than this, all rows together, weighs little beside the weights: no need to start small.
_SMALL_CACHE = 512


def length_bucket(length: int) -> int:
    """The padded length of a prompt: a multiple of 64, of a quarter of its octave from 512 on.

    >>> [length_bucket(n) for n in (1, 64, 65, 500, 513, 1100)]
    [64, 64, 128, 512, 640, 1280]
    """
    step = max(64, _power_of_two(length) // 8)
    return -(-length // step) * step


def row_bucket(rows: int) -> int:
    """The padded number of rows: a power of two."""
    return _power_of_two(rows)


def capacity_bucket(rows: int, tokens: int) -> int:
    """How many tokens a row's cache is made for, when it has to hold `tokens`: a power of two.

    >>> capacity_bucket(1, 100), capacity_bucket(16, 100), capacity_bucket(16, 200)
    (512, 128, 256)
    """
    return max(_power_of_two(tokens), _SMALL_CACHE // rows, 128)


def text_bucket(tokens: int) -> int:
    """How many tokens a row is made for, when each of them is read again at each step: a power of two."""
    return max(_power_of_two(tokens), 64)


def pad_prompts(prompts: Sequence[Sequence[int]], rows: int, length: int, *, left: bool) -> np.ndarray:
    """Prompts as int32 `[rows, length]`, 0 where there is none."""
    tokens = np.zeros((rows, length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        start = length - len(prompt) if left else 0
        row[start : start + len(prompt)] = prompt
    return tokens


def prompt_lengths(prompts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """int32 `[rows]`, 0 where there is none."""
    return np.array([len(prompt) for prompt in prompts] + [0] * (rows - len(prompts)), np.int32)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
