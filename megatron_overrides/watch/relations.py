"""What findings are called, and the relation that each is of (Defect.seen_by; ci/watch/defects.toml)."""

DIFFERENT = "copies differ"
ROUNDING = "copies differ by rounding"
RELATIONS = {
    DIFFERENT: "copies",
    ROUNDING: "copies",
    "the reported gradient norm is wrong": "norm",
    "a weight is not its main weight": "cast",
    "a weight does not train": "moves",
    "a weight has no gradient": "moves",
    "a frozen weight has moved": "moves",
    "not finite": "finite",
    "ranks of one replica have different batches": "batch",
    "parts of a sequence do not join": "batch",
    "replicas have the same batch": "batch",
}
