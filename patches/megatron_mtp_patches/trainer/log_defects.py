"""Wrong numbers in the log: losses, norms and counts."""

from ..defects.conditions import has_any_aux_loss
from ..defects.declare import Defect, Sign

_TRAINING = "megatron.training.training"

DEFECTS = (
    Defect(
        id="ML-3388",
        effect="The validation loss leaves out the last samples, and validation hangs if data-parallel ranks have "
        "different numbers of batches",
        kind="wrong log",
        severity=2,
        signs=Sign(
            "megatron.training.datasets.data_samplers:", has="full_validation", lacks="MegatronFullValidationSampler"
        ),
        affects=lambda run: run.full_validation,
        when="--full-validation",
        state="fixed in 0.18.0",
        evidence="reported",
    ),
    Defect(
        id="ML-3564",
        effect="The validation loss is NaN if a microbatch has no token that counts",
        kind="wrong log",
        severity=1,
        signs=Sign(f"{_TRAINING}:evaluate", has="val = val[:, 0] / val[:, 1]\nval = val.mean()"),
        affects=lambda run: run.sft and run.eval_iters,
        when="--sft with --eval-iters > 0",
        only_if="a microbatch has no token that counts",
        state="fixed in 0.17.0",
        evidence="read",
    ),
    Defect(
        id="ML-4015",
        effect="The logged number of zeros in the gradients is not exact above 16.8 million",
        kind="wrong log",
        severity=1,
        signs=Sign(
            "megatron.core.optimizer.clip_grads:count_zeros_fp32",
            has="total_num_zeros = torch.zeros(1, dtype=torch.float, device='cuda')",
        ),
        affects=lambda run: run.log_num_zeros_in_grad,
        when="--log-num-zeros-in-grad",
        state="fixed in 0.17.0",
        evidence="read",
    ),
    Defect(
        id="ML-6238",
        effect="The second line of the log has the mean losses and step time of the first two steps of the process, a "
        "resumed one included; TensorBoard and Weights & Biases get the right losses",
        kind="wrong log",
        severity=1,
        signs=Sign(
            f"{_TRAINING}:training_log",
            has="should_reset = not is_first_iteration",
            lacks=("should_reset_loss_stats", "not is_first_iteration or"),
        ),
        affects=lambda run: run.log_interval == 1,
        when="--log-interval 1",
        instead="--log-interval 2 or more",
        more_links=(
            "NVIDIA/Megatron-LM#7092",
            "NVIDIA/Megatron-LM#6237",
        ),
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        patch="log-first-step-once",
    ),
    Defect(
        id="ML-1555",
        effect="A loss of 0 is not printed",
        kind="wrong log",
        severity=1,
        signs=Sign(f"{_TRAINING}:training_log", has="if avg > 0.0:"),
        affects=has_any_aux_loss,
        when="--moe-aux-loss-coeff",
        only_if="a loss is exactly 0",
        state="fixed in 0.17.0",
        evidence="read",
    ),
)
