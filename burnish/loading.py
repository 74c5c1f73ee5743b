"""`burnish.load`: from a name to a model, whatever the name means."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from burnish.adapt.vocabulary import VocabularyConfig, learn_tokens
from burnish.compilation import keep_programs
from burnish.config import build_config
from burnish.convert.builtin import BUILT_IN, cached_model
from burnish.convert.families import family_of
from burnish.convert.gguf import gguf_metadata, load_gguf_decoder, open_gguf
from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.convert.hf import CONFIG, load_hf_decoder, read_json
from burnish.data.fit import with_recipe_template
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError
from burnish.wrapper import ModelWrapper, Origin, float_dtype

RUN_CONFIG = "config.yaml"  # what marks a run directory (`burnish.train.run_folder`)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(source: str | Path, *, dtype: Any = None, compute_dtype: Any = None) -> ModelWrapper:
    """Loads a model with its tokenizer.

    source: a built-in name (`smollm2-135m`), a Hugging Face folder, a PEFT adapter folder, a `.gguf` file, a run
    directory, or the id of a model on the Hub (`org/name`). dtype: of parameters, by default float32 on a CPU and
    bfloat16 elsewhere. compute_dtype: of activations and matrix products, by default that of the parameters. Raises
    InputError when the source is none of these or is broken.
    """
    keep_programs()
    dtype = float_dtype(dtype) if dtype is not None else default_dtype()
    path = locate(source)
    name = str(path.resolve()) if Path(source).expanduser().exists() else str(source)
    model = _load(path, name, dtype)
    if compute_dtype is not None:
        model.compute_in(compute_dtype)
    return model


def _load(path: Path, name: str, dtype: Any) -> ModelWrapper:
    if path.suffix == ".gguf":
        return _checked(_load_gguf(name, path, dtype))
    if (path / RUN_CONFIG).exists():
        from burnish.train.runs import load_run

        return load_run(path, load, dtype)
    if (path / "adapter_config.json").exists():
        from burnish.convert.peft import load_peft

        return load_peft(path, load, dtype)
    return _checked(_load_hf(name, path, dtype))


def load_tokenizer(source: str | Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer that `load` gives a model, and the longest text the model takes, in tokens; reads no weights.

    The chat template that a run was trained with goes along. None where a file does not say how long a text may be.
    Raises InputError as `load` does for what is not there or cannot be read.
    """
    path = locate(source)
    if path.suffix == ".gguf":
        reader = open_gguf(path)
        metadata = gguf_metadata(reader)
        return tokenizer_from_gguf(reader), metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if (path / RUN_CONFIG).exists():
        return _run_tokenizer(path)
    if (path / "adapter_config.json").exists():
        place = path / "adapter_config.json"
        base = read_json(place).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise InputError(f"{place}: base_model_name_or_path is missing; name the model it was trained on")
        tokenizer, context = load_tokenizer(base)
        return (Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else tokenizer), context
    hf = read_json(path / CONFIG)
    config = family_of(hf, str(path / CONFIG)).from_hf(hf, str(path / CONFIG))
    return Tokenizer.from_folder(path), config.max_length


def _run_tokenizer(path: Path) -> tuple[Tokenizer, int | None]:
    from burnish.train.run_folder import read_recipe

    recipe = read_recipe(path)
    base = recipe.get("model")
    if not isinstance(base, str) or base == str(path.resolve()):
        raise InputError(f"{path / RUN_CONFIG}: model is {base!r}; it must name what the run started from")
    tokenizer, context = load_tokenizer(base)
    asked = build_config(VocabularyConfig, recipe.get("vocabulary") or {}, place=f"{path / RUN_CONFIG}: vocabulary")
    tokenizer, _ = learn_tokens(tokenizer, asked.add_tokens)
    return with_recipe_template(tokenizer, recipe), context


def _checked(model: ModelWrapper) -> ModelWrapper:
    """Refuses a tokenizer that gives ids the model has no embedding for."""
    vocab, ids = model.decoder.config.vocab_size, model.require_tokenizer().vocab_size
    if ids > vocab:
        raise InputError(
            f"{model.origin.source}: its tokenizer has {ids} ids and the model {vocab} embeddings; "
            "they do not belong together"
        )
    return model


def default_dtype() -> Any:
    """float32 on a CPU, where bfloat16 is slow; bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def locate(source: str | Path) -> Path:
    """The file or folder that a name stands for. Looks at the disk, then the built-in names, then the Hub."""
    name, path = str(source), Path(source).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else _refuse(path)
    if path.is_dir():
        known = (CONFIG, "adapter_config.json", RUN_CONFIG)
        return path if any((path / part).exists() for part in known) else _refuse(path)
    if name in BUILT_IN:
        if not cached_model(name).exists():
            raise InputError(f"{name}: not fetched yet; run `burnish fetch {name}`")
        return cached_model(name)
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name)
    raise InputError(f"{name}: no such file or folder, and no built-in model ({', '.join(BUILT_IN)})")


def _refuse(path: Path) -> Path:
    raise InputError(
        f"{path}: not a model; give a folder with config.json, a PEFT folder, a run directory or a .gguf file"
    )


def _from_hub(name: str) -> Path:
    """The local snapshot of a Hub model, downloaded if it is not in the Hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["README.md", "*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{name}: no such folder, and the Hub did not give it ({reason})") from None


def _load_gguf(source: str, path: Path, dtype: Any) -> ModelWrapper:
    reader = open_gguf(path)
    decoder = load_gguf_decoder(path, reader, dtype)
    return ModelWrapper(decoder, tokenizer_from_gguf(reader), Origin(source, path=path, family=decoder.config.family))


def _load_hf(source: str, path: Path, dtype: Any) -> ModelWrapper:
    decoder = load_hf_decoder(path, dtype)
    generation = path / "generation_config.json"
    origin = Origin(
        source,
        path=path,
        family=decoder.config.family,
        hf_config=read_json(path / CONFIG),
        generation_config=read_json(generation) if generation.exists() else {},
    )
    return ModelWrapper(decoder, Tokenizer.from_folder(path), origin)
