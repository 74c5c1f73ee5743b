"""Which remat policy a run takes: by what is free, by what was asked, and by what it took before."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import burnish as bn
import burnish.train.memory
import burnish.train.remat
import burnish.train.trainer
from burnish.errors import InputError
from burnish.train.callbacks import Callback
from burnish.train.config import TrainConfig
from burnish.train.memory import StepMemory, _available, _left_in, _left_in_group, _left_to_address, free_bytes
from burnish.train.remat import choose_remat
from burnish.train.trainer import Trainer

GIB = 2**30
POLICIES = ("none", "selective", "offload", "block")
NEEDS = {"none": 40, "selective": 20, "offload": 12, "block": 4, None: 30}  # GiB beside the model, which has 100


class Compiler:
    """Makes programs that need what NEEDS says, and notes for which policies it was asked."""

    def __init__(self) -> None:
        self.tried: list[Any] = []

    def __call__(self, policy: Any) -> Any:
        self.tried.append(policy)
        return SimpleNamespace(policy=policy, memory=StepMemory(100 * GIB, NEEDS[policy] * GIB))


def device(platform: str, stats: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


def with_free(gib: float) -> Any:
    """An accelerator with so much left."""
    return device("gpu", {"bytes_limit": 200 * GIB, "bytes_in_use": int((200 - gib) * GIB)})


# Four fifths of what is free are filled.
@pytest.mark.parametrize(
    ("free", "taken"),
    [
        (90, "none"),
        (50.1, "none"),
        (49.9, "selective"),
        (25.1, "selective"),
        (24.9, "offload"),
        (15.1, "offload"),
        (14.9, "block"),
        (5.1, "block"),
    ],
)
def test_an_accelerator_takes_the_fastest_that_fits(free: float, taken: str) -> None:
    compile_with = Compiler()
    programs, choice = choose_remat("auto", compile_with, takes_policy=True, devices=[with_free(free)])
    assert programs.policy == choice.policy == taken
    assert compile_with.tried == list(POLICIES[: POLICIES.index(taken) + 1])  # no slower one is compiled
    assert choice.reason == f"needs {NEEDS[taken]}.00 GiB beside the model, {free:.2f} GiB are free"


@pytest.mark.parametrize(
    ("free", "tried"), [(90, ["selective"]), (25.1, ["selective"]), (24.9, ["selective", "block"])]
)
def test_a_cpu_takes_selective_or_block(monkeypatch: pytest.MonkeyPatch, free: float, tried: list[str]) -> None:
    monkeypatch.setattr(burnish.train.remat, "free_bytes", lambda device: int(free * GIB))
    compile_with = Compiler()
    programs, choice = choose_remat("auto", compile_with, takes_policy=True, devices=[device("cpu")])
    assert programs.policy == choice.policy == tried[-1]
    assert compile_with.tried == tried


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("free", [0, 4])
def test_where_nothing_fits_block_is_taken_with_a_mend(
    monkeypatch: pytest.MonkeyPatch, platform: str, free: int
) -> None:
    monkeypatch.setattr(burnish.train.remat, "free_bytes", lambda device: free * GIB)
    programs, choice = choose_remat("auto", Compiler(), takes_policy=True, devices=[device(platform)])
    assert programs.policy == choice.policy == "block"
    assert choice.reason == (
        f"needs 4.00 GiB beside the model, only {free}.00 GiB are free; should it run out, lower train.batch_size or "
        "raise train.accumulation"
    )


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_selective_where_nobody_says_what_is_free(stats: dict[str, int] | None) -> None:
    compile_with = Compiler()
    programs, choice = choose_remat("auto", compile_with, takes_policy=True, devices=[device("gpu", stats)])
    assert programs.policy == choice.policy == "selective" and compile_with.tried == ["selective"]
    assert "not known" in choice.reason


@pytest.mark.parametrize("asked", POLICIES)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_asked_is_taken_whatever_is_free(asked: Any, platform: str) -> None:
    compile_with = Compiler()
    full = device(platform, {"bytes_limit": 8, "bytes_in_use": 8})
    programs, choice = choose_remat(asked, compile_with, takes_policy=True, devices=[full])
    assert programs.policy == choice.policy == asked and compile_with.tried == [asked]
    assert choice.reason.startswith("as asked")
    assert ("host's" in choice.reason) == (asked == "offload" and platform == "cpu")


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_a_module_that_takes_none_goes_its_own_way(asked: Any) -> None:
    compile_with = Compiler()
    programs, choice = choose_remat(asked, compile_with, takes_policy=False, devices=[with_free(1)])
    assert compile_with.tried == [None] and programs.policy is choice.policy is None


@pytest.mark.parametrize("asked", ["selective", "offload", "block"])
def test_a_policy_for_a_module_that_takes_none_is_refused(asked: Any) -> None:
    compile_with = Compiler()
    with pytest.raises(InputError, match=f"train.remat: {asked} is for .*; leave it out") as caught:
        choose_remat(asked, compile_with, takes_policy=False, devices=[with_free(90)])
    assert "\n" not in str(caught.value) and compile_with.tried == []


def test_memory_of_a_program() -> None:
    """The donated argument's memory is used again: what is extra is the second output, and temporaries."""
    step = jax.jit(lambda x: (x + 1, jnp.cumsum(x)), donate_argnums=0)
    memory = StepMemory.of(step.lower(jax.ShapeDtypeStruct((1000,), jnp.float32)).compile())
    assert memory.arguments == 4000 and memory.extra >= 4000 and memory.total == 4000 + memory.extra

    sizes = SimpleNamespace(
        argument_size_in_bytes=100, output_size_in_bytes=70, alias_size_in_bytes=60, temp_size_in_bytes=7
    )
    assert StepMemory.of(SimpleNamespace(memory_analysis=lambda: sizes)) == StepMemory(arguments=100, extra=17)
    assert StepMemory.of(SimpleNamespace(memory_analysis=lambda: None)) == StepMemory(arguments=0, extra=0)
    assert StepMemory(1, 9).or_more(StepMemory(5, 2)) == StepMemory(5, 9)


