"""Small seeded GPT models with MTP heads on one CPU rank."""

import importlib
import inspect
from functools import partial

import pytest

VOCABULARY, LENGTH, BATCH = 32, 12, 2


@pytest.fixture
def make_model(make_gpt):
    return partial(make_gpt, VOCABULARY, LENGTH)


@pytest.fixture
def batch():
    """Arguments of GPTModel.forward: seeded tokens, their labels, a mask that leaves some positions out."""
    import torch

    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(BATCH, LENGTH, generator=generator) > 0.2).float(),
    }


@pytest.fixture(autouse=True)
def fresh_tracker():
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}
    yield
    MTPLossLoggingHelper.tracker = {}
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))


@pytest.fixture
def gradients():
    """gradients(model, output, weight=1.0): backward from `weight` times the mean output; {name: gradient}."""

    def collect(model, output, weight=1.0):
        model.zero_grad()
        (weight * output.float().mean()).backward()
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}

    return collect


@pytest.fixture
def run_overlapped(monkeypatch):
    """run_overlapped(model, batch): (loss, backward(gradient)) through the nodes of the 1F1B overlap of experts."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 does not define the name without TransformerEngine
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    for name in ("gpt.fine_grained_callables", "common.utils"):
        try:
            module = importlib.import_module(f"megatron.core.models.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "should_free_input"):
            # On one rank the tokens that are "sent" are the tokens themselves; their memory must not be released.
            monkeypatch.setattr(module, "should_free_input", lambda *args, **kwargs: False)
    set_streams()

    def run(model, batch):
        plan = model.build_schedule_plan(**batch)
        loss = TransformerModelChunkSchedulePlan.run(plan, None)
        return loss, lambda gradient: TransformerModelChunkSchedulePlan.run(None, plan, b_grad=gradient)

    return run


@pytest.fixture
def experts():
    """The configuration of a model that the 1F1B overlap accepts."""
    import torch

    return {
        "num_moe_experts": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "mtp_num_layers": 1,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "add_bias_linear": False,
    }


@pytest.fixture
def overlapped_gradients(run_overlapped):
    """overlapped_gradients(model, batch): {name: gradient} of the heads' losses alone, by `run_overlapped`."""

    def collect(model, batch):
        import torch

        model.zero_grad()
        output, backward = run_overlapped(model, batch)
        backward(torch.zeros_like(output))
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    return collect


@pytest.fixture
def make_hybrid():
    """make_hybrid(**config): a hybrid model of attention and MLP layers with two heads."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from tests.trainings.heads import LENGTH, VOCABULARY
    from tests.trainings.hybrid_model import find_hybrid_model

    pytest.importorskip("transformer_engine", reason="layers of hybrid models are TransformerEngine's")
    model, spec = find_hybrid_model()
    if "hybrid_layer_pattern" not in inspect.signature(model.__init__).parameters:
        pytest.skip("0.16 has no heads of hybrid models")

    def build(**settings):
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11)
        sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "mtp_num_layers": 2}
        config = TransformerConfig(
            **sizes,
            **settings,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            normalization="RMSNorm",
        )
        return model(config, spec, VOCABULARY, LENGTH, hybrid_layer_pattern="*-*-/*-/*-")

    return build


@pytest.fixture
def train_hybrid(make_hybrid):
    """train_hybrid(**config): a HeadTraining of `make_hybrid`."""
    from tests.trainings.heads import HeadTraining

    return lambda **settings: HeadTraining([make_hybrid(**settings)])
