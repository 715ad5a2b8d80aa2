"""What each command does with its arguments; it imports what it needs: `run` loads no more than the script would."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..catalog import CATALOG
from ..engine import UsageError


def status(arguments: argparse.Namespace) -> int:
    from .status import show_retired, show_status

    return show_retired(arguments.retired_by) if arguments.retired_by else show_status(as_json=arguments.json)


def explain(arguments: argparse.Namespace) -> int:
    from ..defects.catalog import known_defects
    from .explain import explain, explain_defect, explain_function

    if patch := next((patch for patch in CATALOG if patch.id == arguments.name), None):
        return explain(patch)
    defect = next((one for one in known_defects() if one.id == arguments.name), None)
    return explain_defect(defect) if defect else explain_function(arguments.name)


def run(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        from .run import run_script as run
    else:
        from .verify import verify as run
    # From the words themselves: argparse would take a `--` of the script's for its own.
    rest = arguments.words[arguments.words.index(arguments.script, 1) + 1 :]
    run(arguments.script, rest, arguments.device, arguments.is_module)
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    if arguments.batch:
        if "--" in arguments.words:
            raise UsageError("give --batch or -- FLAGS, not both: a file has the flags of its own run")
        from .doctor_of_files import diagnose_files

        return diagnose_files(arguments.batch, arguments.world_size, arguments.te, arguments.json)
    if "--" not in arguments.words:
        if arguments.world_size or arguments.te or arguments.json:
            raise UsageError("--world-size, --te and --json need the flags of a training: doctor ... -- FLAGS")
        from .environment import examine

        return examine()
    from .doctor import diagnose_flags

    flags = arguments.words[arguments.words.index("--") + 1 :]
    return diagnose_flags(flags, arguments.world_size, arguments.te, as_json=arguments.json)


def parity(arguments: argparse.Namespace) -> int:
    if bool(arguments.batch) == ("--" in arguments.words):
        raise UsageError("parity needs either the flags of a training, parity ... -- FLAGS, or --batch FILE ...")
    if arguments.save and (arguments.batch or arguments.resume):
        raise UsageError("--save is for one run, given by its flags after --, and not for --resume")
    from .parity import Options, compare_cuts, compare_cuts_of_files

    one = arguments
    dtype = one.dtype or ("bf16" if one.resume else "fp32")
    options = Options(one.script, one.ranks, one.cut, one.data, dtype, one.save, one.resume, one.json)
    if one.batch:
        return compare_cuts_of_files(one.batch, options)
    return compare_cuts(one.words[one.words.index("--") + 1 :], options)


def upgrade(arguments: argparse.Namespace) -> int:
    if "--" not in arguments.words:
        raise UsageError("upgrade needs the flags of a training: upgrade FROM TO -- FLAGS")
    from .upgrade import UpgradeOptions, show_upgrade

    one = arguments
    flags = tuple(one.words[one.words.index("--") + 1 :])
    script = one.script and str(Path(one.script).absolute())
    return show_upgrade(
        UpgradeOptions(
            one.from_megatron, one.to_megatron, flags, one.world_size, one.run, script, one.dtype, one.ranks, one.json
        )
    )


def audit(arguments: argparse.Namespace) -> int:
    from .audit import audit

    return audit(arguments.against, arguments.json, arguments.sarif, arguments.fail_on)


def export(arguments: argparse.Namespace) -> int:
    from .export import export_diff

    return export_diff(arguments.ids, arguments.against)


def check_export(arguments: argparse.Namespace) -> int:
    from .check_export import check_export

    return check_export(arguments.folder, arguments.base)


def reproduce(arguments: argparse.Namespace) -> int:
    from .reproduce import reproduce, write_standalone

    if arguments.all and (arguments.standalone or arguments.report):
        raise UsageError("--standalone and --report are about one defect: give its ID in place of --all")
    if arguments.standalone:
        return write_standalone(arguments.id, arguments.standalone)
    if arguments.report:
        from .upstream_report import print_report

        return print_report(arguments.id)
    return reproduce(None if arguments.all else arguments.id, arguments.json)


def zero_touch(arguments: argparse.Namespace) -> int:
    from .zero_touch import disable, enable

    return enable() if arguments.command == "enable" else disable()


def drift(arguments: argparse.Namespace) -> int:
    from .drift import show_drift

    return show_drift(arguments.against, arguments.since, arguments.accept, arguments.only)
