"""Which remat policy a run takes (`burnish.models.remat` says what they are)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax

from burnish.errors import InputError
from burnish.models.remat import RematPolicy
from burnish.train.memory import free_bytes
from burnish.train.programs import Programs

SHARE = 0.8
"""Of what is free, as much is filled: the rest is for what else comes and goes, batches and checkpoints."""


@dataclass(frozen=True)
class RematChoice:
    """The policy of a run, None for a module that takes none, and the reason in words."""

    policy: RematPolicy | None
    reason: str


def choose_remat(
    asked: Literal["auto", RematPolicy],
    compile_with: Callable[[RematPolicy | None], Programs],
    *,
    takes_policy: bool,
    devices: Sequence[jax.Device],
) -> tuple[Programs, RematChoice]:
    """Compiles the step under the policy asked for, or under the fastest one that fits in what a device has free.

    On a CPU `none` is no faster than `selective`, which writes half as much to memory (docs/performance.md), and the
    host's memory is the device's: `selective` and `block` are tried. Elsewhere all four are, fastest first. When
    nothing fits, `block` is taken and the reason says so. Several devices of a CPU share its memory.

    Raises InputError when a policy is asked of a module that takes none.
    """
    if not takes_policy:
        if asked not in ("auto", "none"):
            raise InputError(
                f"train.remat: {asked} is for Burnish's own decoder; leave it out for a module of your own"
            )
        return compile_with(None), RematChoice(None, "the module's own way")
    on_cpu = devices[0].platform == "cpu"
    if asked != "auto":
        same = asked == "offload" and on_cpu
        return compile_with(asked), RematChoice(asked, "as asked" + (", though a CPU's memory is the host's" * same))
    policies: tuple[RematPolicy, ...] = ("none", "selective", "offload", "block")
    if on_cpu:
        policies = ("selective", "block")
    free = free_bytes(devices[0])
    if free is None:
        return compile_with("selective"), RematChoice("selective", "what is free is not known")
    for policy in policies:
        try:
            programs = compile_with(policy)
        except jax.errors.JaxRuntimeError as error:  # a compiler that plans the memory finds that it does not fit
            if policy == policies[-1] or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        need = programs.memory.extra * (len(devices) if on_cpu else 1)
        if need <= SHARE * free:
            return programs, RematChoice(policy, f"needs {_gib(need)} beside the model, {_gib(free)} are free")
    mend = "lower train.batch_size or raise train.accumulation"
    reason = f"needs {_gib(need)} beside the model, only {_gib(free)} are free; should it run out, {mend}"
    return programs, RematChoice(policy, reason)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
