"""Reads a Hugging Face model folder: `config.json` and safetensors, one file or many shards."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from burnish.convert.build import build_decoder
from burnish.convert.families import family_of
from burnish.errors import InputError
from burnish.models.decoder import Decoder

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError names the file and the line that is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: broken JSON at line {error.lineno}: {error.msg}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object is expected, found {type(content).__name__}")
    return content


def load_hf_decoder(folder: Path, dtype: Any) -> Decoder:
    """The decoder of a Hugging Face folder, parameters in `dtype`.

    Raises InputError for an unknown family, a missing or cut shard, a missing tensor or one of another shape.
    """
    hf = read_json(folder / CONFIG)
    family = family_of(hf, str(folder / CONFIG))
    config = family.from_hf(hf, str(folder / CONFIG))
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)

        def read_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
            file_name = family.weight_name(name)
            if file_name not in tensors:
                raise InputError(f"{folder}: tensor {file_name} is missing from the safetensors files")
            path, handle = tensors[file_name]
            try:
                array = handle.get_tensor(file_name)
            except (SafetensorError, TypeError, AttributeError) as error:
                raise InputError(f"{path}: tensor {file_name} cannot be read ({error})") from None
            if array.dtype.kind in "iu":
                raise InputError(f"{path}: tensor {file_name} is {array.dtype}; only float weights are read")
            array = array.T if name.endswith("kernel") else array
            if array.shape != shape:
                wanted = shape[::-1] if name.endswith("kernel") else shape
                found = array.shape[::-1] if name.endswith("kernel") else array.shape
                raise InputError(f"{path}: tensor {file_name} is {list(found)}; config.json asks for {list(wanted)}")
            return array

        return build_decoder(config, read_tensor, dtype)


def _open_tensors(folder: Path, stack: ExitStack) -> Mapping[str, tuple[Path, Any]]:
    """Opens every shard (memory-mapped) and says which holds which tensor."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{folder / INDEX}: no weight_map; copy the index again")
        shards = sorted(set(weight_map.values()))
    elif (folder / WEIGHTS).exists():
        shards = [WEIGHTS]
    else:
        raise InputError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there; copy the weights into the folder")
    tensors: dict[str, tuple[Path, Any]] = {}
    for shard in shards:
        path = folder / shard
        if not path.exists():
            raise InputError(f"{path}: this shard is missing; copy it again ({len(shards)} shards are needed)")
        try:
            handle = stack.enter_context(safe_open(path, "np"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({error}); copy it again") from None
        tensors |= {name: (path, handle) for name in handle.keys()}
    return tensors
