"""What a decoder is, as data: every number and switch that changes its mathematics.

A model family is a function from its published configuration to a `ModelConfig` (see `burnish.convert.families`);
the blocks read nothing else, so nothing about a family hides in code.
"""

from dataclasses import dataclass, field
from typing import Literal

from burnish.errors import InputError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its context extensions.

    `kind` is one of
      default   inverse frequencies theta ** (-2i / rotary_dim);
      linear    positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595);
      dynamic   theta grows with a document longer than `original_max_length` ("NTK-aware", by `factor`);
      llama3    long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1 model card);
      yarn      NTK-by-parts with attention temperature (Peng et al. 2023, arXiv 2309.00071); `truncate` widens its
                ramp to whole dimensions;
      longrope  each frequency divided by its own number, from `long_factors` in a document longer than
                `original_max_length` and from `short_factors` otherwise, with attention temperature (Ding et al. 2024,
                arXiv 2402.13753).

    partial_rotary_factor: the share of a head's features that are rotated, the first ones; the others stay as they are.
    attention_factor: the temperature of yarn and longrope, None for that of their papers.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many features of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on how long a document is."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of gated MLPs (Shazeer et al. 2017, arXiv 1701.06538): `count` of them, `size` wide, of which a router
    picks `per_token` for each token.

    normalized: whether the weights of those picked are made to sum to 1. load_balance: the weight that the
    published training gave the router's own loss, as the files have it.
    """

    count: int
    per_token: int
    size: int
    normalized: bool = True
    load_balance: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: blocks of grouped-query attention and a gated MLP, each in a residual stream.

    Sizes are counts of features or heads; `max_length` is the longest position the model was trained for, in tokens.

    Layers of one model may differ in what they see: `windows` holds one entry a layer, the sliding window in tokens or
    None for full attention, and `ropes` likewise the rotary embedding or None for no positions at all; empty means
    full attention, and `rope`, everywhere.

    norms          where a block normalises: what a part reads ("pre"), what it adds ("post"), or both
    norm_offset    norms multiply by norm_offset + scale (1 in Gemma, whose scales start at 0)
    qk_norm        norms over each query and key: of each head by itself, or of the "whole" projection
    attention_scale  scores are multiplied by it; None: head_dim ** -0.5
    embedding_scale, residual_scale, logit_scale  multiply the embeddings, what a block adds, and the logits
    *_bias         whether linear maps have biases: of queries, keys and values, of the attention's output, of the MLP
    qkv_clip       queries, keys and values are cut to ±qkv_clip before they are rotated
    experts        what stands in for the MLP, in the layers of `expert_layers` (one flag a layer; empty: in all)
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
    norms: Literal["pre", "post", "both"] = "pre"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    ropes: tuple[RopeConfig | None, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qkv_clip: float | None = None
    windows: tuple[int | None, ...] = ()
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

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
        for name in ("windows", "ropes", "expert_layers"):
            given = getattr(self, name)
            if given and len(given) != self.num_layers:
                raise InputError(f"model config: {len(given)} {name} for {self.num_layers} layers")
        if self.experts is not None and self.experts.per_token > self.experts.count:
            raise InputError(
                f"model config: {self.experts.per_token} experts a token, and only {self.experts.count} in all"
            )
        for rope in self.distinct_ropes:
            self._check_rope(rope)

    def _check_rope(self, rope: RopeConfig) -> None:
        rotated = rope.rotary_dim(self.head_dim)
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise InputError(f"model config: rope over {rotated} of {self.head_dim} features; it needs pairs of them")
        if rope.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if len(getattr(rope, name)) != rotated // 2:
                    raise InputError(f"model config: longrope {name} must be {rotated // 2} numbers, one a frequency")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens; None is full attention."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer; None where it has no positions."""
        return self.ropes[layer] if self.ropes else self.rope

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None where it has an MLP."""
        return self.experts if not self.expert_layers or self.expert_layers[layer] else None

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """Every rotary embedding that a layer uses, once."""
        used = self.ropes or (self.rope,)
        return tuple(dict.fromkeys(rope for rope in used if rope is not None))
