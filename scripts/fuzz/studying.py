"""Studies a configuration as `parity` does, and says what came of each cut in a form that a file keeps."""

from __future__ import annotations

import shlex
import time
from typing import Any

from megatron_mtp_patches.engine import PatchError
from megatron_mtp_patches.parity.cuts import list_cuts
from megatron_mtp_patches.parity.small import shrink
from megatron_mtp_patches.parity.study import Result, Study

from .drawing import Configuration

KEPT = 6  # findings of a cut


def study(script: str, configuration: Configuration) -> dict[str, Any]:
    """What came of a configuration: `refused`, Megatron's words where it does not train on one rank, or its cuts."""
    start = time.monotonic()
    answer: dict[str, Any] = configuration._asdict() | {"words": shlex.join(configuration.words), "refused": ""}
    answer |= {"cuts": [], "notes": []}
    try:
        small = shrink(list(configuration.words), configuration.dtype)
        studied = Study(script, small, configuration.data)
        answer["notes"] = studied.notes
        answer["cuts"] = [_describe(one) for one in studied.results(list_cuts(small, configuration.ranks))]
    except PatchError as error:
        answer["refused"] = str(error).removeprefix("the run made small does not train on one rank: ")
    return answer | {"seconds": round(time.monotonic() - start, 1)}


def _describe(result: Result) -> dict[str, Any]:
    dependences = result.verdict.dependences if result.verdict else {}
    return {
        "name": result.cut.name,
        "ranks": result.cut.ranks,
        "seconds": round(result.seconds, 1),
        "outcome": outcome_of(result),
        "refused": result.refusal,
        "findings": [[one.kind, one.name, one.step, one.size] for one in result.findings[:KEPT]],
        "deviating": len(result.findings),
        "explanations": {one.defect.id: one.is_confirmed for one in result.explanations},
        "controls": result.controls,
        "dependences": {one.reason: [some[0].kind, some[0].name, some[0].size] for one, some in dependences.items()},
    }


def outcome_of(result: Result) -> str:
    """ "refused", "unexplained", "explained" by a known defect, "legitimate" or "equal"."""
    if result.verdict is None:
        return "refused"
    if result.findings:
        return "explained" if result.is_explained else "unexplained"
    return "legitimate" if result.verdict.dependences else "equal"
