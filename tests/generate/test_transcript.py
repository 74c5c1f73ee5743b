"""Where an answer ends: stop ids, stop strings across token borders, the limit."""

from pathlib import Path

import gguf
import pytest

from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.generate.transcript import Transcript

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
BPE = tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "bpe.gguf"))
SPM = tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "spm.gguf"))
TEXT = "The quick brown fox jumps over the lazy dog, 1234 times. \U0001f98a Then it sleeps."


def read(tokenizer, text, stop, limit=1000, stop_ids=()):
    """The transcript after as many tokens of the text as it takes, and the pieces it released."""
    transcript, pieces = Transcript(tokenizer, limit, stop_ids, stop), []
    for id in tokenizer.encode(text):
        pieces.append(transcript.push(id, -1.0))
    return transcript, pieces


@pytest.mark.parametrize("tokenizer", [BPE, SPM])
@pytest.mark.parametrize("start", range(0, len(TEXT) - 12, 3))
@pytest.mark.parametrize("width", [1, 4, 11])
def test_text_ends_before_the_stop_string_wherever_it_lies(tokenizer, start, width):
    stop = TEXT[start : start + width]
    transcript, pieces = read(tokenizer, TEXT, [stop, "never there"])
    assert transcript.text == TEXT[: TEXT.index(stop)]
    assert "".join(pieces) == transcript.text
    assert transcript.finish_reason == "stop"
    ids = tokenizer.encode(TEXT)
    assert transcript.token_ids == ids[: len(transcript.token_ids)]
    assert len(transcript.log_probs) == len(transcript.token_ids)
    assert stop in tokenizer.decode(transcript.token_ids)
    # At most the characters of one byte run are needed to be sure.
    assert len(tokenizer.decode(transcript.token_ids)) <= TEXT.index(stop) + width + 16


def test_the_first_of_several_stop_strings_counts():
    transcript, _ = read(BPE, TEXT, ["lazy", "brown", "dog"])
    assert transcript.text == "The quick "


def test_what_might_become_a_stop_string_is_held_back_and_comes_out_when_it_does_not():
    transcript, pieces = read(BPE, "one two three", ["two four"])
    assert transcript.finish_reason is None
    assert "".join(pieces) == transcript.text == "one two three"
    half, pieces = read(BPE, "one two", ["two four"])
    assert "".join(pieces) == "one "
    assert half.text == "one "


def test_held_text_comes_out_at_the_limit():
    ids = BPE.encode("one two")
    transcript, pieces = read(BPE, "one two three", ["two four"], limit=len(ids))
    assert (transcript.text, transcript.finish_reason) == ("one two", "length")
    assert transcript.token_ids == ids
    assert "".join(pieces) == "one two"


def test_a_stop_string_that_only_the_end_settles():
    """The last characters are half a run of bytes until the answer is over."""
    fox = SPM.encode("a\U0001f98a")
    transcript = Transcript(SPM, len(fox), (), ["\U0001f98a"])
    for id in fox:
        transcript.push(id, 0.0)
    assert (transcript.text, transcript.finish_reason) == ("a", "stop")


def test_a_stop_id_is_kept_as_a_token_and_not_shown():
    end = BPE.encode(" dog")[0]
    transcript, _ = read(BPE, "The quick dog sleeps", [], stop_ids=(end,))
    assert transcript.token_ids[-1] == end
    assert (transcript.text, transcript.finish_reason) == ("The quick", "stop")


def test_without_a_tokenizer_there_is_no_text():
    transcript = Transcript(None, 2, (), ())
    assert [transcript.push(5, -0.5), transcript.push(6, -0.5), transcript.push(7, -0.5)] == ["", "", ""]
    assert (transcript.token_ids, transcript.text, transcript.finish_reason) == ([5, 6], "", "length")
