"""Burnish: post-training of language models in JAX and Flax NNX."""
