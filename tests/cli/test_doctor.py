"""`doctor` in this environment, which can train."""

import configparser
import platform
from importlib.metadata import version

import pytest
from megatron_mtp_patches.cli.environment import FRAMEWORKS
from megatron_mtp_patches.megatrons.environment import PARTS

from scripts.common.toml import read_toml

from .fresh_start import ROOT

pytestmark = pytest.mark.forked("torch")


def test_it_exits_with_0_with_all_that_training_needs_and_each_missing_part_has_its_cost(command, rows, release):
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    assert platform.python_version() in done.out
    table = rows(done.out)
    assert table["torch"][0] == version("torch")
    assert table["megatron-core"][0] == release
    assert set(table) >= {"triton", "transformer-engine", "apex", "emerging-optimizers", "nvidia-modelopt", "GPU"}
    for name, (installed, *cost) in table.items():
        if name != "GPU":
            assert installed != "missing" or cost[0], name


def test_the_oldest_wrapt_that_fits_is_the_oldest_that_the_package_requires():
    """Two figures, one of them in setup.cfg."""
    needed = configparser.ConfigParser()
    needed.read(ROOT / "setup.cfg")
    oldest = next(line for line in needed["options"]["install_requires"].splitlines() if line.startswith("wrapt"))
    (limit,) = next(part for part in PARTS if part.distribution == "wrapt").limits
    assert oldest == f"wrapt>={'.'.join(map(str, limit.lowest))}" and oldest[7:] in limit.cost


def test_the_transformers_that_fit_megatron_bridge_are_those_of_ci():
    environments = read_toml(ROOT / "ci" / "matrix.toml")["environment"]
    tested = {word for one in environments for word in one["installs"] if word.startswith("transformers>")}
    parts = [part for framework in FRAMEWORKS for part in framework.beside if part.distribution == "transformers"]
    assert len(parts) == 1
    assert tested == {limit.cost.rpartition(" ")[2] for part in parts for limit in part.limits}
