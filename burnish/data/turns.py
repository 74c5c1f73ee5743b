"""Where in a rendered conversation that lies which is to be learned.

    <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n
                                                           ^------------^ learned

A turn starts where the messages before it end when they are rendered with the generation prompt, which is the
very text generation is given. It ends where the messages up to it end, terminator included; the white space that
follows belongs to nobody. Both are found in one rendering of the whole conversation, so no family of templates
needs code of its own.

Some templates write an earlier turn otherwise once later ones are there (Qwen3 takes its reasoning out). What such
a conversation shows is not what was generated then: each of its turns becomes a text of its own, that ends with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from burnish.data.chat import REASONING_KEYS
from burnish.data.config import DataConfig
from burnish.data.records import ChatRecord
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

Turn = tuple[int, float]
"""A message's number, and its loss weight."""


@dataclass(frozen=True)
class Rendered:
    """A text, and (start, end, weight) of the characters that are learned in it, in order.

    `terminated` is false where the template writes nothing after an answer, so that EOS has to end it.
    """

    text: str
    spans: list[tuple[int, int, float]]
    terminated: bool = True


class _Rewritten(Exception):
    """A template wrote a turn otherwise when more of the conversation was there."""


@dataclass
class TurnFinder:
    """Renders conversations and finds what is learned in them.

    Args:
        tokenizer: renders.
        config: `train_on`, `system` and `rewritten_turns` are read.

    Raises:
        InputError: a system message, but no chat template to put it in.
    """

    tokenizer: "Tokenizer"
    config: DataConfig
    _written: dict[str, bool] = field(default_factory=dict, init=False)  # what the template has a place for

    def __post_init__(self) -> None:
        if self.config.system is not None and self.tokenizer.chat_template is None:
            raise InputError("data.system is set, but the model has no chat template; remove data.system")

    def render(self, chat: ChatRecord) -> list[Rendered]:
        """The conversation as one text, or as several where its template rewrites turns; none has nothing to learn.

        Raises:
            InputError: the model has no chat template, or the template refuses the messages or renders the
                conversation so that its turns cannot be told apart.
        """
        if self.tokenizer.chat_template is None:
            raise InputError("a conversation, but the model has no chat template; set data.chat_template")
        chat = self._with_system(chat)
        self._check_nothing_is_left_out(chat)
        if self.config.train_on == "generation":
            return self._marked(chat)
        if self.config.train_on == "all":
            return self._everything(chat)
        turns = self._trained(chat)
        if not turns:
            return []
        try:
            return [self._together(chat, turns)]
        except _Rewritten as rewritten:
            if len(turns) == 1:
                raise InputError(f"{rewritten}; use another chat template") from None
            if self.config.rewritten_turns == "refuse":
                raise InputError(f"{rewritten}; set data.rewritten_turns=split to learn each turn by itself") from None
        return [self._alone(chat, turn) for turn in turns]

    def _with_system(self, chat: ChatRecord) -> ChatRecord:
        if self.config.system is None or any(message["role"] == "system" for message in chat.messages):
            return chat
        return replace(
            chat,
            messages=({"role": "system", "content": self.config.system}, *chat.messages),
            first_trained=chat.first_trained + 1,
            weights=(None, *chat.weights) if chat.weights else (),
        )

    def _check_nothing_is_left_out(self, chat: ChatRecord) -> None:
        """InputError for what the conversation has and the template has no place for."""
        has = {
            "a system message": any(m["role"] == "system" and m["content"].strip() for m in chat.messages),
            "tools": bool(chat.tools),
            "tool calls": any(message.get("tool_calls") for message in chat.messages),
            "reasoning": any(message.get(key) for message in chat.messages for key in REASONING_KEYS),
        }
        for what, there in has.items():
            if there and not self._writes(what):
                raise InputError(
                    f"{what}, which the chat template leaves out; take it off the row, or use a template with a place "
                    "for it (data.chat_template)"
                )

    def _writes(self, what: str) -> bool:
        """Whether the template writes such a thing; one that refuses it says so by itself."""
        if what not in self._written:
            mark = "burnishprobe"
            asked, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
            call = {"type": "function", "function": {"name": mark, "arguments": {}}}
            schema = {"name": mark, "description": "It", "parameters": {"type": "object", "properties": {}}}
            tools = [{"type": "function", "function": schema}]
            probes: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
                "a system message": ([{"role": "system", "content": mark}, asked, answer], None),
                "tools": ([asked, answer], tools),
                "tool calls": ([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], None),
                "reasoning": ([asked, {**answer, "reasoning_content": mark}], None),
            }
            messages, given = probes[what]
            try:
                self._written[what] = mark in self.tokenizer.render(messages, tools=given)
            except InputError:
                self._written[what] = True
        return self._written[what]

    # ---- which turns

    def _trained(self, chat: ChatRecord) -> list[Turn]:
        """What the recipe trains on, where the row itself says nothing of a message."""
        answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first_trained]
        if self.config.train_on == "last_turn":
            answers = answers[-1:]
        elif self.config.train_on == "completion":
            asked = max((i for i, m in enumerate(chat.messages) if m["role"] == "user"), default=-1)
            answers = [i for i in answers if i > asked]
        weights = dict.fromkeys(answers, 1.0)
        _check_flags(chat)
        weights.update((number, weight) for number, weight in enumerate(chat.weights) if weight is not None)
        return sorted((number, weight) for number, weight in weights.items() if weight > 0)

    # ---- where they are

    def _together(self, chat: ChatRecord, turns: Sequence[Turn]) -> Rendered:
        """All turns in one text, up to the end of the last one: nothing learned sees what follows it."""
        last = turns[-1][0]
        text = self._template(chat, last + 1)
        terminator = self._terminator
        if not terminator:
            if len(turns) > 1:
                raise _Rewritten("the chat template writes nothing after an assistant turn, so that none ends")
            text = text[: len(text) - len(self._ending)]
            return Rendered(text, [(self._start(chat, text, last), len(text), turns[0][1])], terminated=False)
        spans = []
        for number, weight in turns:
            through = text if number == last else self._template(chat, number + 1)
            turn = self._without_tail(through)
            if not text.startswith(turn):
                raise _Rewritten(_difference(number, "this turn", turn, text, "once later ones are there"))
            if not turn.endswith(terminator) and not chat.messages[number].get("tool_calls"):
                raise _Rewritten(f"message {number}: the chat template does not end this turn with {terminator!r}")
            spans.append((self._start(chat, text, number), len(turn), weight))
        return Rendered(text[: spans[-1][1]], spans)

    def _alone(self, chat: ChatRecord, turn: Turn) -> Rendered:
        try:
            return self._together(chat, [turn])
        except _Rewritten as rewritten:
            raise InputError(f"{rewritten}; use another chat template") from None

    def _start(self, chat: ChatRecord, text: str, number: int) -> int:
        """Where message `number` starts in a rendering of more than what is before it."""
        if number == 0:
            raise InputError("message 0: an assistant turn that answers nothing; start with a user turn")
        opening = self._template(chat, number, add_generation_prompt=True)
        if not text.startswith(opening):
            raise _Rewritten(_difference(number, "what comes before this turn", opening, text, "once it is there"))
        return len(opening)

    def _without_tail(self, through: str) -> str:
        """A rendering that ends with an assistant turn, up to that turn's terminator."""
        if through.endswith(self._ending):
            return through[: len(through) - len(self._ending) + len(self._terminator)]
        return through.rstrip()  # a turn that ends otherwise: with tool calls

    @cached_property
    def _terminator(self) -> str:
        """What ends a turn: the ending up to its first added token; what follows that ends the conversation.

        White space may be an added token (Gemma's new lines are), but ends nothing.
        """
        ids, starts = self.tokenizer.encode_with_starts(self._ending)
        ends = [*starts.tolist(), len(self._ending)][1:]
        for id, start, end in zip(ids.tolist(), starts.tolist(), ends, strict=True):
            if id in self.tokenizer.added_ids and self._ending[start:end].strip():
                return self._ending[:end]
        return self._ending.rstrip()

    @cached_property
    def _ending(self) -> str:
        """What the template writes after a plain answer: what two renderings of unlike answers end with in common."""
        asked = {"role": "user", "content": "1+1?"}
        zero, one = (self._probe([asked, {"role": "assistant", "content": digit}]) for digit in "01")
        return zero[len(zero) - _shared_start(zero[::-1], one[::-1]) :]

    # ---- all, and by the template's own marks

    def _everything(self, chat: ChatRecord) -> list[Rendered]:
        text = self._template(chat, len(chat.messages))
        terminated = bool(self._terminator)
        text = text.rstrip() if terminated else text[: len(text) - len(self._ending)]
        weights = [1.0 if weight is None else weight for weight in chat.weights or (None,)]
        spans, start = [], 0
        for number, weight in enumerate(weights):
            last = number + 1 == len(weights)
            if not last and weights[number + 1] == weight:
                continue  # learned alike, so it makes no difference where one ends
            end = len(text) if last else self._end(chat, text, number)
            spans.append((start, end, weight))
            start = end
        spans = [span for span in spans if span[2] > 0]
        return [Rendered(text, spans, terminated)] if spans else []

    def _end(self, chat: ChatRecord, text: str, number: int) -> int:
        """Where message `number` ends in a rendering of them all."""
        piece = self._template(chat, number + 1)
        if not text.startswith(piece):  # what ends a conversation comes after the last message alone
            piece = self._without_tail(piece)
        if not text.startswith(piece):
            difference = _difference(number, "this message", piece, text, "once later ones are there")
            raise InputError(f"{difference}, so that its flag has no place; use another chat template")
        return len(piece)

    def _marked(self, chat: ChatRecord) -> list[Rendered]:
        text, marks = self.tokenizer.render_marked(chat.messages, chat.tools)
        weights = [1.0] * len(marks)
        _check_flags(chat)
        if chat.first_trained or any(weight is not None for weight in chat.weights):
            answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
            if len(answers) != len(marks):
                raise InputError(
                    f"{len(answers)} assistant turns, but the chat template marks {len(marks)} places, so that "
                    "none can be left out; set data.train_on=assistant"
                )
            said = chat.weights or (None,) * len(chat.messages)
            defaults = [float(i >= chat.first_trained) for i in answers]
            weights = [
                default if said[i] is None else float(said[i] or 0)
                for i, default in zip(answers, defaults, strict=True)
            ]
        spans = [
            (*mark, weight) for mark, weight in zip(marks, weights, strict=True) if weight > 0 and mark[0] < mark[1]
        ]
        return [Rendered(text[: spans[-1][1]], spans)] if spans else []

    def _template(self, chat: ChatRecord, end: int, add_generation_prompt: bool = False) -> str:
        """The messages before number `end`."""
        return self.tokenizer.render(chat.messages[:end], add_generation_prompt, chat.tools)

    def _probe(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.render(messages)


def _check_flags(chat: ChatRecord) -> None:
    """Whether only assistant turns ask to be learned."""
    for number, weight in enumerate(chat.weights):
        role = chat.messages[number]["role"]
        if weight and role != "assistant":
            raise InputError(
                f"message {number}: a {role} turn that asks to be learned; set data.train_on=all, or take its flag off"
            )


def _difference(number: int, what: str, before: str, after: str, when: str) -> str:
    same = _shared_start(before, after)
    return (
        f"message {number}: the chat template changes {what} {when} ({before[same : same + 30]!r} becomes "
        f"{after[same : same + 30]!r}), so that it is not what generation would see"
    )


def _shared_start(a: str, b: str) -> int:
    """How many characters two texts start with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
