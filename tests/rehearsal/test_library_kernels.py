"""The kernels of other libraries in plain torch, against recurrences and Megatron's own computation."""

import pytest
import torch
from megatron_mtp_patches.rehearsal import library_kernels
from torch.nn import functional as F

pytestmark = pytest.mark.forked("megatron")
BATCH, LENGTH, HEADS, WIDTH, GROUPS, STATE = 2, 12, 4, 3, 2, 5
LENGTHS = [4, 7, 1]
ENDS = torch.tensor([0, 4, 11, 12], dtype=torch.int32)
SEQUENCES = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def scan_inputs(batch=BATCH):
    shapes = [(HEADS, WIDTH), (HEADS,), (GROUPS, STATE), (GROUPS, STATE), (HEADS, WIDTH)]
    x, dt, B, C, z = (torch.randn(batch, LENGTH, *shape) for shape in shapes)
    return (x, dt, -torch.rand(HEADS), B, C), {"z": z, "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}


def test_the_scan_is_its_recurrence():
    (x, dt, A, B, C), more = scan_inputs()
    out = library_kernels.mamba_chunk_scan_combined(x, dt, A, B, C, 256, dt_softplus=True, **more)
    state = torch.zeros(BATCH, HEADS, WIDTH, STATE)
    for at in range(LENGTH):
        step = F.softplus(dt[:, at] + more["dt_bias"])[..., None, None]
        B_at, C_at = (one[:, at].repeat_interleave(HEADS // GROUPS, 1)[:, :, None] for one in (B, C))
        state = state * (step * A[:, None, None]).exp() + step * x[:, at, ..., None] * B_at
        expected = ((state * C_at).sum(-1) + more["D"][:, None] * x[:, at]) * F.silu(more["z"][:, at])
        torch.testing.assert_close(out[:, at], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_the_gated_norm(norm_before_gate):
    norm = library_kernels.RMSNorm(6, eps=1e-5, group_size=3, norm_before_gate=norm_before_gate)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 4, 6)

    def plain(value):
        return torch.cat([F.rms_norm(half, (3,), eps=1e-5) for half in value.chunk(2, -1)], -1) * norm.weight

    expected = plain(x) * F.silu(z) if norm_before_gate else plain(x * F.silu(z))
    torch.testing.assert_close(norm(x, z), expected)
    torch.testing.assert_close(norm(x), plain(x))


def test_the_convolution_is_that_of_torch_with_padding_in_front():
    x, weight, bias = torch.randn(BATCH, LENGTH, 6), torch.randn(6, 4), torch.randn(6)
    expected = F.silu(F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)[..., :LENGTH])
    other = library_kernels.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu")
    torch.testing.assert_close(other, expected)
    torch.testing.assert_close(library_kernels.causal_conv1d(x, weight, bias, "silu", None, False)[0], other.mT)


def test_the_combined_kernel_is_its_parts():
    (_, dt, A, B, C), more = scan_inputs()
    inner, mixed = HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * STATE
    xbc, weight, bias = torch.randn(BATCH, LENGTH, mixed), torch.randn(mixed, 4), torch.randn(mixed)
    joined = torch.cat([more["z"].flatten(-2), xbc, dt], -1)
    settings = {"headdim": WIDTH, "ngroups": GROUPS}
    fused = library_kernels.mamba_split_conv1d_scan_combined(
        joined, weight, bias, more["dt_bias"], A, more["D"], 256, **settings
    )
    xbc = library_kernels.causal_conv1d(xbc, weight, bias, "silu", None, False)[0]
    x = xbc[..., :inner].unflatten(-1, (HEADS, WIDTH))
    B, C = (one.unflatten(-1, (GROUPS, STATE)) for one in xbc[..., inner:].chunk(2, -1))
    expected = library_kernels.mamba_chunk_scan_combined(x, dt, A, B, C, 256, dt_softplus=True, **more)
    torch.testing.assert_close(fused, expected.flatten(-2))


def delta_rule_inputs():
    q, k = (F.normalize(torch.randn(1, LENGTH, HEADS, STATE), dim=-1) for _ in range(2))
    return q, k, torch.randn(1, LENGTH, HEADS, WIDTH), -torch.rand(1, LENGTH, HEADS), torch.rand(1, LENGTH, HEADS)


def test_the_delta_rule_is_that_of_megatron():
    module = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    module = getattr(module, "common", module)
    q, k, v, g, beta = delta_rule_inputs()
    expected, _ = module.torch_chunk_gated_delta_rule(q, k, v, g, beta)
    chunked, _ = library_kernels.chunk_gated_delta_rule(q, k, v, g, beta)
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-5)


def test_the_l2_norm():
    x = torch.randn(3, 8)
    torch.testing.assert_close(library_kernels.l2norm(x).norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("kernel", ["scan", "convolution", "convolution of fla", "delta rule"])
def test_packed_sequences_do_not_see_each_other(kernel):
    weight = torch.randn(6, 4)
    if kernel == "scan":
        inputs, _ = scan_inputs(batch=1)
        x, dt, A, B, C = inputs
        tensors = [x, dt, B, C]

        def compute(x, dt, B, C, packed):
            return library_kernels.mamba_chunk_scan_combined(x, dt, A, B, C, 256, seq_idx=SEQUENCES if packed else None)
    elif kernel == "delta rule":
        tensors = list(delta_rule_inputs())

        def compute(*tensors, packed):
            return library_kernels.chunk_gated_delta_rule(*tensors, cu_seqlens=ENDS if packed else None)[0]
    else:
        tensors = [torch.randn(1, LENGTH, 6)]

        def compute(x, packed):
            if kernel == "convolution":
                return library_kernels.causal_conv1d_fn(x.mT, weight, seq_idx=SEQUENCES if packed else None).mT
            return library_kernels.causal_conv1d(x, weight, None, None, None, False, ENDS if packed else None)[0]

    parts = zip(*(tensor.split(LENGTHS, 1) for tensor in tensors), strict=True)
    alone = torch.cat([compute(*part, packed=False) for part in parts], 1)
    together = compute(*tensors, packed=True)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, compute(*tensors, packed=False), atol=1e-3)


@pytest.mark.parametrize("size", [1, 8])
def test_hadamard_s_matrix(size):
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(2, 3, size)
    torch.testing.assert_close(library_kernels.hadamard_transform(x, scale=0.5), 0.5 * x @ matrix)
    assert library_kernels.hadamard_transform(x.bfloat16()).dtype == torch.bfloat16


def test_sizes_that_the_library_pads_are_refused():
    with pytest.raises(NotImplementedError, match="of 6 entries"):
        library_kernels.hadamard_transform(torch.ones(6))
