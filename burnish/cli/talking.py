"""`burnish generate` and `burnish chat`."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from burnish.cli.report import make_console
from burnish.config import build_config
from burnish.errors import InputError
from burnish.generate.config import SamplingConfig
from burnish.generate.engine import Sampler, generate
from burnish.loading import load


def answer(
    source: str, prompts: Sequence[str], raw: bool, system: str | None, sampling: dict[str, Any], as_json: bool
) -> None:
    """Prints a reply to each prompt: bare text for one, or one JSON object a line."""
    config = build_config(SamplingConfig, sampling)
    if raw and system:
        raise InputError("--system goes into the chat template, which --raw leaves out; give one of them")
    model = load(source)
    asked: list[Any] = list(prompts) if raw else [_turns(prompt, system) for prompt in prompts]
    for prompt, completion in zip(prompts, generate(model, asked, config), strict=True):
        if as_json:
            said = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
            print(json.dumps({**said, "tokens": completion.token_ids, "log_probs": completion.log_probs}))
        else:
            print(completion.text)


def converse(source: str, system: str | None, sampling: dict[str, Any]) -> None:
    """Reads lines and streams replies until an empty line or the end of the input."""
    config = build_config(SamplingConfig, sampling)
    sampler = Sampler(load(source))
    console = make_console()
    console.print(f"talking to {source}; an empty line ends it", style="dim")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        said = ""
        for piece in sampler.stream(messages, config):
            print(piece, end="", flush=True)
            said += piece
        print()
        messages.append({"role": "assistant", "content": said})


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _turns(prompt: str, system: str | None) -> list[dict[str, Any]]:
    user = {"role": "user", "content": prompt}
    return [{"role": "system", "content": system}, user] if system else [user]
