"""Megatron reads names and shapes of a checkpoint's tensors whatever else torch has written of them."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("read-tensor-metadata-of-newer-torch")]


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a GPT, and its tensors as {name: shape}."""
    from megatron.core import dist_checkpointing
    from megatron_mtp_patches.defects.labs import lab

    tensors = lab.make_gpt(lab.make_config()).sharded_state_dict()
    dist_checkpointing.save(tensors, tmp_path)
    return tmp_path, {tensor.key: tuple(tensor.global_shape) for tensor in tensors.values() if hasattr(tensor, "dtype")}


def test_names_and_shapes_are_read_from_a_folder(checkpoint):
    from megatron.core import dist_checkpointing

    folder, shapes = checkpoint
    tensors = dist_checkpointing.load_tensors_metadata(str(folder))
    assert {name: tuple(tensor.global_shape) for name, tensor in tensors.items()} == shapes


def test_a_property_of_a_newer_torch_is_left_out_and_stays_where_it_was(checkpoint):
    import torch
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint import FileSystemReader

    folder, shapes = checkpoint
    metadata = FileSystemReader(folder).read_metadata()
    for stored in metadata.state_dict_metadata.values():
        if hasattr(stored, "properties"):
            stored.properties.strides = (1,)
            stored.properties.dtype = torch.bfloat16
    tensors = TorchDistLoadShardedStrategy().load_tensors_metadata(Path(folder), metadata)
    assert tensors.keys() == shapes.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    left = [
        stored.properties.strides for stored in metadata.state_dict_metadata.values() if hasattr(stored, "properties")
    ]
    assert set(left) == {(1,)}
