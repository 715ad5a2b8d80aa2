"""dist_muon is saved after a step with two experts, each of which both tensor-parallel ranks have."""

import tempfile

from ...defects.labs.lab import gather, make_config, make_ddp, make_gpt, make_optimizer, start, take_step

RANKS = 2
NEEDS = ("transformer-engine", "Muon")
EXPECTED = "a checkpoint"


def reproduce():
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    start(**sizes)
    config = make_config(num_moe_experts=2, sequence_parallel=True, add_bias_linear=False, **sizes)
    model = make_ddp(config, make_gpt(config, transformer_engine=True).bfloat16())
    optimizer = make_optimizer(model, optimizer="dist_muon", bf16=True)
    take_step(model, optimizer)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = model.sharded_state_dict(metadata=metadata)
    with tempfile.TemporaryDirectory() as own_folder:
        (folder, _) = gather(own_folder)
        dist_checkpointing.save({"optimizer": optimizer.sharded_state_dict(weights, metadata=metadata)}, folder)
        torch.distributed.barrier()
    return EXPECTED, "a checkpoint"
