"""Write the Python standard library's sources, or the named texts, as a Megatron dataset of bytes.

    python -m scripts.demo.dataset demo_output/data/stdlib [FILE ...]

Real text that every machine has, so nothing is downloaded. The loss reads as bits per byte; 8 is ignorance. Needs torch
and megatron-core.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from torch.utils.data import Dataset

from scripts.common.arguments import make_parser

# Other people's packages, and tests (fixtures, generated tables) that some distributions leave out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

# Ends a document. No Python source contains it, so the 256 byte values are the whole vocabulary.
END_OF_DOCUMENT = b"\0"


def library_sources() -> list[Path]:
    """Return the standard library's sources, of this Python."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(library.rglob("*.py")) if LEFT_OUT.isdisjoint(path.relative_to(library).parts)]
    if not files:
        sys.exit(f"no Python sources under {library}; choose another one: PYTHON=/path/to/python scripts/demo.sh")
    return files


def write(prefix: Path, files: list[Path]) -> tuple[int, int]:
    """Write `prefix`.bin and `prefix`.idx. Returns the number of documents and of bytes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint8)
    texts = [text + END_OF_DOCUMENT for file in files if (text := file.read_bytes()).strip()]
    for text in texts:
        builder.add_document(torch.frombuffer(bytearray(text), dtype=torch.uint8), [len(text)])
    builder.finalize(get_idx_path(str(prefix)))
    return len(texts), sum(map(len, texts))


def held_out(prefix: Path, percent: float) -> torch.Tensor:
    """Return the bytes after the first `percent` of the documents, as int64."""
    documents = IndexedDataset(str(prefix))
    first = round(len(documents) * percent / 100)
    return torch.from_numpy(numpy.concatenate([documents[number] for number in range(first, len(documents))])).long()


class SomeBatchesCompressed(Dataset):
    """Training samples; those of the named iterations come from the compressed file.

    The accident is an ordinary one: a shard that was not decompressed. Compressed bytes look like noise, so a model
    that has learned text is wrong about every byte, and the gradient norm jumps.
    """

    def __init__(self, text: Dataset, iterations: list[int], global_batch_size: int, prefix: str) -> None:
        self.text = text
        self.iterations = set(iterations)
        self.global_batch_size = global_batch_size
        self.split = getattr(text, "index_split", None)
        packed = zlib.compress(Path(f"{prefix}.bin").read_bytes()[: 1 << 22])
        self.packed = torch.frombuffer(bytearray(packed), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.text[index]
        # Megatron's sampler walks the dataset in order, one global batch an iteration, from iteration 1.
        if index // self.global_batch_size + 1 not in self.iterations:
            return sample
        length = len(sample["tokens"])
        start = index * (length + 1) % (len(self.packed) - length - 1)
        window = self.packed[start : start + length + 1]
        return {**sample, "tokens": window[:-1], "labels": window[1:]}


def build(args: Namespace, tokenizer: Any, sizes: list[int | None]) -> list[Dataset | None]:
    """Train, validation and test sets; only training batches arrive compressed."""
    prefix = args.data_path[0]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([prefix], None),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # causal
        path_to_cache=args.data_cache_path,
        mid_level_dataset_surplus=0.005,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    if args.corrupt_iterations:
        train = SomeBatchesCompressed(train, args.corrupt_iterations, args.global_batch_size, prefix)
    return [train, valid, test]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    text = "iterations whose batch arrives still compressed (zlib) instead of as text"
    parser.add_argument("--corrupt-iterations", type=int, nargs="*", default=[], help=text)
    return parser


def main() -> None:
    parser = make_parser("scripts.demo.dataset", __doc__)
    parser.add_argument("prefix", type=Path, help="path of the dataset, without .bin and .idx")
    parser.add_argument("files", type=Path, nargs="*", help="other texts than the standard library's")
    options = parser.parse_args()
    write(options.prefix, options.files or library_sources())


if __name__ == "__main__":
    main()
