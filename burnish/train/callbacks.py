"""What watches a run. A callback never changes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.data.examples import EncodeCounts, Encoded
from burnish.train.memory import StepMemory
from burnish.train.remat import RematChoice
from burnish.train.run_folder import TENSORBOARD, RunFolder

if TYPE_CHECKING:
    from burnish.train.trainer import TrainResult


@dataclass(frozen=True)
class RunPlan:
    """What a run is about to do, known before its first step.

    parameters, trainable: counts of numbers. done, total: steps made before, and to be made in all. rows, length,
    micro_batches: shape of a step's batch, at its longest. efficiency: real tokens over slots of the first epoch.
    memory: the compiled step's on one device. remat: what blocks keep for the backward pass, and why. example: the
    first training example. train_counts, efficiency and example are None where rows are streamed. source_counts: of
    several sources, by name.
    """

    recipe: Mapping[str, Any]
    parameters: int
    trainable: int
    done: int
    total: int
    rows: int
    length: int
    micro_batches: int
    train_counts: EncodeCounts | None
    source_counts: Mapping[str, EncodeCounts]
    eval_counts: EncodeCounts
    efficiency: float | None
    memory: StepMemory
    remat: RematChoice
    compile_seconds: float
    lacks: list[str]
    example: Encoded | None


class Callback:
    """Called by the trainer, in this order; every method may be left out."""

    def on_start(self, plan: RunPlan) -> None:
        """Once, when everything is compiled and nothing has been trained."""

    def on_step(self, entry: Mapping[str, float]) -> None:
        """After each logged step: its number, metrics and speed."""

    def on_evaluation(self, entry: Mapping[str, float]) -> None:
        """After each evaluation: the step and each term, prefixed `eval_`."""

    def on_save(self, step: int) -> None:
        """After a checkpoint was begun."""

    def on_end(self, result: "TrainResult") -> None:
        """Once, when the model holds what was trained."""


class MetricsFile(Callback):
    """Writes `metrics.jsonl`: a line a logged step, a line an evaluation."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_step(self, entry: Mapping[str, float]) -> None:
        self._run.append_metrics(entry)

    def on_evaluation(self, entry: Mapping[str, float]) -> None:
        self._run.append_metrics(entry)


class TensorBoard(Callback):
    """Writes the same numbers as TensorBoard scalars under `tensorboard/`."""

    def __init__(self, run: Path, done: int) -> None:
        from tensorboardX import SummaryWriter

        # Points after the checkpoint a run resumes from are taken back: they will be made again.
        self._writer = SummaryWriter(str(run / TENSORBOARD), purge_step=done + 1, write_to_disk=True)

    def on_step(self, entry: Mapping[str, float]) -> None:
        for name, value in entry.items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, int(entry["step"]))

    def on_evaluation(self, entry: Mapping[str, float]) -> None:
        for name, value in entry.items():
            if name != "step":
                self._writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, int(entry["step"]))

    def on_end(self, result: "TrainResult") -> None:
        self._writer.close()
