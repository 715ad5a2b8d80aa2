"""Declares read-gradients-in-their-dtype."""

from ..declarations.shared_edits import GRAD_NORMS, OPTIMIZER_STEP, ROUNDED_NORM
from ..engine import Patch, PullRequest

PATCH = Patch(
    id="read-gradients-in-their-dtype",
    summary="Measure and clip gradients in bf16 and fp32 by a launch for each dtype",
    upstream=(PullRequest(7279),),
    problem="With `--use-precision-aware-optimizer` and gradients in half precision (`--main-grads-dtype bf16`, "
    "`--grad-reduce-in-bf16`), a model that keeps some parameters in fp32 has gradients in both dtypes. Megatron hands "
    "all of them to one launch of a kernel, which reads each in the dtype of the first (NVIDIA/Megatron-LM#7338). The "
    "norm is wrong, and clipping changes some gradients wrongly, or the step ends in an illegal memory access.",
    adds=("One launch measures, and one clips, the gradients of each dtype.",),
    numerics=f"With gradients in several dtypes: the gradient norm, and clipped gradients. {ROUNDED_NORM}",
    is_repair=True,
    edits=(*OPTIMIZER_STEP, *GRAD_NORMS),
)
