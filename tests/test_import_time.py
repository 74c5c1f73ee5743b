"""`burnish --help` answers at once, and importing burnish brings in nothing heavy."""

import json
import statistics
import subprocess
import sys

HEAVY = ("torch", "tensorflow", "transformers", "httpx", "requests", "aiohttp", "huggingface_hub")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_no_name_of_the_package_brings_in_another_framework_or_a_web_client() -> None:
    code = f"""
import sys, json, burnish
for name in burnish.__all__:
    getattr(burnish, name)
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


def test_importing_burnish_adds_little_to_jax_and_flax() -> None:
    code = """
import time, jax, flax.nnx
began = time.perf_counter()
import burnish
print(time.perf_counter() - began)
"""
    assert statistics.median(float(run_python(code)) for _ in range(3)) < 0.3


def test_help_does_not_wait_for_jax() -> None:
    code = """
import sys
sys.argv = ["burnish", "--help"]
from burnish.cli.main import main
try:
    main()
except SystemExit:
    pass
print("jax" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sft" in done.stdout and done.stderr.strip() == "False"
