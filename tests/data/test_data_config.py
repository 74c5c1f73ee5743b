import json
from datetime import date

import pytest
from pydantic import ValidationError

from burnish.data.config import DataConfig, SourceConfig


def test_defaults():
    assert DataConfig().model_dump() == {
        "format": "auto",
        "columns": {},
        "chat_template": None,
        "template_variables": {},
        "date": None,
        "system": None,
        "train_on": "assistant",
        "rewritten_turns": "split",
        "bad_rows": "refuse",
        "max_length": 1024,
        "truncate": "keep_end",
        "overlap": 0,
        "min_trained_tokens": 1,
        "packing": "best_fit",
        "max_segments": None,
        "lookahead": 1024,
        "holdout": 0.1,
        "seed": 0,
        "temperature": None,
        "repeat": True,
        "streaming": False,
        "shuffle_buffer": 10_000,
        "cache": True,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"format": "parquet"},
        {"columns": ["prompt"]},
        {"chat_template": ""},
        {"system": ""},
        {"train_on": "user"},
        {"rewritten_turns": "keep"},
        {"bad_rows": "ignore"},
        {"max_length": 1},
        {"max_length": 2.5},
        {"truncate": "middle"},
        {"overlap": -1},
        {"min_trained_tokens": 0},
        {"packing": "worst_fit"},
        {"packing": 1},
        {"max_segments": 0},
        {"lookahead": 0},
        {"holdout": 1.0},
        {"holdout": -0.1},
        {"holdout": float("nan")},
        {"seed": -1},
        {"temperature": 0},
        {"temperature": float("nan")},
        {"shuffle_buffer": 0},
        {"packed": True},
    ],
)
def test_unusable_values_are_refused_by_name(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        DataConfig(**options)


@pytest.mark.parametrize(
    "option", [{"weight": 0}, {"weight": -1}, {"weight": float("inf")}, {"name": ""}, {"split": ""}]
)
def test_unusable_sources_are_refused_by_name(option):
    with pytest.raises(ValidationError, match=next(iter(option))):
        SourceConfig(path="train.jsonl", **option)


@pytest.mark.parametrize(("given", "means"), [(True, "best_fit"), (False, "none"), ("concat", "concat")])
def test_packing_may_be_true_or_false(given, means):
    assert DataConfig(packing=given).packing == means


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 8}, r"data\.overlap: 8 goes with data\.truncate=split"),
        (
            {"overlap": 15, "truncate": "split", "max_length": 16},
            r"data\.overlap: 15 must be at most max_length - 2, 14",
        ),
        ({"temperature": 2, "streaming": True}, r"data\.temperature needs the sizes of the sources"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**options)
    assert DataConfig(overlap=14, truncate="split", max_length=16).overlap == 14


def test_the_encoding_can_be_written_as_json():
    config = DataConfig(template_variables={"day": date(2026, 1, 2), "flags": (1, 2)}, packing="none")
    encoding = config.encoding()
    assert json.loads(json.dumps(encoding)) == encoding
    assert encoding["template_variables"] == {"day": "2026-01-02", "flags": [1, 2]}
    assert encoding["max_length"] == 1024 and "packing" not in encoding


def test_every_option_is_described():
    for model in (DataConfig, SourceConfig):
        assert all(field.description for field in model.model_fields.values())
