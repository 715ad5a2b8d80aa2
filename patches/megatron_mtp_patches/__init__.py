"""Released megatron-core with the MTP, Muon and Megatron-FSDP behaviour of newer upstream.

Importing this package applies the patches: to what is imported of Megatron already, and to the rest as it arrives. It
imports neither torch nor Megatron itself.

Environment:
    MEGATRON_MTP_PATCHES            all (default), repairs (what removes defects, and no more), none, `id,id` (only
                                    these), `-id,-id` (all but these) or `repairs,-id`
    MEGATRON_MTP_PATCHES_ON_DRIFT   what a refused patch does: raise (default), warn or skip
    MEGATRON_MTP_PATCHES_DEFECTS    off: a training does not say how many known defects affect it

After `megatron-mtp-patches enable`, each Python in which MEGATRON_MTP_PATCHES is set imports this package as it starts.
"""

from __future__ import annotations

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - by PYTHONPATH an older Python also comes here
    raise ImportError(f"megatron_mtp_patches needs Python >= 3.10; this is {sys.version.split()[0]}, {sys.executable}")

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from .catalog import CATALOG
from .doctor.findings import Finding, diagnose_sources
from .doctor.model_gradients import find_unfinalized_gradients, model_configuration
from .engine import Patch, PatchError
from .engine.report import Report
from .megatron_engine import ENGINE
from .mtp import mtp_acceptance_length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module

    from megatron_overrides.mtp.metrics.head_metrics import PassMetrics

    from .mtp.verification.mtp_step import Verification

__version__ = "0.3.0"
__all__ = [
    "Finding",
    "Patch",
    "PatchError",
    "Report",
    "apply",
    "diagnose",
    "metrics",
    "mtp_pass",
    "record",
    "revert",
    "status",
    "verify",
]


def apply(patches: str | None = None, on_drift: str | None = None) -> None:
    """Apply the patches, or apply them again after `revert()`.

    Args:
        patches: which ones, as in MEGATRON_MTP_PATCHES; None takes them from the environment.
        on_drift: 'raise', 'warn' or 'skip' a refused patch; None takes it from the environment.

    Raises:
        PatchError: an unknown patch id, a patch that this Megatron refuses, or parts of two copies of the package.
    """
    _import_overrides()
    ENGINE.apply(
        os.environ.get(ENGINE.project.choice_variable, "all") if patches is None else patches,
        os.environ.get(ENGINE.project.drift_variable, "raise") if on_drift is None else on_drift,
    )


def revert() -> None:
    """Put back every original, copies made by `from x import y` included, and patch nothing further.

    Raises:
        PatchError: another library has changed the same after these patches; then nothing is put back.
    """
    ENGINE.revert()


def status() -> list[Report]:
    """The state of each patch in this process, in the order of the catalog."""
    ENGINE.install_missed_modules()
    return [ENGINE.report(patch) for patch in CATALOG]


def record() -> str:
    """One line that identifies the patches: version, the state of each, and the Megatron sources that it found.

    Raises:
        PatchError: part of a patch that should be applied by now is not, and cannot be.
    """
    ENGINE.install_missed_modules()
    return f"{__version__} {ENGINE.record()}"


def diagnose(*settings: object, transformer_engine: str | None = None, model: object = None) -> list[Finding]:
    """The known defects of this Megatron that affect a run, as `megatron-mtp-patches doctor -- FLAGS` finds them.

    Args:
        settings: Megatron's arguments after validate_args, or the configurations of a trainer: TransformerConfig (or
            the provider of a model), OptimizerConfig, DistributedDataParallelConfig, and so on. A setting is that of
            the first one that has it.
        transformer_engine: its version; None for the one that is installed, or else that this release was made for.
        model: the model, or the list of its chunks, after the trainer has set it up: its configuration comes after
            `settings`, and if the schedules do not finalize its gradients, that is the first finding.

    Raises:
        TypeError: `settings` has something else than objects with settings as attributes, or there are neither settings
            nor a model; `model` is no model of Megatron's.
        ValueError: `transformer_engine` is not a version.
    """
    if model is None:
        return diagnose_sources(settings, transformer_engine)
    configuration = model_configuration(model)
    return [
        *find_unfinalized_gradients(configuration),
        *diagnose_sources((*settings, configuration), transformer_engine),
    ]


def metrics(optimizer: object = None) -> dict[str, float]:
    """The numbers that the patches add to a training log, for the log of another trainer.

        {"mtp grad norm": 0.63, "updates skipped for grad norm": 2, "mtp_1 acceptance %": 1.19, ...}

    Norms and counts are those after the last `optimizer.step()`; the same on all ranks that share the optimizer's
    gradients. The metrics of the MTP heads are those of the last `MTPLossLoggingHelper.track_mtp_metrics`, which
    reduces them: the trainers of Megatron-LM, Megatron-Bridge, verl and ms-swift call that. This function communicates
    with no rank, and synchronizes with the device.

    Args:
        optimizer: as get_megatron_optimizer returned it; None for the one that stepped last in this process.

    Returns:
        The number of each metric that was measured; {} before the first step, or if no patch measures anything.

    Raises:
        TypeError: `optimizer` is not a Megatron optimizer.
    """
    if "megatron.core.optimizer" not in sys.modules or not ENGINE.is_active:
        return {}
    from importlib import import_module

    overrides = import_module("megatron_overrides.report.metrics")
    return {metric.label: float(metric.value) for metric in overrides.training_metrics(optimizer)}


