"""The loop: data in, steps, metrics and checkpoints out.

    model = burnish.load("smollm2-135m")
    model.add_lora(rank=16)
    trainer = Trainer(model, SFT(), {"lr": 2e-4, "batch_size": 8}, out="runs/a")
    result = trainer.train("train.jsonl", epochs=3)

The algorithm is in the objective, the update in `burnish.train.step`; what watches a run is a `Callback`.
"""

import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from burnish.config import build_config
from burnish.data.batches import TrainBatches
from burnish.data.config import DataConfig
from burnish.data.dataset import Examples, Source, load_examples, load_split
from burnish.data.encode import Encoded
from burnish.data.fit import fit_data
from burnish.data.packing import batch_arrays
from burnish.distributed.placement import place_module
from burnish.distributed.sharding import batch_sharding, batch_shards, make_mesh
from burnish.errors import InputError
from burnish.evaluate.objective import Evaluator
from burnish.models.decoder import Decoder
from burnish.models.parts import Parts, choose_trained, take_apart
from burnish.models.paths import write
from burnish.objectives.objective import Objective
from burnish.objectives.sft import SFT
from burnish.train.callbacks import Callback, MetricsFile, RunPlan, TensorBoard
from burnish.train.checkpoint import Checkpoints
from burnish.train.config import TrainConfig, TrainerConfig, with_sections
from burnish.train.loop import Loop
from burnish.train.optimizer import make_optimizer
from burnish.train.placement import init_optimizer
from burnish.train.run_folder import RunFolder
from burnish.train.step import StepState, train_step
from burnish.wrapper import ModelWrapper

FULL_LR, ADAPTER_LR = 1e-5, 2e-4
ACCUMULATION = 4


@dataclass(frozen=True)
class TrainResult:
    """What a run came to: steps made, the last step's metrics, the last evaluation, wall time, and its directory."""

    steps: int
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    out: Path | None = None


