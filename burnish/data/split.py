"""Rows held out for evaluation."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence

from burnish.data.records import Record, TextRecord, TokensRecord
from burnish.errors import InputError


def split_holdout(
    records: Sequence[Record], fraction: float, seed: int, place: str = "data"
) -> tuple[list[Record], list[Record]]:
    """Split records into (training, held out); both keep the order of the file. Errors call the records `place`.

    Rows with the same prompt fall on the same side, so no held-out question is also trained on. Which side a
    prompt falls on depends on the seed and on its own text: prompts are ordered by a hash of both, and held
    out from the first one on until `fraction` of the rows is reached (at least one row).

    Raises:
        InputError: all rows have the same prompt, so nothing can be held out.
    """
    if fraction == 0:
        return list(records), []
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[_prompt(record)].append(record)
    if len(groups) < 2:
        raise InputError(
            f"{place}: data.holdout={fraction:g} cannot hold out rows: all {len(records)} have the same prompt; "
            "give evaluation data or set data.holdout=0"
        )
    order = sorted(groups, key=lambda prompt: hashlib.sha256(f"{seed}\n{prompt}".encode()).digest())
    target = max(1, round(fraction * len(records)))
    held: set[int] = set()
    for prompt in order[:-1]:  # the last one always stays
        if len(held) + len(groups[prompt]) <= target:
            held.update(record.index for record in groups[prompt])
    if not held:  # every prompt has more rows than the target
        held = {record.index for record in groups[min(order, key=lambda prompt: len(groups[prompt]))]}
    return (
        [record for record in records if record.index not in held],
        [record for record in records if record.index in held],
    )


def _prompt(record: Record) -> str:
    """What comes before the first answer; the whole row where nothing is asked before one."""
    if isinstance(record, TokensRecord):
        learned = next((i for i, weight in enumerate(record.weights) if weight), 0)
        return f"tokens\n{record.tokens[:learned] or record.tokens}"
    if isinstance(record, TextRecord):
        # As the two turns it may become, so that both spellings of a row meet.
        return _prompt(record.as_chat()) if record.prompt else f"text\n{record.completion}"
    answers = (i for i, m in enumerate(record.messages) if m["role"] == "assistant" and i >= record.first_trained)
    before = record.messages[: next(answers, len(record.messages))]
    asked = any(message["role"] == "user" for message in before)
    return json.dumps(before if asked else record.messages, sort_keys=True)
