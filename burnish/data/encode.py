"""Records -> token ids and the mask of tokens that are learned.

A conversation is rendered once (`burnish.data.turns`) and that one text is tokenised. Learned are the trained
turns with their terminators. Without a chat template a prompt and its completion are raw text, ended by EOS,
once.

Tokens may merge across the place where the prompt ends ("is" + "land"). Generation is given the prompt's own
tokens and can never see such a merge, so where one occurs the text is cut there and both sides are tokenised
apart. Where none occurs cutting would change nothing, and is not done: some tokenizers put a space before
every text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from burnish.data.config import DataConfig
from burnish.data.records import Record, TextRecord
from burnish.data.turns import Rendered, TurnFinder
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """An example as tokens.

    Attributes:
        example_id: the record's index in its data set.
        tokens: int32 [length].
        loss_mask: bool [length]; true where the token is to be learned. The first token follows nothing, so
            nothing predicts it: its mask is false.
    """

    example_id: int
    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclass
class EncodeCounts:
    """What became of the rows: `rows == kept + dropped`, always."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0  # of those kept
    dropped_too_long: int = 0
    dropped_no_target: int = 0  # cutting took away every trained token
    tokens: int = 0
    trained_tokens: int = 0

    @property
    def dropped(self) -> int:
        return self.dropped_too_long + self.dropped_no_target


def encode_records(
    records: Sequence[Record], tokenizer: "Tokenizer", config: DataConfig
) -> tuple[list[Encoded], EncodeCounts]:
    """Encode every record and cut it to `config.max_length`.

    Raises:
        InputError: a record cannot be rendered or encoded (the message names its place), or none is left.
    """
    encoder = Encoder(tokenizer, config.system)
    counts, examples = EncodeCounts(), []
    for record in records:
        counts.rows += 1
        tokens, loss_mask = encoder.encode(record)
        if len(tokens) > config.max_length and config.truncate == "drop":
            counts.dropped_too_long += 1
            continue
        kept = _kept_tokens(tokens, config, tokenizer.bos_id)
        example = Encoded(record.index, tokens[kept], loss_mask[kept])
        example.loss_mask[0] = False
        if not example.loss_mask.any():
            counts.dropped_no_target += 1
            continue
        counts.kept += 1
        counts.truncated += len(kept) < len(tokens)
        counts.tokens += len(example.tokens)
        counts.trained_tokens += int(example.loss_mask.sum())
        examples.append(example)
    if not examples:
        raise InputError(_nothing_left(counts, config))
    return examples, counts


def _kept_tokens(tokens: np.ndarray, config: DataConfig, bos_id: int | None) -> np.ndarray:
    """Indices of the tokens that stay; a leading BOS always does, for the model knows no text without it."""
    if len(tokens) <= config.max_length:
        return np.arange(len(tokens))
    if config.truncate == "keep_start":
        return np.arange(config.max_length)
    kept = np.arange(len(tokens) - config.max_length, len(tokens))
    if bos_id is not None and tokens[0] == bos_id:
        kept[0] = 0
    return kept


def _nothing_left(counts: EncodeCounts, config: DataConfig) -> str:
    if counts.rows == 0:
        return "no rows to encode: the data set is empty"
    return (
        f"all {counts.rows} rows were dropped at data.max_length={config.max_length} "
        f"({counts.dropped_too_long} too long, {counts.dropped_no_target} with nothing left to learn); "
        "raise data.max_length or set data.truncate=keep_end"
    )


