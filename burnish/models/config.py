"""What a decoder is, as data: every number and switch that changes its mathematics.

A model family is a function from its published configuration to a `ModelConfig` (see `burnish.convert.families`);
the blocks read nothing else, so nothing about a family hides in code.
"""

from dataclasses import dataclass, field
from typing import Literal

from burnish.errors import InputError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its context extensions.

    `kind` is one of
      default   inverse frequencies theta ** (-2i / head_dim);
      linear    positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595);
      llama3    long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1 model card);
      yarn      NTK-by-parts with attention temperature (Peng et al. 2023, arXiv 2309.00071); `truncate` widens its
                ramp to whole dimensions.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: pre-norm blocks of grouped-query attention and a gated MLP.

    Sizes are counts of features or heads; `max_length` is the longest position the model was trained for, in
    tokens. `windows` holds one entry a layer: the sliding window in tokens, or None for full attention; empty means
    full attention everywhere.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    family: str = "llama"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"model config: {name} is {value!r}; it must be a whole number of 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"model config: head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise InputError(f"model config: {len(self.windows)} windows for {self.num_layers} layers")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens; None is full attention."""
        return self.windows[layer] if self.windows else None
