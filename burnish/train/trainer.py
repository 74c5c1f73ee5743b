"""The loop: data in, steps, metrics and checkpoints out.

    model = burnish.load("smollm2-135m")
    model.add_lora(rank=16)
    trainer = Trainer(model, SFT(), {"lr": 2e-4, "batch_size": 8}, out="runs/a")
    result = trainer.train("train.jsonl", epochs=3)

The algorithm is in the objective, the update in `burnish.train.step`; what watches a run is a `Callback`.
"""

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from burnish.compilation import keep_programs, share_programs
from burnish.config import build_config
from burnish.data.batches import TrainBatches
from burnish.data.dataset import Dataset, load_dataset, load_examples
from burnish.data.examples import EncodeCounts, Examples
from burnish.data.fit import fit_data, fit_tokenizer, with_day
from burnish.data.packing import batch_arrays
from burnish.data.parts import Source, recorded
from burnish.data.stream import StreamBatches
from burnish.distributed.placement import place_module
from burnish.distributed.sharding import batch_sharding, batch_shards, make_mesh
from burnish.errors import InputError
from burnish.evaluate.objective import Evaluator
from burnish.models.decoder import Decoder
from burnish.models.parts import Parts, choose_trained, take_apart
from burnish.models.paths import write
from burnish.models.remat import RematPolicy
from burnish.objectives.objective import Objective
from burnish.objectives.sft import SFT
from burnish.train.callbacks import Callback, MetricsFile, RunPlan, TensorBoard
from burnish.train.checkpoint import Checkpoints
from burnish.train.config import TrainConfig, TrainerConfig, with_sections
from burnish.train.loop import Loop
from burnish.train.optimizer import make_optimizer
from burnish.train.placement import init_optimizer
from burnish.train.plan import check_same, micro_batches, total_steps
from burnish.train.programs import Programs
from burnish.train.remat import RematChoice, choose_remat
from burnish.train.run_folder import RunFolder
from burnish.train.step import StepState, train_step
from burnish.wrapper import ModelWrapper

FULL_LR, ADAPTER_LR = 1e-5, 2e-4


