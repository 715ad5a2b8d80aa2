"""Rotary position embeddings."""

from ..defects.conditions import is_hybrid, is_vlm
from ..defects.declare import Defect, Sign

DEFECTS = (
    Defect(
        id="ML-6306",
        effect="--rope-scaling-factor does not reach the model, which scales its rotary embeddings by 8",
        severity=4,
        signs=(
            Sign(
                "megatron.training.argument_utils:gpt_config_from_args",
                has='kwargs["rope_scaling"] = args.use_rope_scaling',
                lacks="rope_scaling_factor",
            ),
            Sign("gpt_builders:gpt_builder", has="rope_scaling=args.use_rope_scaling", lacks="rope_scaling_factor"),
        ),
        affects=lambda run: (
            # a hybrid model, MLA and other embeddings read neither flag
            run.use_rope_scaling
            and run.rope_scaling_factor not in (None, 8)
            and run.position_embedding_type in (None, "rope")
            and not (run.multi_latent_attention or is_hybrid(run) or is_vlm(run))  # ML-6586
        ),
        when="--use-rope-scaling with --rope-scaling-factor other than 8, in a GPT with --position-embedding-type "
        "rope and without --multi-latent-attention",
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        patch="pass-rope-scaling-factor",
        second_reading="the models and builders of 0.16.1 to main, that of pretrain_vlm.py, too; its program; doctor "
        "under its flags and just outside; the threads of #6305 and #6306; the wrappers of its patch",
    ),
    Defect(
        id="ML-3794",
        effect="Fused rotary embeddings of packed sequences pair each element of a head with one of its other half, "
        "not with its neighbour as --rotary-interleaved asks, so weights that were trained so see wrong positions",
        severity=3,
        signs=Sign(
            "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            has="fused_apply_rotary_pos_emb_thd(",
            lacks="cp_rank=cp_group.rank(), interleaved=config.rotary_interleaved",
        ),
        affects=lambda run: run.rotary_interleaved and run.apply_rope_fusion and run.sft is not False,
        when="--rotary-interleaved without --no-rope-fusion, with packed sequences (--sft)",
        only_if="sequences are packed",
        instead="--no-rope-fusion",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.17.1, of fused and unfused embeddings; the commit of #3794; what "
        "TransformerConfig of 0.16.1 refuses; that --no-rope-fusion reads the setting",
    ),
    Defect(
        id="ML-6586",
        effect="pretrain_vlm.py ignores --rotary-base and --rope-scaling-factor: the language model uses 10000, and 8 "
        "with --use-rope-scaling",
        severity=3,
        signs=Sign("pretrain_vlm:", has="LLaVAModel(", lacks="language_rotary_base"),
        affects=lambda run: (
            is_vlm(run)
            and run.position_embedding_type in (None, "rope")
            and (
                run.rotary_base not in (None, 10000)
                or (run.use_rope_scaling and run.rope_scaling_factor not in (None, 8))
            )
        ),
        when="pretrain_vlm.py with --position-embedding-type rope, and --rotary-base other than 10000 or "
        "--use-rope-scaling with --rope-scaling-factor other than 8",
        instead="give LLaVAModel in pretrain_vlm.py the arguments language_rotary_base=args.rotary_base and "
        "language_rope_scaling_factor=args.rope_scaling_factor",
        only_if="the script is pretrain_vlm.py, and not another one with its flags",
        state="fixed on main",
        evidence="read",
        patch="pass-rope-scaling-factor",
        second_reading="pretrain_vlm.py and LLaVAModel of 0.16.1, 0.18.2, 0.19.0 and main; the commit of #6586; doctor "
        "under its flags and just outside; the wrapper of its patch",
    ),
)
