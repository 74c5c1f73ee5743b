"""The `data` section of a recipe."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FormatName = Literal[
    "auto",
    "messages",
    "conversations",
    "preference",
    "prompt_completion",
    "alpaca",
    "question_answer",
    "text",
    "tokens",
]
TrainOn = Literal["assistant", "completion", "last_turn", "all", "generation"]
Packing = Literal["best_fit", "first_fit", "concat", "none"]

_ENCODING = {
    *("chat_template", "template_variables", "date", "system", "train_on", "rewritten_turns", "bad_rows", "max_length"),
    *("truncate", "overlap", "min_trained_tokens"),
}


def _packing(value: Any) -> Any:
    """`packing: true` and `packing: false`, as recipes elsewhere have it."""
    return {True: "best_fit", False: "none"}.get(value, value) if isinstance(value, bool) else value


class RowFormat(BaseModel):
    """How a row is read: its form, and what its columns are called."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: FormatName = Field("auto", description="Form of the rows; auto: recognised row by row (docs/data.md).")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our column -> theirs, or a text with theirs in it: {prompt: 'Q: {question}', completion: answer}.",
    )


class SourceConfig(BaseModel):
    """One of `data.sources`: rows that are mixed with others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="File, folder, glob, or hf:ORG/NAME.")
    name: str | None = Field(None, min_length=1, description="What metrics call it; null: the file's name.")
    weight: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Its share of the examples (of a stream: of the rows read), relative to the others'; null: by its "
        "size.",
    )
    format: FormatName | None = Field(None, description="Form of its rows; null: as data.format.")
    columns: dict[str, str] | None = Field(None, description="As data.columns; null: those.")
    subset: str | None = Field(None, min_length=1, description="Configuration of a Hub data set.")
    split: str = Field("train", min_length=1, description="Split of a Hub data set.")


class DataConfig(RowFormat):
    """How records become rows of tokens. Where the records come from is given beside it."""

    chat_template: str | None = Field(
        None,
        min_length=1,
        description="chatml, llama3, gemma, mistral, qwen3, phi, plain, or a .jinja file; null: the model's own.",
    )
    template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template, as {enable_thinking: false}."
    )
    date: datetime.date | None = Field(
        None, description="Today, to templates that write the date; null: the day a run begins, which it records."
    )
    system: str | None = Field(
        None, min_length=1, description="System message of conversations that have none of their own."
    )
    train_on: TrainOn = Field(
        "assistant",
        description="What is learned: assistant turns, the completion (all after the last user turn), the last_turn, "
        "all tokens, or what the template marks by {% generation %}.",
    )
    rewritten_turns: Literal["split", "refuse"] = Field(
        "split",
        description="Where a template changes earlier turns once later ones are there: make an example of each trained "
        "turn, or refuse. (train_on=all and generation learn what the template writes.)",
    )
    bad_rows: Literal["refuse", "drop"] = Field("refuse", description="Stop at a row that cannot be read, or count it.")
    max_length: int = Field(1024, ge=2, description="Tokens in a row of a batch; longer examples are cut.")
    truncate: Literal["keep_end", "keep_start", "split", "drop"] = Field(
        "keep_end", description="What to do with an example longer than max_length (packing=concat has none)."
    )
    overlap: int = Field(0, ge=0, description="truncate=split: tokens that a piece sees of the one before it.")
    min_trained_tokens: int = Field(1, ge=1, description="Examples with fewer tokens to learn are dropped and counted.")
    packing: Annotated[Packing, BeforeValidator(_packing)] = Field(
        "best_fit",
        description="Several examples in a row: best_fit (also true), first_fit, concat (raw text, cut anywhere), none "
        "(also false: rows as long as the longest of their batch).",
    )
    max_segments: int | None = Field(None, ge=1, description="Most examples in a row; null: as many as fit.")
    lookahead: int = Field(1024, ge=1, le=10**6, description="Rows kept open for a later example to fill.")
    holdout: float = Field(0.1, ge=0, lt=1, description="Fraction of rows held out where no evaluation set is given.")
    seed: int = Field(0, ge=0, description="Fixes the held-out rows, the order of every epoch, and the mixture.")
    temperature: float | None = Field(
        None, gt=0, le=1000, description="Mix sources by size ** (1 / temperature), where none has a weight."
    )
    repeat: bool = Field(
        True,
        description="A mixture's epoch ends with the source that lasts longest, others repeat; false: the first. "
        "A stream goes on without end; false: until each row has come once.",
    )
    streaming: bool = Field(False, description="Read rows as they are needed: for files larger than memory.")
    shuffle_buffer: int = Field(10_000, ge=1, le=10**8, description="streaming: rows shuffled among each other.")
    cache: bool = Field(True, description="Keep tokenised files in the cache, to be used again.")

    @model_validator(mode="after")
    def _no_option_is_ignored(self) -> "DataConfig":
        if self.overlap and self.truncate != "split":
            raise ValueError(f"data.overlap: {self.overlap} goes with data.truncate=split; set one or the other")
        if self.overlap > self.max_length - 2:
            raise ValueError(f"data.overlap: {self.overlap} must be at most max_length - 2, {self.max_length - 2}")
        if self.temperature is not None and self.streaming:
            raise ValueError(
                "data.temperature needs the sizes of the sources, which a stream does not know; give weights"
            )
        if self.packing == "none" and self.max_segments is not None:
            raise ValueError("data.max_segments: data.packing=none has one example in a row; take one away")
        if self.rewritten_turns == "refuse" and self.train_on in ("all", "generation"):
            raise ValueError(
                f"data.rewritten_turns=refuse: data.train_on={self.train_on} learns what the template writes; "
                "take one away"
            )
        return self

    def encoding(self) -> dict[str, Any]:
        """The options that decide the tokens of an example, JSON-able."""
        return self.model_dump(mode="json", include=_ENCODING)
