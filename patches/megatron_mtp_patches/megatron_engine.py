"""The engine that applies the catalog to Megatron: one for the process, which knows what it has patched."""

from pathlib import Path

from .catalog import BASE, CATALOG
from .engine import Project
from .engine.engine import Engine

ENGINE = Engine(
    Project(
        package=__package__,
        library="Megatron",
        library_package="megatron",
        repository="NVIDIA/Megatron-LM",
        # The wheel of 0.16.1 has no trainer, nor the tokenizer of --sft, which is in its trainer.
        optional_parts=("megatron.training", "megatron.core.tokenizers.text.libraries"),
    ),
    CATALOG,
    str(Path(__file__).with_name("fingerprints.json")),
    base=BASE,
)
