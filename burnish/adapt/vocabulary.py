"""New tokens: the tokenizer learns them, embedding and head get rows for them.

    before                          after add_tokens(["<call>", "</call>"], pad_to_multiple_of=64)
    tokenizer     49152 ids         49154: the new ones are special tokens with the next ids
    embed.weight  [49152, 576]      [49216, 576]: each new row is the mean of the rows of known tokens

The mean is a fair guess at an unknown token: its logit is the mean logit, so it takes little from the others (Hewitt
2021, "Initializing New Word Embeddings for Pretrained Language Models"). Rows that a checkpoint has beyond its
tokenizer's ids are used before any are added.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from pydantic import BaseModel, ConfigDict, Field, field_validator

from burnish.errors import InputError
from burnish.models.decoder import Decoder

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


class VocabularyConfig(BaseModel):
    """Tokens that a model is given beyond those it came with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    add_tokens: list[str] = Field(
        default_factory=list,
        description="New special tokens, as [<call>, </call>]. With adapters, the whole embedding and head are trained "
        "beside them, so that the new rows are learned.",
    )
    pad_to_multiple_of: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Rows of the embedding are rounded up to a multiple of this; 64 suits a GPU.",
    )

    @field_validator("add_tokens")
    @classmethod
    def _each_once(cls, tokens: list[str]) -> list[str]:
        if "" in tokens:
            raise ValueError("a token is empty; take it out")
        if twice := [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice; name each token once")
        return tokens


def learn_tokens(tokenizer: "Tokenizer", tokens: Sequence[str]) -> tuple["Tokenizer", list[str]]:
    """A copy of the tokenizer that reads and writes each token as one id, and those it did not do so before.

    Raises InputError for a token whose text is how the vocabulary spells another one inside.
    """
    from burnish.data.tokenizer import Tokenizer
    from burnish.data.tokenizer_files import make_special

    new = [token for token in tokens if not tokenizer.has_token(token)]
    for token in new:
        id = tokenizer.backend.token_to_id(token)
        written = token if id is None else tokenizer.decode([id], skip_special=False)
        if written != token:
            raise InputError(
                f"vocabulary.add_tokens: {token!r} is how the tokenizer spells {written!r} inside; name it otherwise"
            )
    backend = copy.deepcopy(tokenizer.backend)
    make_special(backend, new)
    learned = Tokenizer(
        backend,
        tokenizer.special_tokens,
        tokenizer.chat_templates,
        stop_ids=tokenizer._more_stop_ids,
        model_max_length=tokenizer.model_max_length,
        name=tokenizer.name,
    )
    return learned, new


def grow_vocabulary(decoder: Decoder, known: Sequence[int], fresh: Sequence[int], multiple: int | None) -> None:
    """Gives the ids `fresh` rows that are the mean of the rows of `known` ids, in place.

    Where the embedding is too short, or its length no multiple of `multiple`, it grows; all rows that it grows by are
    the mean, too. Raises InputError, before anything is changed, for a head with adapters: they would have to grow.
    """
    head, have = decoder.head, decoder.config.vocab_size
    needed = max([have, *(id + 1 for id in fresh)])
    rows = math.ceil(needed / (multiple or 1)) * (multiple or 1)
    if rows == have and not fresh:
        return
    if head is not None and len(head.adapters):
        raise InputError("vocabulary.add_tokens: the head has an adapter, which cannot grow; merge_lora() first")
    ids, places = jnp.asarray(known), jnp.asarray(fresh, jnp.int32)

    def grown(matrix: jax.Array) -> jax.Array:
        """[vocab, hidden] -> [rows, hidden]."""
        mean = jnp.mean(matrix[ids], axis=0, dtype=jnp.float32).astype(matrix.dtype)
        more = jnp.broadcast_to(mean, (rows - have, matrix.shape[1]))
        return jnp.concatenate([matrix, more]).at[places].set(mean)

    decoder.embed.weight.set_value(grown(decoder.embed.weight[...]))
    if head is not None:
        head.kernel.set_value(grown(head.kernel[...].T).T)
    decoder.config = dataclasses.replace(decoder.config, vocab_size=rows)
