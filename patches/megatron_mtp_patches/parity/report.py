"""A program that shows the first finding of a study again, to report it."""

from __future__ import annotations

import shlex
from pathlib import Path

from .. import __version__
from ..megatrons.installed import describe_megatron
from .flags import join
from .left_out import EVEN_LAYERS
from .study import Result, Study

_PROGRAM = '''"""{cut}: Megatron-LM computes other numbers than on one rank.

{deviations}
{controls}
Seen with {megatron}; patches of megatron-mtp-patches {version}: {patches}.
To see it again, in a checkout of that Megatron-LM, without a GPU:

    pip install megatron-mtp-patches=={version}
    python {file}
"""

import os
import shlex
import sys

os.environ["MEGATRON_MTP_PATCHES"] = {patches!r}

from megatron_mtp_patches.cli import main

FLAGS = """
{flags}
"""
OPTIONS = ["--script", {script!r}, "--data", {data!r}, "--dtype", {dtype!r}, "--ranks", "{ranks}", "--cut", {cut!r}]
sys.exit(main(["parity", *OPTIONS, "--", *shlex.split(FLAGS)]))
'''


def write_report(file: Path, script: str, study: Study, results: list[Result]) -> str:
    """Write a program that shows the first finding that no known defect explains, or else the first one.

    Returns a line that names the cut, or says that there is nothing to write.
    """
    differing = sorted((one for one in results if one.findings), key=lambda one: one.is_explained)
    if not differing:
        return "nothing is saved: every cut that trains is equal"
    result = differing[0]
    words = join([*study.small.flags, *study.small.left_out.get(EVEN_LAYERS, [])])  # which say that stages are virtual
    controls = [f"* {name}: {'equal' if equal else 'differs'}" for name, equal in result.controls.items()]
    chosen = "all" if study.all_are_applied else ",".join(study.applied) or "none"
    text = _PROGRAM.format(
        cut=result.cut.name,
        deviations="\n".join(f"* {one}" for one in result.findings[:10]),
        controls="\n".join(controls),
        megatron=describe_megatron().partition(", in ")[0],
        version=__version__,
        patches=chosen,
        file=file.name,
        flags=shlex.join(words).replace(" --", "\n--"),
        script=Path(script).name,
        data=study.data,
        dtype=study.small.dtype,
        ranks=result.cut.ranks,
    )
    file.write_text(text, encoding="utf-8")
    return f"{file} shows {result.cut.name} again"
