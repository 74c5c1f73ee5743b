"""Added tokens: one id each, rows that are the mean of the others, trained with adapters, there again after loading."""

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from burnish.adapt.vocabulary import VocabularyConfig
from burnish.convert.hf_out import save_hf
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError
from burnish.generate.config import SamplingConfig
from burnish.generate.engine import generate
from burnish.loading import load
from burnish.models.parts import choose_trained, take_apart
from burnish.models.paths import read, write
from burnish.train.checkpoint import Checkpoints
from burnish.train.optimizer import OptimizerState
from burnish.train.step import StepState

NEW = ["<call>", "</call>", "⟨obs⟩"]
TEXT = "Say <call>add 1 2</call> and⟨obs⟩ then<call>."


def rows(model):
    """Embedding and head [vocab, hidden], as float32."""
    decoder = model.decoder
    found = [decoder.embed.weight[...]] + ([] if decoder.head is None else [decoder.head.kernel[...].T])
    return [np.asarray(matrix, np.float32) for matrix in found]


def in_bfloat16(model):
    write(model.module, {key: array.astype(jnp.bfloat16) for key, array in read(model.module).items()})
    model.decoder.dtype = jnp.dtype(jnp.bfloat16)
    return model


# ---- the tokenizer


def test_each_is_one_id_and_text_comes_back(make_tiny, bpe_tokenizer):
    size, model = bpe_tokenizer.vocab_size, make_tiny()
    assert model.add_tokens(NEW) == [size, size + 1, size + 2]
    tokenizer = model.tokenizer
    assert [tokenizer.encode(token) for token in NEW] == [[size], [size + 1], [size + 2]]
    ids = tokenizer.encode(TEXT)
    assert [id for id in ids if id >= size] == [size, size + 1, size + 2, size]
    assert tokenizer.decode(ids, skip_special=False) == TEXT
    assert tokenizer.decode(ids) == "Say add 1 2 and then."
    assert tokenizer.chat_template == bpe_tokenizer.chat_template and tokenizer.stop_ids == bpe_tokenizer.stop_ids
    # Whoever shares the old tokenizer notices nothing.
    assert bpe_tokenizer.vocab_size == size and len(bpe_tokenizer.encode("<call>")) > 1


def test_files_keep_them(make_tiny, tmp_path):
    model = make_tiny()
    model.add_tokens(NEW)
    model.tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode(TEXT) == model.tokenizer.encode(TEXT) and again.vocab_size == model.tokenizer.vocab_size


