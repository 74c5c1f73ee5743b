import pytest
from pydantic import ValidationError

from burnish.data.config import DataConfig


def test_defaults():
    assert DataConfig().model_dump() == {
        "max_length": 1024,
        "packing": True,
        "truncate": "keep_end",
        "holdout": 0.1,
        "seed": 0,
        "system": None,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 1},
        {"max_length": 2.5},
        {"holdout": 1.0},
        {"holdout": -0.1},
        {"holdout": float("nan")},
        {"truncate": "middle"},
        {"seed": -1},
        {"system": ""},
        {"packed": True},
    ],
)
def test_unusable_values_are_refused_by_name(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        DataConfig(**options)
