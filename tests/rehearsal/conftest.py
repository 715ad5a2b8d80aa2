"""Tests of rehearsals: the layers, which every process from level "torch" on has, and the commands that use them."""

from pathlib import Path

import pytest

from tests.warm.levels import ON_GPU

ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--fp8-format", dest="fp8")
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
def validate_args(args):
    args.validated = True
    return args
"""
INITIALIZE = """
from .arguments import parse_args, validate_args
def initialize():
    return validate_args(parse_args())
"""


@pytest.fixture(autouse=True)
def in_a_rehearsal(request):
    """Skip a test whose level has no rehearsal."""
    level = request.node.get_closest_marker("forked")
    if ON_GPU and level and level.args[0] != "python":
        pytest.skip("with TEST_DEVICE=gpu there is no rehearsal")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a package that looks like Megatron's, with names imported by `from x import y`."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # else the regular package of an installed megatron-core comes first
    (package / "arguments.py").write_text(ARGUMENTS)
    (package / "initialize.py").write_text(INITIALIZE)
    return tmp_path
