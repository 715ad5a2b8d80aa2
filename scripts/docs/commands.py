"""The command line that several pages show, in one place. tests/end_to_end/test_shown_commands.py runs it."""

from __future__ import annotations

CPU = """\
<!-- run by a test: cpu-command -->
```bash
ARGS="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --bf16 --transformer-impl local
    --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 2 --mtp-detach-heads
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0 --eval-interval 1000"
megatron-mtp-patches run --device cpu pretrain_gpt.py $ARGS
```"""


def blocks() -> dict[str, str]:
    return {"cpu-command": CPU}