@pytest.mark.parametrize(
    ("available", "left", "free"), [(70, 30, 30), (30, 70, 30), (70, None, 70), (None, 30, 30), (None, None, None)]
)
def test_a_cpu_has_the_less_of_what_kernel_and_container_allow(
    monkeypatch: pytest.MonkeyPatch, available: int | None, left: int | None, free: int | None
) -> None:
    monkeypatch.setattr(burnish.train.memory, "_available", lambda: available)
    monkeypatch.setattr(burnish.train.memory, "_left_in_group", lambda: left)
    assert free_bytes(device("cpu")) == free
    assert free_bytes(device("gpu")) is None  # the host's memory is none of an accelerator's
    assert free_bytes(device("gpu", {"bytes_limit": 100, "bytes_in_use": 45})) == 55


def test_this_machine_has_memory() -> None:
    free = free_bytes(jax.devices("cpu")[0])
    assert free is None or 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_limit_on_addresses_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "statm"
    status.write_text("3 2 1 0 0 0 0\n")
    limits = {"none": resource.RLIM_INFINITY, "some": 5 * resource.getpagesize(), "passed": resource.getpagesize()}
    left = {}
    for name, limit in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, resource.RLIM_INFINITY))
        left[name] = _left_to_address(status)
    assert left == {"none": None, "some": 2 * resource.getpagesize(), "passed": 0}
    monkeypatch.setattr(burnish.train.memory, "_left_to_address", lambda: 7)
    assert free_bytes(jax.devices("cpu")[0]) == 7


