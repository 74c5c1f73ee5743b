"""What the benchmarks read off the machine: its matrix products' speed, and the memory of this process."""

import ctypes
import gc
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROWS, N_IN, N_OUT = 2048, 576, 1536


class Roofline:
    """A matrix product of 2048 x 576 by 576 x 1536 in float32, as JAX runs it."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        self._operands = jnp.asarray(draw((ROWS, N_IN), np.float32)), jnp.asarray(draw((N_IN, N_OUT), np.float32))
        self._product = jax.jit(lambda a, b: a @ b).lower(*self._operands).compile()

    def gflops(self, times: int = 25) -> float:
        """Median GFLOP/s of so many products; takes less than half a second."""
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            self._product(*self._operands).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return 2 * ROWS * N_IN * N_OUT / statistics.median(seconds) / 1e9


def forget() -> None:
    """Gives back what nobody uses: Python's garbage, compiled programs, and the C library's free lists."""
    gc.collect()
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Starts `resident_peak` anew from what is resident now (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    """Bytes of this process in memory."""
    return _status("VmRSS")


def resident_peak() -> int:
    """The most bytes of this process in memory since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
