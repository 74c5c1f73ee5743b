"""A model as users hold it: module, tokenizer, and where it came from."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from burnish.adapt.config import LoraConfig
from burnish.adapt.lora import Merged, add_lora, merge_lora, unmerge_lora
from burnish.adapt.vocabulary import VocabularyConfig, grow_vocabulary, learn_tokens
from burnish.config import build_config
from burnish.errors import InputError
from burnish.models.decoder import Decoder
from burnish.models.language_model import Features, features_of
from burnish.models.linen import LinenModel
from burnish.models.parts import generation_of, only_adapters
from burnish.models.paths import leaves

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Origin:
    """Where a model came from, as far as saving it again needs to know.

    source: what was loaded, as `load` takes it (local paths are absolute; "" when no name stands for the model); path:
    the file or folder of the base's weights; family: its `model_type`; hf_config and generation_config: the base's
    files as they were, so that what Burnish does not use is not lost; first: see `base`; base_rows: where the
    vocabulary was extended, the rows of the base's embedding: embedding and head are part of the adapters then.
    """

    source: str
    path: Path | None = None
    family: str | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    first: str | None = None
    base_rows: int | None = None

    @property
    def base(self) -> str:
        """What the adapters that are on are relative to; "" where no file holds that."""
        return self.source if self.first is None else self.first

    def after_run(self, run: str, *, trained: Iterable[str], adapted: bool) -> "Origin":
        """The origin once a run has trained these parameters.

        After full training the run itself is the base of whatever adapter comes next; adapters trained together with
        what lies under them are relative to nothing that was kept.
        """
        if only_adapters(trained, extended=self.base_rows is not None):
            return replace(self, source=run, first=self.base)
        return replace(self, source=run, first="" if adapted else run, base_rows=None)


class ModelWrapper:
    """A language model with its tokenizer and origin.

    `module` is our `Decoder`, or any NNX or Linen module that maps tokens [batch, length] to logits
    [batch, length, vocab] (or has `hidden` and `unembedding`; see `burnish.models.language_model`). Linen modules take
    their `variables`, as `module.init` returned them.

    >>> from flax import linen
    >>> class Bigram(linen.Module):
    ...     @linen.compact
    ...     def __call__(self, tokens):
    ...         return linen.Embed(32, 32)(tokens)
    >>> ModelWrapper(Bigram()).parameters
    1024
    """

    def __init__(
        self,
        module: nnx.Module | linen.Module,
        tokenizer: "Tokenizer | None" = None,
        origin: Origin | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if variables is not None and not isinstance(module, linen.Module):
            raise InputError("variables: an NNX module holds its own; give them with Linen modules alone")
        self.module: nnx.Module = LinenModel(module, variables) if isinstance(module, linen.Module) else module
        if not isinstance(self.module, nnx.Module):
            raise InputError(f"{type(module).__name__} is neither an NNX nor a Linen module")
        self.features: Features = features_of(self.module)
        self.tokenizer = tokenizer
        self.origin = origin or Origin(source=type(module).__name__)
        self.adapter: LoraConfig | None = None  # of the adapters put on since loading, as resolved
        self.vocabulary = VocabularyConfig()  # of the tokens added since loading
        self._base_of_merged: str | None = None

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Logits [batch, length, vocab] of tokens [batch, length]; see `Decoder`."""
        if not self.features.packing:
            if positions is not None or segment_ids is not None:
                raise InputError(f"{type(self.module).__name__} takes no positions or segment_ids")
            return self.module(tokens)
        return self.module(tokens, positions=positions, segment_ids=segment_ids)

    @property
    def decoder(self) -> Decoder:
        """The module, when it is our decoder; InputError otherwise."""
        if not isinstance(self.module, Decoder):
            raise InputError(
                f"{type(self.module).__name__}: this needs a model of a known family, not a foreign module"
            )
        return self.module

    @property
    def context(self) -> int | None:
        """The longest text the model takes, in tokens; None where that is not known."""
        return self.module.config.max_length if isinstance(self.module, Decoder) else None

    def require_tokenizer(self) -> "Tokenizer":
        """The tokenizer; InputError when the model was wrapped without one."""
        if self.tokenizer is None:
            raise InputError("the model has no tokenizer; give it one: ModelWrapper(module, tokenizer)")
        return self.tokenizer

    @property
    def parameters(self) -> int:
        """How many numbers the model holds, adapters included."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.module, nnx.Param)))

    @property
    def adapted(self) -> bool:
        """Whether adapters are on."""
        return any(generation_of(variable) is not None for _, variable in leaves(self.module).values())

    def add_tokens(self, tokens: Sequence[str], *, pad_to_multiple_of: int | None = None) -> list[int]:
        """Makes each token one id of the tokenizer, with rows in embedding and head; returns their ids, in order.

        What the tokenizer has as one token already is left as it is; the others become special tokens. The wrapper has
        a tokenizer of its own from then on. Adapters put on afterwards are trained together with the whole embedding
        and head. Raises InputError for tokens that are empty or there twice, and when new adapters are on already.
        """
        given = {"add_tokens": tokens if isinstance(tokens, str) else list(tokens)}
        asked = build_config(VocabularyConfig, {**given, "pad_to_multiple_of": pad_to_multiple_of}, place="vocabulary")
        if asked == VocabularyConfig():
            return []
        if self.adapter is not None:
            raise InputError("vocabulary.add_tokens: new adapters are on already; add tokens before add_lora()")
        # Calls are recorded as one, which comes to the same as long as the multiple stays.
        multiple, earlier = asked.pad_to_multiple_of, self.vocabulary.pad_to_multiple_of
        if multiple and earlier and multiple != earlier:
            raise InputError(f"vocabulary.pad_to_multiple_of: it was {earlier} before; leave it at that")
        multiple = multiple or earlier
        before, had, rows = self.require_tokenizer(), self.vocabulary.add_tokens, self.decoder.config.vocab_size
        after, new = learn_tokens(before, asked.add_tokens)
        ids = [after.encode(token)[0] for token in asked.add_tokens]
        known = before.backend.get_vocab()
        fresh = sorted(set(ids) - set(known.values()))
        grow_vocabulary(self.decoder, sorted(id for token, id in known.items() if token not in had), fresh, multiple)
        if new or self.decoder.config.vocab_size != rows:
            self.origin = replace(self.origin, base_rows=self.origin.base_rows or rows)
        self.tokenizer = after
        self.vocabulary = VocabularyConfig(add_tokens=[*had, *new], pad_to_multiple_of=multiple)
        return ids

    def add_lora(
        self, rank: int | None = None, alpha: float | None = None, *, seed: int = 0, **options: Any
    ) -> list[str]:
        """Puts fresh adapters on (options as in `LoraConfig`); returns the names of the layers that got one.

        Adapters that are on already stay, frozen. Raises InputError for options out of range.
        """
        config = build_config(LoraConfig, {"rank": rank, "alpha": alpha, **options}, place="adapter")
        return self.prepare(config, seed=seed)

    def prepare(self, adapter: LoraConfig, *, seed: int = 0) -> list[str]:
        """Readies the model for training as a recipe's adapter section says; returns the adapted layers' names.

        With kind "none" everything is to be trained, so adapters that are on become part of their kernels.
        """
        if adapter.kind == "none":
            if self.adapted:
                merge_lora(self.decoder, jnp.float32)  # as the masters are that will be trained
            self.adapter = None
            return []
        if self.adapter is not None:  # two at once: no recipe says that, so no run of it could be loaded again
            self.origin = replace(self.origin, source="", first=self.origin.base)
        extended = bool(self.vocabulary.add_tokens)
        self.adapter, names = add_lora(self.decoder, adapter, seed=seed, with_embeddings=extended)
        return names

    def compute_in(self, dtype: Any) -> None:
        """Sets the dtype of activations and matrix products, apart from that of the weights.

        Norms, softmax, losses and sums of products stay in float32, and so do gradients and the optimizer's state.

        Raises InputError for a dtype that is none, for a module that is not Burnish's own decoder, and for anything
        but float32 where the head has an adapter, which would round away.
        """
        wanted, decoder = float_dtype(dtype, option="compute_dtype"), self.decoder
        head = decoder.head
        if wanted != jnp.float32 and head is not None and len(head.adapters):
            raise InputError("compute_dtype: an adapter on the head needs float32")
        decoder.dtype = wanted

    def note_run(self, run: str, trained: Iterable[str]) -> None:
        """Notes that the model is what a run made of it, from the stored keys of what was trained.

        run: its directory; "" when it has none. Adapters and tokens are no longer new from then on.
        """
        self.origin = self.origin.after_run(run, trained=trained, adapted=self.adapted)
        self.adapter, self.vocabulary = None, VocabularyConfig()

    def save(self, folder: "str | os.PathLike[str]", *, dtype: Any = None) -> Path:
        """Writes a Hugging Face folder, adapters merged; see `burnish.convert.hf_out.save_hf`."""
        from burnish.convert.hf_out import save_hf

        return save_hf(self, folder, dtype=dtype)

    def merge_lora(self) -> Merged:
        """Adds the adapters into the kernels; what it returns undoes it (`unmerge_lora`)."""
        self.adapter, self._base_of_merged = None, self.origin.first
        self.origin = replace(self.origin, first="")  # no file holds what new adapters would be relative to
        return merge_lora(self.decoder)

    def unmerge_lora(self, merged: Merged) -> None:
        """Puts back what `merge_lora` replaced, bit for bit."""
        unmerge_lora(self.decoder, merged)
        self.origin = replace(self.origin, first=self._base_of_merged)


def float_dtype(dtype: Any, *, option: str = "dtype") -> Any:
    """A dtype that models are kept and computed in; InputError, naming the option, for any other."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise InputError(f"{option}: {dtype!r} is none that models are kept in; use float32 or bfloat16")
    return found
