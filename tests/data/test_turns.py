"""Where the turns of a rendered conversation are. The named templates, and tokens, are in test_masks_grid.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from burnish.data.config import DataConfig
from burnish.data.fit import fit_tokenizer
from burnish.data.records import ChatRecord
from burnish.data.tokenizer import Tokenizer
from burnish.data.turns import TurnFinder
from burnish.errors import InputError

SYSTEM = {"role": "system", "content": "S"}
TALK = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}"
    "{% endfor %}" + PROMPT
)


def find(tokenizer: Tokenizer, template: str, messages=TALK, weights=(), first=0, tools=None, **options) -> list[tuple]:
    """(text, [(what is learned, weight), ...], whether it is terminated) of each text."""
    config = DataConfig(**options)
    finder = TurnFinder(fit_tokenizer(tokenizer.with_chat_template(template), config), config)
    texts = finder.render(ChatRecord(0, "", tuple(messages), first, tools, weights))
    return [(r.text, [(r.text[a:b], weight) for a, b, weight in r.spans], r.terminated) for r in texts]


def learned(*arguments, **options) -> list[tuple[str, float]]:
    """What is learned, of all texts."""
    return [span for _, spans, _ in find(*arguments, **options) for span in spans]


def test_a_conversation_is_one_text_up_to_its_last_answer(bpe_tokenizer):
    ((text, spans, terminated),) = find(bpe_tokenizer, TURNS + PROMPT, [*TALK, TALK[0]])
    assert text == "[user]Q1<|im_end|>\n[assistant]A1<|im_end|>\n[user]Q2<|im_end|>\n[assistant]A2<|im_end|>"
    assert spans == [("A1<|im_end|>", 1.0), ("A2<|im_end|>", 1.0)] and terminated


# What a template writes after an answer -> what of it ends the turn; "" is nothing.
ENDINGS = {
    "<|im_end|>": "<|im_end|>",
    "<|im_end|>\n": "<|im_end|>",
    " <|im_end|>\n\n": " <|im_end|>",
    "\n<|im_end|>": "\n<|im_end|>",
    "<|im_end|><|endoftext|>": "<|im_end|>",
    "\n###\n": "\n###",
    "\n": "",
    "\n\n": "",
    "": "",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_ends_a_turn(bpe_tokenizer, ending):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '" + ending.replace("\n", "\\n") + "' }}{% endfor %}"
    )
    spaces = Backend.from_str(bpe_tokenizer.backend.to_str())
    spaces.add_tokens([AddedToken("\n", normalized=False), AddedToken("\n\n", normalized=False)])
    for tokenizer in (bpe_tokenizer, Tokenizer(spaces, bpe_tokenizer.special_tokens)):  # as Gemma has them
        end = ENDINGS[ending]
        ((_, spans, terminated),) = find(tokenizer, template + PROMPT, TALK[:2])
        assert spans == [(f"A1{end}", 1.0)] and terminated == bool(end)
        texts = find(tokenizer, template + PROMPT)
        assert [span for _, spans, _ in texts for span in spans] == [(f"A1{end}", 1.0), (f"A2{end}", 1.0)]
        assert len(texts) == (1 if end else 2), "EOS can end but one turn of a text"


def test_eos_at_the_end_of_the_conversation_is_no_rewriting(bpe_tokenizer):
    closing = "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    for options in ({}, {"rewritten_turns": "refuse"}):
        ((text, spans, _),) = find(bpe_tokenizer, TURNS + PROMPT + closing, **options)
        assert spans == [("A1<|im_end|>", 1.0), ("A2<|im_end|>", 1.0)] and "<|endoftext|>" not in text
    ((text, spans, _),) = find(bpe_tokenizer, TURNS + PROMPT + closing, train_on="all", weights=(0.0, None, 0.0, None))
    assert spans == [("\n[assistant]A1<|im_end|>", 1.0), ("\n[assistant]A2<|im_end|>\n<|endoftext|>", 1.0)]


def test_an_answer_that_is_not_ended_is_named(bpe_tokenizer):
    template = TURNS.replace("<|im_end|>", "{{ '' if m.content == 'A1' else '<|im_end|>' }}")
    with pytest.raises(InputError, match=r"message 1: the chat template does not end this turn with '<\|im_end\|>'"):
        find(bpe_tokenizer, template + PROMPT, TALK[:2])


# ---- rewriting

COUNTED = "{{ messages | length }}" + TURNS + PROMPT  # a later message changes all before it
SHOUTED = (
    TURNS.replace(
        "{{ m.content }}", "{{ m.content | lower if m.role == 'assistant' and not loop.last else m.content }}"
    )
    + PROMPT
)


def test_rewritten_turns_are_split_or_refused(bpe_tokenizer):
    (one, two) = find(bpe_tokenizer, SHOUTED)
    assert one == ("[user]Q1<|im_end|>\n[assistant]A1<|im_end|>", [("A1<|im_end|>", 1.0)], True)
    for template in (COUNTED, SHOUTED):
        with pytest.raises(InputError, match=r"message 1: the chat template changes .*set data\.rewritten_turns=split"):
            find(bpe_tokenizer, template, rewritten_turns="refuse")
    assert two[0].startswith("[user]Q1<|im_end|>\n[assistant]a1<|im_end|>\n[user]Q2")
    assert two[1] == [("A2<|im_end|>", 1.0)]


def test_a_turn_whose_own_prompt_is_changed_by_it_cannot_be_learned(bpe_tokenizer):
    """There is nothing to split: generation never sees that text."""
    for options in ({}, {"rewritten_turns": "refuse"}, {"train_on": "last_turn"}):
        with pytest.raises(
            InputError, match=r"message \d: .* what comes before this turn .* use another chat template"
        ):
            find(bpe_tokenizer, COUNTED, TALK[:2], **options)


# ---- what the row and the recipe say


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flags_win_over_the_recipe(bpe_tokenizer, data):
    weights = tuple(
        data.draw(st.sampled_from([None, 0.0, 0.5, 3.0] if m["role"] == "assistant" else [None, 0.0])) for m in TALK
    )
    first = data.draw(st.sampled_from([0, 1, 2, 3]))
    train_on, default = data.draw(
        st.sampled_from([("assistant", {1, 3}), ("completion", {3}), ("last_turn", {3}), ("generation", {1, 3})])
    )
    system = data.draw(st.sampled_from([None, "S"]))
    default = {n for n in default if n >= first}
    right = []
    for number in (1, 3):
        weight = weights[number]
        weight = float(number in default) if weight is None else weight
        if weight:
            right.append((f"A{(number + 1) // 2}<|im_end|>", weight))
    options = {"train_on": train_on, "system": system}
    assert learned(bpe_tokenizer, MARKED, TALK, weights, first, **options) == right
    texts = find(bpe_tokenizer, MARKED, TALK, weights, first, **options)
    assert all(text.count("[system]S") == int(system is not None) for text, _, _ in texts)


def test_a_prompt_of_messages_is_not_learned_by_marks_either(bpe_tokenizer):
    assert learned(bpe_tokenizer, MARKED, first=2, train_on="generation") == [("A2<|im_end|>", 1.0)]
    flagged = learned(bpe_tokenizer, MARKED, weights=(None, 0.5, None, None), first=2, train_on="generation")
    assert flagged == [("A1<|im_end|>", 0.5), ("A2<|im_end|>", 1.0)]


def test_all_is_learned_but_what_is_flagged(bpe_tokenizer):
    pieces = ["[user]Q1<|im_end|>\n", "[assistant]A1<|im_end|>\n", "[user]Q2<|im_end|>\n", "[assistant]A2<|im_end|>"]
    whole = "".join(pieces)
    assert find(bpe_tokenizer, TURNS + PROMPT, train_on="all") == [(whole, [(whole, 1.0)], True)]
    for number in range(4):
        weights = tuple(0.0 if n == number else None for n in range(4))
        found = learned(bpe_tokenizer, TURNS + PROMPT, weights=weights, train_on="all")
        sides = ["".join(pieces[:number]), "".join(pieces[number + 1 :])]
        assert found == [(side, 1.0) for side in sides if side]
    assert find(bpe_tokenizer, TURNS + PROMPT, weights=(0.0,) * 4, train_on="all") == []
    found = learned(bpe_tokenizer, TURNS + PROMPT, weights=(0.5, None, 2.0, 2.0), train_on="all")
    assert found == [(pieces[0], 0.5), (pieces[1], 1.0), (pieces[2] + pieces[3], 2.0)]


def test_all_with_a_flag_where_the_template_rewrites(bpe_tokenizer):
    with pytest.raises(InputError, match=r"message 0: the chat template changes this message .* its flag has no place"):
        find(bpe_tokenizer, COUNTED, weights=(0.0, None, None, None), train_on="all")


def test_an_answer_to_nothing(bpe_tokenizer):
    with pytest.raises(InputError, match="message 0: an assistant turn that answers nothing; start with a user turn"):
        find(bpe_tokenizer, TURNS + PROMPT, TALK[1:])
    found = learned(bpe_tokenizer, TURNS + PROMPT, TALK[1:], weights=(0.0, None, None))
    assert found == [("A2<|im_end|>", 1.0)], "it may be there if it is not learned"


# ---- the template's own marks


def test_the_marks_of_the_template(bpe_tokenizer):
    ((text, spans, terminated),) = find(bpe_tokenizer, MARKED, [*TALK, TALK[0]], train_on="generation")
    assert text == "[user]Q1\n[assistant]A1<|im_end|>\n[user]Q2\n[assistant]A2<|im_end|>" and terminated
    assert spans == [("A1<|im_end|>", 1.0), ("A2<|im_end|>", 1.0)]
    # Exactly what is in them, be it without terminator or half an answer; nothing is nothing.
    for inside, right in {"{{ m.content }}": ["A1", "A2"], "{{ m.content[1] }}": ["1", "2"], "": []}.items():
        template = MARKED.replace("{{ m.content }}<|im_end|>{% endg", inside + "{% endg")
        assert learned(bpe_tokenizer, template, train_on="generation") == [(each, 1.0) for each in right]


def test_marks_that_control_white_space(bpe_tokenizer):
    template = MARKED.replace("{% generation %}", "  {%- generation -%}\n  ").replace("{% endg", "  {%- endg")
    assert learned(bpe_tokenizer, template, train_on="generation") == [("A1<|im_end|>", 1.0), ("A2<|im_end|>", 1.0)]


@pytest.mark.parametrize("remark", ["", "{# no generation marks #}", "{% set generation = 1 %}"])
def test_a_template_without_marks(bpe_tokenizer, remark):
    with pytest.raises(InputError, match=r"marks nothing by \{% generation %\}; set data\.train_on to assistant"):
        find(bpe_tokenizer, remark + TURNS + PROMPT, train_on="generation")


def test_marks_that_are_not_one_for_each_answer(bpe_tokenizer):
    """They are learned as they are, unless some are to be left out: which, cannot be told."""
    template = MARKED.replace("{% generation %}", "{% generation %}!{% endgeneration %}{% generation %}")
    assert [span for span, _ in learned(bpe_tokenizer, template, train_on="generation")].count("!") == 2
    for more in ({"weights": (None, 0.0, None, None)}, {"first": 2}):
        with pytest.raises(InputError, match="2 assistant turns, but the chat template marks 4 places"):
            find(bpe_tokenizer, template, train_on="generation", **more)


# ---- what is handed on


def test_tools_and_variables_reach_every_rendering(bpe_tokenizer):
    template = (
        "{{ tools | tojson }}{{ mood }}" + TURNS + "{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
    )
    template = template.replace("[{{ m.role }}]", "[{{ m.role }}]{{ mood if m.role == 'assistant' }}")
    for mood in ("calm", "wild"):
        options = {"tools": ({"name": "f"},), "template_variables": {"mood": mood}}
        ((text, spans, _),) = find(bpe_tokenizer, template, **options)
        assert text.startswith(f'[{{"name": "f"}}]{mood}[user]Q1')
        assert spans == [("A1<|im_end|>", 1.0), ("A2<|im_end|>", 1.0)]


def test_without_a_template(bpe_tokenizer):
    bare = Tokenizer(bpe_tokenizer.backend, bpe_tokenizer.special_tokens)
    with pytest.raises(InputError, match=r"set data\.chat_template"):
        TurnFinder(bare, DataConfig()).render(ChatRecord(0, "", tuple(TALK)))
    with pytest.raises(InputError, match=r"data\.system is set, but the model has no chat template"):
        TurnFinder(bare, DataConfig(system="S"))
