"""FSDP2 around a model that does not train as a whole."""

import importlib

import pytest


class Reached(Exception):
    pass


@pytest.fixture
def shard(monkeypatch):
    """shard(config, model): have FSDP2 wrap the model, up to where it cuts weights into shards, which needs a GPU."""
    fsdp = importlib.import_module("megatron.core.distributed.torch_fully_sharded_data_parallel")

    def stop(*_, **__):
        raise Reached

    def wrap(config, model):
        with pytest.raises(Reached):
            fsdp.TorchFullyShardedDataParallel(config, None, model)

    monkeypatch.setattr(fsdp, "fully_shard", stop)
    return wrap
