"""A run directory: `config.yaml`, `metrics.jsonl`, `checkpoints/`, and the lock that keeps a second run out.

`config.yaml` is the resolved recipe, enough to run it again. `metrics.jsonl` has a line a logged step.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from burnish.errors import InputError

CONFIG, METRICS, LOCK = "config.yaml", "metrics.jsonl", ".lock"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"


class RunFolder:
    """One run's directory, held by this process until `close`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, recipe: Mapping[str, Any]) -> "RunFolder":
        """Makes the directory and writes the recipe.

        Raises InputError when the folder holds anything already, or another run holds it.
        """
        path = Path(path)
        check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None
        run = cls(path, lock)
        run.record(recipe)
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> "RunFolder":
        """Takes hold of an existing run directory, to go on with it."""
        path = Path(path)
        read_recipe(path)
        return cls(path, _lock(path))

    def record(self, recipe: Mapping[str, Any]) -> None:
        """Writes the recipe, whole or not at all."""
        text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
        scratch = self.path / (CONFIG + ".new")
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, self.path / CONFIG)

    def cut_metrics(self, step: int) -> None:
        """Drops metric lines after `step`, and a last line that was cut short: they will be written again."""
        path = self.path / METRICS
        if not path.exists():
            return
        kept = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); move it away to go on without it") from None
        for number, line in enumerate(lines, start=1):
            entry = _entry(line)
            if entry is None and number == len(lines):
                break  # cut short by whatever ended the run
            if entry is None:
                raise InputError(f"{path}: line {number} is no metrics; move the file away to go on without it")
            if entry <= step:
                kept.append(line + "\n")
        scratch = path.with_suffix(".new")
        scratch.write_text("".join(kept), encoding="utf-8")
        os.replace(scratch, path)

    def append_metrics(self, entry: Mapping[str, Any]) -> None:
        """Adds one line."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Lets other runs in."""
        self._lock.close()

    def discard_if_bare(self) -> None:
        """Takes the directory away when nothing was logged or saved in it: a run that never began leaves nothing."""
        checkpoints = self.path / CHECKPOINTS
        if (self.path / METRICS).exists() or (checkpoints.is_dir() and any(checkpoints.iterdir())):
            return
        for part in (checkpoints, self.path / TENSORBOARD):
            shutil.rmtree(part, ignore_errors=True)
        for name in (CONFIG, LOCK):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def _entry(line: str) -> int | None:
    """The step of a line of metrics; None when it is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def check_new(path: Path) -> None:
    """Raises InputError unless a run can begin in this folder: it must not be there, or be empty."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; give --out a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if (path / LOCK).exists():
        _lock(path).close()  # says so when another run holds it
    if {entry.name for entry in path.iterdir()} <= {LOCK}:
        return
    checkpoints = path / CHECKPOINTS
    if (path / CONFIG).exists() and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        raise InputError(f"{path}: holds a run that saved nothing; remove the folder, or give another --out")
    if (path / CONFIG).exists():
        raise InputError(f"{path}: holds a run already; go on with `burnish resume {path}`, or give another --out")
    raise InputError(f"{path}: holds something else; give --out a new or empty folder")


def _lock(path: Path) -> IO[str]:
    if (path / LOCK).is_dir():
        raise InputError(f"{path / LOCK}: is a folder where the run's lock belongs; remove it")
    handle = (path / LOCK).open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise InputError(f"{path}: another run is writing here; wait for it, or give another --out") from None
    return handle


def read_recipe(path: Path) -> dict[str, Any]:
    """The resolved recipe of a run directory; InputError when it is none or its YAML is broken."""
    return read_yaml(path / CONFIG, missing=f"{path}: not a run directory ({CONFIG} is missing)")


def read_yaml(path: Path, *, missing: str | None = None) -> dict[str, Any]:
    """A YAML mapping from a file; InputError names the file and the line that is broken."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(missing or f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path}: a value cannot be read as YAML ({type(error).__name__})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{path}: broken YAML{where}: {problem}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a mapping of keys is expected, found {type(content).__name__}")
    return content
