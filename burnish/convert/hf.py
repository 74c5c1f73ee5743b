"""Reads a Hugging Face model folder: `config.json` and safetensors, one file or many shards."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from burnish.convert.build import build_decoder
from burnish.convert.families import Place, family_of
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
    except RecursionError:
        raise InputError(f"{path}: JSON nested too deep") from None
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
    files = _find_tensors(folder)
    embed, head = (family.place(name, config).tensors[0] for name in ("embed.weight", "head.kernel"))
    if config.tie_embeddings and _differ(files, embed, head):
        # A file that says tied and holds a head of its own: transformers 5 believes the head.
        config = replace(config, tie_embeddings=False)

    def check_tensors(names: list[str]) -> None:
        wanted = {tensor for name in names for tensor in family.place(name, config).tensors}
        if missing := sorted(wanted - set(files)):
            raise InputError(f"{folder}: {_named(missing)} missing from the safetensors files")
        # A tied head may be there as a copy of the embedding.
        if surplus := sorted(name for name in set(files) - wanted - {head} if not name.endswith(_COMPUTED)):
            raise InputError(
                f"{folder}: {_named(surplus)} in the files, and config.json describes a model without; "
                "they do not belong together"
            )

    def read_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        place = family.place(name, config)
        turned = name.endswith("kernel")
        if len(place.tensors) == 1:
            array = read_one(place.tensors[0], place, shape[::-1] if turned else shape)
        else:
            wanted = shape[:0:-1] if turned else shape[1:]
            array = np.stack([read_one(tensor, place, wanted) for tensor in place.tensors])
        return array.swapaxes(-1, -2) if turned else array

    def read_one(tensor: str, place: Place, shape: tuple[int, ...]) -> np.ndarray:
        path = files[tensor]
        with _opened(path) as handle:
            try:
                stored = handle.get_slice(tensor)
                found = list(stored.get_shape())
                array = stored[:] if place.rows is None else stored[place.rows]
            except (SafetensorError, TypeError, AttributeError) as error:
                raise InputError(f"{path}: tensor {tensor} cannot be read ({error})") from None
        if array.dtype.kind in "iub":
            raise InputError(f"{path}: tensor {tensor} is {array.dtype}; only float weights are read")
        wanted = [place.height or shape[0], *shape[1:]]
        if found != wanted:
            raise InputError(f"{path}: tensor {tensor} is {found}; config.json asks for {wanted}")
        return array

    return build_decoder(config, read_tensor, dtype, check=check_tensors)


def _named(tensors: list[str]) -> str:
    """The first few of some tensors, as the subject of a sentence."""
    first = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
    return f"tensor {first} is" if len(tensors) == 1 else f"tensors {first} are"


_COMPUTED = (".rotary_emb.inv_freq",)
"""Tensors that old files hold and every reader computes itself."""


def _opened(path: Path) -> Any:
    """A safetensors file, mapped into memory until the `with` block ends.

    It is opened anew for each tensor: what was read would stay mapped, and so count as memory, as long as it is open.
    """
    try:
        return safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); copy it again") from None


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor; every file is opened once."""
    found: dict[str, Path] = {}
    shards = _shards(folder)
    for path in shards:
        if not path.exists():
            raise InputError(f"{path}: this shard is missing; copy it again ({len(shards)} shards are needed)")
        with _opened(path) as handle:
            found |= dict.fromkeys(handle.keys(), path)
    return found


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise InputError(f"{folder / INDEX}: weight_map must give a file of this folder for each tensor")
        return [folder / name for name in sorted(names)]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise InputError(
            f"{folder}: only safetensors are read, and the weights here are pickled; "
            "load them with transformers and write them anew with save_pretrained"
        )
    raise InputError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there; copy the weights into the folder")


def _differ(files: Mapping[str, Path], one: str, other: str, rows: int = 4096) -> bool:
    """Whether both tensors are there and unlike, compared some rows at a time."""
    if one not in files or other not in files:
        return False
    with _opened(files[one]) as first_file, _opened(files[other]) as second_file:
        first, second = first_file.get_slice(one), second_file.get_slice(other)
        if first.get_shape() != second.get_shape() or first.get_dtype() != second.get_dtype():
            return True
        count = first.get_shape()[0]
        parts = [slice(at, min(at + rows, count)) for at in range(0, count, rows)]
        return any(not np.array_equal(first[part], second[part]) for part in parts)
