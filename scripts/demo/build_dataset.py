"""Write the Python standard library's own sources as a Megatron dataset of bytes.

Real text that every machine has, so nothing is downloaded. The loss reads as bits per byte; 8 is ignorance.

    python scripts/demo/build_dataset.py demo_output/data/stdlib
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

# Other people's packages, and tests (fixtures, generated tables) that some distributions leave out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

# Ends a document. No Python source contains it, so the 256 byte values are the whole vocabulary.
END_OF_DOCUMENT = b"\0"


def source_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))


def documents(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        text = path.read_bytes()
        if text.strip():
            yield text + END_OF_DOCUMENT


def build(prefix: Path, files: list[Path]) -> tuple[int, int]:
    """Write `prefix`.bin and `prefix`.idx. Returns the number of documents and of bytes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint8)
    n_documents = n_bytes = 0
    for document in documents(files):
        builder.add_document(torch.frombuffer(bytearray(document), dtype=torch.uint8), [len(document)])
        n_documents += 1
        n_bytes += len(document)
    builder.finalize(get_idx_path(str(prefix)))
    return n_documents, n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="path of the dataset, without .bin and .idx")
    parser.add_argument("files", type=Path, nargs="*", help="other texts than the standard library's")
    options = parser.parse_args()
    root = Path(sysconfig.get_path("stdlib"))
    files = options.files or source_files(root)
    if not files:
        parser.error(
            f"no Python sources under {root}. This Python was installed without its library's sources: "
            "choose another one with PYTHON=/path/to/python scripts/demo.sh"
        )
    n_documents, n_bytes = build(options.prefix, files)
    print(
        f"{n_documents} source files, {n_bytes / 1e6:.1f} million bytes -> {options.prefix}.bin, {options.prefix}.idx"
    )


if __name__ == "__main__":
    main()
