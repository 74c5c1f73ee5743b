"""Where a program that is being traced is going to run."""

import jax


def on_cpu() -> bool:
    """Whether that is a CPU: JAX's default back end is taken to be the target.

    What is worth doing differs by platform (the layout of a product, what fits a cache); what comes out does not.
    """
    return jax.default_backend() == "cpu"
