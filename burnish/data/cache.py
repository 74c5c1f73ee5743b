"""Tokenised files, kept to be used again: `tokens/KEY/` in the cache folder, one KEY for all that decides them.

A folder appears under its name only when whole, so two runs may make the same one at once: the second to finish
throws its own away. A folder that is damaged is made again.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

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
    try:
        _write(folder, made)
    except OSError:  # a full or read-only disk: the run goes on without a cache
        return made
    return made


def _read(folder: Path) -> dict[str, Examples] | None:
    try:
        described = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
        found = {}
        for name, counts in described.items():
            arrays = {array: np.load(folder / f"{name}-{array}.npy", mmap_mode="r") for array in _ARRAYS}
            found[name] = Examples(**arrays, counts=EncodeCounts(**counts))
            if len(found[name].tokens) != found[name].starts[-1] or len(found[name].starts) != len(found[name]) + 1:
                return None
        return found
    except (OSError, ValueError, TypeError, IndexError):
        return None


def _write(folder: Path, made: Mapping[str, Examples]) -> None:
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        for name, examples in made.items():
            for array in _ARRAYS:
                np.save(staging / f"{name}-{array}.npy", getattr(examples, array))
        described = {name: asdict(examples.counts) for name, examples in made.items()}
        (staging / "examples.json").write_text(json.dumps(described), encoding="utf-8")
        if folder.exists() and _read(folder) is None:
            shutil.rmtree(folder)
        if not folder.exists():
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