class Encoder:
    """Encodes one record at a time for one tokenizer.

    Args:
        tokenizer: tokenises and renders.
        system: message put before conversations that have no system message.
    """

    def __init__(self, tokenizer: "Tokenizer", system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._turns = TurnFinder(tokenizer, system)

    def encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int32 [length]) and loss mask (bool [length]) of a record, uncut."""
        try:
            rendered = self._rendered(record)
            ids, mask = self._tokenise(rendered)
            if not rendered.terminated:
                ids, mask = self._with_eos(ids, mask)
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from error
        bos = self.tokenizer.bos_id
        if self.tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:  # many templates write it
            ids, mask = [bos, *ids], np.concatenate([[False], mask])
        return np.array(ids, dtype=np.int32), mask

    def prompt(self, record: Record) -> list[int]:
        """The tokens generation is given to answer a record: those before its last trained turn."""
        try:
            return self.tokenizer.encode(self._prompt_text(record), add_bos=True)
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from error

    def _rendered(self, record: Record) -> Rendered:
        if not isinstance(record, TextRecord):
            return self._turns.render(record)
        if self.tokenizer.chat_template is not None:
            return self._turns.render(record.as_chat())
        text = record.prompt + record.completion
        return Rendered(text, [(len(record.prompt), len(text))], terminated=False)

    def _prompt_text(self, record: Record) -> str:
        if not isinstance(record, TextRecord):
            return self._turns.prompt(record)
        return record.prompt if self.tokenizer.chat_template is None else self._turns.prompt(record.as_chat())

    def _tokenise(self, rendered: Rendered) -> tuple[list[int], np.ndarray]:
        """Ids of the text, and which lie in the spans; those before a span are as the prompt's alone."""
        ids, offsets = self.tokenizer.encode_with_offsets(rendered.text)
        starts = _starts(offsets)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.spans:
            prompt = self.tokenizer.encode(rendered.text[:start])
            if ids[: len(prompt)] != prompt:
                return self._tokenise_apart(rendered)
            mask[len(prompt) : _count_before(starts, end, rendered.text)] = True
        return ids, mask

    def _tokenise_apart(self, rendered: Rendered) -> tuple[list[int], np.ndarray]:
        """The same with the text cut at the start of every span."""
        text, spans = rendered.text, rendered.spans
        ids = self.tokenizer.encode(text[: spans[0][0]])
        mask = [np.zeros(len(ids), dtype=bool)]
        stops = [start for start, _ in spans[1:]] + [len(text)]
        for (start, end), stop in zip(spans, stops, strict=True):
            more, starts = self._continue(ids, text[:start], text[start:stop])
            ids = ids + more
            mask.append(np.arange(len(more)) < _count_before(starts + start, end, text))
        return ids, np.concatenate(mask)

    def _continue(self, ids: list[int], before: str, text: str) -> tuple[list[int], np.ndarray]:
        """Ids of `text`, and where each starts in it, such that `ids` and they together read `before + text`.

        A tokenizer that puts a space before every text would put one between the two. Tokenised behind an
        anchor, whose own tokens are taken off again, the text has none.
        """
        decoded = self.tokenizer.decode(self.tokenizer.encode(before + text), skip_special=False)
        for anchor in ("", "\n", "."):
            lead = self.tokenizer.encode(anchor)
            more, offsets = self.tokenizer.encode_with_offsets(anchor + text)
            anchored = more[: len(lead)] == lead
            more, offsets = more[len(lead) :], offsets[len(lead) :]
            if anchored and self.tokenizer.decode(ids + more, skip_special=False) == decoded:
                return more, _starts(offsets) - len(anchor)
        raise InputError(
            f"the prompt's end ({before[-10:]!r}) and the answer's start ({text[:10]!r}) cannot be told "
            "apart by the tokenizer; move the white space between them to the answer's start"
        )

    def _with_eos(self, ids: list[int], mask: np.ndarray) -> tuple[list[int], np.ndarray]:
        """EOS, learned, at the end; not a second one where the text brings its own."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise InputError("the tokenizer has no token to end the answer with; set its eos_token")
        return (ids, mask) if ids[-1] == eos else ([*ids, eos], np.append(mask, True))


def _starts(offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array([start for start, _ in offsets], dtype=np.int64)


def _count_before(starts: np.ndarray, end: int, text: str) -> int:
    """How many tokens start before character `end`; at the text's end all, those of no character too."""
    return len(starts) if end == len(text) else int(np.searchsorted(starts, end, side="left"))
