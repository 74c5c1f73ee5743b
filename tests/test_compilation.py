"""Programs kept from one process to the next. The processes are real, each with a cache of the test's own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish import compilation

# `run(n)` compiles a program that no other number shares; `found()` counts those that came from the cache.
BEGIN = """
import os, pwd, resource, shutil, signal, sys
from pathlib import Path
import jax
import numpy as np
from burnish import compilation
from burnish.compilation import keep_programs, share_programs

compilation._MIN_SECONDS = 0  # what is compiled here is small
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

def run(number):
    assert jax.jit(lambda x: number * x)(np.ones(3)).tolist() == [number] * 3

def found():
    return events.count("/jax/compilation_cache/cache_hits")
"""


def start(cache: Path | str, code: str, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    everything = {**kept, "BURNISH_CACHE": str(cache), **environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", BEGIN + code], env=everything, text=True, **pipes)


def end(process: subprocess.Popen[str], status: int = 0) -> str:
    """What it printed; a process that complains of anything has failed."""
    out, err = process.communicate(timeout=60)
    assert err == "" and process.returncode == status
    return out.strip()


def python(cache: Path | str, code: str, status: int = 0, **environment: str) -> str:
    return end(start(cache, code, **environment), status)


def entries(cache: Path) -> list[Path]:
    return list(cache.glob("programs/*/*-cache.*"))


def folders(cache: Path) -> set[Path]:
    return set(cache.glob("programs/*/.run-*"))


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder, (then, then))


def test_a_later_process_finds_what_took_long_to_compile(tmp_path: Path) -> None:
    code = """
run(2)
compilation._MIN_SECONDS = 60
keep_programs()
keep_programs()
run(3)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
run(4)
print(found())
"""
    assert python(tmp_path, code) == "0"
    assert len(entries(tmp_path)) == 1 and folders(tmp_path) == set()
    assert python(tmp_path, "keep_programs(); run(2); run(3); run(4); print(found())") == "1"
    assert len(entries(tmp_path)) == 3 and folders(tmp_path) == set()
    assert 0 < compilation._MIN_SECONDS < 1


def test_a_killed_process_leaves_what_it_shared_and_no_half_of_anything(tmp_path: Path) -> None:
    """The kernel ends it within the write of its second entry; its folder is swept once it is old."""
    kill = """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
keep_programs()
run(2)
share_programs()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
run(3)
"""
    python(tmp_path, kill, status=-signal.SIGXFSZ)
    [left] = folders(tmp_path)
    assert sorted(path.stat().st_size > 1000 for path in left.glob("*-cache")) == [False, True]
    assert [path.stat().st_size > 1000 for path in entries(tmp_path)] == [True]

    age(left, compilation._YOUNG_SECONDS - 10)
    code = "keep_programs(); run(2); run(4); share_programs(); print(found(), flush=True); os.kill(os.getpid(), 9)"
    assert python(tmp_path, code, status=-signal.SIGKILL) == "1"
    assert left in folders(tmp_path)

    age(left, compilation._YOUNG_SECONDS + 10)
    assert python(tmp_path, "keep_programs(); run(2); run(4); run(3); print(found())") == "2"  # no word of the half
    assert len(folders(tmp_path) - {left}) == 1  # of the one that was killed just now
    assert not left.exists()
    assert [path.stat().st_size > 1000 for path in entries(tmp_path)] == [True] * 3


def test_processes_at_once_keep_their_folders_and_all_they_compile(tmp_path: Path) -> None:
    wait = "keep_programs(); print(flush=True); sys.stdin.readline(); run({0}); run(4); print(found())"
    living = [start(tmp_path, wait.format(number)) for number in (2, 3)]
    for process in living:
        assert process.stdout is not None and process.stdout.readline() == "\n"
    theirs = folders(tmp_path)
    for folder in theirs:
        age(folder, 7 * 24 * 3600)  # a long run that compiles nothing new
    assert python(tmp_path, "keep_programs(); run(5); print(found())") == "0"
    assert len(theirs) == 2 and folders(tmp_path) == theirs
    assert [end(process) for process in living] == ["0", "0"]  # nor does one see what another is at
    assert len(entries(tmp_path)) == 4 and folders(tmp_path) == set()
    assert python(tmp_path, "keep_programs(); run(2); run(3); run(4); run(5); print(found())") == "4"


@pytest.mark.parametrize("content", [b"", b"\x78 cut"], ids=["empty", "cut"])
def test_an_entry_that_broke_is_replaced(tmp_path: Path, content: bytes) -> None:
    """Without a word: whoever comes after finds a whole one."""
    code = "keep_programs(); run(2); print(found())"
    python(tmp_path, code)
    for entry in entries(tmp_path):
        entry.write_bytes(content)
    assert python(tmp_path, code) == "0"
    assert int(python(tmp_path, code)) > 0


def test_a_fork_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    code = """
import warnings
warnings.simplefilter("ignore")  # JAX's word on forks
keep_programs()
own = Path(jax.config.jax_compilation_cache_dir)
(own / "half-cache").touch()  # the parent is at it
if os.fork() == 0:
    share_programs()
    sys.exit()
