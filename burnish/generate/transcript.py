"""One answer while it is made: tokens in, text out, cut at stop strings."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from burnish.data.tokenizer import StreamDecoder
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class Transcript:
    """Collects an answer's tokens and says when it is over.

    Attributes:
      token_ids, log_probs: of all tokens up to the one that ended the answer, which is included.
      text: what may be shown so far: a stop string, or what might yet become one, is not in it.
      finish_reason: "stop" for a stop id or a stop string, "length" for the limit, None while it goes on.
    """

    def __init__(
        self, tokenizer: "Tokenizer | None", limit: int, stop_ids: Collection[int], stop: Sequence[str]
    ) -> None:
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._limit = limit
        self._stop_ids = stop_ids
        self._stop = stop
        self._held = ""

    def push(self, token: int, log_prob: float) -> str:
        """Takes one token; returns the text that it adds. What comes after the end is dropped."""
        if self.finish_reason is not None:
            return ""
        if math.isnan(log_prob):
            raise InputError("the model's logits are not numbers; its weights are damaged")
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        before = len(self.text)
        if token in self._stop_ids:
            self.finish_reason = "stop"
        elif self._decoder is not None:
            self._take(self._decoder.push(token))
        if self.finish_reason is None and len(self.token_ids) == self._limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._close()
        return self.text[before:]

    def _take(self, piece: str) -> None:
        """Moves text on from `_held` to `text`, as far as no stop string may begin there."""
        self._held += piece
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.text += self._held[: min(found)]
            self._held = ""
            self.finish_reason = "stop"
            self._decoder = None
            return
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        self.text += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]

    def _close(self) -> None:
        if self._decoder is not None:
            self._take(self._decoder.flush())
        self.text += self._held
        self._held = ""


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string.

    >>> _overlap("one\\nQ", "\\nQ:")
    2
    """
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