@pytest.mark.parity
def test_transformers_reads_them(make_tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_tiny()
    model.add_tokens(NEW)
    model.tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = model.tokenizer.encode(TEXT)
    assert theirs.encode(TEXT, add_special_tokens=False) == ids
    assert theirs.decode(ids) == TEXT and len(theirs) == model.tokenizer.vocab_size
    assert set(model.add_tokens(NEW)) <= set(theirs.all_special_ids) | set(theirs.added_tokens_decoder)


def test_what_is_one_token_already_stays_as_it_is(make_tiny, bpe_tokenizer):
    model = make_tiny()
    eos, word = bpe_tokenizer.encode("<|im_end|>"), bpe_tokenizer.encode(" the")
    assert len(word) == 1, "the fixture has no such word"
    before = rows(model)
    assert model.add_tokens(["<|im_end|>", " the"]) == eos + word
    assert np.array_equal(rows(model)[0], before[0])
    assert model.tokenizer.vocab_size == bpe_tokenizer.vocab_size
    assert model.tokenizer.decode(word) == " the", "an ordinary word became special"
    assert model.vocabulary == VocabularyConfig() and model.origin.base_rows is None


@pytest.mark.parametrize(
    "tokens, message",
    [
        (["<a>", ""], "vocabulary.add_tokens: a token is empty"),
        (["<a>", "<b>", "<a>"], "vocabulary.add_tokens: '<a>' is there twice"),
        ("<a>", "vocabulary.add_tokens: input should be a valid list"),
        (["Ġthe"], "'Ġthe' is how the tokenizer spells ' the' inside"),
    ],
)
def test_refused_before_anything_changes(make_tiny, tokens, message):
    model = make_tiny()
    before = model.tokenizer
    with pytest.raises(InputError, match=message) as error:
        model.add_tokens(tokens)
    assert "\n" not in str(error.value)
    assert model.tokenizer is before and model.vocabulary == VocabularyConfig()


# ---- the rows


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_new_rows_are_the_mean_and_old_ones_stay(make_tiny, bpe_tokenizer, tied, bfloat16):
    size = bpe_tokenizer.vocab_size
    model = make_tiny(tie_embeddings=tied)
    model = in_bfloat16(model) if bfloat16 else model
    before, tokens = rows(model), jnp.arange(1, 12)[None]
    logits = np.asarray(model(tokens))
    axes = {name: model.decoder.embed.weight.get_metadata("axes") for name in ("embed",)}
    model.add_tokens(NEW, pad_to_multiple_of=64)
    wanted = -(-(size + 3) // 64) * 64
    assert model.decoder.config.vocab_size == wanted
    for old, new in zip(before, rows(model), strict=True):
        assert new.shape == (wanted, old.shape[1])
        assert np.array_equal(new[:size], old)
        mean = old.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(
            new[size:], np.tile(mean, (wanted - size, 1)), rtol=2**-8 if bfloat16 else 1e-4, atol=1e-6
        )
    assert model.decoder.embed.weight[...].dtype == (jnp.bfloat16 if bfloat16 else jnp.float32)
    assert model.decoder.embed.weight.get_metadata("axes") == axes["embed"] == ("vocab", "embed")
    found = np.asarray(model(tokens))
    assert found.shape == (1, 11, wanted)
    np.testing.assert_allclose(found[..., :size], logits, rtol=1e-5, atol=1e-5 * np.abs(logits).max())
    assert np.isfinite(np.asarray(model(jnp.asarray([[1, size, size + 2]])))).all()


def test_spare_rows_of_the_checkpoint_come_first(make_tiny, bpe_tokenizer):
    size = bpe_tokenizer.vocab_size
    model = make_tiny(vocab_size=size + 5)
    [before] = rows(model)
    model.add_tokens(NEW)
    [after] = rows(model)
    assert after.shape == before.shape
    assert np.array_equal(after[:size], before[:size]) and np.array_equal(after[size + 3 :], before[size + 3 :])
    # The mean is that of real tokens: the spare rows are not in it.
    np.testing.assert_allclose(after[size : size + 3], [before[:size].mean(axis=0)] * 3, rtol=1e-4, atol=1e-6)
    assert model.origin.base_rows == size + 5


def test_padding_alone(make_tiny, bpe_tokenizer):
    size = bpe_tokenizer.vocab_size
    model = make_tiny()
    assert model.add_tokens([], pad_to_multiple_of=size + 7) == []
    [after] = rows(model)
    np.testing.assert_allclose(after[size:], [after[:size].mean(axis=0)] * 7, rtol=1e-4, atol=1e-6)
    model.add_lora(rank=2)
    assert all(".adapters." in key for key in choose_trained(model.module, [])), "no token is new, nothing to learn"


def test_two_calls_are_recorded_as_the_one_they_equal(make_tiny):
    twice, once = make_tiny(), make_tiny()
    twice.add_tokens(NEW[:1], pad_to_multiple_of=64)
    twice.add_tokens(NEW)
    assert twice.vocabulary == VocabularyConfig(add_tokens=NEW, pad_to_multiple_of=64)
    once.add_tokens(twice.vocabulary.add_tokens, pad_to_multiple_of=twice.vocabulary.pad_to_multiple_of)
    assert np.array_equal(rows(twice)[0], rows(once)[0])
    assert twice.tokenizer.encode(TEXT) == once.tokenizer.encode(TEXT)
    with pytest.raises(InputError, match="pad_to_multiple_of: it was 64 before"):
        twice.add_tokens(["<more>"], pad_to_multiple_of=8)


# ---- beside adapters


def test_tokens_come_before_adapters(make_tiny):
    model = make_tiny(tie_embeddings=False)
    model.add_lora(rank=2, targets=["head"])
    with pytest.raises(InputError, match=r"add tokens before add_lora\(\)"):
        model.add_tokens(NEW)
    model.note_run("", choose_trained(model.module, []))  # as loaded
    with pytest.raises(InputError, match="the head has an adapter, which cannot grow"):
        model.add_tokens(NEW)
    assert model.vocabulary == VocabularyConfig()


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_trained_with_the_next_adapters_alone(make_tiny, tied):
    whole = {"embed.weight"} | (set() if tied else {"head.kernel"})

    def beside_adapters(model):
        return {key for key in choose_trained(model.module, []) if ".adapters." not in key}

    model = make_tiny(tie_embeddings=tied)
    model.add_lora(rank=2)
    assert beside_adapters(model) == set()
    model.note_run("run-a", choose_trained(model.module, []))
    model.add_tokens(NEW)
    model.add_lora(rank=2)
    trained = choose_trained(model.module, [])
    assert beside_adapters(model) == whole
    assert not any("adapters.0" in key for key in trained), "the adapter of the first run is frozen"
    generate(model, [[1, 2]], SamplingConfig(max_tokens=2, temperature=0.0))
    assert choose_trained(model.module, []).keys() == trained.keys(), "sampling changed what is trained"
    model.note_run("run-b", trained)
    assert model.origin.base == "tiny" and model.origin.base_rows == rows(make_tiny())[0].shape[0]
    model.add_lora(rank=2)
    assert beside_adapters(model) == set()
    model.unmerge_lora(model.merge_lora())
    assert beside_adapters(model) == set()
    model.merge_lora()
    assert not model.adapted and choose_trained(model.module, []).keys() == read(model.module).keys()


def test_unmerging_brings_back_what_is_trained(make_tiny):
    model = make_tiny()
    model.add_tokens(NEW)
    model.add_lora(rank=2)
    trained = choose_trained(model.module, []).keys()
    merged = model.merge_lora()
    assert not model.adapted
    model.unmerge_lora(merged)
    assert choose_trained(model.module, []).keys() == trained


def test_after_full_training_the_run_is_the_base(make_tiny):
    model = make_tiny()
    model.add_tokens(NEW)
    model.note_run("run-a", choose_trained(model.module, []))
    assert (model.origin.base, model.origin.base_rows) == ("run-a", None)
    model.add_lora(rank=2)
    assert all(".adapters." in key for key in choose_trained(model.module, []))


# ---- loaded again


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind, multiple", [("lora", None), ("none", 64)])
def test_a_run_is_loaded_again(make_tiny, tmp_path, tied, kind, multiple):
    save_hf(make_tiny(tie_embeddings=tied), tmp_path / "base")
    model = load(tmp_path / "base")
    model.add_tokens(NEW, pad_to_multiple_of=multiple)
    if kind == "lora":
        model.add_lora(rank=2)
    run = tmp_path / "run"
    recipe = {
        "model": str(tmp_path / "base"),
        "vocabulary": model.vocabulary.model_dump(),
        "adapter": model.adapter.model_dump() if model.adapter else {"kind": "none"},
    }
    train(model, run, recipe)
    again = load(run)
    tokens = jnp.asarray([again.tokenizer.encode(TEXT)])
    assert tokens.tolist() == [model.tokenizer.encode(TEXT)]
    assert np.array_equal(np.asarray(again(tokens)), np.asarray(model(tokens)))
    assert (again.decoder.head is None) == tied
    assert again.vocabulary == VocabularyConfig() and again.adapter is None
    assert again.origin.base == str(run if kind == "none" else tmp_path / "base")
    again.add_lora(rank=2)
    assert all(".adapters." in key for key in choose_trained(again.module, [])), "the tokens are new no more"


def train(model, run, recipe):
    """Leaves a run's files, as if training had moved every trained number, and the model moved as well."""
    parts, params, _ = take_apart(model.module, choose_trained(model.module, []))
    generator = np.random.default_rng(0)
    params = {
        key: array + jnp.asarray(generator.normal(0, 0.1, array.shape), jnp.float32) for key, array in params.items()
    }
    write(model.module, params)
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    state = StepState(params, OptimizerState(jnp.asarray(3), dict(params)))
    checkpoints = Checkpoints(run, keep=None)
    checkpoints.save(3, state, parts.trained, {}, recipe)
    checkpoints.close()