@dataclass(frozen=True)
class TrainResult:
    """What a run came to: steps made, the last step's metrics, the last evaluation, wall time, and its directory.

    data_ended: a stream ended before the steps did. rows: what became of the rows that were read; source_rows: the
    same for each of several sources.
    """

    steps: int
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    out: Path | None = None
    data_ended: bool = False
    rows: EncodeCounts = field(default_factory=EncodeCounts)
    source_rows: Mapping[str, EncodeCounts] = field(default_factory=dict)


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
        keep_programs()
        self.model = model
        self.objective: Objective = objective or SFT()
        given = (
            config if isinstance(config, TrainerConfig) else build_config(TrainerConfig, with_sections(config or {}))
        )
        self.config = _resolve(given, model)
        if model.tokenizer is not None:
            data = with_day(self.config.data, fit_tokenizer(model.tokenizer, self.config.data))
            self.config = self.config.model_copy(update={"data": data})
            model.tokenizer = fit_tokenizer(model.tokenizer, data)
        self.out = Path(out) if out is not None else None
        self.mesh = make_mesh(self.config.mesh)
        self.callbacks: list[Callback] = list(callbacks)
        self.stopping = False
        self._sources: dict[str, Any] = {}
        self._remat: RematChoice | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        """What the run is told, resolved: what `config.yaml` holds. An objective that is not ours is not in it."""
        recipe = {
            **self.config.model_dump(mode="json"),
            "model": self.model.origin.source,
            "vocabulary": self.model.vocabulary.model_dump(),
            "adapter": self.model.adapter.model_dump() if self.model.adapter else {"kind": "none"},
        }
        if isinstance(self.model.module, Decoder):
            recipe["dtype"] = self.model.module.embed.weight.dtype.name
            recipe["compute_dtype"] = self.model.module.dtype.name
        if isinstance(self.objective, SFT):
            recipe["sft"] = asdict(self.objective)
        for key, source in self._sources.items():
            recipe["data"][key] = source
        if self._remat is not None and self._remat.policy is not None:
            recipe["train"]["remat"] = self._remat.policy
        return recipe

    def stop(self) -> None:
        """Asks the loop to end after the step it is in, with a checkpoint."""
        self.stopping = True

    def train(
        self,
        dataset: Source | Dataset,
        *,
        epochs: float | None = None,
        eval_dataset: Source | None = None,
        resume: bool = False,
    ) -> TrainResult:
        """Trains on a file, folder, glob or hf:ORG/NAME, on rows (docs/data.md), on several sources, or a `Dataset`.

        Without an evaluation set, `data.holdout` of the rows are held out. `epochs` overrides the config. With
        `resume`, the run in `out` goes on from its last checkpoint as if it had never stopped.

        Raises InputError for bad data, sizes that do not fit, and a loss that is not finite.
        """
        if epochs is not None:
            length = {"epochs": epochs, "steps": None}
            train = build_config(TrainConfig, {**self.config.train.model_dump(), **length}, place="train")
            self.config = self.config.model_copy(update={"train": train})
        if jax.process_count() > 1:
            raise InputError("this trains on the devices of one process; start it without jax.distributed")
        self.stopping, self._remat = False, None
        started, config, module = time.perf_counter(), self.config, self.model.module
        data = self._load(dataset, eval_dataset)
        batches = data.batches(self.model.require_tokenizer(), config.train.batch_size, config.data)
        total = total_steps(batches, config.train)
        shards = batch_shards(self.mesh)
        cut = micro_batches(config.train, shards)

        place_module(module, self.mesh)
        parts, params, frozen = take_apart(module, choose_trained(module, config.train.trainable))
        optimizer = make_optimizer(
            config.optimizer, parts.trained, {key: array.shape for key, array in params.items()}, total
        )
        state = StepState(params, init_optimizer(optimizer, params, parts.trained, self.mesh))

        with ExitStack() as stack:
            run = self._open(resume, stack)
            checkpoints = stack.enter_context(closing(Checkpoints(run.path, config.train.keep))) if run else None
            done = 0
            asked = config.train.remat
            if resume:
                done, state, recorded = _restore(checkpoints, run, state, parts, batches, self.recipe)
                asked = recorded if asked == "auto" else asked
            step = functools.partial(
                train_step,
                parts,
                self.objective,
                optimizer,
                shards,
                sources=data.names,
                neftune_alpha=config.train.neftune_alpha,
            )
            programs = self._compile(step, asked, state, frozen, batches.longest, cut)
            if run and not resume:
                run.record(self.recipe)
            evaluate = self._evaluator(parts, frozen, data.held_out, data.held_out_names)
            callbacks = [*self._trackers(run, done), *self.callbacks]
            if not self.callbacks:  # nobody is listening who would say it
                for lack in self.model.features.missing():
                    warnings.warn(f"{type(module).__name__}: {lack}", stacklevel=2)
            plan = self._plan(data, batches, params, programs, done, total, cut)
            for callback in callbacks:
                callback.on_start(plan)
            loop = Loop(
                config.train,
                state,
                done,
                total,
                step=programs,
                batches=batches,
                sources=data.names,
                evaluate=(lambda state: evaluate(state.params)) if len(data.held_out) else None,
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
        # What the model has become: the run's, or, without a run directory, one that no name stands for.
        self.model.note_run(str(self.out.resolve()) if self.out is not None else "", parts.trained)
        seconds = time.perf_counter() - started
        result = TrainResult(
            loop.done,
            loop.metrics,
            loop.evaluation,
            seconds,
            self.out,
            data_ended=loop.data_ended,
            rows=batches.counts,
            source_rows=data.by_source(batches.source_counts),
        )
        for callback in callbacks:
            callback.on_end(result)
        return result

    def evaluate(self, dataset: Source) -> dict[str, float]:
        """Each term of the objective over every trained token of a data set, `sum / weight`, prefixed `eval_`."""
        examples = load_examples(dataset, self.model.require_tokenizer(), self.config.data)
        place_module(self.model.module, self.mesh)
        parts, params, frozen = take_apart(self.model.module, {})
        return self._evaluator(parts, frozen, examples)(params)

    def _load(self, dataset: Source | Dataset, eval_dataset: Source | None) -> Dataset:
        self._sources = {}
        if isinstance(dataset, Dataset):
            if eval_dataset is not None:
                raise InputError("eval_dataset: a Dataset has what it is evaluated on; give load_dataset both")
            return dataset
        named = {"eval_path": recorded(eval_dataset)}
        train = recorded(dataset)
        named["sources" if isinstance(train, list) else "path"] = train
        self._sources = {key: source for key, source in named.items() if source}
        return load_dataset(dataset, eval_dataset, self.model.require_tokenizer(), self.config.data)

    def _compile(
        self,
        step: Callable[..., Any],
        asked: Literal["auto", RematPolicy],
        state: StepState,
        frozen: list[Any],
        longest: int,
        cut: int,
    ) -> Programs:
        """The step, compiled for the longest rows under a remat policy that fits."""
        train = self.config.train
        put = functools.partial(_put, cut=cut, sharding=batch_sharding(self.mesh, micro_batches=True))
        batch = batch_arrays(Examples.of([]), [[]] * train.batch_size, longest)

        def compile_with(policy: RematPolicy | None) -> Programs:
            key = jax.random.key(train.seed or 0)
            programs = Programs(functools.partial(step, remat=policy), state, frozen, key, put)
            programs.compile(state, batch)
            return programs

        devices = list(self.mesh.devices.flat)
        takes_policy = self.model.features.remat
        programs, self._remat = choose_remat(asked, compile_with, takes_policy=takes_policy, devices=devices)
        share_programs()
        return programs

    def _plan(
        self,
        data: Dataset,
        batches: TrainBatches | StreamBatches,
        params: Mapping[str, jax.Array],
        programs: Programs,
        done: int,
        total: int,
        cut: int,
    ) -> RunPlan:
        assert self._remat is not None  # it is chosen by now
        return RunPlan(
            recipe=self.recipe,
            parameters=self.model.parameters,
            trainable=sum(array.size for array in params.values()),
            done=done,
            total=total,
            rows=self.config.train.batch_size,
            length=batches.longest,
            micro_batches=cut,
            train_counts=None if data.train is None else data.train.counts,
            source_counts={} if data.train is None else data.by_source(data.train.source_counts),
            eval_counts=data.held_out.counts,
            efficiency=batches.efficiency if isinstance(batches, TrainBatches) else None,
            memory=programs.memory,
            remat=self._remat,
            compile_seconds=programs.compile_seconds,
            lacks=self.model.features.missing(),
            example=None if data.train is None else data.train[0],
        )

    def _evaluator(
        self, parts: Parts, frozen: list[Any], examples: Examples, sources: tuple[str, ...] = ()
    ) -> Evaluator:
        # Rows of a micro-batch, so that evaluation fits wherever training does.
        rows = self.config.train.batch_size // micro_batches(self.config.train, batch_shards(self.mesh))
        return Evaluator(parts, frozen, self.objective, examples, self.config.data, rows, self.mesh, sources)

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
    if train.neftune_alpha and not model.features.neftune:
        raise InputError(f"train.neftune_alpha: {type(model.module).__name__} takes no noise; set it to 0")
    data = fit_data(data, context=model.context, packing=model.features.packing)
    return config.model_copy(update={"train": train, "optimizer": optimizer, "data": data})


def _put(batch: Mapping[str, np.ndarray], *, cut: int, sharding: Any) -> dict[str, jax.Array]:
    """[rows, length] -> [micro_batches, rows, length], on the devices."""
    return {name: jax.device_put(array.reshape(cut, -1, *array.shape[1:]), sharding) for name, array in batch.items()}


def _restore(
    checkpoints: Checkpoints | None,
    run: RunFolder | None,
    state: StepState,
    parts: Parts,
    batches: TrainBatches | StreamBatches,
    recipe: Mapping[str, Any],
) -> tuple[int, StepState, Any]:
    """The last checkpoint's step, state and remat policy; data order and metrics are put back to it."""
    assert checkpoints is not None and run is not None  # `_open` refuses to resume without a directory
    done = checkpoints.latest_step()
    if done is None:
        raise InputError(f"{run.path}: no checkpoint to resume from; remove the folder and start the run again")
    before = checkpoints.recipe(done)
    # What fits by now may be another policy, which would round in other places.
    policy = build_config(TrainConfig, {"remat": before["train"].get("remat", "auto")}, place="train").remat
    before = {**before, "train": {**before["train"], "remat": policy}}
    if recipe["train"]["remat"] == "auto":
        recipe = {**recipe, "train": {**recipe["train"], "remat": policy}}
    check_same(before, recipe, run.path)
    restored = checkpoints.restore(done, state, parts.trained)
    batches.set_state(restored.data)
    run.cut_metrics(done)
    return done, restored.state, policy
