"""Models of Hugging Face whose MTP heads are loaded, refused, initialized or left out by Megatron-Bridge."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .bridge_runs import rank_lines

pytestmark = [
    pytest.mark.forked("bridge"),
    pytest.mark.guards(
        "refuse-uninitialized-heads-in-megatron-bridge",
        "initialize-mtp-heads-in-megatron-bridge",
        "name-heads-left-out-in-megatron-bridge",
    ),
]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """What bridge_load.py prints: {title: [that of the first rank, that of the second]}, and all output."""
    words = ["run", "--device", "cpu", str(HERE / "bridge_load.py"), str(tmp_path_factory.mktemp("hugging_face"))]
    ended = run_ranks(2, partial(run_command, "all", *words))
    output = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, output[-6000:]
    return rank_lines(output), output


def test_heads_that_a_checkpoint_lacks_are_refused_unless_they_are_initialized(loaded):
    """On two pipeline stages, of which the last one has the head."""
    lines, _ = loaded
    assert lines["whole"] == lines["initialized"] == ["loaded", "loaded"]
    assert all(text.startswith("refused: ") for text in lines["lacking"])
    assert "another rank names them" in lines["lacking"][0]
    assert "nothing has initialized them: mtp.layers.0.eh_proj.weight, " in lines["lacking"][1]
    assert all("Set model.mtp_init to last-layer or random" in text for text in lines["lacking"])
    assert all("write num_nextn_predict_layers 0" in text for text in lines["lacking"])


def test_mtp_init_fills_heads_that_a_checkpoint_lacks(loaded):
    """From the last layer on two pipeline stages, at random on two tensor-parallel ranks."""
    lines, output = loaded
    assert lines["last-layer"][0] == "no head here"
    assert re.fullmatch(r"\d\d+ tensors, copies: True", lines["last-layer"][1])
    assert output.count("has no MTP heads: they were initialized (last-layer)") == 1
    one, other = lines["random"]
    assert one == other and one.startswith("finite True, router 0.")


def test_mtp_init_refuses_a_checkpoint_with_a_part_of_the_heads(loaded):
    lines, _ = loaded
    assert all("initializes all MTP heads, but the checkpoint" in text for text in lines["partial"])
    assert "It lacks mtp.layers.0.eh_proj.weight. Set" in lines["partial"][1]


def test_an_export_names_the_heads_that_it_leaves_out(loaded):
    lines, output = loaded
    assert lines["exported heads"] == ["0", "0"]
    (warning,) = re.findall(r"This export leaves out trained MTP heads, because the checkpoint (.*)", output)
    assert "/lacking lacks tensors of their names: mtp.layers.0." in warning and "from_hf_config(config)" in warning


def test_an_export_by_a_configuration_with_too_few_heads_names_what_to_write_into_it(loaded):
    lines, output = loaded
    assert lines["exported by a configuration without heads"] == ["0", "0"]
    (warning,) = re.findall(r"This DeepseekV3Config gives no names to MTP heads of the model, (.*)", output)
    assert "cannot export them: mtp.layers.0." in warning and "num_nextn_predict_layers" in warning
