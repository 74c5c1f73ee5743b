"""Examples longer than a row: cut, split, or dropped, and always counted by whoever asks."""

import numpy as np

from burnish.data.config import DataConfig
from burnish.data.encode import Tokens


def cut(example: Tokens, config: DataConfig, bos_id: int | None) -> list[Tokens]:
    """Pieces of at most `config.max_length` tokens, as `config.truncate` says; none where the example is dropped.

    A leading BOS stays at the start of every piece, for the model knows no text without it. With `split`, a piece
    begins with `overlap` tokens (at least one, where there is place) of the piece before, as context that is not
    learned again: every token is learned exactly once.
    """
    length = config.max_length
    if len(example.ids) <= length:
        return [example]
    if config.truncate == "drop":
        return []
    if config.truncate == "keep_start":
        return [Tokens(example.ids[:length], example.weights[:length])]
    lead = int(bos_id is not None and example.ids[0] == bos_id)
    if config.truncate == "keep_end":
        return [_piece(example, len(example.ids) - length + lead, length, lead, known=1 - lead)]
    overlap = min(max(1, config.overlap), length - lead - 1)  # with BOS in rows of two there is place for none
    pieces, end = [Tokens(example.ids[:length], example.weights[:length])], length
    while end < len(example.ids):
        pieces.append(_piece(example, end - overlap, length, lead, known=overlap))
        end += length - lead - overlap
    return pieces


def _piece(example: Tokens, start: int, length: int, lead: int, known: int) -> Tokens:
    """`lead` tokens of the example's start, then those from `start` on; the first `known` of them are not learned."""
    kept = np.concatenate([np.arange(lead), np.arange(start, min(start + length - lead, len(example.ids)))])
    weights = example.weights[kept]
    weights[: lead + known] = 0
    return Tokens(example.ids[kept], weights)