class Trainer:
    """Trains a model on an objective, in place.

    config: a `TrainerConfig`, or a mapping with its sections or their keys alone (`{"lr": 1e-5, "batch_size": 32}`).
    out: the run directory; None keeps nothing on disk.
    """

    def __init__(
        self,
        model: ModelWrapper,
        objective: Objective | None = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        *,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model = model
        self.objective: Objective = objective or SFT()
        given = (
            config if isinstance(config, TrainerConfig) else build_config(TrainerConfig, with_sections(config or {}))
        )
        self.config = _resolve(given, model)
        self.out = Path(out) if out is not None else None
        self.mesh = make_mesh(self.config.mesh)
        self.callbacks: list[Callback] = list(callbacks)
        self.stopping = False
        self._sources: dict[str, str] = {}

    @property
    def recipe(self) -> dict[str, Any]:
        """What the run is told, resolved: what `config.yaml` holds. An objective that is not ours is not in it."""
        recipe = {
            **self.config.model_dump(mode="json"),
            "model": self.model.origin.source,
            "adapter": self.model.adapter.model_dump() if self.model.adapter else {"kind": "none"},
        }
        if isinstance(self.model.module, Decoder):
            recipe["dtype"] = self.model.module.dtype.name
        if isinstance(self.objective, SFT):
            recipe["sft"] = asdict(self.objective)
        for key, source in self._sources.items():
            recipe["data"][key] = source
        return recipe

    def stop(self) -> None:
        """Asks the loop to end after the step it is in, with a checkpoint."""
        self.stopping = True

    def train(
        self,
        dataset: Source,
        *,
        epochs: float | None = None,
        eval_dataset: Source | None = None,
        resume: bool = False,
    ) -> TrainResult:
        """Trains on a JSONL file, or on rows with `messages` or `prompt` and `completion`.

        Without an evaluation set, `data.holdout` of the rows are held out. `epochs` overrides the config. With
        `resume`, the run in `out` goes on from its last checkpoint as if it had never stopped.

        Raises InputError for bad data, sizes that do not fit, and a loss that is not finite.
        """
        if epochs is not None:
            length = {"epochs": epochs, "steps": None}
            train = build_config(TrainConfig, {**self.config.train.model_dump(), **length}, place="train")
            self.config = self.config.model_copy(update={"train": train})
        self.stopping = False
        started, config, module = time.perf_counter(), self.config, self.model.module
        sources = {"path": dataset, "eval_path": eval_dataset}
        self._sources = {key: str(Path(v).resolve()) for key, v in sources.items() if isinstance(v, str | Path)}
        train_set, eval_set = load_split(dataset, eval_dataset, self.model.require_tokenizer(), config.data)
        batches = TrainBatches(train_set.encoded, config.train.batch_size, config.data)
        total = _total_steps(batches, config.train)
        shards = batch_shards(self.mesh)
        cut = _micro_batches(config.train, shards)

        place_module(module, self.mesh)
        if isinstance(module, Decoder):
            module.remat = config.train.remat
        parts, params, frozen = take_apart(module, choose_trained(module, config.train.trainable))
        optimizer = make_optimizer(
            config.optimizer, parts.trained, {key: array.shape for key, array in params.items()}, total
        )
        state = StepState(params, init_optimizer(optimizer, params, parts.trained, self.mesh))

        with ExitStack() as stack:
            run = self._open(resume, stack)
            checkpoints = stack.enter_context(closing(Checkpoints(run.path, config.train.keep))) if run else None
            done = 0
            if resume:
                done, state = _restore(checkpoints, run, state, parts, batches, self.recipe)
            put = functools.partial(_put, cut=cut, sharding=batch_sharding(self.mesh, micro_batches=True))
            step, compile_seconds = _compile(
                functools.partial(train_step, parts, self.objective, optimizer, shards),
                state,
                frozen,
                put(batch_arrays([], [[]] * config.train.batch_size, config.data.max_length)),
                key := jax.random.key(config.train.seed or 0),
            )
            evaluate = self._evaluator(parts, frozen, eval_set.encoded) if eval_set.encoded else None
            callbacks = [*self._trackers(run, done), *self.callbacks]
            lacks = self.model.features.missing()
            if not self.callbacks:  # nobody is listening who would say it
                for lack in lacks:
                    warnings.warn(f"{type(module).__name__}: {lack}", stacklevel=2)
            plan = RunPlan(
                recipe=self.recipe,
                parameters=self.model.parameters,
                trainable=sum(array.size for array in params.values()),
                done=done,
                total=total,
                rows=config.train.batch_size,
                length=config.data.max_length,
                micro_batches=cut,
                train_counts=train_set.counts,
                eval_counts=eval_set.counts,
                efficiency=_efficiency(train_set, batches, config.data),
                memory_bytes=_memory(step),
                compile_seconds=compile_seconds,
                lacks=lacks,
                example=train_set.encoded[0],
            )
            for callback in callbacks:
                callback.on_start(plan)
            loop = Loop(
                config.train,
                state,
                done,
                total,
                step=lambda state, batch: step(state, frozen, put(batch), key),
                batches=batches,
                evaluate=None if evaluate is None else lambda state: evaluate(state.params),
                save=None
                if checkpoints is None
                else lambda at, state: checkpoints.save(at, state, parts.trained, batches.get_state(), self.recipe),
                stopping=lambda: self.stopping,
                callbacks=callbacks,
            )
            try:
                loop.run()
            finally:
                write(module, loop.state.params)
        self._remember(parts)
        result = TrainResult(loop.done, loop.metrics, loop.evaluation, time.perf_counter() - started, self.out)
        for callback in callbacks:
            callback.on_end(result)
        return result

    def evaluate(self, dataset: Source) -> dict[str, float]:
        """Each term of the objective over every trained token of a data set, `sum / weight`, prefixed `eval_`."""
        examples = load_examples(dataset, self.model.require_tokenizer(), self.config.data)
        place_module(self.model.module, self.mesh)
        parts, params, frozen = take_apart(self.model.module, {})
        return self._evaluator(parts, frozen, examples.encoded)(params)

    def _evaluator(self, parts: Parts, frozen: list[Any], examples: Sequence[Encoded]) -> Evaluator:
        # Rows of a micro-batch, so that evaluation fits wherever training does.
        rows = self.config.train.batch_size // _micro_batches(self.config.train, batch_shards(self.mesh))
        return Evaluator(parts, frozen, self.objective, examples, self.config.data, rows, self.mesh)

    def _open(self, resume: bool, stack: ExitStack) -> RunFolder | None:
        if self.out is None:
            if resume:
                raise InputError("resume needs the run directory; give Trainer out=")
            return None
        if not self.model.origin.source:
            raise InputError(
                "this model was trained without a run directory, or has two new adapters on: a run could not name "
                "what it started from; save() it and load that, or give the first Trainer out="
            )
        run = RunFolder.reopen(self.out) if resume else RunFolder.create(self.out, self.recipe)
        stack.enter_context(closing(run))
        if not resume:
            stack.callback(run.discard_if_bare)
        return run

    def _trackers(self, run: RunFolder | None, done: int) -> list[Callback]:
        if run is None:
            return []
        return [MetricsFile(run), *([TensorBoard(run.path, done)] if self.config.train.tensorboard else [])]

    def _remember(self, parts: Parts) -> None:
        """Notes what the model has become: the run's, or, without a run directory, one that no name stands for."""
        origin = self.model.origin
        source = str(self.out.resolve()) if self.out is not None else ""
        self.model.origin = origin.after_run(source, trained=parts.trained, adapted=self.model.adapted)
        self.model.adapter = None


def _resolve(config: TrainerConfig, model: ModelWrapper) -> TrainerConfig:
    """Fills in what depends on the model and on chance, so that `config.yaml` says what was done."""
    train, optimizer, data = config.train.with_seed(), config.optimizer, config.data
    if model.adapted and model.adapter is None and not train.trainable:
        raise InputError(
            "the adapters this model was loaded with are frozen: put new ones on with add_lora(), or train everything "
            "after merge_lora()"
        )
    if optimizer.lr is None:
        adapters_only = model.adapted and not train.trainable
        optimizer = optimizer.model_copy(update={"lr": ADAPTER_LR if adapters_only else FULL_LR})
    data = fit_data(data, context=model.context, packing=model.features.packing)
    return config.model_copy(update={"train": train, "optimizer": optimizer, "data": data})


# What may change between a run and its resumption: it moves no parameter.
_FREE = ("train.log_every", "train.eval_every", "train.save_every", "train.keep", "train.tensorboard")
_FREE_SECTIONS = ("mesh", "task")


def _check_same(recorded: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """InputError for the first option that a resumed run would have otherwise than before."""
    before, after = _flat(recorded), _flat(now)
    for key in before.keys() & after.keys():
        if key in _FREE or key.split(".")[0] in _FREE_SECTIONS or key in ("data.path", "data.eval_path"):
            continue
        if before[key] != after[key]:
            raise InputError(
                f"{out}: {key} is {after[key]!r}, and was {before[key]!r} before; resume with the same, or start anew"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _total_steps(batches: TrainBatches, config: TrainConfig) -> int:
    """Steps of the run: the config's, or those of so many epochs (packing makes epochs differ by a step or so)."""
    if config.steps is not None:
        return config.steps
    whole, part = divmod(config.epochs or 1.0, 1)
    steps = sum(batches.steps_per_epoch(epoch) for epoch in range(int(whole)))
    return steps + math.ceil(part * batches.steps_per_epoch(int(whole))) if part else steps


def _micro_batches(config: TrainConfig, shards: int) -> int:
    """Into how many micro-batches a batch is cut; each must have as many rows for every device."""
    rows = config.batch_size
    possible = [n for n in range(1, rows // shards + 1) if rows % (n * shards) == 0]
    if not possible:
        raise InputError(
            f"train.batch_size: {rows} rows cannot be shared by {shards} devices; use a multiple of {shards}"
        )
    if config.accumulation is None:
        return max(n for n in possible if n <= ACCUMULATION)
    if config.accumulation not in possible:
        raise InputError(
            f"train.accumulation: {config.accumulation} does not cut {rows} rows evenly over {shards} devices; "
            f"these do: {', '.join(map(str, possible))}"
        )
    return config.accumulation


def _put(batch: Mapping[str, np.ndarray], *, cut: int, sharding: Any) -> dict[str, jax.Array]:
    """[rows, length] -> [micro_batches, rows, length], on the devices."""
    return {name: jax.device_put(array.reshape(cut, -1, *array.shape[1:]), sharding) for name, array in batch.items()}


def _compile(step: Callable[..., Any], state: StepState, *arguments: Any) -> tuple[Any, float]:
    """The compiled step, and the seconds it took. It reuses the state's memory; the next state lives where that did."""
    began = time.perf_counter()
    places = (jax.tree.map(lambda array: array.sharding, state), None)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, *arguments).compile()
    return compiled, time.perf_counter() - began


def _memory(compiled: Any) -> int:
    """Bytes a step needs on one device: arguments, outputs that reuse none of them, temporaries; 0 where unknown."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return 0
    fresh_outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + fresh_outputs + sizes.temp_size_in_bytes


def _efficiency(train_set: Examples, batches: TrainBatches, config: DataConfig) -> float:
    """Real tokens over slots of the first epoch's rows."""
    return train_set.counts.tokens / (len(batches.plan(0).rows) * config.max_length)


def _restore(
    checkpoints: Checkpoints | None,
    run: RunFolder | None,
    state: StepState,
    parts: Parts,
    batches: TrainBatches,
    recipe: Mapping[str, Any],
) -> tuple[int, StepState]:
    """The last checkpoint's step and state; data order and metrics are put back to it."""
    assert checkpoints is not None and run is not None  # `_open` refuses to resume without a directory
    done = checkpoints.latest_step()
    if done is None:
        raise InputError(f"{run.path}: no checkpoint to resume from; remove the folder and start the run again")
    _check_same(checkpoints.recipe(done), recipe, run.path)
    restored = checkpoints.restore(done, state, parts.trained)
    batches.set_state(restored.data)
    run.cut_metrics(done)
    return done, restored.state
