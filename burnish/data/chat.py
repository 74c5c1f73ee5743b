"""Chat templates: small Jinja2 programs that come with a model and turn a conversation into text.

A template is code by somebody else, so it runs in Jinja2's immutable sandbox: it sees plain data, cannot
reach Python's internals, and cannot change what it was given. What a template may call beside Jinja2 itself
is what Hugging Face transformers gives it (https://huggingface.co/docs/transformers/chat_templating):

    raise_exception(message)    refuse the conversation
    strftime_now(format)        the local time
    x | tojson                  JSON as it is: no HTML escapes, non-ASCII kept
    {% break %}, {% continue %}
    {% generation %} ... {% endgeneration %}    marks what the model writes; `render_marked` finds it

Every failure, the template's own refusal included, is an `InputError` of one line.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from burnish.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2 import nodes as jinja_nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stands at both ends of what a template marks, while it is rendered; no text has it by chance.
_MARK = re.compile("burnish-generation-4fc1b97d1f0e5a23")
_TAG = re.compile(r"\{%[-+]?\s*generation\b")
# Strings of a JSON text, which stay, and its nulls.
_JSON_NULL = re.compile(r'("(?:[^"\\]|\\.)*")|\bnull\b')
# Names under which a message's reasoning is passed, the standard one first. Templates read the first two.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: the template's text.
      origin: where it came from, for error messages.

    Raises:
      InputError: the text is not a valid template.
    """

    def __init__(self, source: str, origin: str) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self.origin = origin
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise InputError(
                f"chat template {origin}, line {error.lineno}: {_one_line(error.message)}; mend it"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
          messages: `{"role": ..., "content": ...}` and whatever else the template reads. Keys that hold None
            are dropped, as most templates would print "None".
          add_generation_prompt: end with the header of the turn that the model is to write.
          tools: JSON schemas of the functions the model may call.
          variables: further names the template may read, as `bos_token`.

        Raises:
          InputError: no messages, a message that is not plain data, or a template that refuses or fails.
        """
        return self._render(self._template, messages, add_generation_prompt, tools, variables)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation, and the (start, end) characters of what `{% generation %}` tags enclose.

        Raises:
          InputError: as `render`; or the template has no such tag.
        """
        if not _TAG.search(self.source):
            raise InputError(
                f"chat template {self.origin} marks nothing by {{% generation %}}; "
                "set data.train_on to assistant, or use a template that has the tags"
            )
        text, spans = "", []
        for number, piece in enumerate(_MARK.split(self._render(self._marking, messages, False, tools, variables))):
            if number % 2:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        return text, spans

    @functools.cached_property
    def _marking(self) -> "Template":
        return _environment(marking=True).from_string(self.source)

    def _render(
        self,
        template: "Template",
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        if not messages:
            raise InputError("a conversation needs at least one message; this one has none")
        context = {**_environment().globals, **(variables or {})}
        context["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        context["tools"] = None if tools is None else _plain(tools, "tools")
        context["documents"] = None
        context["add_generation_prompt"] = add_generation_prompt
        try:
            # As `template.render`, but for its copying of every name the environment knows.
            return "".join(template.root_render_func(template.new_context(context, shared=True)))
        except Exception as error:  # the template is a program: it can fail in any way Python can
            raise InputError(
                f"chat template {self.origin} did not take the conversation: {_one_line(error)}; "
                "change the messages or give another template"
            ) from error


def default_variables(variables: Mapping[str, Any]) -> str:
    """The head of a template that sets variables to these values where a caller has not set them.

    Raises:
      InputError: a name that is none, or a value that is no text, number, boolean or null, or list or object of them.
    """
    head = ""
    for name, value in variables.items():
        if not name.isidentifier():
            raise InputError(f"data.template_variables: {name!r} is no name of a variable; use letters and _")
        written = json.dumps(_plain(value, f"data.template_variables.{name}"), ensure_ascii=False)
        written = _JSON_NULL.sub(lambda match: match[1] or "none", written)
        # No more than the line is taken away behind it: templates are rendered with trim_blocks.
        head += f"{{% if {name} is not defined %}}{{% set {name} = {written} %}}{{% endif %}}\n"
    return head


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _message(message: Any, place: str) -> dict[str, Any]:
    """One message as plain data, without its None values, its reasoning under the names templates read."""
    if type(message) is dict and all(type(value) is str for value in message.values()):
        plain: dict[str, Any] = dict(message)  # most are; nothing in it needs a look
    elif isinstance(message, Mapping):
        plain = {key: value for key, value in _plain(message, place).items() if value is not None}
    else:
        raise InputError(f'{place} is {type(message).__name__}; write {{"role": ..., "content": ...}}')
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any, place: str) -> Any:
    """A copy made of JSON's types only, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (enums, NumPy scalars) are cut back to the base type.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
    raise InputError(
        f"{place} is {type(value).__name__}; templates take text, numbers, booleans, None, lists and objects"
    )


@functools.cache
def _environment(marking: bool = False) -> "ImmutableSandboxedEnvironment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - the attribute Jinja2 reads

        def parse(self, parser: "Parser") -> "jinja_nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marking:
                mark = nodes.Output([nodes.TemplateData(_MARK.pattern)])
                body = [mark, *body, mark]
            # A scope of its own: what is set inside is not seen outside, as with the tag's original.
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
