"""What findings are called, and the relation that each is of (Defect.seen_by; ci/watch/defects.toml)."""

ROUNDING = "copies differ by rounding"
RELATIONS = {
    "copies differ": "copies",
    ROUNDING: "copies",
    "the gradient norm is another one": "norm",
    "a weight is not its main weight": "cast",
    "a weight does not train": "moves",
    "a weight has no gradient": "moves",
    "a frozen weight has moved": "moves",
    "not finite": "finite",
    "ranks have other batches": "batch",
    "parts of a sequence do not join": "batch",
    "replicas have the same batch": "batch",
}
