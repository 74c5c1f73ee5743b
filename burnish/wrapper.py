"""A model as users hold it: module, tokenizer, and where it came from."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from burnish.adapt.config import LoraConfig
from burnish.adapt.lora import Merged, add_lora, merge_lora, unmerge_lora
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
    files as they were, so that what Burnish does not use is not lost; first: see `base`.
    """

    source: str
    path: Path | None = None
    family: str | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    first: str | None = None

    @property
    def base(self) -> str:
        """What the adapters that are on are relative to; "" where no file holds that."""
        return self.source if self.first is None else self.first

    def after_run(self, run: str, *, trained: Iterable[str], adapted: bool) -> "Origin":
        """The origin once a run has trained these parameters.

        After full training the run itself is the base of whatever adapter comes next; adapters trained together with
        what lies under them are relative to nothing that was kept.
        """
        base = self.base if only_adapters(trained) else "" if adapted else run
        return replace(self, source=run, first=base)


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
        self.adapter, names = add_lora(self.decoder, adapter, seed=seed)
        return names

    def save(self, folder: "str | os.PathLike[str]", *, dtype: Any = None) -> Path:
        """Writes a Hugging Face folder, adapters merged; see `burnish.convert.hf_out.save_hf`."""
        from burnish.convert.hf_out import save_hf

        return save_hf(self, folder, dtype=dtype)

    def merge_lora(self) -> Merged:
        """Adds the adapters into the kernels; what it returns undoes it (`unmerge_lora`)."""
        self.adapter = None
        return merge_lora(self.decoder)

    def unmerge_lora(self, merged: Merged) -> None:
        """Puts back what `merge_lora` replaced, bit for bit."""
        unmerge_lora(self.decoder, merged)
