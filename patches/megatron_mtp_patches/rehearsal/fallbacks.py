"""Fix what breaks in Megatron itself without TransformerEngine, Apex and a CUDA toolkit.

A GPU image has all three, so upstream does not test these paths.

* Megatron uses torch's Adam in place of FusedAdam, and the DistributedOptimizer cannot resume with it:
  state_dict() asserts `len(steps) == 1` for an optimizer that has not made a step yet;
  loading a parameter's state overwrites its step with the template's 0, or raises KeyError: 'step';
  load_state_dict() leaves one `step` tensor for all parameters, which then advances once per parameter.
* 0.16.1's checkout looks for nvcc when it starts, to build kernels, although it has none left to build.
* Megatron compiles the helpers of its datasets with `make` even if they are there already, and ends the process if that
  fails; a wheel has no Makefile. The Makefile calls python3 and python3-config of PATH, and a virtual environment has
  no python3-config: the helpers are compiled for the system's Python, and the import fails.
* A framework that passes use_transformer_engine=True to a function that makes layer specs (Megatron-Bridge does, for
  the MTP block) gets a NameError without TransformerEngine. In a rehearsal these functions make local layers, as
  Megatron's command line does with --transformer-impl local.
* On upstream's main, building an MTP layer checks whether a module is an inference layer, whose class derives from a
  mock of TransformerEngine: TypeError: isinstance() arg 2 must be a type.

One fix is for speed: the writers of a checkpoint hand their results to a process that Megatron spawns. That process
imports torch to read them, and with the layers of a rehearsal this takes ten seconds of each run. Here it is a fork.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from ..engine.import_hook import when_imported


def install() -> None:
    """Fix each when its module is imported."""
    when_imported(["megatron.core.optimizer.distrib_optimizer"], _fix_resume)
    when_imported(["megatron.core.tensor_parallel.inference_layers"], _fix_inference_check)
    when_imported(["megatron.legacy.fused_kernels"], _build_no_kernels)
    when_imported(["megatron.core.datasets.utils"], _compile_missing_helpers)
    when_imported(["megatron.core.models.gpt.gpt_layer_specs"], _make_local_specs)
    when_imported(["megatron.core.dist_checkpointing.strategies.filesystem_async"], _collect_results_in_a_fork)


def _build_no_kernels(module: Any) -> None:
    module.load = lambda args: None


def _compile_missing_helpers(module: Any) -> None:
    compile_helpers = module.compile_helpers

    @functools.wraps(compile_helpers)
    def compile_if_missing() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            with _make_for_this_python():
                compile_helpers()
            importlib.invalidate_caches()

    module.compile_helpers = compile_if_missing


def _make_for_this_python() -> Any:
    """A context in which `make` uses the headers of this Python, and the file suffix of its extension modules."""
    return mock.patch.dict(
        os.environ,
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        MAKEFLAGS=f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
    )


def _make_local_specs(module: Any) -> None:
    if module.HAVE_TE:
        return
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if "use_transformer_engine" in inspect.signature(function).parameters:
            setattr(module, name, _with_local_layers(function))


def _with_local_layers(make_specs: Any) -> Any:
    signature = inspect.signature(make_specs)

    @functools.wraps(make_specs)
    def make_local_specs(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["use_transformer_engine"] = False
        return make_specs(*bound.args, **bound.kwargs)

    return make_local_specs


def _collect_results_in_a_fork(module: Any) -> None:
    name = "get_write_results_queue" if hasattr(module, "get_write_results_queue") else "_get_write_results_queue"
    get_queue = getattr(module, name, None)
    if get_queue is None:  # a newer Megatron may collect them in another way
        return

    @functools.wraps(get_queue)
    def get_queue_of_fork(*args: Any, **kwargs: Any) -> Any:
        if module._results_queue is None:
            module._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return get_queue(*args, **kwargs)

    setattr(module, name, get_queue_of_fork)


def _fix_inference_check(module: Any) -> None:
    if not isinstance(getattr(module, "InferenceColumnParallelLinear", object), type):
        module.is_inference_column_parallel_linear = lambda layer: False


def _fix_resume(module: ModuleType) -> None:
    if module.HAVE_APEX_OR_TE:
        return
    optimizer = module.DistributedOptimizer
    optimizer.state_dict = _with_initial_state(optimizer.state_dict)
    optimizer.__init__ = _separating_steps_at_load(optimizer.__init__)
    set_states = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = _keeping_step(set_states)


def _with_initial_state(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def initialize_first(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    return initialize_first


def _keeping_step(set_states: Any) -> Any:
    @functools.wraps(set_states)
    def keep_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return keep_step


def _separating_steps_at_load(initialize: Any) -> Any:
    @functools.wraps(initialize)
    def initialize_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self.optimizer.register_load_state_dict_post_hook(_separate_steps)

    return initialize_with_hook


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()
