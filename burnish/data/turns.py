"""Where in a rendered conversation the assistant's turns lie.

    <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n
                                                           ^------------^ learned

A turn starts where the messages before it end when they are rendered with the generation prompt, which is the
very text generation is given. It ends behind the terminator the template writes after the content; the white
space that follows belongs to nobody. Everything is found in one rendering of the whole conversation, so no
family of templates needs code of its own.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from burnish.data.records import ChatRecord
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rendered:
    """A text and the (start, end) characters of what is learned in it.

    `terminated` is false where the template writes nothing after an answer, so that EOS has to end it.
    """

    text: str
    spans: list[tuple[int, int]]
    terminated: bool = True


@dataclass
class TurnFinder:
    """Renders conversations and finds their trained turns.

    Args:
        tokenizer: renders.
        system: message put before conversations that have no system message.

    Raises:
        InputError: a system message, but no chat template to put it in.
    """

    tokenizer: "Tokenizer"
    system: str | None = None
    # What the template writes after an answer, white space included; found at the first conversation.
    _ending: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.system is not None and self.tokenizer.chat_template is None:
            raise InputError("data.system is set, but the model has no chat template; remove data.system")

    def render(self, chat: ChatRecord) -> Rendered:
        """The conversation up to the end of its last assistant turn; nothing learned sees what follows.

        Raises:
            InputError: the model has no chat template, or the template refuses the messages or renders the
                conversation so that its turns cannot be told apart.
        """
        chat = self._whole(chat)
        turns = _trained_turns(chat)
        text = self._template(chat)
        if self._ending is None:
            self._ending = self._turn_ending(chat, turns[-1])
        terminator = self._ending.rstrip()
        if not terminator:
            text = text[: len(text) - len(self._ending)]
            return Rendered(text, [(self._start(chat, text, _only(turns)), len(text))], terminated=False)
        starts = [self._start(chat, text, turn) for turn in turns]
        limits = [*starts[1:], len(text)]
        spans = [
            (start, self._end(chat, text, turn, limit, terminator))
            for turn, start, limit in zip(turns, starts, limits, strict=True)
        ]
        return Rendered(text[: spans[-1][1]], spans)

    def prompt(self, chat: ChatRecord) -> str:
        """What generation is given to write the last assistant turn."""
        chat = self._whole(chat)
        return self._opening(chat, _trained_turns(chat)[-1])

    def _whole(self, chat: ChatRecord) -> ChatRecord:
        """The conversation with its system message and without what follows the last assistant turn."""
        if self.tokenizer.chat_template is None:
            raise InputError("a conversation, but the model has no chat template; give text prompts and completions")
        messages, first = chat.messages, chat.first_trained
        messages = messages[: max(i for i, m in enumerate(messages) if m["role"] == "assistant") + 1]
        if self.system is not None and all(message["role"] != "system" for message in messages):
            messages, first = ({"role": "system", "content": self.system}, *messages), first + 1
        return replace(chat, messages=messages, first_trained=first)

    def _start(self, chat: ChatRecord, text: str, turn: int) -> int:
        opening = self._opening(chat, turn)
        if not text.startswith(opening):
            same = _shared_start(opening, text)
            raise InputError(
                f"message {turn}: the chat template changes what comes before this assistant turn once the "
                f"turn is there ({opening[same : same + 30]!r} becomes {text[same : same + 30]!r}), so what "
                "generation would see cannot be trained on; use another chat template"
            )
        return len(opening)

    def _end(self, chat: ChatRecord, text: str, turn: int, limit: int, terminator: str) -> int:
        """Where the turn's terminator ends; the next trained turn starts at `limit`."""
        message = chat.messages[turn]
        # The content may have been trimmed or rewritten, so it is not looked for: what follows it is what
        # stays when its last character is another one.
        unlike = {**message, "content": "1" if message["content"].rstrip().endswith("0") else "0"}
        messages = (*chat.messages[:turn], unlike, *chat.messages[turn + 1 :])
        content_end = len(text) - _shared_end(text, self._template(replace(chat, messages=messages)))
        at = text.find(terminator, content_end, limit)
        between = text[content_end:at].strip()
        if at < 0 or (between and not message.get("tool_calls")):
            raise InputError(
                f"message {turn}: the chat template does not end this assistant turn with {terminator!r}, as "
                "it would end the last one; use a template that ends every turn"
            )
        return at + len(terminator)

    def _opening(self, chat: ChatRecord, turn: int) -> str:
        """What generation is given to write message `turn`."""
        if turn == 0:
            raise InputError("message 0: an assistant turn that answers nothing; start with a user turn")
        return self._template(replace(chat, messages=chat.messages[:turn]), add_generation_prompt=True)

    def _turn_ending(self, chat: ChatRecord, turn: int) -> str:
        """What two renderings of unlike contents end with in common is the template's own."""
        before = chat.messages[:turn]
        zero, one = (
            self._template(replace(chat, messages=(*before, {"role": "assistant", "content": digit}))) for digit in "01"
        )
        return zero[len(zero) - _shared_end(zero, one) :]

    def _template(self, chat: ChatRecord, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.render(chat.messages, add_generation_prompt, chat.tools)


def _trained_turns(chat: ChatRecord) -> list[int]:
    return [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first_trained]


def _only(turns: list[int]) -> int:
    if len(turns) > 1:
        raise InputError(
            "the chat template writes nothing after an assistant turn, so a conversation of several cannot "
            "teach where one ends; use a template with an end-of-turn token"
        )
    return turns[0]


def _shared_start(a: str, b: str) -> int:
    """How many characters two texts start with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared_end(a: str, b: str) -> int:
    return _shared_start(a[::-1], b[::-1])
