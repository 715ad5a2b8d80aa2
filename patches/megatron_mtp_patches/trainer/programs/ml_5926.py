"""The number of parameters that train in a GPT that a ModelBuilder has built for a run with --freeze-all-layers."""

from ...defects.labs.lab import LENGTH, VOCABULARY, make_config, start


def reproduce():
    from types import SimpleNamespace

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars, training
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    start()
    sizes = {"vocab_size": VOCABULARY, "seq_length": LENGTH, "position_embedding_type": "rope"}
    config = GPTModelConfig(
        transformer=make_config(), transformer_layer_spec=lambda _: get_gpt_layer_local_spec(), **sizes
    )
    global_vars._GLOBAL_ARGS = SimpleNamespace(freeze_all_layers=True)
    if hasattr(training, "_freeze_all_model_chunks"):  # on main the trainer adds it
        config.pre_wrap_hooks.append(training._freeze_all_model_chunks)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = GPTModelBuilder(config).build_distributed_models(groups, DistributedDataParallelConfig())
    return 0, sum(param.requires_grad for model in models for param in model.parameters())
