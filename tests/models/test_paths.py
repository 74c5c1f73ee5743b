"""Selectors over names."""

import pytest

from burnish.errors import InputError
from burnish.models.paths import matches, select

NAMES = [f"layers.{layer}.{part}" for layer in (0, 1, 10) for part in ("attn.q_proj", "attn.o_proj", "mlp.up_proj")]
NAMES.append("head")


@pytest.mark.parametrize(
    "selector, count",
    [
        ("q_proj", 3),
        ("*_proj", 9),
        ("attn", 6),
        ("head", 1),
        ("layers", 9),
        ("layers.1", 3),
        ("layers.1*", 6),
        ("layers.*.attn", 6),
        ("layers.*.attn.q_proj", 3),
        ("layers.10.mlp.up_proj", 1),
        ("*", 10),
        ("layers.?.attn.[qo]_proj", 4),
        ("attn.q_proj", 0),
        ("layers.1.attn.q_proj.kernel", 0),
        ("Q_PROJ", 0),
        ("q_pro", 0),
        ("", 0),
    ],
)
def test_matches(selector, count):
    assert sum(matches(name, selector) for name in NAMES) == count


def test_select_joins_selectors():
    assert select(NAMES, ["head", "layers.1.attn"], option="x") == {
        "head",
        "layers.1.attn.q_proj",
        "layers.1.attn.o_proj",
    }


@pytest.mark.parametrize(
    "wrong, near", [("q_porj", "layers."), ("layers.1.attn.q_porj", "layers.1.attn.q_proj"), ("", "")]
)
def test_a_selector_of_nothing_names_the_option_and_what_is_near(wrong, near):
    with pytest.raises(InputError) as error:
        select(NAMES, ["head", wrong], option="adapter.targets")
    message = str(error.value)
    assert message.startswith(f"adapter.targets: {wrong!r} matches nothing") and near in message and "\n" not in message
