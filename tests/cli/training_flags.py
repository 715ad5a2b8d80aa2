"""The flags of small trainings, for `doctor`."""

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --position-embedding-type rope --bf16"
)
EXPERTS = (
    f"{SMALL} --num-experts 8 --moe-grouped-gemm --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --disable-bias-linear"
)
