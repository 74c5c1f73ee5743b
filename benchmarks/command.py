"""What every benchmark's command does alike."""

import argparse
import sys
from collections.abc import Callable

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
