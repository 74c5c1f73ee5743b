"""The mesh, and the one table of rules that maps logical axis names of parameters and batches to it.

One device is a mesh of one: nothing in training asks how many there are.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from burnish.distributed.config import MeshConfig
from burnish.errors import InputError

# Fully sharded data parallelism (Rajbhandari et al. 2020, arXiv 1910.02054): every matrix has one `embed` side, and
# that side is cut; rows of a batch are cut over all devices.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "layers": None,
    "vocab": None,
    "heads": None,
    "kv_heads": None,
    "mlp": None,
    "norm": None,
    "expert": None,
    "rank": None,
}


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh with axes data and fsdp over all devices; InputError when they do not multiply to the device count."""
    count = jax.device_count()
    fsdp = config.fsdp or count // config.data
    if config.data * fsdp != count:
        raise InputError(f"mesh: data={config.data} times fsdp={fsdp} is not the number of devices, {count}")
    return jax.make_mesh((config.data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def batch_shards(mesh: Mesh) -> int:
    """Into how many pieces the rows of a batch are cut."""
    return math.prod(mesh.shape[name] for name in ("data", "fsdp"))


def parameter_sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Where a parameter with these logical axes lives. A side that the mesh does not divide is kept whole."""
    spec = []
    for name, size in zip(axes, shape, strict=True):
        rule = RULES[name] if name is not None else None
        divides = isinstance(rule, str) and size % mesh.shape[rule] == 0
        spec.append(rule if divides else None)
    return NamedSharding(mesh, P(*spec))


def batch_sharding(mesh: Mesh, *, micro_batches: bool) -> NamedSharding:
    """Rows cut over all devices: arrays [rows, length], or [micro_batches, rows, length]."""
    return NamedSharding(mesh, P(None, RULES["batch"]) if micro_batches else P(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, P())
