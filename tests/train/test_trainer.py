"""The trainer as Python callers meet it."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen, nnx

import burnish as bn
from burnish.errors import InputError
from burnish.train.callbacks import Callback
from burnish.train.config import TrainConfig
from burnish.train.plan import micro_batches
from burnish.train.run_folder import RunFolder
from burnish.train.trainer import Trainer
from burnish.wrapper import ModelWrapper

ROWS = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(30)]
SHORT = {"batch_size": 4, "max_length": 32, "steps": 2, "lr": 1e-2}


class Keep(Callback):
    def __init__(self) -> None:
        self.plan, self.steps, self.evaluations = None, [], []

    def on_start(self, plan) -> None:
        self.plan = plan

    def on_step(self, entry) -> None:
        self.steps.append(entry)

    def on_evaluation(self, entry) -> None:
        self.evaluations.append(entry)


def test_training_lowers_the_loss_and_the_run_is_a_model(make_tiny, tmp_path: Path) -> None:
    make_tiny().save(tmp_path / "base")
    model = bn.load(tmp_path / "base")
    model.add_lora(rank=8)
    keep = Keep()
    trainer = Trainer(model, bn.SFT(), {**SHORT, "steps": 30, "lr": 3e-2}, out=tmp_path / "run", callbacks=[keep])
    result = trainer.train(ROWS)
    assert result.metrics["loss"] < 0.5 * keep.steps[0]["loss"]
    assert result.steps == 30 and keep.plan.trainable == sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(model.module, nnx.LoRAParam))
    )
    tokens = jnp.arange(3, 15)[None]
    again = bn.load(tmp_path / "run")
    np.testing.assert_array_equal(again(tokens), model(tokens))
    assert not np.allclose(again(tokens), bn.load(tmp_path / "base")(tokens), atol=1e-2)
    recipe = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recipe["adapter"]["rank"] == 8 and recipe["adapter"]["alpha"] == 16.0
    assert recipe["optimizer"]["lr"] == 3e-2 and recipe["model"] == str(tmp_path / "base")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 31))
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_run_on_a_run_adds_an_adapter(make_tiny, tmp_path: Path) -> None:
    make_tiny().save(tmp_path / "base")
    model = bn.load(tmp_path / "base")
    model.add_lora(rank=4)
    Trainer(model, None, SHORT, out=tmp_path / "a").train(ROWS)
    second = bn.load(tmp_path / "a")
    with pytest.raises(InputError, match="frozen"):
        Trainer(second, None, SHORT)
    second.add_lora(rank=2)
    first_adapter = np.asarray(second.decoder.runs[0].blocks[0].attn.q_proj.adapters[0].b[...])
    Trainer(second, None, SHORT, out=tmp_path / "b").train(ROWS)
    layer = second.decoder.runs[0].blocks[0].attn.q_proj
    np.testing.assert_array_equal(layer.adapters[0].b[...], first_adapter)
    assert np.abs(layer.adapters[1].b[...]).max() > 0
    tokens = jnp.arange(3, 15)[None]
    np.testing.assert_array_equal(bn.load(tmp_path / "b")(tokens), second(tokens))
    assert bn.load(tmp_path / "b").origin.base == str(tmp_path / "base")


def test_full_training_keeps_float32_masters_of_a_bfloat16_model(make_tiny, tmp_path: Path) -> None:
    make_tiny().save(tmp_path / "base", dtype="bfloat16")
    model = bn.load(tmp_path / "base", dtype="bfloat16")
    before = np.asarray(model.decoder.norm.scale[...], np.float32)
    Trainer(model, None, {**SHORT, "lr": 1e-5, "schedule": {"name": "constant", "warmup_ratio": 0.0}}).train(ROWS)
    after = np.asarray(model.decoder.norm.scale[...], np.float32)
    moved = np.abs(after - before)
    assert 0 < moved.max() < 1e-4  # bfloat16 near 1 has steps of 0.4 %: it would have swallowed this


def test_epochs_set_the_number_of_steps(make_tiny) -> None:
    model = make_tiny()
    model.add_lora(rank=2)
    keep = Keep()
    options = {"batch_size": 4, "max_length": 32, "packing": False, "lr": 1e-3, "holdout": 0.0}
    result = Trainer(model, None, options, callbacks=[keep]).train(ROWS, epochs=2)
    assert result.steps == 2 * math.ceil(30 / 4)
    assert result.evaluation == {} and sum(entry["trained_tokens"] for entry in keep.steps) > 0


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(make_tiny, tmp_path: Path) -> None:
    make_tiny().save(tmp_path / "base")
    model = bn.load(tmp_path / "base")
    scale = model.decoder.norm.scale
    scale.set_value(scale[...].at[0].set(jnp.nan))
    model.add_lora(rank=2)
    with pytest.raises(InputError, match=r"step 1: loss is nan; lower optimizer.lr"):
        Trainer(model, None, SHORT, out=tmp_path / "run").train(ROWS)
    assert not (tmp_path / "run").exists()  # nothing was made, so nothing is left


def test_two_runs_cannot_write_one_folder(make_tiny, tmp_path: Path) -> None:
    held = RunFolder.create(tmp_path / "run", {"model": "x"})
    model = make_tiny()
    model.add_lora(rank=2)
    with pytest.raises(InputError, match="another run is writing here"):
        Trainer(model, None, SHORT, out=tmp_path / "run").train(ROWS)
    held.close()
    with pytest.raises(InputError, match="holds a run that saved nothing"):
        Trainer(model, None, SHORT, out=tmp_path / "run").train(ROWS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        Trainer(model, None, SHORT, out=tmp_path / "other").train(ROWS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": float("nan")}, r"optimizer.lr: .*finite"),
        ({"lr": -1.0}, r"optimizer.lr: .*greater than 0"),
        ({"steps": 0}, r"train.steps: .*greater than or equal to 1"),
        ({"batch_sise": 4}, r"batch_sise: unknown key; did you mean train.batch_size"),
        ({"train": {"batch_sise": 4}}, r"train.batch_sise: unknown key; did you mean batch_size"),
        ({"batch_size": 6, "accumulation": 4}, r"train.accumulation: 4 does not cut 6 rows .*: 1, 2, 3, 6"),
        ({"max_length": 512}, r"data.max_length: 512 is longer than the model's context; use 256 or less"),
        ({"trainable": ["layers.*.attention"]}, r"train.trainable: 'layers.\*.attention' matches nothing"),
        ({"trainable": ["layers.0"]}, r"train.trainable: .*covers some layers"),
    ],
)
def test_bad_options_are_one_line(make_tiny, options, said) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Trainer(make_tiny(), None, {**SHORT, **options}).train(ROWS)
    assert "\n" not in str(caught.value)


class Bigram(linen.Module):
    vocab: int

    @linen.compact
    def __call__(self, tokens):
        return linen.Dense(self.vocab)(linen.Embed(self.vocab, 16)(tokens))


class Recurrent(nnx.Module):
    """A language model that is nobody's decoder: it has hidden states and an unembedding, and takes no segments."""

    def __init__(self, vocab: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(rngs.normal((vocab, 16)) * 0.1)
        self.mix = nnx.Linear(16, 16, rngs=rngs)

    def hidden(self, tokens):
        x = self.table[...][tokens]
        return nnx.tanh(self.mix(jnp.cumsum(x, axis=1))) + x

    def unembedding(self):
        return self.table[...], "vocab_dim"

    def __call__(self, tokens):
        return self.hidden(tokens) @ self.table[...].T


@pytest.mark.parametrize("foreign", [Bigram, Recurrent])
def test_foreign_models_are_trained(bpe_tokenizer, foreign) -> None:
    model = ModelWrapper(foreign(bpe_tokenizer.vocab_size), bpe_tokenizer)
    keep = Keep()
    options = {"batch_size": 4, "max_length": 32, "steps": 25, "lr": 3e-2}
    result = Trainer(model, None, options, callbacks=[keep]).train(ROWS)
    assert result.metrics["loss"] < 0.5 * keep.steps[0]["loss"]
    assert keep.plan.recipe["data"]["packing"] == "none"
    assert any("segment_ids" in said for said in keep.plan.lacks)


def test_the_loss_of_a_model_with_hidden_states_is_that_of_its_logits(bpe_tokenizer) -> None:
    class LogitsOnly(nnx.Module):
        def __init__(self, inner) -> None:
            self.inner = inner

        def __call__(self, tokens):
            return self.inner(tokens)

    inner = Recurrent(bpe_tokenizer.vocab_size)
    one = Trainer(ModelWrapper(inner, bpe_tokenizer), bn.SFT(label_smoothing=0.1), SHORT).evaluate(ROWS)
    two = Trainer(ModelWrapper(LogitsOnly(inner), bpe_tokenizer), bn.SFT(label_smoothing=0.1), SHORT).evaluate(ROWS)
    np.testing.assert_allclose(one["eval_loss"], two["eval_loss"], rtol=1e-6)


def test_evaluation_does_not_depend_on_the_batch(make_tiny) -> None:
    model = make_tiny()
    losses = [
        Trainer(model, None, {**SHORT, "batch_size": size, "packing": packing}).evaluate(ROWS)["eval_loss"]
        for size, packing in ((1, True), (8, True), (5, False))
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_only_the_newest_adapters_are_trained(make_tiny, tmp_path: Path) -> None:
    """Also on layers that the newest ones are not on."""
    make_tiny().save(tmp_path / "base")
    model = bn.load(tmp_path / "base")
    model.add_lora(rank=4)
    Trainer(model, None, SHORT, out=tmp_path / "a").train(ROWS)
    second = bn.load(tmp_path / "a")
    second.add_lora(rank=2, targets=["q_proj"])
    block = second.decoder.runs[0].blocks[0].attn
    before = np.asarray(block.k_proj.adapters[0].b[...])
    Trainer(second, None, SHORT, out=tmp_path / "b").train(ROWS)
    np.testing.assert_array_equal(block.k_proj.adapters[0].b[...], before)
    assert np.abs(block.q_proj.adapters[1].b[...]).max() > 0


def test_runs_of_one_process_can_be_loaded_again(make_tiny, tmp_path: Path) -> None:
    make_tiny().save(tmp_path / "base")
    model = bn.load(tmp_path / "base")
    Trainer(model, None, SHORT, out=tmp_path / "a").train(ROWS)
    model.add_lora(rank=2)
    Trainer(model, None, SHORT, out=tmp_path / "b").train(ROWS)
    tokens = jnp.arange(3, 15)[None]
    np.testing.assert_array_equal(bn.load(tmp_path / "b")(tokens), model(tokens))


def test_a_run_that_could_not_be_loaded_again_is_refused(make_tiny, tmp_path: Path) -> None:
    model = make_tiny()
    Trainer(model, None, SHORT).train(ROWS)
    model.add_lora(rank=2)
    with pytest.raises(InputError, match="trained without a run directory"):
        Trainer(model, None, SHORT, out=tmp_path / "b").train(ROWS)


def test_defaults_run(make_tiny) -> None:
    """On a model whose context is shorter than the default row, too."""
    model = make_tiny()
    model.add_lora()
    trainer = Trainer(model)
    assert trainer.config.data.max_length == 256
    assert trainer.train(ROWS).steps == 1


def test_a_batch_that_devices_cannot_share_is_refused() -> None:
    with pytest.raises(InputError, match="6 rows cannot be shared by 4 devices; use a multiple of 4"):
        micro_batches(TrainConfig(batch_size=6), 4)
    assert micro_batches(TrainConfig(batch_size=24), 4) == 3


def test_logged_metrics_are_those_of_the_whole_batch(make_tiny) -> None:
    """Not means of micro-batches: cut in four, or whole, the same numbers are logged."""
    logged = []
    for accumulation in (1, 4):
        keep = Keep()
        options = {**SHORT, "accumulation": accumulation, "packing": False, "steps": 1}
        Trainer(make_tiny(), bn.SFT(z_loss=1e-3), options, callbacks=[keep]).train(ROWS)
        logged.append([keep.steps[0][name] for name in ("loss", "nll", "z_loss", "grad_norm", "trained_tokens")])
    np.testing.assert_allclose(logged[0], logged[1], rtol=1e-5)


class WithDropout(nnx.Module):
    def __init__(self, vocab: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(vocab, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.drop(self.table(tokens)))


def test_a_foreign_model_is_evaluated_without_its_dropout(bpe_tokenizer) -> None:
    module = WithDropout(bpe_tokenizer.vocab_size)
    model = ModelWrapper(module, bpe_tokenizer)
    assert any("dropout" in said for said in model.features.missing())
    loss = Trainer(model, None, SHORT).evaluate(ROWS)["eval_loss"]
    module.eval()
    assert loss == Trainer(model, None, SHORT).evaluate(ROWS)["eval_loss"]
    with pytest.warns(UserWarning, match="dropout is switched off"):
        Trainer(model, None, SHORT).train(ROWS)
