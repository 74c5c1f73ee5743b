"""What a block keeps of its forward pass for the backward pass (Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost", arXiv 1604.06174), by name:

    none        everything that differentiation asks for
    selective   KEPT alone; norms, rotations and activations, which are cheap, are computed again
    offload     KEPT, moved to the memory of the host until it is needed (accelerators)
    block       nothing but the block's input; the whole block is computed again

A part names what it computes with `kept(array, name)`; nothing else about a block knows of this.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

RematPolicy = Literal["none", "selective", "offload", "block"]

KEPT = ("query", "key", "value", "attention", "after_attention", "gate", "up")
"""The outputs of a block's large products, as the backward pass reads them.

`attention` stands for the output of the core and the log-sum-exp of its scores (`burnish.ops.attention`).
"""


def kept(array: jax.Array, name: str) -> jax.Array:
    """The array under a name of `KEPT`."""
    assert name in KEPT, name
    return checkpoint_name(array, name)


def rematerialized(body: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """`body`, a scan's, recomputed in the backward pass as the policy says."""
    if policy == "none":
        return body
    policies = jax.checkpoint_policies
    chosen = {
        "selective": policies.save_only_these_names(*KEPT),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(KEPT),
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "block": policies.nothing_saveable,
    }
    # A scan's forward and backward loops are apart: nothing that must be computed again can be merged back.
    return jax.checkpoint(body, policy=chosen[policy], prevent_cse=False)
