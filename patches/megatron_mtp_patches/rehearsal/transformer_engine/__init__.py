"""Layer 8: TransformerEngine. Its own Python runs; only its compiled extension is replaced by stand-ins in torch.

The wheel `transformer-engine` holds all of its Python: modules, autograd functions, optimizers, attention backends,
context parallelism. The extension `transformer_engine_torch` holds kernels. Their stand-ins here compute in fp32 and
round once, so their numbers agree with those of plain torch, and not bit for bit with those of a GPU. fp8, fp4,
userbuffers and NVSHMEM raise a NotImplementedError that names them when they are called.

The layer is on if `transformer_engine` can be imported, everything that its Python imports is installed, and the
extension is not: `pip install --no-deps transformer-engine==VERSION` and, in a clone, `pip install '.[te]'`.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...engine.import_hook import when_imported
from ...megatrons.environment import IMPORTS_OF_TRANSFORMER_ENGINE

ORIGIN = f"{__name__}.extension"  # the origin in the stand-in's module spec


def has_python() -> bool:
    """True if TransformerEngine's Python is installed."""
    return find_spec("transformer_engine") is not None


def missing() -> list[str]:
    """List what TransformerEngine's Python imports and this environment lacks, by pip's names."""
    return [name for module, name in IMPORTS_OF_TRANSFORMER_ENGINE.items() if find_spec(module) is None]


def version() -> str:
    """Return the installed version, such as "2.17.1", or "" if it is not installed."""
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return ""


def installation_advice() -> str:
    """Say what to install so that this layer is on, as the second half of a sentence."""
    if not has_python():
        package = "transformer-engine" + (f"=={fitting}" if (fitting := _fitting_version()) else "")
        return (
            f"install its Python in an environment for rehearsals alone: `pip install --no-deps {package}`, and "
            f"`pip install '.[te]'` in a clone of megatron_mtp_patches"
        )
    if missing():
        return f"install what its Python imports: pip install {' '.join(missing())}"
    return "use an environment without transformer_engine_torch, which needs a GPU"


def _fitting_version() -> str | None:
    """The version that the installed Megatron was made for, if that is known."""
    from ...megatrons.installed import find_releases, find_transformer_engine

    return find_transformer_engine(find_releases())[0]


def available() -> bool:
    """True if this layer can be on: TransformerEngine's Python is installed and complete, its extension is not."""
    return has_python() and not _has_extension() and not missing()


def _has_extension() -> bool:
    spec = find_spec("transformer_engine_torch")
    return spec is not None and spec.origin != ORIGIN


def prepare() -> None:
    """Set the variables that torch, triton and transformer_engine read when they are imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine's own switch: load no shared library
    os.environ["NVTE_RELEASE_BUILD"] = "0"
    os.environ["TRITON_INTERPRET"] = "1"  # its Triton kernels (cross entropy) run in Triton's interpreter


def install() -> None:
    """Install the stand-ins: TransformerEngine's when it is imported, Apex's now."""
    # Imported now and not when they are needed: a child process has removed the package from sys.modules by then.
    from . import extension, permutation, triton_bfloat16, weight_gradient

    def stand_in(common: ModuleType) -> None:
        sys.modules["transformer_engine_torch"] = extension.make()
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]

    sys.modules["fused_weight_gradient_mlp_cuda"] = weight_gradient
    when_imported(["transformer_engine.common"], stand_in)
    when_imported(["transformer_engine.pytorch.triton.permutation"], permutation.install)
    when_imported(["triton.runtime.autotuner"], _keep_one_config)
    when_imported(["triton.runtime.interpreter"], triton_bfloat16.install)


def _keep_one_config(autotuner: ModuleType) -> None:
    """Keep only the first config of Triton's autotuner, which would time them on a GPU even in the interpreter."""
    start = autotuner.Autotuner.__init__

    @functools.wraps(start)
    def with_one_config(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.configs = self.configs[:1]

    autotuner.Autotuner.__init__ = with_one_config
