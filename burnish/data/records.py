"""What a row of data says, whatever form it was written in: a conversation, a text, or tokens."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatRecord:
    """A conversation. Assistant turns from message `first_trained` on are what is learned, unless weights say other.

    Attributes:
        index: position in the data set, from 0; becomes `example_ids`.
        place: what an error calls it: "train.jsonl, line 3".
        messages: `{"role": ..., "content": ...}` and whatever else a template reads; no training flags.
        first_trained: messages before it are a prompt that is given, whatever their role.
        tools: JSON schemas of functions, for the template.
        weights: what the row says of each message: None nothing, 0 not to be learned, else its loss weight; empty where
            it says nothing of any.
    """

    index: int
    place: str
    messages: tuple[Message, ...]
    first_trained: int = 0
    tools: tuple[Any, ...] | None = None
    weights: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class TextRecord:
    """A prompt and a completion without roles: raw text to a base model, two turns to a chat model.

    Where `raw`, it is text to be learned whole whatever the model: there is no prompt, and no template is used.
    """

    index: int
    place: str
    prompt: str
    completion: str
    raw: bool = False

    def as_chat(self) -> ChatRecord:
        """The same as a user turn and an assistant turn."""
        turns = ({"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.completion})
        return ChatRecord(self.index, self.place, turns, first_trained=1)


@dataclass(frozen=True)
class TokensRecord:
    """Token ids as they are, with a loss weight for each: no template, no BOS, no EOS is put to them."""

    index: int
    place: str
    tokens: tuple[int, ...]
    weights: tuple[float, ...]


Record = ChatRecord | TextRecord | TokensRecord
