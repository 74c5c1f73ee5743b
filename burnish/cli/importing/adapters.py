"""Keys of PEFT's LoRA, which both tools hand on."""

from burnish.cli.importing.keys import Draft, Keys

_ALL_LINEAR = ("all", "all-linear")


def read_lora(keys: Keys, draft: Draft, *, rank: str, targets: str, rslora: str) -> None:
    """Translates rank, alpha, dropout and targets, by the tool's names of them, into `adapter`."""
    draft.put("adapter.kind", "lora")
    draft.put("adapter.rank", keys.whole(rank))
    draft.put("adapter.alpha", keys.number("lora_alpha"))
    draft.put("adapter.dropout", keys.number("lora_dropout"))
    draft.put("adapter.rslora", keys.flag(rslora))
    layers = keys.names(targets)
    if not layers or any(layer in _ALL_LINEAR for layer in layers):
        return  # all of every block: Burnish's default
    if all(layer.replace(".", "").isidentifier() for layer in layers):
        draft.put("adapter.targets", layers)
    else:
        keys.refuse(
            targets, "a pattern; write selectors as adapter.targets: [q_proj, v_proj]. All linear layers for now"
        )


def refuse_lora(keys: Keys, why: str) -> None:
    """Lists what is said of adapters where there are none."""
    for key, value in keys.tree.items():
        if key.startswith(("lora_", "peft_", "loraplus_")) and value:
            keys.refuse(key, why)
