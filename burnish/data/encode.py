"""Records -> token ids and the loss weight of each.

A conversation is rendered once (`burnish.data.turns`) and that one text is tokenised. Learned are the trained
turns with their terminators. Without a chat template a prompt and its completion are raw text, ended by EOS,
once.

Tokens may merge across the place where the prompt ends ("is" + "land"). Generation is given the prompt's own
tokens and can never see such a merge, so where one occurs the text is cut there and both sides are tokenised
apart. Where none occurs cutting would change nothing, and is not done: some tokenizers put a space before
every text.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burnish.data.config import DataConfig
from burnish.data.fit import fit_tokenizer
from burnish.data.records import Record, TextRecord, TokensRecord
from burnish.data.turns import Rendered, TurnFinder
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

_LOOK_BACK = 64  # tokens before an answer, among which its turn's header is looked for


class Tokens(NamedTuple):
    """Token ids (int32 [length]), and the loss weight of each (float32 [length]); 0 is not learned."""

    ids: np.ndarray
    weights: np.ndarray


class Encoder:
    """Encodes one record at a time for one tokenizer.

    Args:
        tokenizer: tokenises and renders.
        config: the chat template, what is learned, and the system message; lengths are not its affair.
    """

    def __init__(self, tokenizer: "Tokenizer", config: DataConfig) -> None:
        self.tokenizer = fit_tokenizer(tokenizer, config)
        self._config = config
        self._turns = TurnFinder(self.tokenizer, config)
        self._ids_of = lru_cache(1024)(self.tokenizer.encode)

    def encode(self, record: Record) -> list[Tokens]:
        """A record's tokens, uncut: one example; several where the template rewrites turns; none if nothing is learned.

        Raises:
            InputError: the record cannot be rendered or encoded; the message begins with its place.
        """
        try:
            if isinstance(record, TokensRecord):
                return self._given(record)
            return [self._finished(rendered) for rendered in self._rendered(record)]
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from error

    def _rendered(self, record: Record) -> list[Rendered]:
        assert not isinstance(record, TokensRecord)
        train_on = self._config.train_on
        if not isinstance(record, TextRecord):
            return self._turns.render(record)
        if not record.raw and self.tokenizer.chat_template is not None:
            return self._turns.render(record.as_chat())
        if train_on == "generation" and not record.raw:
            raise InputError("data.train_on=generation needs a chat template; set data.chat_template or train_on")
        text = record.prompt + record.completion
        start = 0 if train_on == "all" else len(record.prompt)
        return [Rendered(text, [(start, len(text), 1.0)], terminated=False)]

    def _given(self, record: TokensRecord) -> list[Tokens]:
        ids, weights = np.array(record.tokens, np.int32), np.array(record.weights, np.float32)
        over = np.flatnonzero(ids >= self.tokenizer.vocab_size)
        if len(over):
            raise InputError(
                f"input_ids[{over[0]}]: {ids[over[0]]} is no id of this tokenizer, which has "
                f"{self.tokenizer.vocab_size}; the row was made with another one"
            )
        return [_unpredicted(ids, weights)]

    def _finished(self, rendered: Rendered) -> Tokens:
        """With EOS where the text does not end itself, and BOS where the model wants one and the text has none."""
        ids, weights = self._tokenise(rendered)
        if not len(ids):
            raise InputError("the tokenizer reads nothing in it: no character is one of its own; remove the row")
        eos, bos = self.tokenizer.eos_id, self.tokenizer.bos_id
        if not rendered.terminated:
            if eos is None:
                raise InputError("the tokenizer has no token to end the answer with; set its eos_token")
            if ids[-1] != eos:  # a text may bring its own
                _, end, weight = rendered.spans[-1]
                learned = weight if end == len(rendered.text) else 0.0
                ids, weights = np.append(ids, np.int32(eos)), np.append(weights, np.float32(learned))
        if self.tokenizer.adds_bos and bos is not None and ids[0] != bos:  # many templates write it
            ids, weights = np.insert(ids, 0, bos), np.insert(weights, 0, 0)
        return _unpredicted(ids, weights)

    def _tokenise(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the text, and their weights; those before a span are as the prompt's alone."""
        text = rendered.text
        ids, starts = self.tokenizer.encode_with_starts(text)
        weights = np.zeros(len(ids), np.float32)
        for start, end, weight in rendered.spans:
            first = int(starts.searchsorted(start))
            if not self._parts(text, start, ids[:first], starts):
                return self._tokenise_apart(rendered)
            weights[first : _count_before(starts, end, text)] = weight
        return ids, weights

    def _parts(self, text: str, at: int, before: np.ndarray, starts: np.ndarray) -> bool:
        """Whether `before`, the tokens that start before character `at`, are those of the text before it alone.

        An added token is found whatever stands around it, so what is left of one need not be tokenised again.
        """
        near = before[-_LOOK_BACK:].tolist()
        for number in range(len(near) - 1, -1, -1):
            if near[number] in self.tokenizer.added_ids:
                header = int(starts[len(before) - len(near) + number])
                return self._ids_of(text[header:at]) == near[number:]
        return self.tokenizer.encode(text[:at]) == before.tolist()

    def _tokenise_apart(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """The same with the text cut at the start of every span."""
        text, spans = rendered.text, rendered.spans
        ids = self.tokenizer.encode(text[: spans[0][0]])
        weights: list[np.ndarray] = [np.zeros(len(ids))]
        stops = [start for start, _, _ in spans[1:]] + [len(text)]
        for (start, end, weight), stop in zip(spans, stops, strict=True):
            more, starts = self._continue(ids, text[:start], text[start:stop])
            ids = ids + more
            weights.append(weight * (np.arange(len(more)) < _count_before(starts + start, end, text)))
        return np.array(ids, np.int32), np.concatenate(weights).astype(np.float32)

    def _continue(self, ids: list[int], before: str, text: str) -> tuple[list[int], np.ndarray]:
        """Ids of `text`, and where each starts in it, such that `ids` and they together read `before + text`.

        A tokenizer that puts a space before every text would put one between the two. Tokenised behind an
        anchor, whose own tokens are taken off again, the text has none.
        """
        decoded = self.tokenizer.decode(self.tokenizer.encode(before + text), skip_special=False)
        for anchor in ("", "\n", "."):
            lead = self.tokenizer.encode(anchor)
            found, starts = self.tokenizer.encode_with_starts(anchor + text)
            anchored = found[: len(lead)].tolist() == lead
            more, starts = found[len(lead) :].tolist(), starts[len(lead) :]
            if anchored and self.tokenizer.decode(ids + more, skip_special=False) == decoded:
                return more, starts - len(anchor)
        raise InputError(
            f"the prompt's end ({before[-10:]!r}) and the answer's start ({text[:10]!r}) cannot be told "
            "apart by the tokenizer; move the white space between them to the answer's start"
        )


def _unpredicted(ids: np.ndarray, weights: np.ndarray) -> Tokens:
    """The first token follows nothing, so nothing predicts it."""
    weights[:1] = 0
    return Tokens(ids, weights)


def _count_before(starts: np.ndarray, end: int, text: str) -> int:
    """How many tokens start before character `end`; at the text's end all, those of no character too."""
    return len(starts) if end == len(text) else int(np.searchsorted(starts, end))
