"""Checkpoints: the states of random generators, which are each rank's own."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    expert_parallel,
    has_megatron_fsdp,
    has_torch_dist_format,
    pipeline_parallel,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_STATE = "megatron.training.checkpointing:get_rng_state"


def _saves_random_state(run: Any) -> bool:
    return bool(run.save and not run.no_save_rng)


def _loads_random_state(run: Any) -> bool:
    return bool(run.load and not (run.no_load_rng or run.finetune))


DEFECTS = (
    Defect(
        id="ML-3736",
        effect="Loading a checkpoint with another data-parallel size, or by 0.17 or newer, ends in an error, because "
        "the states of the random generators are saved for that size",
        kind="crash",
        severity=3,
        signs=Sign(_STATE, has="if ep_size > 1:"),
        affects=lambda run: (
            (_saves_random_state(run) or _loads_random_state(run))
            and has_torch_dist_format(run)
            and expert_parallel(run) > 1
        ),
        when="--save (without --no-save-rng) or --load (without --no-load-rng and --finetune) in the format "
        "torch_dist, with --expert-model-parallel-size > 1",
        only_if="the tensor- and pipeline-parallel sizes stay the same, and the data- or context-parallel size does "
        "not, or 0.17 or newer loads the checkpoint",
        instead="--no-load-rng in the run that loads it",
        introduced_by=("NVIDIA/Megatron-LM#2658",),
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="sources of 0.16.1 and 0.17.1, with the shape that each gives the state and when they load it; "
        "a load of 0.16.1 with each other shape",
    ),
    Defect(
        id="ML-6858",
        effect="After a resume all expert-parallel ranks go on with the random states of the first one, so what they "
        "draw for experts and routers, as random logits, is no longer independent",
        kind="lost state",
        severity=2,
        signs=Sign(_STATE, has="(pp_size, tp_size)", lacks="dp_size"),
        affects=lambda run: (
            _loads_random_state(run)
            and run.is_of_megatron_trainer
            and has_torch_dist_format(run)
            and expert_parallel(run) > 1
            and not run.data_parallel_random_init
        ),
        when="--load (without --no-load-rng and --finetune) in the format torch_dist with "
        "--expert-model-parallel-size > 1, without --data-parallel-random-init",
        introduced_by=("NVIDIA/Megatron-LM#3736",),
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        second_reading="the saving and loading of random states in 0.16.1 to main; where Megatron draws from the "
        "generator of experts; the thread of #6858; its program; parity --resume of EP2 on 0.18.2",
    ),
    Defect(
        id="fsdp-random-states-of-experts",
        effect="After a resume all expert-parallel ranks of Megatron-FSDP go on with the random states of one of them, "
        "so what they draw for experts and routers, as random logits, is no longer independent",
        kind="lost state",
        severity=2,
        signs=Sign(_STATE, has="{f'({pp_rank}, {tp_rank})': rng_state_list}"),
        affects=lambda run: (
            _loads_random_state(run)
            and run.is_of_megatron_trainer
            and has_megatron_fsdp(run)
            and expert_parallel(run) > 1
            and not run.data_parallel_random_init
        ),
        when="--use-megatron-fsdp with --load (without --no-load-rng and --finetune) and "
        "--expert-model-parallel-size > 1, without --data-parallel-random-init, in Megatron's own trainer",
        evidence="reproduced",
        second_reading="the saving and loading of random states in 0.16.1 to main; parity --resume of EP2 on 0.18.2",
    ),
    Defect(
        id="fsdp-random-states-of-new-ranks",
        effect="Loading a checkpoint of Megatron-FSDP on more tensor- or pipeline-parallel ranks ends in an error, "
        "because it has no states of the random generators of the new ones",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.training.checkpointing:load_checkpoint",
            has="if args.auto_detect_ckpt_format or ckpt_format == 'torch_dist':",
        ),
        affects=lambda run: (
            _loads_random_state(run)
            and run.is_of_megatron_trainer
            and has_megatron_fsdp(run)
            and tensor_parallel(run) * pipeline_parallel(run) > 1
        ),
        when="--use-megatron-fsdp with --load (without --no-load-rng and --finetune), and "
        "--tensor-model-parallel-size > 1 or --pipeline-model-parallel-size > 1, in Megatron's own trainer",
        only_if="one of these two sizes is larger than that of the checkpoint",
        instead="--no-load-rng in the run that loads it",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the saving and loading of random states in 0.16.1 to main; parity --resume from one rank to "
        "TP2 on 0.18.2 and 0.19.2, on 0.18.2 also with --no-load-rng and with --no-strict-fsdp-dtensor-load",
    ),
)
