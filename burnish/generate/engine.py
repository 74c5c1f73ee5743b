"""Text from a model: prompts in, answers out.

    answers = generate(model, ["2 + 2 =", [{"role": "user", "content": "Hi"}]], SamplingConfig(max_tokens=32))
    for piece in stream(model, [{"role": "user", "content": "Hi"}]):
        print(piece, end="", flush=True)

An answer depends on its prompt, the sampling section and its seed; not on the prompts around it, their order, or the
batch size, but for the rounding of float32, which other shapes may do otherwise.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from burnish.config import build_config
from burnish.errors import InputError
from burnish.generate.config import SamplingConfig
from burnish.generate.decode import DecodeBatch
from burnish.generate.rereading import UncachedModel
from burnish.generate.sampling import rules_of, seeds_of
from burnish.generate.transcript import FinishReason, Transcript
from burnish.generate.unrolled import CachedModel
from burnish.wrapper import ModelWrapper

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Plain text, a conversation (`{"role": ..., "content": ...}`, oldest first), or token ids."""

Sampling = SamplingConfig | Mapping[str, Any] | None

_STREAM_STEPS = 4


@dataclass(frozen=True)
class Completion:
    """One answer.

    token_ids: what was drawn, the token that ended it included; log_probs: of each, under the distribution it was drawn
    from (`burnish.generate.sampling`); text: without special tokens, up to the stop string (empty if the model has no
    tokenizer); finish_reason: "stop", or "length" when max_tokens or the model's context ran out; prompt_length: in
    tokens; seed: asking for this prompt alone with this seed gives this answer again.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    log_probs: list[float]
    prompt_length: int
    seed: int


def generate(
    model: ModelWrapper, prompts: Sequence[Prompt], sampling: Sampling = None, *, batch_size: int = 32
) -> list[Completion]:
    """One answer a prompt, in the order of the prompts. See `Sampler.generate`; keep a `Sampler` to call it often."""
    return Sampler(model).generate(prompts, sampling, batch_size=batch_size)


def stream(model: ModelWrapper, prompt: Prompt, sampling: Sampling = None) -> Iterator[str]:
    """The text of one answer, piece by piece. See `Sampler.stream`."""
    return Sampler(model).stream(prompt, sampling)


@dataclass(frozen=True)
class _Request:
    place: int
    ids: list[int]
    limit: int
    seed: int


class Sampler:
    """A model made ready to generate.

    It holds the weights as they are when it is made, in a layout of its own (`burnish.generate.unrolled`); after the
    model has changed, make a new one. What it holds of the model's own arrays must not be donated to a jitted step
    while it is in use.
    """

    def __init__(self, model: ModelWrapper) -> None:
        self.tokenizer = model.tokenizer
        self._model: CachedModel | UncachedModel
        if model.features.cache:
            self._model = CachedModel(model.decoder)
        else:
            self._model = UncachedModel(
                model.module, None if model.tokenizer is None else model.tokenizer.model_max_length
            )
        self._stop_ids = () if model.tokenizer is None else model.tokenizer.stop_ids

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling = None, *, batch_size: int = 32
    ) -> list[Completion]:
        """One answer a prompt, in the order of the prompts.

        Args:
          prompts: texts, conversations, or token ids.
          sampling: a `SamplingConfig` or its fields; None for the defaults.
          batch_size: the most prompts decoded together. Memory and speed grow with it.

        Raises:
          InputError: a sampling field out of its range, a prompt that is empty or longer than the model's context, a
            conversation for a model without a chat template, text for a model without a tokenizer.
        """
        if batch_size < 1:
            raise InputError(f"batch_size: {batch_size} must be 1 or more")
        config = self._config(sampling)
        # By length, so that rows of a batch need little padding; in equal shares, so that they need one shape.
        requests = sorted(self._requests(prompts, config), key=lambda request: len(request.ids))
        batches = -(-len(requests) // batch_size)
        answers: dict[int, Completion] = {}
        for i in range(batches):
            share = requests[i * len(requests) // batches : (i + 1) * len(requests) // batches]
            answers |= self._answer(share, config)
        return [answers[place] for place in range(len(requests))]

    def stream(self, prompt: Prompt, sampling: Sampling = None) -> Iterator[str]:
        """The text of one answer, piece by piece; joined, it is the text of `generate`. Raises as `generate` does."""
        config = self._config(sampling)
        return self._pieces(self._requests([prompt], config), config)

    def _pieces(self, requests: list[_Request], config: SamplingConfig) -> Iterator[str]:
        batch, [transcript] = self._begin(requests, config)
        while transcript.finish_reason is None:
            tokens, log_probs = batch.advance(_STREAM_STEPS)
            for token, log_prob in zip(tokens[0].tolist(), log_probs[0].tolist(), strict=True):
                if piece := transcript.push(token, log_prob):
                    yield piece

    def _answer(self, requests: list[_Request], config: SamplingConfig) -> dict[int, Completion]:
        """Answers of one batch, by the requests' places."""
        batch, transcripts = self._begin(requests, config)
        while not all(transcript.finish_reason for transcript in transcripts):
            tokens, log_probs = batch.advance()
            for transcript, *row in zip(transcripts, tokens.tolist(), log_probs.tolist(), strict=True):
                for token, log_prob in zip(*row, strict=True):
                    transcript.push(token, log_prob)  # -1 comes after the end only
            batch.stop([transcript.finish_reason is not None for transcript in transcripts])
        return {
            request.place: Completion(
                token_ids=transcript.token_ids,
                text=transcript.text,
                finish_reason=transcript.finish_reason or "length",
                log_probs=transcript.log_probs,
                prompt_length=len(request.ids),
                seed=request.seed,
            )
            for request, transcript in zip(requests, transcripts, strict=True)
        }

    def _begin(self, requests: list[_Request], config: SamplingConfig) -> tuple[DecodeBatch, list[Transcript]]:
        batch = DecodeBatch(
            self._model,
            prompts=[request.ids for request in requests],
            limits=[request.limit for request in requests],
            seeds=[request.seed for request in requests],
            rules=rules_of(config),
            stop_ids=self._stop_ids,
        )
        return batch, [Transcript(self.tokenizer, request.limit, self._stop_ids, config.stop) for request in requests]

    def _config(self, sampling: Sampling) -> SamplingConfig:
        config = (
            sampling
            if isinstance(sampling, SamplingConfig)
            else build_config(SamplingConfig, sampling or {}, place="sampling")
        )
        if config.stop and self.tokenizer is None:
            raise InputError("sampling.stop: this model has no tokenizer, so its answers have no text; remove it")
        return config

    def _requests(self, prompts: Sequence[Prompt], config: SamplingConfig) -> list[_Request]:
        seeds = seeds_of(secrets.randbits(32) if config.seed is None else config.seed, len(prompts))
        requests, longest = [], self._model.max_length
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            try:
                ids = self._ids(prompt)
            except InputError as error:
                raise InputError(f"prompt {place}: {error}") from None
            if longest is not None and len(ids) >= longest:
                raise InputError(
                    f"prompt {place}: {len(ids)} tokens leave no room for an answer in the model's context of "
                    f"{longest}; shorten it"
                )
            limit = config.max_tokens if longest is None else min(config.max_tokens, longest - len(ids))
            requests.append(_Request(place, ids, limit, seed))
        return requests

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self._speaking().encode(prompt, add_bos=True)
        elif prompt and isinstance(prompt[0], Mapping):
            tokenizer, messages = self._speaking(), cast(Sequence[Mapping[str, Any]], prompt)
            ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True), add_bos=True)
        else:
            ids = [int(id) for id in cast(Sequence[int], prompt)]
        if not ids:
            raise InputError("it holds no tokens; give at least one")
        size = self._model.vocab_size
        wrong = [id for id in ids if id < 0 or (size is not None and id >= size)]
        if wrong:
            raise InputError(f"token id {wrong[0]} is outside the model's vocabulary of {size}")
        return ids

    def _speaking(self) -> "Tokenizer":
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer; give token ids")
        return self.tokenizer
