"""A run is made small: sizes shrink, kinds of layers and other flags stay, and what is left out has a reason."""

from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.forked("patched"),
]
pytest.importorskip("megatron.training.arguments", reason="the 0.16.1 wheel has no megatron.training")


@pytest.fixture
def shrink():
    from megatron_mtp_patches.parity.small import shrink

    return lambda flags, dtype="fp32": shrink(flags.split(), dtype)


def values_of(small, *names):
    return {name: flag.values[0] for name in names for flag in small.flags if flag.name == name}


def test_sizes_shrink_and_other_flags_stay(shrink):
    small = shrink("--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --swiglu --normalization RMSNorm")
    sizes = values_of(small, "--num-layers", "--hidden-size", "--num-attention-heads")
    assert sizes == {"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4"}
    assert {"--swiglu", "--normalization"} <= {flag.name for flag in small.flags}
    assert sum(flag.name == "--num-layers" for flag in small.flags) == 1


def test_each_kind_of_layer_stays(shrink):
    small = shrink("--num-experts 256 --moe-router-topk 8 --moe-layer-freq ([0]*3+[1]*58) --num-layers 61")
    names = ("--num-layers", "--num-experts", "--moe-router-topk", "--moe-layer-freq")
    assert list(values_of(small, *names).values()) == ["4", "8", "4", "([0]*1+[1]*3)"]


@pytest.mark.parametrize("groups, kept", [("1", "1"), ("8", "2")])
def test_query_groups_stay_one_or_several(shrink, groups, kept):
    small = shrink(f"--num-attention-heads 32 --group-query-attention --num-query-groups {groups}")
    assert values_of(small, "--num-query-groups") == {"--num-query-groups": kept}


def test_what_is_left_out_has_its_reason(shrink):
    small = shrink("--bf16 --fp8-format hybrid --save here --save-interval 5 --lr 1e-4 --wandb-project mine --swiglu")
    reasons = {flag.name: reason for reason, flags in small.left_out.items() for flag in flags}
    assert reasons.keys() == {"--bf16", "--fp8-format", "--save", "--save-interval", "--wandb-project"}
    assert "--lr" in {flag.name for flag in small.changed}
    assert reasons["--fp8-format"] == "it needs a GPU" and reasons["--bf16"] == "the small run computes in fp32"
    assert "--bf16" in {flag.name for flag in shrink("--bf16", "bf16").flags}


def test_heads_with_a_learning_rate_have_one_that_does_not_rise_to_that_of_the_run(shrink):
    rates = values_of(shrink("--mtp-num-layers 1 --mtp-lr 1e-4"), "--lr", "--mtp-lr", "--mtp-min-lr")
    assert 0 < float(rates["--mtp-min-lr"]) <= float(rates["--mtp-lr"]) < float(rates["--lr"])


def test_a_second_learning_rate_stays_another_one(shrink):
    rates = values_of(shrink("--lr 1e-4 --decoupled-lr 1e-5"), "--lr", "--decoupled-lr")
    assert len(set(rates.values())) == 2
    assert not values_of(shrink("--lr 1e-4"), "--decoupled-lr")


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon", "soap"])
def test_updates_that_are_large_whatever_the_gradient_is_have_a_low_rate(shrink, release, optimizer):
    if optimizer == "soap" and release.startswith("0.17"):
        pytest.skip("0.17 has no SOAP")
    rates = values_of(
        shrink(f"--optimizer {optimizer} --mtp-num-layers 1 --mtp-lr 1e-4"), "--lr", "--min-lr", "--mtp-lr"
    )
    assert float(rates["--mtp-lr"]) < float(rates["--lr"]) == float(rates["--min-lr"])
    assert float(rates["--lr"]) < 0.1 * float(values_of(shrink("--optimizer adam"), "--lr")["--lr"])


def test_a_value_after_an_equals_sign_is_a_value(shrink):
    small = shrink("--num-layers=8 --normalization=RMSNorm")
    assert values_of(small, "--normalization") == {"--normalization": "RMSNorm"}


def test_fused_attention_takes_the_place_of_flash_attention(shrink):
    assert values_of(shrink("--attention-backend flash"), "--attention-backend") == {"--attention-backend": "fused"}
    assert values_of(shrink("--attention-backend local"), "--attention-backend") == {"--attention-backend": "local"}


def test_what_the_small_run_has_of_its_own_is_not_read(shrink):
    assert not values_of(shrink("--seed ${SEED} --tokenizer-type ${TYPE} --log-throughput"), "--seed")


def test_flags_that_the_parser_refuses_are_wrong_usage(shrink):
    from megatron_mtp_patches.engine import UsageError

    with pytest.raises(UsageError, match="invalid int value: 'many'"):
        shrink("--num-layers many")


