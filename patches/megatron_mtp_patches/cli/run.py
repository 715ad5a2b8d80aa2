"""Run a training script as `python SCRIPT ARGS...` would, with the patches and, on request, on the CPU.

Importing this module has already imported `megatron_mtp_patches`, which applies the patches.
"""

from __future__ import annotations

import atexit
import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from ..engine import PatchError, UsageError
from ..engine.source import find_file

_NO_GPU = "torch finds no GPU here; --device cpu, before the script, rehearses without one."


def run_script(script: str, arguments: list[str], device: str | None, is_module: bool = False) -> None:
    """Run `script` as __main__ with `arguments`; returns or raises (SystemExit too) as the script does.

    With `is_module` it is the name of a module, as after `python -m`.

    An assertion about the flags that Megatron raises without a message gets one. Where Megatron does not know a flag
    because its patch was left out or it is misspelt, stderr explains it. Where the script fails without a GPU, the last
    line on stderr names the rehearsal; where there is no Megatron, or a mixture of two that does not import, it says
    so.

    device "cpu": torch.cuda resolves to the CPU first. "cuda": a GPU must be there. None: torch is left alone.
    """
    if not is_module and not Path(script).is_file():
        raise UsageError(f"no such script: {script}")
    if not getattr(sys.flags, "safe_path", False):
        # the script's own directory replaces ours: a Megatron checkout beside pretrain_gpt.py shadows a wheel
        sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    if is_module and find_file(script) is None:
        raise UsageError(f"no such module: {script}")
    _choose_device(device)
    sys.argv = [script, *arguments]
    with _name_rehearsal_where_no_gpu_is(), _say_which_megatron_was_found(), _say_what_to_change(arguments):
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    if device == "cpu":
        from .. import rehearsal

        rehearsal.close()


def _choose_device(device: str | None) -> None:
    if device == "cpu":
        from .. import rehearsal

        rehearsal.install()
    elif device == "cuda":
        try:
            import torch
        except ImportError as error:
            raise PatchError(f"--device cuda needs torch, which does not import: {error}") from error
        if torch.cuda.device_count() == 0:
            raise UsageError(f"--device cuda: {_NO_GPU}")


@contextlib.contextmanager
def _name_rehearsal_where_no_gpu_is() -> Iterator[None]:
    try:
        yield
    except Exception:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.device_count() == 0:
            # at exit: Python has printed the traceback then
            atexit.register(print, f"megatron-mtp-patches: {_NO_GPU}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _say_which_megatron_was_found() -> Iterator[None]:
    try:
        yield
    except ImportError:
        from ..megatrons.installed import describe_mixture

        if mixture := describe_mixture():
            atexit.register(print, f"megatron-mtp-patches: {mixture}", file=sys.stderr)
        raise
    finally:
        if find_file("megatron.core") is None:  # asked now: the script may have put it on the path
            from ..megatrons.installed import describe_megatron

            atexit.register(print, f"megatron-mtp-patches: nothing was patched: {describe_megatron()}", file=sys.stderr)


@contextlib.contextmanager
def _say_what_to_change(arguments: list[str]) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        from ..doctor.megatron_refusals import is_silent_refusal, reason

        if is_silent_refusal(error):
            error.args = (f"Megatron refuses these flags: {reason(error)}",)
        raise
    except SystemExit as ended:
        if ended.code == UsageError.exit_code:  # argparse's as well
            from ..doctor.megatron_refusals import flags_left_out, flags_misspelt

            if "--device" in arguments:
                print("megatron-mtp-patches: --device goes before the name of the script", file=sys.stderr)
            for sentence in (*flags_left_out(arguments), *flags_misspelt(arguments)):
                print(f"megatron-mtp-patches: {sentence}", file=sys.stderr)
        raise
