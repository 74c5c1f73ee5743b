"""Whole answers of tiny models: equal to the full forward pass, to the trainer's log-probs, and to themselves."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from burnish.convert.builtin import cached_model
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError
from burnish.generate import decode
from burnish.generate.config import SamplingConfig
from burnish.generate.engine import Completion, Sampler, generate, stream
from burnish.generate.shapes import length_bucket
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.ops.head import token_logprobs
from burnish.wrapper import ModelWrapper

VARIANTS = {
    "tied": {},
    "untied, windows, caps": {
        "tie_embeddings": False,
        "num_layers": 3,
        "windows": (4, None, 4),
        "attention_softcap": 5.0,
        "final_softcap": 8.0,
        "qkv_bias": True,
        "output_bias": True,
    },
}
HI = [{"role": "user", "content": "Hi"}]


class Bigram(nnx.Module):
    """A foreign module that gives logits: the next token depends on the last one and on how far it is."""

    def __init__(self, vocab: int) -> None:
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (vocab, vocab)) * 2)
        self.place = nnx.Param(jax.random.normal(jax.random.key(1), (256, vocab)) * 2)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[...][tokens] + self.place[...][: tokens.shape[1]]


class Hidden(nnx.Module):
    """A foreign module that gives hidden states: our decoder, with its cache out of sight."""

    def __init__(self, decoder: Decoder) -> None:
        self.inner = decoder
        self.config = decoder.config

    def hidden(self, tokens: jax.Array) -> jax.Array:
        return self.inner.hidden(tokens)

    def unembedding(self) -> tuple[jax.Array, str]:
        return self.inner.unembedding()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        raise AssertionError("logits of all tokens are not needed")


def prompts_of(count: int, vocab: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


@nnx.jit
def full_forward(module: nnx.Module, tokens: jax.Array) -> jax.Array:
    return module(tokens)


@nnx.jit(static_argnames="temperature")
def full_log_probs(decoder: Decoder, tokens: jax.Array, *, temperature: float) -> jax.Array:
    matrix, layout = decoder.unembedding()
    return token_logprobs(
        decoder.hidden(tokens[:, :-1]),
        matrix,
        tokens[:, 1:],
        unembed_layout=layout,
        temperature=temperature,
        softcap=decoder.config.final_softcap,
    )


def padded(text: list[int], length: int = 256) -> jax.Array:
    """One row, padding on the right, which causal models do not see."""
    return jnp.asarray([text + [0] * (length - len(text))])


def greedy_by_hand(model: ModelWrapper, prompt: list[int], count: int) -> list[int]:
    """Argmax of the whole forward pass, one token after another, nothing cached."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(full_forward(model.module, padded(text, 128))[0, len(text) - 1].argmax()))
        if model.tokenizer and text[-1] in model.tokenizer.stop_ids:
            break
    return text[len(prompt) :]


def trainer_log_probs(model: ModelWrapper, prompt: list[int], answer: Completion, temperature: float) -> np.ndarray:
    text = prompt + answer.token_ids
    found = full_log_probs(model.decoder, padded(text), temperature=temperature)
    return np.asarray(found)[0, len(prompt) - 1 : len(text) - 1]


def answers_of(completions: list[Completion]) -> list[tuple]:
    return [(each.token_ids, each.text, each.finish_reason) for each in completions]


# ---- equal to the model


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_the_argmax_of_the_full_forward_pass(make_tiny, variant):
    model = make_tiny(**VARIANTS[variant])
    prompts = prompts_of(5, model.decoder.config.vocab_size)
    for prompt, answer in zip(prompts, generate(model, prompts, {"temperature": 0, "max_tokens": 30}), strict=True):
        assert answer.token_ids == greedy_by_hand(model, prompt, 30)
        assert answer.prompt_length == len(prompt)
        # Saturated models repeat themselves; ours must not, or nothing is shown.
        assert len(set(answer.token_ids)) > 3 or len(answer.token_ids) < 6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_log_probs_are_the_trainers(make_tiny, variant, temperature):
    model = make_tiny(**VARIANTS[variant])
    prompts = prompts_of(4, model.decoder.config.vocab_size)
    answers = generate(model, prompts, {"temperature": temperature, "max_tokens": 40, "seed": 5})
    assert sum(len(answer.token_ids) for answer in answers) > 40
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = trainer_log_probs(model, prompt, answer, temperature or 1.0)
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_act_and_the_model_is_left_alone(make_tiny, dtype):
    model = make_tiny()
    model = ModelWrapper(Decoder(model.decoder.config, random_params(0, dtype, 0.2), dtype=dtype), model.tokenizer)
    prompts = prompts_of(4, model.decoder.config.vocab_size)
    settings = {"temperature": 0, "max_tokens": 20}
    before = generate(model, prompts, settings)
    model.add_lora(rank=4, targets=["q_proj", "layers.1.mlp"])
    assert answers_of(generate(model, prompts, settings)) == answers_of(before)
    for path, variable in nnx.to_flat_state(nnx.state(model.module, nnx.LoRAParam)):
        if path[-1] == "b":
            variable.set_value(jax.random.normal(jax.random.key(1), variable.shape) * 0.1)
    kernels = jax.tree.map(np.asarray, nnx.state(model.module))
    after = generate(model, prompts, settings)
    jax.tree.map(np.testing.assert_array_equal, kernels, jax.tree.map(np.asarray, nnx.state(model.module)))
    assert model.adapted
    assert answers_of(after) != answers_of(before)
    if dtype == "float32":
        for prompt, answer in zip(prompts, after, strict=True):
            assert answer.token_ids == greedy_by_hand(model, prompt, 20)


