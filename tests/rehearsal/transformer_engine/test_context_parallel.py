"""Context parallelism: ranks with chunks of the sequences compute what one rank computes with the whole sequences."""

import pytest
import torch
import torch.distributed as dist

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
pytestmark = pytest.mark.forked("torch")
LENGTH, BATCH, HEADS, WIDTH = 16, 2, 4, 8
WAYS = ("p2p", "all_gather", "a2a")
PACKED = [0, 8, 12, 32]  # sequences of different lengths, each a multiple of 2 * ranks


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


def of_this_rank(tensor, along, rank, ranks):
    """Return the rank's chunk from the front and its chunk from the back."""
    chunks = tensor.chunk(2 * ranks, along)
    return torch.cat((chunks[rank], chunks[2 * ranks - rank - 1]), along)


def forward_and_backward(qkv, grad, form, mask, way=None, **more):
    leaves = [one.detach().requires_grad_() for one in qkv]
    module = te.DotProductAttention(
        HEADS,
        WIDTH,
        attention_dropout=0.0,
        qkv_format=form,
        attn_mask_type=mask,
        cp_comm_type=way or "p2p",
        cp_group=dist.group.WORLD if way else None,
        cp_global_ranks=list(range(dist.get_world_size())) if way else None,
        cp_stream=torch.cuda.Stream() if way else None,
    )
    out = module(*leaves, **more)
    return [out, *torch.autograd.grad(out, leaves, grad.reshape(out.shape))]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way, mask", [(way, "causal") for way in WAYS] + [("p2p", "no_mask"), ("a2a", "no_mask")])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_dense_sequences(form, mask, way, assert_same):
    along = form.index("s")
    shape = (LENGTH, BATCH, HEADS, WIDTH) if form == "sbhd" else (BATCH, LENGTH, HEADS, WIDTH)
    qkv = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn(*shape[:2], HEADS * WIDTH, dtype=torch.bfloat16)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = forward_and_backward(qkv, grad, form, mask)
    mine = [of_this_rank(one, along, rank, ranks) for one in qkv]
    actual = forward_and_backward(mine, of_this_rank(grad, along, rank, ranks), form, mask, way)
    for one, whole in zip(actual, expected, strict=True):
        assert_same(one, of_this_rank(whole.view(*shape[:2], *one.shape[2:]), along, rank, ranks), torch.bfloat16)


@pytest.mark.ranks(2)
def test_packed_sequences(assert_same):
    """Ring attention over sequences of different lengths, one after the other in one tensor."""
    ends = torch.tensor(PACKED, dtype=torch.int32)
    qkv = [torch.randn(PACKED[-1], HEADS, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn(PACKED[-1], HEADS * WIDTH, dtype=torch.bfloat16)
    longest = int((ends[1:] - ends[:-1]).max())
    more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    expected = forward_and_backward(qkv, grad, "thd", "padding_causal", **more)
    mine = tex.thd_get_partitioned_indices(ends, PACKED[-1], dist.get_world_size(), dist.get_rank()).long()
    more |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    actual = forward_and_backward([one[mine] for one in qkv], grad[mine], "thd", "padding_causal", "p2p", **more)
    for one, whole in zip(actual, expected, strict=True):
        assert_same(one, whole[mine].view(one.shape), torch.bfloat16)
