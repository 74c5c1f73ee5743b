"""Which commands start themselves again with huge pages, when, and that nothing else of them changes."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import burnish.cli.main
from burnish.cli import huge_pages
from burnish.cli.huge_pages import with_huge_pages

OURS = "glibc.malloc.hugetlb=1"
Started = list[tuple[str, list[str], str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What was started again (program, words, tunables), on a machine that has all it takes and no JAX at work."""
    calls: Started = []

    def execv(program: str, words: list[str]) -> None:
        calls.append((program, words, os.environ["GLIBC_TUNABLES"]))

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-O", "-m", "burnish.cli.main", "sft", "a recipe.yaml"])
    # A worker of a parallel run has a main module without a file.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "main.py", raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.35"))
    monkeypatch.setattr(huge_pages, "_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    return calls


def test_the_same_command_is_started_with_the_same_python(started: Started) -> None:
    with_huge_pages()
    words = [sys.executable, "-O", "-m", "burnish.cli.main", "sft", "a recipe.yaml"]
    assert started == [(sys.executable, words, OURS)]


def test_other_tunables_are_kept(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3:glibc.malloc.arena_max=4")
    with_huge_pages()
    assert [tunables for *_, tunables in started] == [f"glibc.malloc.check=3:glibc.malloc.arena_max=4:{OURS}"]


@pytest.mark.parametrize("set_to", [OURS, "glibc.malloc.hugetlb=0", f"glibc.malloc.check=3:{OURS}"])
def test_who_has_set_it_is_not_asked(started: Started, monkeypatch: pytest.MonkeyPatch, set_to: str) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", set_to)
    with_huge_pages()
    assert started == [] and os.environ["GLIBC_TUNABLES"] == set_to


def test_a_program_with_jax_at_work_goes_on(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", platform)  # any module
    with_huge_pages()
    assert started == [] and os.environ["GLIBC_TUNABLES"] == ""


@pytest.mark.parametrize("enabled", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_the_kernel_must_give_them_for_the_asking(started: Started, tmp_path: Path, enabled: str | None) -> None:
    (tmp_path / "enabled").unlink()
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled)
    with_huge_pages()
    assert started == [] and os.environ["GLIBC_TUNABLES"] == ""


@pytest.mark.parametrize(
    ("library", "does"),
    [
        (("glibc", "2.36"), True),
        (("glibc", "2.100"), True),
        (("glibc", "3.0"), True),
        (("glibc", "2.34"), False),
        (("glibc", "2.4"), False),
        (("glibc", ""), False),
        (("glibc", "2.35-custom"), False),
        (("libc", "5.4"), False),
        (("musl", "3.1"), False),
        (("", ""), False),  # no Linux
    ],
)
def test_the_libc_must_know_how(started: Started, monkeypatch: pytest.MonkeyPatch, library, does: bool) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    with_huge_pages()
    assert len(started) == does


def test_what_cannot_be_started_goes_on_as_it_is(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(program: str, words: list[str]) -> None:
        raise FileNotFoundError(program)

    monkeypatch.setattr(os, "execv", execv)
    with_huge_pages()


def test_closed_streams_are_no_matter(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with_huge_pages()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "does"),
    [
        ("sft --out runs/a", True),
        ("resume runs/a", True),
        ("--help", False),
        ("inspect --model sft", False),
        ("eval", False),
        ("generate resume", False),
        ("", False),
    ],
)
def test_commands_that_train_and_no_others(monkeypatch: pytest.MonkeyPatch, words: str, does: bool) -> None:
    order: list[str] = []
    monkeypatch.setattr(burnish.cli.main, "with_huge_pages", lambda: order.append("huge pages"))
    monkeypatch.setattr(burnish.cli.main, "app", lambda **options: order.append("command"))
    monkeypatch.setattr(sys, "argv", ["burnish", *words.split()])
    with pytest.raises(SystemExit):
        burnish.cli.main.main()
    assert order == ["huge pages"] * does + ["command"]


@pytest.fixture
def burnish_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in a process of its own that prints what it finds set, each time that it starts."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    code = f"""
import os, platform, sys
from pathlib import Path
from burnish.cli import huge_pages, main
print(sys.flags.utf8_mode, os.environ["GLIBC_TUNABLES"])
huge_pages._PAGES = Path({str(tmp_path / "enabled")!r})
platform.libc_ver = lambda: ("glibc", "2.39")
main.main()
"""

    def run(tunables: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "utf8", "-c", code, *map(str, words)]
        environment = {**os.environ, "GLIBC_TUNABLES": tunables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_bad_recipe_is_one_line_once(burnish_process, tmp_path: Path) -> None:
    recipe = tmp_path / "a recipe.yaml"
    recipe.write_text("train:\n  stepps: 3\n")
    done = burnish_process("glibc.malloc.arena_max=4", "sft", recipe, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["1 glibc.malloc.arena_max=4", f"1 glibc.malloc.arena_max=4:{OURS}"]
    [line] = done.stderr.splitlines()
    assert line.startswith("burnish: ") and "train.stepps: unknown key" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("tunables", "starts"), [("", ["1 ", f"1 {OURS}"]), (OURS, [f"1 {OURS}"])])
def test_a_command_starts_twice_at_most(burnish_process, tunables: str, starts: list[str]) -> None:
    done = burnish_process(tunables, "resume")
    assert (done.returncode, done.stdout.splitlines()) == (2, starts)
    assert len(done.stderr.splitlines()) == 1


def test_help_starts_once(burnish_process) -> None:
    done = burnish_process("", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("1 \n") and OURS not in done.stdout


def test_a_program_from_stdin_runs_to_its_end(tmp_path: Path) -> None:
    """Started again it would be empty, and end well with nothing done."""
    words = ["burnish", "sft", "--model", str(tmp_path / "none"), "--data", str(tmp_path / "none"), "--out", "x"]
    program = f"import sys; sys.argv = {words}\nfrom burnish.cli.main import main; main()\n"
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable], input=program, capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 2 and "no such file or folder" in done.stderr
