"""Options of the whole suite. They live here, not deeper, so that every way of calling pytest knows them."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        metavar="FILE",
        help="hand values for tests/objectives, in the form of tests/objectives/reference.json",
    )