def test_each_axis_of_the_layout_is_a_cut_and_so_is_each_pair(shrink):
    from megatron_mtp_patches.parity.cuts import list_cuts, reference_flags

    layout = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4"
    sharding = "--use-distributed-optimizer --overlap-grad-reduce"
    small = shrink(f"--num-layers 8 {layout} {sharding}")
    names = ["TP2 with SP", "PP2", "DP2", "TP2 with SP PP2", "TP2 with SP DP2", "PP2 DP2"]
    assert [cut.name for cut in list_cuts(small, 4)] == names
    cuts = {cut.name: cut for cut in list_cuts(small, 4)}
    assert [cut.name for cut in list_cuts(small, 2)] == ["TP2 with SP", "PP2", "DP2"]
    names = {flag.name for flag in reference_flags(small)}
    assert not names & {"--tensor-model-parallel-size", "--sequence-parallel", "--use-distributed-optimizer"}
    assert "--use-distributed-optimizer" in {flag.name for flag in cuts["TP2 with SP"].flags}
    assert (cuts["PP2 DP2"].ranks, cuts["PP2"].ranks) == (4, 2)
    virtual = shrink("--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2")
    assert [cut.name for cut in list_cuts(virtual, 4)] == ["PP2", "PP2 VPP2", "DP2", "PP2 DP2", "PP2 VPP2 DP2"]


def test_flags_that_need_an_axis_are_in_its_cuts_alone(shrink):
    from megatron_mtp_patches.parity.cuts import OF_AXIS, list_cuts, reference_flags

    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    experts = "--num-experts 64 --expert-model-parallel-size 8 --bf16"
    small = shrink(f"--num-layers 8 {layout} {experts} {' '.join(OF_AXIS)}", "bf16")
    having = {cut.name: {flag.name for flag in cut.flags} & OF_AXIS.keys() for cut in list_cuts(small, 2)}
    kinds = {"TP2": {"TP"}, "EP2": {"EP"}, "PP2": {"PP"}, "PP2 VPP2": {"PP", "PP2 VPP2"}, "DP2": set()}
    assert having == {cut: {name for name, one in OF_AXIS.items() if one in kinds[cut]} for cut in kinds}
    assert not {flag.name for flag in reference_flags(small)} & OF_AXIS.keys()


def test_the_dispatcher_that_needs_deepep_becomes_all_to_all(shrink):
    flags = "--num-experts 4 --moe-token-dispatcher-type"
    assert values_of(shrink(f"{flags} flex"), "--moe-token-dispatcher-type").popitem()[1] == "alltoall"
    assert values_of(shrink(f"{flags} allgather"), "--moe-token-dispatcher-type").popitem()[1] == "allgather"


def test_one_rank_has_the_distributed_optimizer_where_the_precision_of_its_states_needs_it(shrink):
    from megatron_mtp_patches.parity.cuts import reference_flags

    flags = "--bf16 --use-distributed-optimizer --overlap-grad-reduce"
    names = [
        {flag.name for flag in reference_flags(shrink(f"{flags} {more}", "bf16"))}
        for more in ("", "--use-precision-aware-optimizer")
    ]
    assert ["--use-distributed-optimizer" in one for one in names] == [False, True]
    assert not any("--overlap-grad-reduce" in one for one in names)


def test_the_whole_layout_is_a_cut_in_which_experts_divide_the_ranks_of_the_others(shrink):
    from megatron_mtp_patches.parity.cuts import list_cuts

    def last(flags, most_ranks):
        *_, cut = list_cuts(shrink(f"--num-layers 8 {flags}"), most_ranks)
        return cut.name, cut.ranks

    dense = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
    assert last(f"{dense} --context-parallel-size 2", 8) == ("TP2 CP2 by p2p PP2", 8)
    assert last(f"{dense} --context-parallel-size 2", 4) == ("PP2 DP2", 4)
    experts = "--num-experts 8 --expert-model-parallel-size 8"
    assert last(f"{dense} {experts} --expert-tensor-parallel-size 1", 4) == ("TP2 EP2 PP2 on 4 ranks", 4)
    assert last(f"{dense} {experts}", 8) == ("TP2 EP2 PP2", 8)  # experts are divided by TP as well


def test_what_defects_ask_for_is_recorded_dtypes_included(monkeypatch):
    import torch
    from megatron import training
    from megatron_mtp_patches.parity.training import _plain_arguments

    arguments = SimpleNamespace(megatron_fsdp_grad_comm_dtype=torch.bfloat16, optimizer="adam", timers=object())
    monkeypatch.setattr(training, "get_args", lambda: arguments)
    assert _plain_arguments() == {"megatron_fsdp_grad_comm_dtype": torch.bfloat16, "optimizer": "adam"}
