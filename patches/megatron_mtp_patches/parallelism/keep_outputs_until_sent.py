"""Declares keep-outputs-until-sent."""

from ..engine import Patch, Probe, PullRequest, Wrap

PATCH = Patch(
    id="keep-outputs-until-sent",
    summary="Keep the output of a pipeline stage in memory until it is sent",
    upstream=(PullRequest(4047, native_since="0.18.0", part="without waiting for the send"),),
    problem="With interleaved pipeline stages, and without `--no-overlap-p2p-communication`, 0.16 and 0.17 free "
    "the output of a stage while it is being sent. The allocator gives its memory to other tensors, so the next "
    "stage may compute on what these write: wrong losses and gradients, up to NaN. Whether it happens is a race. "
    "With NCCL, versions of PyTorch that mark what they send as in use by the stream (`record_stream`) hide it.",
    adds=("What is sent stays in memory until the send is done.",),
    numerics="With interleaved stages: all, where memory was written over while it was sent.",
    notes=(
        "Upstream waits for the send before it frees an output. The patch does not wait: PyTorch keeps the alias that "
        "it sends. An output takes memory until then.",
    ),
    is_repair=True,
    probe=Probe(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        contains="send_next_wait_handle is not None and config.deallocate_pipeline_outputs",
    ),
    edits=(
        Wrap(
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            "megatron_overrides.parallelism.pipeline_sends:send_what_stays_in_memory",
        ),
    ),
)
