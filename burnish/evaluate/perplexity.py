"""Perplexity of a model on records: exp of the mean negative log-likelihood of the trained tokens."""

import math
from dataclasses import dataclass

from burnish.data.config import DataConfig
from burnish.data.dataset import load_examples
from burnish.data.examples import EncodeCounts
from burnish.data.fit import fit_data, fit_tokenizer
from burnish.data.parts import Source
from burnish.distributed.config import MeshConfig
from burnish.distributed.placement import place_module
from burnish.distributed.sharding import batch_shards, make_mesh
from burnish.errors import InputError
from burnish.evaluate.objective import Evaluator
from burnish.models.parts import take_apart
from burnish.objectives.sft import SFT
from burnish.wrapper import ModelWrapper


@dataclass(frozen=True)
class Perplexity:
    """nll: mean over `tokens` of -log p, in nats; counts: what became of the rows."""

    nll: float
    tokens: int
    counts: EncodeCounts

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if self.nll < 700 else math.inf


def perplexity(model: ModelWrapper, source: Source, config: DataConfig | None = None, *, rows: int = 4) -> Perplexity:
    """The model's perplexity on the assistant's tokens (or the completions) of a data set, terminators included.

    rows: rows of a batch on each device. Raises InputError for bad data or a model without tokenizer.
    """
    config = fit_data(config or DataConfig(), context=model.context, packing=model.features.packing)
    examples = load_examples(source, fit_tokenizer(model.require_tokenizer(), config), config)
    mesh = make_mesh(MeshConfig())
    place_module(model.module, mesh)
    parts, trained, frozen = take_apart(model.module, {})
    evaluator = Evaluator(parts, frozen, SFT(), examples, config, rows * batch_shards(mesh), mesh)
    found = evaluator(trained)
    if not math.isfinite(found["eval_nll"]):
        raise InputError(
            f"{model.origin.source}: its loss on this data is {found['eval_nll']}; the weights are damaged"
        )
    return Perplexity(found["eval_nll"], int(found["eval_tokens"]), examples.counts)
