"""Pipeline parallelism and the schedules of a step."""

from __future__ import annotations

from typing import Any

from ..defects.declare import Defect, Sign


def _frees_what_it_sends(run: Any) -> bool:
    """True if interleaved stages send asynchronously and free what they sent."""
    is_overlapped = run.virtual_pipeline_model_parallel_size and run.overlap_p2p_comm
    return bool(is_overlapped and run.deallocate_pipeline_outputs is not False)  # no argument: Megatron sets it


DEFECTS = (
    Defect(
        id="ML-4047",
        effect="A pipeline stage frees its output while it is still sending it, so the next stage may compute on other "
        "data: wrong losses and gradients, up to NaN",
        severity=5,
        signs=Sign(
            "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
            has="deallocate_output_tensor(output_tensor, config.deallocate_pipeline_outputs)",
            lacks="if send_next_wait_handle is not None and config.deallocate_pipeline_outputs:",
        ),
        affects=_frees_what_it_sends,
        when="--num-virtual-stages-per-pipeline-rank (or another interleaved layout) without "
        "--no-overlap-p2p-communication",
        only_if="PyTorch gives the memory of a tensor back while it is being sent (a race: with NCCL it depends on "
        "PyTorch's version and on TORCH_NCCL_AVOID_RECORD_STREAMS)",
        instead="--no-overlap-p2p-communication",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="keep-outputs-until-sent",
        seen_by="finite",
    ),
    Defect(
        "ML-6616",
        "Ranks order the parameter groups of dense weights and experts differently, so from 0.18 on they wait for each "
        "other in different collectives",
        kind="hang",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer:_get_param_groups",
            has="sorted(params_key, key=lambda x: (x[0] is not None, x[0]))",
        ),
        affects=lambda run: (
            "muon" in str(run.optimizer) and run.num_experts and (run.pipeline_model_parallel_size or 1) > 1
        ),
        when="--optimizer muon or dist_muon with --num-experts and --pipeline-model-parallel-size > 1",
        more_links=("NVIDIA/Megatron-LM#1515",),
        state="open",
        evidence="reproduced",
        only_if="a pipeline stage meets experts before dense weights with the same settings, as where these are frozen",
        patch="order-param-groups-alike",
    ),
)
