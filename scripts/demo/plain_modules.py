"""Megatron's flags for where TransformerEngine and Apex are absent: its own modules do everything."""

PLAIN_MODULES = (
    "--transformer-impl local --attention-backend unfused --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