@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_models_without_a_cache(make_tiny, kind):
    tiny = make_tiny(final_softcap=6.0)
    module = Bigram(tiny.decoder.config.vocab_size) if kind == "logits" else Hidden(tiny.decoder)
    model = ModelWrapper(module)
    assert not model.features.cache
    reference = tiny if kind == "hidden" else model
    prompts = prompts_of(3, 500, longest=40)
    for prompt, answer in zip(prompts, generate(model, prompts, {"temperature": 0, "max_tokens": 20}), strict=True):
        expected = greedy_by_hand(ModelWrapper(reference.module), prompt, 20)
        assert (answer.token_ids, answer.text, answer.finish_reason) == (expected, "", "length")
    sampled = generate(model, prompts, {"max_tokens": 20, "seed": 1, "temperature": 0.8})
    assert answers_of(generate(model, prompts, {"max_tokens": 20, "seed": 1, "temperature": 0.8}, batch_size=1)) == (
        answers_of(sampled)
    )


def test_memory_grows_with_the_answers(make_tiny):
    """Past the first cache, with rows that end at different times."""
    model = ModelWrapper(make_tiny(max_length=1024).module)
    prompts = prompts_of(8, 500)
    limit = 150
    answers = generate(model, prompts, {"max_tokens": limit, "seed": 0})
    assert all(len(answer.token_ids) == limit for answer in answers)
    np.testing.assert_allclose(answers[3].log_probs, trainer_log_probs(model, prompts[3], answers[3], 1.0), atol=1e-4)


# ---- equal to itself


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9}, {"top_p": 0.9, "top_k": 50}])
def test_answers_depend_on_no_neighbour_order_or_batch_size(make_tiny, settings):
    model = make_tiny(num_layers=1)
    prompts = prompts_of(7, model.decoder.config.vocab_size)
    config = SamplingConfig(max_tokens=25, seed=11, **settings)
    sampler = Sampler(model)
    together = sampler.generate(prompts, config)
    for batch_size in (1, 3):
        assert answers_of(sampler.generate(prompts, config, batch_size=batch_size)) == answers_of(together)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = sampler.generate([prompt], config.model_copy(update={"seed": answer.seed}))
        assert answers_of(alone) == answers_of([answer])
        assert alone[0].seed == answer.seed


def test_seeds(make_tiny):
    model = make_tiny(num_layers=1)
    same = [[40, 41, 42]] * 4
    drawn = [generate(model, same, {"max_tokens": 12}) for _ in range(2)]
    assert len({tuple(answer.token_ids) for answers in drawn for answer in answers}) == 8
    again = generate(model, same, {"max_tokens": 12, "seed": drawn[0][0].seed})
    assert again == drawn[0]
    with_seed = [generate(model, same, {"max_tokens": 12, "seed": 3}) for _ in range(2)]
    assert with_seed[0] == with_seed[1]
    assert answers_of(with_seed[0]) != answers_of(generate(model, same, {"max_tokens": 12, "seed": 4}))


