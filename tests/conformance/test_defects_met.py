"""Which runs meet the defects that depend on more than one setting."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("python")

MOE = {"num_experts": 4, "num_layers": 4, "moe_layer_freq": 1}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
HYBRID = {**MOE, "mtp_num_layers": 2, "hybrid_layer_pattern": "M*ME/ME/ME"}
MEAN, TWICE, INDEX = "divided by more than", "as many times as it has passes", "IndexError"


@pytest.fixture
def find():
    """find(patch, release, settings): the defects that the patch removes from such a run."""
    from megatron_mtp_patches.diagnosis import Settings, find_defects

    def search(patch, release, settings):
        found = find_defects(Settings([SimpleNamespace(**settings)], None), frozenset({release}))
        return [finding.text for finding in found if finding.patch == patch]

    return search


@pytest.mark.parametrize(
    "release, run, expected",
    [
        ("0.16.1", {**MOE, "mtp_num_layers": 2}, []),
        ("0.16.1", {**MOE, "moe_layer_freq": 2, "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": 3, "mtp_num_layers": 2}, []),
        ("0.16.1", {**MOE, "moe_layer_freq": [1, 1, 1, 0], "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": [1, 1, 1, 0]}, []),
        ("0.19.2", {**MOE, **REPEATED}, [MEAN]),
        ("0.19.2", {**MOE, **REPEATED, "mtp_num_layers": 1}, []),
        ("0.19.2", {**MOE, **REPEATED, "num_experts": None}, []),
        ("0.19.2", HYBRID, [MEAN]),
        ("0.19.2", {**HYBRID, **REPEATED}, [MEAN, TWICE]),
        ("0.19.2", {**HYBRID, **REPEATED, "hybrid_layer_pattern": "M*ME/MM/MM"}, [MEAN]),
        ("main", {**HYBRID, **REPEATED}, []),
        ("main", {**HYBRID, "hybrid_layer_pattern": "M*ME/ME", "mtp_num_layers": 1}, [INDEX]),
        ("main", {**HYBRID, "hybrid_layer_pattern": "M*ME/E-/E-"}, []),
    ],
)
def test_auxiliary_losses(find, release, run, expected):
    texts = find("average-aux-loss-over-moe-layers", release, run)
    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


@pytest.mark.parametrize("optimizer, is_met", [("muon", True), ("dist_muon", True), ("adam", False)])
@pytest.mark.parametrize(
    "settings, may_be_met",
    [({}, False), ({"attention_output_gate": True}, True)]
    + [({"attention_output_gate": True, "muon_split_qkv": splits}, splits) for splits in (False, True)],
)
def test_gated_attention(find, optimizer, is_met, settings, may_be_met):
    found = find("split-gated-qkv-for-muon", "0.18.2", {"optimizer": optimizer, **settings})
    assert len(found) == (is_met and may_be_met)
