"""Compiled programs, kept from one run to the next in `$BURNISH_CACHE/programs`.

JAX writes its persistent cache in place: a run that is killed leaves half an entry, which is complained of and never
replaced. So each process gets a folder of its own, filled with links to what is there, and what it has compiled is
linked back when it is whole. Runs at the same time never see each other's unfinished work.

    programs/<machine>/jit_train_step-1abb...-cache.48213    whole entries, and how many bytes each has
    programs/<machine>/.run-<random>/                        a process's own, locked as long as it lives

Code compiled for one kind of processor can crash another: the machine's name is a hash of what its processor can do.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import IO

import jax

from burnish.files import cache_folder

_OWN, _LOCK = ".run-", "lock"
_MIN_SECONDS = 0.3  # a program that compiles faster is not kept
_YOUNG_SECONDS = 60
_MOST_BYTES = 512 * 2**20

_mine: "_Programs | None" = None


class _Programs:
    """This process's folder, and the one it shares."""

    def __init__(self, shared: Path) -> None:
        shared = shared.absolute()  # wherever the process goes from here
        shared.mkdir(parents=True, exist_ok=True)
        self.shared, self.process = shared, os.getpid()
        _sweep(shared)
        self.own = Path(tempfile.mkdtemp(prefix=_OWN, dir=shared))
        self._lock: IO[str] = (self.own / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for entry in _shared(shared):
            name, _, size = entry.name.rpartition(".")
            with contextlib.suppress(FileNotFoundError):  # another process is sweeping, too
                if size == str(entry.stat().st_size):
                    _link(entry, self.own / name)
                else:  # cut since: JAX would complain of it at every run, and never replace it
                    entry.unlink()

    def share(self) -> None:
        """Gives what was compiled so far to later runs."""
        if self.process != os.getpid():  # a fork of this process: the folder is its parent's
            return
        with contextlib.suppress(OSError):  # somebody emptied the cache meanwhile
            for entry in self.own.glob("*-cache"):
                target = self.shared / f"{entry.name}.{entry.stat().st_size}"
                if not target.exists() and _whole(entry):
                    _link(entry, target)

    def close(self) -> None:
        """Shares, and removes the folder."""
        if self.process == os.getpid():
            self.share()
            shutil.rmtree(self.own, ignore_errors=True)


def keep_programs() -> None:
    """Has JAX keep what takes long to compile; once a process. `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.

    Does nothing where JAX was given a cache already, or where the folder cannot be written.
    """
    global _mine
    asked = jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if _mine is not None or asked:
        return
    try:
        _mine = _Programs(cache_folder() / "programs" / _machine())
    except (OSError, RuntimeError):  # RuntimeError: no cache is named, and nobody's home is known
        return
    atexit.register(_mine.close)
    jax.config.update("jax_compilation_cache_dir", str(_mine.own))
    # Caches of parts of programs would put the path of this folder into the name of every entry.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)


def share_programs() -> None:
    """What was compiled so far is there for other runs, however this one ends."""
    if _mine is not None:
        _mine.share()


def _machine() -> str:
    """A name for what runs compiled code alike: architecture and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        can = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {can}".encode()).hexdigest()[:16]


def _shared(folder: Path) -> list[Path]:
    return list(folder.glob("*-cache.*"))


def _whole(entry: Path) -> bool:
    """Whether an entry was written to its end, as on a full disk it is not. JAX compresses them, by zlib at least."""
    content = entry.read_bytes()
    if content[:1] != b"\x78":  # another compression, which finds out for itself
        return bool(content)
    try:
        zlib.decompress(content)
    except zlib.error:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # it is there, it was swept away, or the file system has no links
        os.link(source, target)


def _sweep(shared: Path) -> None:
    """Removes the folders of processes that are gone, and the oldest entries above `_MOST_BYTES`."""
    for folder in shared.glob(f"{_OWN}*"):
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue  # perhaps not locked yet
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # alive, or about to be
            continue
    sizes: dict[Path, os.stat_result] = {}
    for entry in _shared(shared):
        with contextlib.suppress(FileNotFoundError):  # another process is sweeping, too
            sizes[entry] = entry.stat()
    total = sum(each.st_size for each in sizes.values())
    for entry in sorted(sizes, key=lambda entry: sizes[entry].st_mtime):
        if total <= _MOST_BYTES:
            return
        total -= sizes[entry].st_size
        entry.unlink(missing_ok=True)
