"""Every objective against the hand values of a reference file, and its gradient against finite differences.

The file is a list of groups; a group has `inputs`, shared by its `rows`; a row has a `name`, `params` that go
with the inputs, and the `value`. Groups that CASES knows are checked, and it must know every row of them.

    pytest tests/objectives                              # the project's own reference.json
    pytest tests/objectives --reference other.json       # another file of the same form
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.objectives.pairs import mean
from burnish.objectives.sft import SFT, entropy
from burnish.ops.head import head_map

OWN_FILE = Path(__file__).with_name("reference.json")
ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """One row made ready. `formula(x, held)` is NumPy; `held` is x where the gradient stops."""

    at: np.ndarray
    ours: Callable[[jax.Array], jax.Array]
    formula: Callable[[np.ndarray, np.ndarray], Any]


def sft_loss(given: dict[str, Any], params: dict[str, Any], loss: str) -> Case:
    objective = SFT(loss=loss, **params)
    targets, weights = np.array(given["targets"]), np.array(given["weights"])

    def ours(logits: jax.Array) -> jax.Array:
        found = head_map(logits, jnp.eye(logits.shape[1]), targets, weights, outputs=objective.head_outputs)
        return mean(*objective(found, jnp.asarray(weights))["loss"])

    def formula(logits: np.ndarray, held: np.ndarray) -> Any:
        log_p, log_p_held = log_softmax(logits), log_softmax(held)
        rows = np.arange(len(targets))
        per_token = -log_p[rows, targets]
        if loss == "dft":
            per_token = per_token * np.exp(log_p_held[rows, targets])
        smoothing = params.get("label_smoothing", 0)
        per_token = (1 - smoothing) * per_token + smoothing * -log_p.mean(axis=1)
        per_token = per_token + params.get("z_loss", 0) * (logits - log_p)[:, 0] ** 2
        return (weights * per_token).sum() / weights.sum()

    return Case(np.array(given["logits"]), ours, formula)


def sft_entropy(given: dict[str, Any], params: dict[str, Any]) -> Case:
    weights = np.array(given["weights"])

    def ours(logits: jax.Array) -> jax.Array:
        found = head_map(logits, jnp.eye(logits.shape[1]), mask=weights, outputs=("entropy",))
        return mean(*entropy(found.entropy, jnp.asarray(weights)))

    def formula(logits: np.ndarray, held: np.ndarray) -> Any:
        log_p = log_softmax(logits)
        return (weights * -(np.exp(log_p) * log_p).sum(axis=1)).sum() / weights.sum()

    return Case(np.array(given["logits"]), ours, formula)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


CASES: dict[str, dict[str, Callable[[dict[str, Any], dict[str, Any]], Case]]] = {
    "sft": {
        "cross_entropy": lambda given, params: sft_loss(given, params, "cross_entropy"),
        "cross_entropy_z_loss": lambda given, params: sft_loss(given, params, "cross_entropy"),
        "cross_entropy_label_smoothing": lambda given, params: sft_loss(given, params, "cross_entropy"),
        "dft": lambda given, params: sft_loss(given, params, "dft"),
        "entropy": sft_entropy,
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        option = metafunc.config.getoption("--reference")
        file = OWN_FILE if option is None else metafunc.config.invocation_params.dir / option
        metafunc.parametrize(("group", "row"), list(rows_of(file)))


def rows_of(file: Path) -> Iterator[Any]:
    try:
        groups = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--reference {file}: cannot be read as JSON: {error}") from error
    for group in groups:
        for row in group["rows"] if group["group"] in CASES else ():
            words = [group["group"], row["name"], *(f"{k}={v}" for k, v in row["params"].items())]
            yield pytest.param(group, row, id="-".join(words))


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def make_case(group: dict[str, Any], row: dict[str, Any]) -> Case:
    cases = CASES[group["group"]]
    assert row["name"] in cases, f"group {group['group']} has no case for row {row['name']!r}"
    return cases[row["name"]](group["inputs"], row["params"])


def test_value_equals_the_row(group: dict[str, Any], row: dict[str, Any], float64: None) -> None:
    case = make_case(group, row)
    np.testing.assert_allclose(case.ours(jnp.asarray(case.at)), row["value"], rtol=1e-12, atol=1e-12)


def test_gradient_equals_finite_differences(group: dict[str, Any], row: dict[str, Any], float64: None) -> None:
    case = make_case(group, row)
    step = 1e-5
    expected = np.zeros_like(case.at)
    for index in np.ndindex(case.at.shape):
        nudge = np.zeros_like(case.at)
        nudge[index] = step
        above, below = case.formula(case.at + nudge, case.at), case.formula(case.at - nudge, case.at)
        expected[index] = (above - below) / (2 * step)
    assert np.abs(expected).max() > 1e-3  # else anything would pass
    np.testing.assert_allclose(jax.grad(case.ours)(jnp.asarray(case.at)), expected, rtol=1e-7, atol=1e-9)


def test_another_file_is_read_and_held_to(tmp_path: Path) -> None:
    """A wrong value and an unknown row fail, and nothing else; a group without cases is left out."""
    sft = next(group for group in json.loads(OWN_FILE.read_text()) if group["group"] == "sft")
    right, wrong = sft["rows"][0], dict(sft["rows"][3], value=0.5)
    unknown = dict(right, name="cross_entropy_of_tomorrow")
    groups = [dict(sft, rows=[right, wrong, unknown]), {"group": "tomorrow", "inputs": {}, "rows": [right]}]
    file = tmp_path / "other.json"
    file.write_text(json.dumps(groups))
    words = ["tests/objectives", "--reference", str(file), "-k", "test_value", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "2 failed, 1 passed" in done.stdout
    assert "FAILED tests/objectives/test_reference.py::test_value_equals_the_row[sft-dft]" in done.stdout
    assert "no case for row 'cross_entropy_of_tomorrow'" in done.stdout
