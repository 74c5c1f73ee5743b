"""Characters that are seldom meant are found; those of living languages are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.characters import excerpt, odd_characters, visible


def misread(text: str) -> str:
    """UTF-8 as a program that thinks of Windows-1252 reads it."""
    return text.encode("utf-8").decode("cp1252")


ODD = {
    "escape": ("a\x1b[31mb", "control", 1, "U+001B"),
    "windows line end": ("a\r\nb", "control", 1, "U+000D"),
    "nul": ("\0", "control", 0, "U+0000"),
    "c1": ("ab\x93", "control", 2, "U+0093"),
    "zero width": ("a\u200bb", "invisible", 1, "U+200B"),
    "byte-order mark": ("\ufeffa", "invisible", 0, "U+FEFF"),
    "direction override": ("a\u202eb", "invisible", 1, "U+202E"),
    "replacement": ("na\ufffdve", "replacement", 2, "U+FFFD"),
    "private use": ("a\ue000", "private_use", 1, "U+E000"),
    "run": ("a" + "=" * 100, "long_run", 1, "U+003D"),
    "run of spaces": (" " * 200, "long_run", 0, "U+0020"),
    "accent": (misread("café"), "mojibake", 3, "'Ã©'"),
    "dash": (misread("a – b"), "mojibake", 2, "'â€'"),
    "degree": (misread("3 °C"), "mojibake", 2, "'Â°'"),
    "emoji": (misread("😀"), "mojibake", 0, "'ðŸ'"),
    "cyrillic": (misread("привет"), "mojibake", 0, "'Ð¿Ñ€'"),
    "chinese": (misread("中国"), "mojibake", 0, r"'ä¸\xadå›½'"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_character_is_found_where_it_is(name: str) -> None:
    text, kind, at, which = ODD[name]
    assert (kind, at, which) in [tuple(odd) for odd in odd_characters(text)]


@pytest.mark.parametrize(
    "text",
    [
        "plain\n\ttext",
        "El niño comió piñas a 3 °C; «¿qué?» — “sí”…",
        "Er sagte: „Das macht Spaß“ – „groß…“",
        "CAFÉ” À LA CARTE’ ÊTRE",
        "Tiếng Việt: Ấn Độ, ÂN ÁI",
        "👩‍👩‍👧 ❤️ می‌خواهم हिन्दी क्‍ष עברית العربية 中文 한국어 Привет, Ðórr",
        "€5 – 3 ƒ, ½ ¼ ² µ",
        "| --- | --- |\n" + "-" * 80 + "\n" + "#" * 79,
    ],
)
def test_living_languages_and_markdown_are_left_alone(text: str) -> None:
    assert list(odd_characters(text)) == []


@given(st.text())
def test_what_is_shown_is_harmless_and_one_line(text: str) -> None:
    shown = visible(text)
    kinds = {odd.kind for odd in odd_characters(shown)}
    assert not kinds & {"control", "invisible", "replacement", "private_use"}
    assert len(excerpt(text).splitlines()) <= 1
    if text.isascii() and text.isprintable():
        assert shown == text


def test_an_excerpt_is_around_its_place() -> None:
    text = "x" * 500 + "\x1b" + "y" * 500
    assert "xx⟨U+001B⟩yy" in excerpt(text, at=500)
    assert excerpt("a\n\tb") == "a⏎⇥b"
    assert excerpt("a" * 70, 60) == "a" * 60 + "…"
