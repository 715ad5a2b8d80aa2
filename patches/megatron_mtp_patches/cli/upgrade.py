"""`upgrade FROM TO -- FLAGS`: what another Megatron changes for a run."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ..doctor.findings import Finding
from ..engine import UsageError
from ..parity.upgrade.comparison import Comparison, compare
from ..parity.upgrade.reading import Reading, read_in
from ..parity.upgrade.trees import Tree, open_tree
from .console import make_printer
from .doctor_output import exit_code
from .upgrade_output import show_comparison, show_numbers

if TYPE_CHECKING:
    from ..parity.upgrade.numbers import CutNumbers, Functions


DIFFERS = 3  # an exit code
# Where the older Megatron refuses the flags, and where the newer one does.
ADVICE = (
    "There is nothing to compare unless the run starts in the older Megatron: give the flags that it had there, and "
    "beside them those that the newer one alone knows.",
    "After the upgrade the run does not start with these flags: change them until both Megatrons take them.",
)


class UpgradeOptions(NamedTuple):
    """The options of the command.

    Attributes:
        before, after: how the user calls the two Megatrons.
        flags: of the run.
        world_size: its number of ranks; None for the smallest that fits.
        trains: train the run made small in both.
        script: the file that a user starts; '' for the one beside each Megatron.
        dtype: "fp32" or "bf16", of the small run.
        ranks: the most of a cut; 1 for one rank alone.
        as_json: print one JSON object, and nothing else.
    """

    before: str
    after: str
    flags: tuple[str, ...]
    world_size: int | None
    trains: bool
    script: str
    dtype: str
    ranks: int
    as_json: bool


def show_upgrade(options: UpgradeOptions) -> int:
    """Print what changes for the run of these flags from one Megatron to another.

    Returns 1 if the newer one has a defect of severity 3 or more that affects the run, that the older one has not, and
    that the patches do not remove; else 3 if a number of the small run differs; else 2 if the newer one does not know a
    flag; else 0.

    Raises:
        PatchError: a Megatron does not import.
        UsageError: there is no such Megatron, it refuses the flags, or the run made small does not train.
    """
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        trees = [stack.enter_context(open_tree(name)) for name in (options.before, options.after)]
        readings = list(pool.map(lambda tree, advice: _read(tree, options, advice), trees, ADVICE))
        comparison = compare(*readings)
        show = make_printer()
        if not options.as_json:
            show_comparison(show, readings, comparison)
        cuts, functions = _train(trees, options) if options.trains else ([], None)
    if options.as_json:
        print(json.dumps(_describe(readings, comparison, cuts, functions), indent=1))
    elif functions:
        show_numbers(show, cuts, functions)
    differs = any(one.deviations or any(one.refusals) for one in cuts)
    is_severe = exit_code((Finding(**one) for one in comparison.new), is_doubtful=False)
    return is_severe or DIFFERS * differs or UsageError.exit_code * bool(comparison.unknown)


def _read(tree: Tree, options: UpgradeOptions, advice: str) -> Reading:
    try:
        return read_in(tree, list(options.flags), options.world_size)
    except UsageError as error:
        raise UsageError(f"{error}\n{advice}") from error


def _train(trees: list[Tree], options: UpgradeOptions) -> tuple[list[CutNumbers], Functions]:
    from ..parity.upgrade.numbers import compare_functions, compare_numbers
    from ..parity.upgrade.small_run import SmallRunOptions, train_in

    small = SmallRunOptions(options.script, options.dtype, options.ranks, options.flags)
    before = train_in(trees[0], small)
    after = train_in(trees[1], small._replace(draw=before.draw))
    return list(compare_numbers(before, after)), compare_functions(before, after)


def _describe(
    readings: list[Reading], comparison: Comparison, cuts: list[CutNumbers], functions: Functions | None
) -> dict[str, Any]:
    facts = {
        side: {name: getattr(reading, name) for name in ("megatron", "transformer_engine", "world_size")}
        for side, reading in zip(("from", "to"), readings, strict=True)
    }
    changes = {name: [one._asdict() for one in getattr(comparison, name)] for name in ("changed", "added", "dropped")}
    numbers = [
        one._asdict()
        | {"deviations": list(map(str, one.deviations)), "defects": [defect._asdict() for defect in one.defects]}
        for one in cuts
    ]
    ran = {"functions": functions._asdict(), "cuts": numbers} if functions else {}
    return {**facts, **comparison._asdict(), **changes, **ran}