def test_what_the_kernel_calls_available(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    assert _available(table) is None
    table.write_text("MemTotal:       8000 kB\nMemFree:         100 kB\n")
    assert _available(table) is None
    table.write_text("MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   3000 kB\nBuffers:   7 kB\n")
    assert _available(table) == 3_072_000


def test_what_a_control_group_has_left(tmp_path: Path) -> None:
    assert _left_in(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 350\nfile 250\nactive_file 50\ninactive_file 200\n")
    assert _left_in(tmp_path) is None  # no limit
    (tmp_path / "memory.max").write_text("1000\n")
    assert _left_in(tmp_path) == 600  # 400 not used, and 200 of files that nobody has looked at lately
    (tmp_path / "memory.stat").write_text("anon 350\n")
    assert _left_in(tmp_path) == 400


def test_the_groups_above_count_too(tmp_path: Path) -> None:
    root, mine = tmp_path / "cgroup", tmp_path / "mine"
    for folder, limit in (("", "max"), ("slurm", "900"), ("slurm/job", "2000")):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "memory.max").write_text(limit)
        (root / folder / "memory.current").write_text("300")
        (root / folder / "memory.stat").write_text("inactive_file 0\n")
    assert _left_in_group(root, mine) is None
    mine.write_text("0::/slurm/job\n")
    assert _left_in_group(root, mine) == 600
    mine.write_text("0::/\n")
    assert _left_in_group(root, mine) is None
    mine.write_text("1:cpu:/slurm\n")  # version 1 alone
    assert _left_in_group(root, mine) is None


def test_a_compiler_that_says_it_does_not_fit_is_believed() -> None:
    def compile_with(policy):
        if policy in ("none", "selective"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20 GiB of 16")
        return SimpleNamespace(memory=StepMemory(1, 1))

    device = SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 0})
    _, choice = choose_remat("auto", compile_with, takes_policy=True, devices=[device])
    assert choice.policy == "offload"

    def broken(policy):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        choose_remat("auto", broken, takes_policy=True, devices=[device])


def test_devices_that_are_one_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burnish.train.remat, "free_bytes", lambda device: 1000)
    cpu = SimpleNamespace(platform="cpu")
    programs = {"selective": SimpleNamespace(memory=StepMemory(0, 200)), "block": SimpleNamespace(memory=StepMemory())}
    for count, policy in ((4, "selective"), (5, "block")):
        _, choice = choose_remat("auto", programs.__getitem__, takes_policy=True, devices=[cpu] * count)
        assert choice.policy == policy


def test_runs_of_earlier_versions_said_true_or_false() -> None:
    assert TrainConfig(remat=True).remat == "block"
    assert TrainConfig(remat=False).remat == "none"


def test_a_run_records_its_policy_and_a_resumed_one_keeps_to_it(
    make_tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[Any] = []
    plans: list[Any] = []

    class Watch(Callback):
        def on_start(self, plan) -> None:
            events.append("start")
            plans.append(plan)

    def train_step(*args: Any, remat: Any, **named: Any) -> Any:
        events.append(remat)
        return step(*args, remat=remat, **named)

    def run(free: int, *, resume: bool = False, **options: Any) -> None:
        monkeypatch.setattr(burnish.train.remat, "free_bytes", lambda device: free)
        options = {"batch_size": 2, "max_length": 16, "steps": 1, "holdout": 0.0, "tensorboard": False, **options}
        model = bn.load(tmp_path / "base")
        model.add_lora(rank=2)
        trainer = Trainer(model, None, options, out=tmp_path / "run", callbacks=[Watch()])
        trainer.train([{"prompt": "1?", "completion": "1!"}] * 4, resume=resume)

    step = burnish.train.trainer.train_step
    monkeypatch.setattr(burnish.train.trainer, "train_step", train_step)
    monkeypatch.setattr(burnish.train.trainer, "keep_programs", lambda: events.append("keep"))
    monkeypatch.setattr(burnish.train.trainer, "share_programs", lambda: events.append("share"))
    make_tiny(num_layers=1).save(tmp_path / "base")

    run(free=2**50)
    assert events == ["keep", "selective", "share", "start"]  # programs are kept, whatever comes after
    assert plans[0].remat.policy == plans[0].recipe["train"]["remat"] == "selective"
    assert "1048576.00 GiB are free" in plans[0].remat.reason and plans[0].memory.extra > 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]["remat"] == "selective"

    events.clear()
    run(free=1, resume=True)
    assert events == ["keep", "selective", "share", "start"]
    assert plans[1].done == 1 and plans[1].remat.policy == plans[1].recipe["train"]["remat"] == "selective"

    with pytest.raises(InputError, match=r"train\.remat is 'block', and was 'selective' before") as caught:
        run(free=1, resume=True, remat="block")
    assert "\n" not in str(caught.value) and len(plans) == 2
