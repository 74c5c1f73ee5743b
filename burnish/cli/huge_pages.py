"""Training on a CPU with huge pages: a step takes hundreds of megabytes anew, and four kilobytes at a time is slow.

glibc reads how it is to ask the kernel for memory when a process starts, and then only. So a command that trains
starts itself again, once, with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`: it asks for huge pages where they are to be had
for the asking (docs/performance.md says what that gains). Any setting of one's own is left as it is.
"""

import contextlib
import os
import platform
import sys
from pathlib import Path

_TUNABLE = "glibc.malloc.hugetlb"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_huge_pages() -> None:
    """Replaces this process by the same with huge pages; returns where they are set or not to be had.

    Returns, too, where JAX is at work already: then this is somebody's program, which is not ours to start again. And
    where the program came on stdin: that has been read, and the same again would be an empty one.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or "jax" in sys.modules or _from_stdin() or not _for_the_asking():
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(part for part in (tunables, f"{_TUNABLE}=1") if part)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from outside
            stream.flush()
    with contextlib.suppress(OSError):  # no interpreter is there by now, or its path is not known: go on without
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _from_stdin() -> bool:
    """Whether the interpreter read this program from stdin; one given by -c has no file, either."""
    return getattr(sys.modules["__main__"], "__file__", "<stdin>") == "<stdin>" and "-c" not in sys.orig_argv


def _for_the_asking() -> bool:
    """Whether the kernel gives huge pages to those who ask, and this libc knows how to (2.35 or later)."""
    library, version = platform.libc_ver()
    try:
        numbers = tuple(int(part) for part in version.split("."))
        return library == "glibc" and numbers >= (2, 35) and "[madvise]" in _PAGES.read_text()
    except (OSError, ValueError):
        return False
