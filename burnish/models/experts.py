"""A mixture of experts in place of an MLP: a router picks a few for each token, and their outputs are added up.

Tokens are sorted by expert, so that each expert's are the rows of one product (`jax.lax.ragged_dot`): nothing is
dropped and no expert has a capacity.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.models.config import ModelConfig
from burnish.models.layers import ACTIVATIONS, DropoutKeys, ParamMaker


class Router(nnx.Module):
    """Scores of the experts, and the few that are picked (Fedus et al. 2021, arXiv 2101.03961)."""

    def __init__(self, config: ModelConfig, make: ParamMaker) -> None:
        assert config.experts is not None
        self.kernel = make((config.hidden_size, config.experts.count), ("embed", None), "normal")
        self.per_token, self.normalized = config.experts.per_token, config.experts.normalized

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [tokens, hidden] -> (weights [tokens, per_token] float32, the experts' numbers [tokens, per_token])."""
        scores = jnp.matmul(x, self.kernel[...].astype(x.dtype), preferred_element_type=jnp.float32)
        weights, picked = jax.lax.top_k(jax.nn.softmax(scores), self.per_token)
        return weights / weights.sum(-1, keepdims=True) if self.normalized else weights, picked


class ExpertKernel(nnx.Module):
    """One linear map an expert: kernel [experts, in, out]."""

    def __init__(self, count: int, n_in: int, n_out: int, axes: tuple[str, str], make: ParamMaker) -> None:
        self.kernel = make((count, n_in, n_out), ("expert", *axes), "normal")

    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """rows [rows, in], the first sizes[0] of them for the first expert, and so on -> [rows, out]."""
        return jax.lax.ragged_dot(rows, self.kernel[...].astype(rows.dtype), sizes)


class Experts(nnx.Module):
    """Gated MLPs, one an expert."""

    def __init__(self, config: ModelConfig, make: ParamMaker) -> None:
        assert config.experts is not None
        count, n, m = config.experts.count, config.hidden_size, config.experts.size
        self.gate_proj = ExpertKernel(count, n, m, ("embed", "mlp"), make)
        self.up_proj = ExpertKernel(count, n, m, ("embed", "mlp"), make)
        self.down_proj = ExpertKernel(count, m, n, ("mlp", "embed"), make)
        self.count, self.activation = count, config.activation

    def __call__(self, x: jax.Array, weights: jax.Array, picked: jax.Array) -> jax.Array:
        """x [tokens, hidden], weights and picked [tokens, per_token] -> [tokens, hidden]."""
        per_token = picked.shape[1]
        order = jnp.argsort(picked.ravel(), stable=True)
        sizes = jnp.bincount(picked.ravel(), length=self.count).astype(jnp.int32)
        rows = x[order // per_token]
        inner = ACTIVATIONS[self.activation](self.gate_proj(rows, sizes)) * self.up_proj(rows, sizes)
        outputs = self.down_proj(inner, sizes)
        by_token = jnp.zeros_like(outputs).at[order].set(outputs).reshape(*picked.shape, -1)
        return (by_token * weights[..., None].astype(x.dtype)).sum(1)


class MixtureOfExperts(nnx.Module):
    """Sum over the picked experts of weight * expert(x)."""

    def __init__(self, config: ModelConfig, make: ParamMaker) -> None:
        self.router = Router(config, make)
        self.experts = Experts(config, make)

    def __call__(self, x: jax.Array, dropout: DropoutKeys | None = None) -> jax.Array:
        """x [batch, length, hidden] -> the same."""
        del dropout  # of adapters: experts have none
        tokens = x.reshape(-1, x.shape[-1])
        return self.experts(tokens, *self.router(tokens)).reshape(x.shape)
