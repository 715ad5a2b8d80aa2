"""A GPT with tied embeddings and an MTP head on two pipeline stages is saved."""

import tempfile

from ...defects.labs.lab import gather, make_config, make_gpt, start

RANKS = 2
EXPECTED = "a checkpoint"


def reproduce():
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    start(pipeline_model_parallel_size=2)
    config = make_config(mtp_num_layers=1, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = make_gpt(config, share_embeddings_and_output_weights=True)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    with tempfile.TemporaryDirectory() as own_folder:
        (folder, _) = gather(own_folder)
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), folder)
        torch.distributed.barrier()
    return EXPECTED, "a checkpoint"