assert os.wait()[1] == 0
assert (own / "half-cache").exists() and not list(own.parent.glob("half-cache*"))
(own / "half-cache").unlink()
run(2)
"""
    python(tmp_path, code)
    assert len(entries(tmp_path)) == 1 and folders(tmp_path) == set()


@pytest.mark.parametrize("given", ["JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"])
def test_what_jax_was_told_is_left_alone(tmp_path: Path, given: str) -> None:
    own = str(tmp_path / "own") if given == "JAX_COMPILATION_CACHE_DIR" else "false"
    code = "keep_programs(); run(2); share_programs(); print(jax.config.jax_compilation_cache_dir)"
    said = python(tmp_path / "cache", code, **{given: own})
    assert said == (own if given == "JAX_COMPILATION_CACHE_DIR" else "None")
    assert not (tmp_path / "cache").exists()


def test_without_a_folder_to_write_everything_works(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "programs").touch()
    code = f"""
def nobody(user):
    raise KeyError(user)
pwd.getpwuid = nobody
del os.environ["HOME"]
for cache in ({str(tmp_path / "file")!r}, {str(tmp_path / "half")!r}, "/proc/burnish", ""):
    os.environ["BURNISH_CACHE"] = cache
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None, cache
share_programs()
run(2)
"""
    python("", code, HOME="/")


def test_a_cache_that_is_emptied_under_a_process_and_one_named_from_elsewhere(tmp_path: Path) -> None:
    code = f"""
os.chdir({str(tmp_path)!r})
keep_programs()
os.chdir("/")
run(2)
share_programs()
print(len(os.listdir({str(tmp_path / "cache" / "programs")!r} + "/" + compilation._machine())))
shutil.rmtree({str(tmp_path / "cache")!r})
share_programs()
"""
    assert python("cache", code) == "2"  # the entry, and the folder of the process
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_entries_go_where_all_are_too_large(tmp_path: Path) -> None:
    shared = tmp_path / "programs" / compilation._machine()
    shared.mkdir(parents=True)
    half = compilation._MOST_BYTES // 2
    names = [*(f"{letter}-cache.{half}" for letter in "dacb"), "notes"]
    for days, name in enumerate(names):  # the first is the newest
        with (shared / name).open("wb") as file:
            file.truncate(half)  # takes no room: it is a hole
        age(shared / name, days * 24 * 3600)
    python(tmp_path, "keep_programs()")
    assert {path.name for path in shared.iterdir()} == {names[0], names[1], "notes"}


def test_the_machine_is_known_by_what_its_processor_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(cpuinfo: str) -> str:
        monkeypatch.setattr(compilation.Path, "read_text", lambda path: cpuinfo)
        return compilation._machine()

    first = name("cpu MHz : 2100\nflags : sse avx2\n\ncpu MHz : 2300\nflags : sse avx2\n")
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert first == name("cpu MHz : 3000\nflags : sse avx2\n")
    assert first != name("cpu MHz : 2100\nflags : sse avx2 avx512f\n")
    assert name("Features : fp asimd\n") != name("Features : fp asimd sve\n")
