"""Tokenised files, kept to be used again: `tokens/KEY/` in the cache folder, one KEY for all that decides them.

A folder appears under its name only when whole, so two runs may make the same one at once: the second to finish
throws its own away. A folder that is damaged is made again.
"""

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from burnish.data.examples import EncodeCounts, Examples
from burnish.files import cache_folder

# Put up whenever the same rows and options would give other tokens than before.
VERSION = 1
_ARRAYS = ("tokens", "weights", "starts", "ids", "sources")


def cached(key: Mapping[str, Any], make: Callable[[], dict[str, Examples]]) -> dict[str, Examples]:
    """What `make` gives, from the cache where it holds that for `key`; examples are mapped from its files."""
    digest = hashlib.sha256(json.dumps({**key, "version": VERSION}, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens" / digest
    found = _read(folder)
    if found is not None:
        return found
    made = make()
    with suppress(OSError):  # a full or read-only disk: the run goes on without a cache
        _write(folder, made)
    return made


def _read(folder: Path) -> dict[str, Examples] | None:
    try:
        described = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
        found = {}
        for name, (counts, checksums) in described.items():
            *checksums, of_counts = checksums
            if of_counts != _checksum_of(counts):
                return None
            # Not np.load, which takes a damaged file for one of other kinds.
            arrays: dict[str, Any] = {array: open_memmap(folder / f"{name}-{array}.npy", mode="r") for array in _ARRAYS}
            found[name] = Examples(**arrays, counts=EncodeCounts(**counts))
            if _checksums(found[name]) != checksums:
                return None
        return found or None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _checksums(examples: Examples) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(getattr(examples, array)).data) for array in _ARRAYS]


def _checksum_of(counts: Any) -> int:
    return zlib.crc32(json.dumps(counts, sort_keys=True).encode())


def _write(folder: Path, made: Mapping[str, Examples]) -> None:
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        for name, examples in made.items():
            for array in _ARRAYS:
                np.save(staging / f"{name}-{array}.npy", getattr(examples, array))
        described = {
            name: (counts := asdict(examples.counts), [*_checksums(examples), _checksum_of(counts)])
            for name, examples in made.items()
        }
        (staging / "examples.json").write_text(json.dumps(described), encoding="utf-8")
        if folder.is_file():
            folder.unlink()
        elif folder.exists() and _read(folder) is None:
            shutil.rmtree(folder)
        if not folder.exists():
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
