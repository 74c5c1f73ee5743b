"""Optimizers over a flat dict of trainable arrays, blind to whether blocks are stacked.

One step, for gradients g of parameters p (float32 masters) at step t:

    g <- g min(1, clip_norm / ‖g‖)                 once, over all parameters together
    d <- direction(g, moments)                      AdamW, Lion, Adafactor, Muon or SGD: each layer on its own
    p <- p - lr(t) lr_scale (d + weight_decay p)    lr_scale and weight_decay by parameter name

A stacked array [layers, ...] holds one parameter a layer. Whatever looks at shapes (Muon's
orthogonalization, Adafactor's factoring and clipping) or at names (decay, groups) sees the layer's own, so
stacking changes no update.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from burnish.errors import InputError
from burnish.models.paths import Leaf, matches
from burnish.train.optimizer_config import NO_DECAY, GroupConfig, OptimizerConfig
from burnish.train.schedule import Schedule, make_schedule

Arrays = Mapping[str, jax.Array]
Factor = float | np.ndarray  # one for all, or one a layer: [layers, 1, ...]

# Tables of one row a token, of our decoder and of modules that name things as Flax and Hugging Face do.
TABLES = ("embed.weight", "head.kernel", "embedding", "lm_head.kernel")


class OptimizerState(NamedTuple):
    """step: int32 scalar, updates made so far; moments: by leaf key, what is remembered (float32)."""

    step: jax.Array
    moments: dict[str, Any]


@dataclass(frozen=True)
class LeafRule:
    """How one stored leaf is updated.

    The transform is that of a single layer, without learning rate and weight decay.
    """

    transform: optax.GradientTransformation
    stacked: bool
    lr_scale: Factor
    weight_decay: Factor

    def init(self, param: jax.Array) -> Any:
        init = jax.vmap(self.transform.init) if self.stacked else self.transform.init
        return init(param.astype(jnp.float32))

    def direction(self, grad: jax.Array, moments: Any, param: jax.Array) -> tuple[jax.Array, Any]:
        """lr_scale (d + weight_decay p) in float32, in the shape of the parameter, and the new moments."""
        grad, param = grad.astype(jnp.float32), param.astype(jnp.float32)
        update = jax.vmap(self.transform.update) if self.stacked else self.transform.update
        direction, moments = update(grad, moments, param)
        return self.lr_scale * (direction + self.weight_decay * param), moments


@dataclass(frozen=True)
class Optimizer:
    """What `make_optimizer` builds. `init` and `update` are pure and go under `jax.jit`."""

    rules: Mapping[str, LeafRule]
    schedule: Schedule
    clip_norm: float | None

    def init(self, params: Arrays) -> OptimizerState:
        """The state before the first step. Moments are float32 whatever the parameters are."""
        moments = {key: rule.init(params[key]) for key, rule in self.rules.items()}
        return OptimizerState(jnp.zeros((), jnp.int32), moments)

    def update(
        self, grads: Arrays, state: OptimizerState, params: Arrays
    ) -> tuple[dict[str, jax.Array], OptimizerState, dict[str, jax.Array]]:
        """What to add to the parameters (float32), the next state, and metrics.

        Metrics, float32 scalars: `grad_norm`, of all gradients together before clipping; `lr`, the rate of
        this step before groups scale it. Where a gradient is not finite, neither are `grad_norm` and the
        moments: whether such a step is taken is for the caller to decide.
        """
        grads, norm = clip_by_global_norm(grads, self.clip_norm)
        lr = self.schedule(state.step)
        updates, moments = {}, {}
        for key, rule in self.rules.items():
            direction, moments[key] = rule.direction(grads[key], state.moments[key], params[key])
            updates[key] = -lr * direction
        return updates, OptimizerState(state.step + 1, moments), {"grad_norm": norm, "lr": lr}


def make_optimizer(
    config: OptimizerConfig,
    leaves: Mapping[str, Leaf],
    shapes: Mapping[str, tuple[int, ...]],
    total_steps: int,
) -> Optimizer:
    """The optimizer of the trainable leaves of a model, for a run of `total_steps` updates.

    `shapes` are those of the stored arrays, the layers axis included. Both mappings go by leaf key and hold
    what is trained, nothing else.

    Raises InputError when `config.lr` is not set, a selector of a group (or of `no_decay`, its defaults
    aside) covers no trained parameter, two groups cover the same one, or the schedule does not fit in the
    run.
    """
    if config.lr is None:
        raise InputError("optimizer.lr: not set; give a number above 0")
    schedule = make_schedule(config.schedule, config.lr, total_steps)
    names = [name for leaf in leaves.values() for name in leaf.names]
    own = [selector for selector in config.no_decay if selector not in NO_DECAY]
    _check_selectors(names, own, option="optimizer.no_decay")
    group_of = _assign_groups(names, config.groups)

    def factors(name: str) -> tuple[float, float]:
        """lr_scale and weight_decay of one parameter."""
        group = group_of.get(name)
        scale, decay = (1.0, None) if group is None else (group.lr_scale, group.weight_decay)
        if any(matches(name, selector) for selector in config.no_decay):
            return scale, 0.0
        return scale, config.weight_decay if decay is None else decay

    rules = {}
    for key, leaf in leaves.items():
        scales, decays = zip(*map(factors, leaf.names), strict=True)
        shape = shapes[key][1:] if leaf.stacked else shapes[key]
        rules[key] = LeafRule(
            transform=_direction(config, leaf, shape),
            stacked=leaf.stacked,
            lr_scale=_per_layer(scales, len(shape)),
            weight_decay=_per_layer(decays, len(shape)),
        )
    return Optimizer(rules, schedule, config.clip_norm)


def clip_by_global_norm(grads: Arrays, max_norm: float | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gradients scaled so that their joint norm is at most max_norm, and the norm before (float32 scalar).

    ‖g‖ = sqrt(sum of the squares of all entries of all arrays), so stacking does not matter (Pascanu et al.
    2012, arXiv 1211.5063). None clips nothing. When the norm is not finite the gradients are returned as they
    are: scaling by max_norm / inf would turn the finite ones into an innocent-looking 0.
    """
    squares = [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads.values()]
    norm = jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
    if max_norm is None:
        return dict(grads), norm
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), 1.0)
    return {key: (grad * factor).astype(grad.dtype) for key, grad in grads.items()}, norm