@pytest.mark.parametrize("cached", [True, False])
def test_a_sampler_keeps_the_weights_it_was_made_with(make_tiny, cached):
    tiny = make_tiny(num_layers=1)
    sampler = Sampler(tiny if cached else ModelWrapper(Hidden(tiny.decoder)))
    config = SamplingConfig(max_tokens=10, seed=0)
    before = sampler.generate([[40, 41]], config)
    for variable in jax.tree.leaves(nnx.state(tiny.module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_value(variable[...] * 1.5)
    assert sampler.generate([[40, 41]], config) == before
    assert generate(tiny, [[40, 41]], config)[0].log_probs != before[0].log_probs


def test_few_programs_are_compiled(make_tiny):
    model = make_tiny(num_layers=1)
    Sampler(model).generate([[40] * 3], {"max_tokens": 8, "temperature": 0.5})
    compiled = decode._decode._cache_size()
    # Other lengths, limits, temperatures, seeds, weights, and a model made anew.
    Sampler(model).generate([[41] * 60], {"max_tokens": 40, "temperature": 0.9})
    Sampler(make_tiny(seed=1, num_layers=1)).generate([[40] * 9], {"max_tokens": 5, "seed": 1})
    "".join(Sampler(model).stream([41] * 20, {"max_tokens": 7}))
    assert decode._decode._cache_size() == compiled
    assert len({length_bucket(n) for n in range(1, 2049)}) <= 20
    assert all(n <= length_bucket(n) < n + max(64, n / 3) for n in range(1, 5000))


# ---- where answers end


def test_stop_ids_end_an_answer(make_tiny, bpe_tokenizer):
    model = make_tiny(num_layers=1)
    prompt = prompts_of(1, 500, seed=2)[0]
    plain = generate(ModelWrapper(model.module), [prompt], {"temperature": 0, "max_tokens": 12})[0].token_ids
    at = next(i for i in range(3, 12) if plain[i] not in plain[:i])
    stopping = Tokenizer(bpe_tokenizer.backend, bpe_tokenizer.special_tokens, stop_ids=[plain[at]])
    answer = generate(ModelWrapper(model.module, stopping), [prompt], {"temperature": 0, "max_tokens": 12})[0]
    assert (answer.token_ids, answer.finish_reason) == (plain[: at + 1], "stop")
    assert answer.text == bpe_tokenizer.decode(plain[:at])
    assert len(answer.log_probs) == at + 1


def test_stop_strings_end_an_answer_and_streaming_says_the_same(make_tiny):
    model = make_tiny()
    prompt = prompts_of(1, 500, seed=3)[0]
    whole = generate(model, [prompt], {"temperature": 0, "max_tokens": 40})[0]
    stop = whole.text[9:14]
    config = SamplingConfig(temperature=0, max_tokens=40, stop=[stop])
    cut = generate(model, [prompt], config)[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    assert "".join(stream(model, prompt, config)) == cut.text
    pieces = list(stream(model, prompt, {"temperature": 0, "max_tokens": 40}))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5


@pytest.mark.parametrize("max_tokens", [1, 2, 32, 33])
def test_max_tokens(make_tiny, max_tokens):
    model = ModelWrapper(make_tiny(num_layers=1).module)
    answer = generate(model, [[40, 41]], {"max_tokens": max_tokens})[0]
    assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("cached", [True, False])
def test_the_context_is_the_limit(make_tiny, bpe_tokenizer, cached):
    tiny = make_tiny(max_length=96)
    short = Tokenizer(bpe_tokenizer.backend, model_max_length=96)
    model = ModelWrapper(tiny.module if cached else Hidden(tiny.decoder), short)
    prompts = [[40] * 90, [41] * 95, [42] * 20]
    answers = generate(model, prompts, {"max_tokens": 1000, "seed": 0})
    assert [len(answer.token_ids) for answer in answers] == [6, 1, 76]
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    with pytest.raises(InputError, match="prompt 1: 96 tokens leave no room") as error:
        generate(model, [[40], [40] * 96])
    assert "\n" not in str(error.value)


# ---- prompts


def test_prompts_in_every_form(make_tiny, bpe_tokenizer):
    model = make_tiny(num_layers=1)
    text = bpe_tokenizer.render(HI, add_generation_prompt=True)
    prompts = ["The quick", HI, text, bpe_tokenizer.encode("The quick")]
    chat_a, chat_b = generate(model, prompts, {"temperature": 0, "max_tokens": 8})[1:3]
    assert chat_a == Completion(**{**chat_b.__dict__, "seed": chat_a.seed})
    plain, *_, ids = generate(model, prompts, {"temperature": 0, "max_tokens": 8})
    assert plain.token_ids == ids.token_ids
    assert generate(model, []) == []


def test_what_cannot_be_answered_is_named(make_tiny, bpe_tokenizer):
    model = make_tiny(num_layers=1)
    bare = Tokenizer(bpe_tokenizer.backend)
    cases = [
        (model, ["a", ""], {}, "prompt 1: it holds no tokens"),
        (model, [[]], {}, "prompt 0: it holds no tokens"),
        (model, [[5, 10**6]], {}, "prompt 0: token id 1000000 is outside"),
        (model, ["a"], {"temperature": float("nan")}, "sampling.temperature"),
        (model, ["a"], {"temperature": -1}, "sampling.temperature"),
        (model, ["a"], {"heat": 1}, "sampling.heat: unknown key"),
        (ModelWrapper(model.module, bare), [HI], {}, "prompt 0: .* has no chat template"),
        (ModelWrapper(model.module), ["a"], {}, "prompt 0: this model has no tokenizer"),
        (ModelWrapper(model.module), [[5]], {"stop": "x"}, "sampling.stop"),
    ]
    for wrapper, prompts, settings, message in cases:
        with pytest.raises(InputError, match=message) as error:
            generate(wrapper, prompts, settings)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="batch_size"):
        generate(model, ["a"], batch_size=0)
    with pytest.raises(InputError, match="prompt 0"):
        stream(model, "")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    from burnish.loading import load

    path = os.environ.get("BURNISH_SMOLLM2_GGUF") or cached_model("smollm2-135m")
    if not os.path.exists(path):
        pytest.skip("run `burnish fetch smollm2-135m`, or set BURNISH_SMOLLM2_GGUF")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = generate(load(path), [question], {"temperature": 0, "max_tokens": 24})[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
