"""What a compiled step needs of a device, and what the device has."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a compiled step on one device; 0 where the compiler does not say.

    arguments: parameters, state and batch, which are there already; extra: temporaries, and outputs that reuse none of
    the arguments' memory.
    """

    arguments: int = 0
    extra: int = 0

    @property
    def total(self) -> int:
        """What the device holds in the middle of a step."""
        return self.arguments + self.extra

    @classmethod
    def of(cls, compiled: Any) -> "StepMemory":
        """Reads it off a compiled program."""
        sizes = compiled.memory_analysis()
        if sizes is None:
            return cls()
        fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return cls(sizes.argument_size_in_bytes, fresh + sizes.temp_size_in_bytes)

    def or_more(self, other: "StepMemory") -> "StepMemory":
        """The greater of two, each figure by itself: the two run one after the other."""
        return StepMemory(max(self.arguments, other.arguments), max(self.extra, other.extra))


def free_bytes(device: jax.Device) -> int | None:
    """Memory that a program may still take on a device; None where nobody says.

    Accelerators report their own. A CPU has what the kernel calls available, or less where a control group (a
    container) or the process's own limit (`ulimit -v`) allows less.
    """
    if stats := device.memory_stats():
        return int(stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else None
    if device.platform != "cpu":
        return None
    known = [free for free in (_available(), _left_in_group(), _left_to_address()) if free is not None]
    return min(known, default=None)


def _available(table: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_to_address(status: Path = Path("/proc/self/statm")) -> int | None:
    """What the limit on this process's addresses leaves; None where it has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        used = int(status.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    return max(limit - used, 0)


def _left_in_group(root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int | None:
    """What version 2 control groups leave this process, file cache counted as free; None where none has a limit.

    Its own group and all above it count.
    """
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return None
    own = next((root / line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), root)
    groups = [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return min((left for left in map(_left_in, groups) if left is not None), default=None)


def _left_in(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())  # "max" is no limit
        used = int((group / "memory.current").read_text())
        details = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - used + int(details.get("inactive_file", 0))