def _direction(config: OptimizerConfig, leaf: Leaf, shape: tuple[int, ...]) -> optax.GradientTransformation:
    """The step direction of one layer's parameter, to be multiplied by -lr; `shape` is without a layers axis.

    adamw      Loshchilov and Hutter 2017, arXiv 1711.05101
    lion       Chen et al. 2023, arXiv 2302.06675
    adafactor  Shazeer and Stern 2018, arXiv 1804.04235; the rate is explicit (no relative step), updates are
               clipped to a root mean square of 1, matrices with both sides of 128 or more are factored
    muon       Jordan 2024, https://kellerjordan.github.io/posts/muon; AdamW for all that is no matrix
    sgd        with momentum as trace <- momentum trace + g (Sutskever et al. 2013 for Nesterov's form)
    """
    if config.name == "muon" and _is_matrix(leaf, shape):
        return _muon(config, shape)
    if config.name in ("adamw", "muon"):
        return optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "lion":
        return optax.scale_by_lion(config.b1, config.b2)
    if config.name == "adafactor":
        second_moment = optax.scale_by_factored_rms(decay_rate=config.decay_rate, epsilon=config.eps)
        by_parameter = optax.scale_by_param_block_rms() if config.parameter_scale else optax.identity()
        return optax.chain(second_moment, optax.clip_by_block_rms(1.0), by_parameter)
    if config.momentum:
        return optax.trace(config.momentum, nesterov=bool(config.nesterov))
    return optax.identity()


def _muon(config: OptimizerConfig, shape: tuple[int, ...]) -> optax.GradientTransformation:
    """Momentum made nearly orthogonal by five Newton-Schulz steps, times a factor for the shape [in, out].

    'rms': 0.2 sqrt(max(in, out)), which gives entries the root mean square of an AdamW step (Liu et al.
    2025, arXiv 2502.16982), so one lr serves both kinds of parameter. 'shape': sqrt(max(1, out / in)),
    as Jordan has it.
    """
    n_in, n_out = shape[-2:]
    rms, shape_factor = 0.2 * math.sqrt(max(n_in, n_out)), math.sqrt(max(1, n_out / n_in))
    factor = rms if config.muon_scale == "rms" else shape_factor
    orthogonal = optax.contrib.scale_by_muon(
        beta=config.momentum,
        eps=config.eps,
        nesterov=config.nesterov,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
    )
    return optax.chain(orthogonal, optax.scale(factor))


def _is_matrix(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Whether Muon orthogonalizes it: linear maps and adapters; not vectors, embeddings or unembeddings.

    More than two axes are matrices side by side (experts). The head's adapter has a vocab axis too, but its
    "rank" axis shows it to be a matrix.
    """
    if len(shape) < 2:
        return False
    table = "vocab" in leaf.axes or any(matches(leaf.names[0], selector) for selector in TABLES)
    return "rank" in leaf.axes or not table


def _per_layer(values: Sequence[float], ndim: int) -> Factor:
    """One factor for all layers where they agree, else one each: [layers, 1, ...] float32, 1 + ndim axes."""
    if len(set(values)) == 1:
        return values[0]
    return np.asarray(values, np.float32).reshape(-1, *(1,) * ndim)


def _assign_groups(names: Sequence[str], groups: Sequence[GroupConfig]) -> dict[str, GroupConfig]:
    """The group of each name that is in one."""
    owner: dict[str, int] = {}
    for index, group in enumerate(groups):
        _check_selectors(names, group.selectors, option=f"optimizer.groups.{index}.selectors")
        for name in names:
            if any(matches(name, selector) for selector in group.selectors):
                if name in owner:
                    raise InputError(
                        f"optimizer.groups: {name} is in groups {owner[name]} and {index}; narrow the selectors of one"
                    )
                owner[name] = index
    return {name: groups[index] for name, index in owner.items()}


def _check_selectors(names: Sequence[str], selectors: Sequence[str], *, option: str) -> None:
    """Raises InputError for a selector that covers no trained parameter, with the nearest that would."""
    for selector in selectors:
        if any(matches(name, selector) for name in names):
            continue
        parts = list(dict.fromkeys(part for name in names for part in name.split(".")))
        known = list(names) if "." in selector else parts
        near = difflib.get_close_matches(selector, known, n=2, cutoff=0.5) or list(names[:2])
        raise InputError(f"{option}: {selector!r} covers nothing that is trained; near it: {', '.join(near)}")
