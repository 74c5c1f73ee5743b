"""What every benchmark's command does alike."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from burnish.errors import InputError


def run(main: Callable[[], None]) -> None:
    """Runs a benchmark; what is wrong with its input is one line, and exit code 2."""
    try:
        main()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def count(text: str) -> int:
    """A whole number of 1 or more, as argparse reads it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return int(text)


def new_file(text: str) -> Path:
    """A file that can be written once all is measured, as argparse reads it."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder must be there")
    return path


def peers_folder(text: str) -> Path:
    """A folder with the peers' scripts and environments, as argparse reads it."""
    folder = Path(text).resolve()
    for peer in ("tunix", "trl"):
        for part in (folder / f"{peer}_sft.py", folder / peer / "bin" / "python"):
            if not part.exists():
                raise argparse.ArgumentTypeError(f"{part} is not there")
    return folder