def mtp_pass(
    compute: bool, labels: Tensor | None = None, loss_mask: Tensor | None = None
) -> AbstractContextManager[PassMetrics]:
    """Run the MTP heads and their losses in the forward passes of the `with` block, or do not, and on which labels.

        with megatron_mtp_patches.mtp_pass(compute=True) as metrics, torch.no_grad():
            model(...)                # or the forward passes of a whole validation set
        print(metrics.reduce())       # {"mtp_1 loss": 2.31, ..., "mtp acceptance length": 1.87, ...}

    Args:
        compute: True also runs them where there are no gradients, and measures them. False also skips them where there
            are gradients; then the heads get none, so do it in every microbatch of a step or in none.
        labels: [b, s] int64, the labels of the heads for one microbatch, where the model is given other ones or none.
            Label i is token i + 1, on this context-parallel rank, as for the model.
        loss_mask: [b, s], 1 where a position counts for the heads (a response, say), in place of the model's own.

    Returns:
        A context manager; its value has `reduce()`, a collective that returns means over all passes inside and over all
        data- and context-parallel ranks. It is empty where no losses of heads were computed without gradients.

    Raises:
        PatchError: mtp-acceptance-length is not applied.
        NotImplementedError: in a forward pass of a model whose MTP loss another library computes (verl).
        ValueError: in a forward pass whose tokens have another shape than `labels` or `loss_mask`.
    """
    from importlib import import_module

    ENGINE.install_missed_modules()
    state = ENGINE.report(mtp_acceptance_length.PATCH).state
    if state in ("disabled", "refused"):
        raise PatchError(f"mtp_pass needs the patch {mtp_acceptance_length.PATCH.id}, which is {state}")
    forward_pass = import_module("megatron_overrides.mtp.forward_pass")
    return forward_pass.mtp_pass(compute, labels, loss_mask)


def verify(model: Module | Sequence[Module], optimizer: object, forward_backward: Callable[[], object]) -> Verification:
    """Find out in a running process which parameters the MTP loss trains, as `verify-mtp` does for a script.

        verification = megatron_mtp_patches.verify(model, optimizer, lambda: run_schedule(data_iterator, model))
        assert verification.ok, verification  # the MTP loss trains heads and nothing else

    It is a collective of all ranks. Gradients are zero after it, and `forward_backward` has used up its batch.
    Parameters, buffers, optimizer, random numbers of torch and Megatron, and what waits to be logged are as they were.

    Args:
        model: the model in its wrappers (DDP, Megatron-FSDP), or its chunks.
        optimizer: what get_megatron_optimizer returned.
        forward_backward: runs one step without an update. In Megatron's schedules the main loss and the auxiliary
            losses of routers get no gradient then. Another loop must leave the main loss out (or multiply it by 0).

    Returns:
        A Verification: `ok`, the names `heads` and `others` that got a gradient, `norms` by group; str() describes it.

    Raises:
        PatchError: the patches have been taken out by `revert()`, or `forward_backward` calls `optimizer.step`.
        TypeError: `optimizer` is not a Megatron optimizer, or `forward_backward` cannot be called.
    """
    from importlib import import_module

    from .mtp.verification import LISTENING

    if not ENGINE.is_active:
        raise PatchError("verify needs the patches in place: call megatron_mtp_patches.apply() before it")
    ENGINE.add_base(LISTENING)
    step = import_module("megatron_mtp_patches.mtp.verification.mtp_step")
    return step.run(list(model) if isinstance(model, (list, tuple)) else [model], optimizer, forward_backward)


def _import_overrides() -> None:
    """Import megatron_overrides, which has what the patches call, from beside this package, whatever the path has.

    In a clone whose package is also installed, `python -m` would find that of the clone first.

    Raises:
        PatchError: it is imported already, from another copy, or it is missing.
    """
    own = Path(__file__).resolve().parents[1]
    folders = (own / "megatron_overrides", own.parent / "megatron_overrides")  # the latter in a clone
    folder = next((one for one in folders if (one / "__init__.py").is_file()), None)
    if folder is None:
        raise PatchError(f"megatron_overrides is missing beside {own / __name__}: install the package again")
    imported = sys.modules.get("megatron_overrides")
    if imported is None:
        spec = spec_from_file_location("megatron_overrides", folder / "__init__.py")
        assert spec and spec.loader
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    elif Path(str(imported.__file__)).resolve().parent != folder:
        raise PatchError(
            f"megatron_overrides is imported from {imported.__file__}, and {__name__} from {own}: these are two "
            f"copies. Import {__name__} first"
        )


def _is_command() -> bool:
    """True if this process is `megatron-mtp-patches` or `python -m megatron_mtp_patches`."""
    words = getattr(sys, "argv", None) or [""]
    if words[0] == "-m":  # as long as Python looks for the module to run, which stands before its arguments
        return sys.orig_argv[-len(words)].removeprefix("-m") == __name__
    return words[0].rpartition(os.sep)[2].partition(".")[0] == "megatron-mtp-patches"


try:
    ENGINE.revert_earlier_import()
    apply()
except PatchError:
    if not _is_command():  # which prints it without a traceback
        raise
