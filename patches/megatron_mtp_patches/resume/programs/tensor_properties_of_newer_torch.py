"""A GPT is saved, its tensors described as torch 2.15 does it, with their strides: Megatron reads names and
shapes of all tensors from the metadata.
"""

import tempfile
from pathlib import Path

from ...defects.labs.lab import make_config, make_gpt, start

EXPECTED = "all tensors"


def reproduce():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

    start()
    model = make_gpt(make_config())
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(model.sharded_state_dict(), folder)
        metadata = FileSystemReader(folder).read_metadata()
        tensors = [
            stored for stored in metadata.state_dict_metadata.values() if isinstance(stored, TensorStorageMetadata)
        ]
        for stored in tensors:
            stored.properties.strides = None  # what torch 2.15 has of a tensor that it knows no strides of
        read = TorchDistLoadShardedStrategy().load_tensors_metadata(Path(folder), metadata)
    return EXPECTED, EXPECTED if len(read) == len(tensors) else f"{len(read)} of {len(tensors)} tensors"
