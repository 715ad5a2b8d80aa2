"""Two interleaved pipeline stages with two chunks each and four microbatches: how many of the tensors that a rank sends
are still in memory when it waits for the send.
"""

from ...defects.labs.lab import LENGTH, make_config, make_gpt, start, tokens

RANKS = 2


def reproduce():
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch.multiprocessing.reductions import StorageWeakRef

    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    start(**sizes)
    settings = {"num_layers": 4, "pipeline_dtype": torch.float32, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    config = make_config(deallocate_pipeline_outputs=True, **settings, **sizes)
    rank = torch.distributed.get_rank()
    chunks = []
    for chunk in (0, 1):
        ends = {"pre_process": (rank, chunk) == (0, 0), "post_process": (rank, chunk) == (1, 1)}
        chunks.append(make_gpt(config, vp_stage=chunk, **ends))
        chunks[-1].model_type = ModelType.encoder_or_decoder
    in_memory = []
    isend = torch.distributed.isend

    class Watched:
        def __init__(self, request, tensor):
            self.request, self.memory = request, StorageWeakRef(tensor.untyped_storage())

        def wait(self):
            in_memory.append(not self.memory.expired())
            self.request.wait()

    def watched_isend(tensor, *args, **kwargs):
        return Watched(isend(tensor, *args, **kwargs), tensor)

    torch.distributed.isend = watched_isend
    ids, positions = tokens()

    def forward_step(_, model):
        return model(ids, positions, None, labels=ids), lambda losses: (losses.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(()), iter(())],
        model=chunks,
        num_microbatches=4,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    return len(in_memory), sum(in_memory)
