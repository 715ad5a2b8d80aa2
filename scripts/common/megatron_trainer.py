"""Flags of Megatron's trainer that several scripts need."""

# Where TransformerEngine and Apex are absent.
PLAIN_MODULES = """
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
"""
