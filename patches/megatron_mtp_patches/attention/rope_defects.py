"""Rotary position embeddings."""

from ..defects.conditions import is_vlm
from ..defects.declare import Defect, Sign

DEFECTS = (
    Defect(
        id="ML-6586",
        effect="pretrain_vlm.py ignores --rotary-base and --rope-scaling-factor: the language model uses 10000 and 8",
        severity=3,
        signs=Sign("pretrain_vlm:", has="LLaVAModel(", lacks="language_rotary_base"),
        affects=lambda run: (
            is_vlm(run)
            and (
                run.rotary_base not in (None, 10000)
                or (run.use_rope_scaling and run.rope_scaling_factor not in (None, 8))
            )
        ),
        when="pretrain_vlm.py with --rotary-base or --rope-scaling-factor",
        instead="give LLaVAModel in pretrain_vlm.py the arguments language_rotary_base=args.rotary_base and "
        "language_rope_scaling_factor=args.rope_scaling_factor",
        only_if="the script is pretrain_vlm.py, and not another one with its flags",
        state="fixed on main",
        evidence="read",
        patch="pass-rope-scaling-factor",
    ),
)
