"""A block: attention and an MLP, or experts, each added to the residual stream."""

import jax
from flax import nnx

from burnish.models.config import ModelConfig
from burnish.models.experts import MixtureOfExperts
from burnish.models.layers import MLP, Attention, Context, LayerCache, ParamMaker, RMSNorm
from burnish.models.remat import kept


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms also, or only, over what is added, where the model has them
    there."""

    def __init__(self, config: ModelConfig, layer: int, make: ParamMaker) -> None:
        def norm(place: str) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config, make) if config.norms in (place, "both") else nnx.data(None)

        self.attn_norm = norm("pre")
        self.attn = Attention(config, layer, make)
        self.attn_post_norm = norm("post")
        self.mlp_norm = norm("pre")
        experts = config.layer_experts(layer) is not None
        self.mlp = MixtureOfExperts(config, make) if experts else MLP(config, make)
        self.mlp_post_norm = norm("post")
        self.residual_scale = config.residual_scale

    def __call__(
        self, x: jax.Array, context: Context, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        mixed, cache = self.attn(_normed(x, self.attn_norm), context, cache)
        x = kept(x + self._added(mixed, self.attn_post_norm), "after_attention")
        return x + self._added(self.mlp(_normed(x, self.mlp_norm), context.dropout), self.mlp_post_norm), cache

    def _added(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x = _normed(x, norm)
        return x if self.residual_scale == 1 else x * self.residual_scale


def _normed(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x if norm is None else norm(x)
