"""Examples as text, with what is trained marked."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from burnish.data.characters import visible
from burnish.data.tokenizer import StreamDecoder, Tokenizer


def pieces_of(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; together they are the whole text, decoded at once.

    A character of several tokens is the last one's; those before it have "".
    """
    stream = StreamDecoder(tokenizer, skip_special=False)
    pieces = [stream.push(token) for token in tokens.tolist()]
    pieces[-1] += stream.flush()
    return pieces


def spans(pieces: Sequence[str], weights: np.ndarray) -> list[tuple[str, float]]:
    """The text cut wherever the loss weight changes, and the weight of each part."""
    runs = groupby(zip(pieces, weights.tolist(), strict=True), key=lambda pair: pair[1])
    return [("".join(piece for piece, _ in run), weight) for weight, run in runs]


def weighted(weights: np.ndarray) -> bool:
    """Whether weights are other than 0 and 1, so that they have to be said."""
    return not set(weights.tolist()) <= {0.0, 1.0}


def marked(pieces: Sequence[str], weights: np.ndarray, *, plain: bool) -> Text:
    """The text with what is trained in bold green, or in ⟦ ⟧ where there is no colour."""
    text = Text()
    for part, weight in spans(pieces, weights):
        part = visible(part)
        if weight:
            text.append(f"⟦{part}⟧" if plain else part, style="bold green")
            text.append(f"×{weight:g}" if weighted(weights) else "", style="yellow")
        else:
            text.append(part, style="dim")
    return text
