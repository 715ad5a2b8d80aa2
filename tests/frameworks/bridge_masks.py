"""Run Megatron-Bridge's gpt_step with a loss mask on two ranks.

    torchrun --nproc-per-node 2 bridge_masks.py

Prints of the masks that a model gets under context parallelism whether they are those of its labels, and of the
gradient that the heads of a small GPT get whether it is that of Megatron-LM's trainer, and blind to masked labels.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

LENGTH, VOCABULARY = 32, 64


def on_host(number):
    """A tensor of one number on the CPU: in a rehearsal every tensor says that it is on the GPU."""
    tensor = MagicMock(is_cuda=False, item=lambda: number, numel=lambda: 1)
    tensor.cpu.return_value = tensor
    return tensor


def batch(torch, cu_seqlens=None):
    """One sequence [1, LENGTH], or packed ones; a position counts if its label is a multiple of 3."""
    from megatron.bridge.training import gpt_step

    labels = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    values = {
        "tokens": labels.roll(1, dims=1),
        "labels": labels,
        "loss_mask": (labels % 3 == 0).float(),
        "attention_mask": None,
        "position_ids": torch.arange(LENGTH)[None],
    }
    if cu_seqlens and hasattr(gpt_step, "_packed_metadata_for_forward"):
        values |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor([cu_seqlens], dtype=torch.int32))
        values |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), torch.tensor([LENGTH]))
    elif cu_seqlens:  # as Bridge 0.5.1 calls them
        values["cu_seqlens"] = torch.tensor([cu_seqlens], dtype=torch.int32)
        values["cu_seqlens_argmin"] = on_host(len(cu_seqlens))
        values["max_seqlen"] = torch.tensor([LENGTH])
    return values


def step(values, model, config):
    """What forward_step returns for a model."""
    from megatron.bridge.training.gpt_step import forward_step

    dataset = SimpleNamespace(skip_getting_attention_mask_from_dataset=True)
    container = SimpleNamespace(model=config, dataset=dataset, rerun_state_machine=MagicMock())
    state = SimpleNamespace(timers=MagicMock(), straggler_timer=MagicMock(), cfg=container)
    return forward_step(state, iter([dict(values)]), model)


def record(values):
    """The arguments that a model gets from gpt_step on this context-parallel rank."""
    import torch

    class Recorder(torch.nn.Module):
        config = SimpleNamespace(mtp_num_layers=1)

        def forward(self, **arguments):
            self.arguments = arguments
            return arguments["labels"].float()

    model = Recorder()
    step(values, model, model.config)
    return model.arguments


def gradients(forward, model):
    """The gradients that the MTP loss alone gives to the heads."""
    model.zero_grad()
    (0.0 * forward()).sum().backward()
    heads = {name: param.grad.clone() for name, param in model.named_parameters() if "mtp.layers." in name}
    assert heads and any(grad.norm() > 0.0 for grad in heads.values())
    return heads


def same(torch, one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def main():
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    for name, values in (("whole", batch(torch)), ("packed", batch(torch, [0, 12, LENGTH]))):
        arguments = record(values)
        is_part = arguments["labels"].shape[1] == LENGTH // 2
        is_right = torch.equal(arguments["loss_mask"], (arguments["labels"] % 3 == 0).float())
        print(f"rank {rank}, {name}: {'right' if is_part and is_right else 'wrong'}", flush=True)
    parallel_state.destroy_model_parallel()

    provider = GPTModelProvider(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=64,
        num_attention_heads=2,
        seq_length=LENGTH,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=1,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        mtp_num_layers=1,
    )
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    values = batch(torch)
    masked = gradients(lambda: step(values, model, provider)[0], model)
    values["labels"] = torch.where(values["loss_mask"] == 0, 1 + 0 * values["labels"], values["labels"])
    blind = gradients(lambda: step(values, model, provider)[0], model)
    inputs = batch(torch)
    arguments = (inputs["tokens"], inputs["position_ids"], None)  # pretrain_gpt.py calls the model like this
    trainer = gradients(lambda: model(*arguments, labels=inputs["labels"], loss_mask=inputs["loss_mask"]), model)
    print(f"rank {rank}, gradient as of Megatron-LM's trainer: {same(torch, masked, trainer)}", flush=True)
    print(f"rank {rank}, blind to masked labels: {same(torch, masked, blind)}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main()
