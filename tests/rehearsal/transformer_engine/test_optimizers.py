"""FusedAdam, FusedSGD and the kernels over lists of tensors, compared with torch's own."""

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
FusedAdam, FusedSGD = te.optimizers.FusedAdam, te.optimizers.FusedSGD
pytestmark = pytest.mark.forked("torch")
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
HALF = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16, "master_weight_dtype": torch.float16}
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
CASES = {
    "plain": {},
    "Adam with L2": {"adam_w_mode": False},
    "master weights": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "decoupled gradients": {"master_weights": True, "use_decoupled_grad": True},
    "decoupled gradients and remainders": {
        "master_weights": True,
        "use_decoupled_grad": True,
        "store_param_remainders": True,
    },
    "capturable": {"capturable": True},
    "capturable, master weights": {"master_weights": True, "capturable": True},
    "bf16 moments": {"master_weights": True, **BF16},
    "fp16 state": {"master_weights": True, **HALF},
}


def adam_of_torch(start, gradients, l2):
    parameter = torch.nn.Parameter(start.clone().float())
    optimizer = (torch.optim.Adam if l2 else torch.optim.AdamW)([parameter], **ADAM)
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("case", CASES)
def test_fused_adam(case):
    settings = CASES[case]
    master = settings.get("master_weights")
    dtype = torch.bfloat16 if master else torch.float32
    start = torch.randn(7, 9).to(dtype)
    gradients = [torch.randn(7, 9).to(torch.float32 if settings.get("use_decoupled_grad") else dtype) for _ in range(5)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = FusedAdam([parameter], **ADAM, **settings)
    for gradient in gradients:
        if settings.get("use_decoupled_grad"):
            parameter.decoupled_grad = gradient
        else:
            parameter.grad = gradient.clone()
        optimizer.step()
    expected = adam_of_torch(start, gradients, l2=settings.get("adam_w_mode") is False)
    if not master:
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)
        return
    torch.testing.assert_close(parameter.float(), expected.bfloat16().float(), rtol=1e-2, atol=1e-2)
    actual = optimizer.get_unscaled_state(parameter, "master_param")
    if settings.get("store_param_remainders"):
        low = actual.int()
        high = parameter.detach().view(torch.int16).int() - (low < 0).int()
        actual = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
    rounded = "exp_avg_dtype" in settings
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2 if rounded else 1e-6, atol=2e-3 if rounded else 1e-6)


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
def test_fused_sgd(nesterov):
    start, gradients = torch.randn(7, 9), [torch.randn(7, 9) for _ in range(4)]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    parameters = []
    for kind in (FusedSGD, torch.optim.SGD):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], **settings)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        parameters.append(parameter.detach())
    torch.testing.assert_close(*parameters, rtol=1e-6, atol=1e-6)


def test_scaling_flags_values_that_are_not_finite():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    kernels = [(tex.multi_tensor_scale, 0.5), (tex.multi_tensor_scale_tensor, torch.tensor(0.5))]
    for kernel, scale in kernels:
        for last, flagged in ((1.0, 0), (torch.inf, 1), (torch.nan, 1)):
            flag = torch.zeros(1, dtype=torch.int32)
            sources = [*tensors, torch.tensor([last])]
            targets = [torch.empty_like(one) for one in sources]
            kernel(2048, flag, [sources, targets], scale)
            assert int(flag) == flagged
            assert all(torch.equal(to, one * 0.5) for to, one in zip(targets[:2], tensors, strict=True))


@pytest.mark.parametrize("per_tensor", [False, True])
def test_norms(per_tensor):
    tensors = [torch.randn(3), torch.randn(2, 2)]
    flag = torch.zeros(1, dtype=torch.int32)
    total, each = tex.multi_tensor_l2norm(2048, flag, [tensors], per_tensor)
    torch.testing.assert_close(total, torch.cat([one.flatten() for one in tensors]).norm().view(1))
    torch.testing.assert_close(each, torch.stack([one.norm() for one in tensors]) if per_tensor else torch.empty(0))
    scaled, _ = tex.multi_tensor_unscale_l2norm(2048, flag, [tensors], torch.tensor([0.25]), per_tensor)
    torch.testing.assert_close(scaled, total / 4)
    assert int(flag) == 0
    tex.multi_tensor_l2norm(2048, flag, [[torch.tensor([torch.inf])]], per_tensor)
    assert int(flag) == 1


def ones(dtype=torch.float32):
    return torch.ones(4, dtype=dtype)


def flag():
    return torch.zeros(1, dtype=torch.int32)


def norm(*tensors):
    return tex.multi_tensor_l2norm(2048, flag(), [list(tensors)])


def scale(sources, targets):
    return tex.multi_tensor_scale(2048, flag(), [sources, targets], 0.5)


def adam(*lists):
    return tex.multi_tensor_adam(2048, flag(), list(lists), 0.1, 0.9, 0.95, 1e-8, 1, 1, 1, 0.0)


FULL, HALF_WIDTH, MIXED = [ones()], [ones(torch.bfloat16)], [ones(), ones(torch.bfloat16)]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: norm(*MIXED), "multi_tensor_l2norm: tensor 1 of tensors is torch.bfloat16, but .*once for each dtype"),
        (
            lambda: tex.multi_tensor_unscale_l2norm(2048, flag(), [MIXED], torch.ones(1)),
            "multi_tensor_unscale_l2norm: tensor 1 of tensors is torch.bfloat16",
        ),
        (lambda: scale(2 * FULL, MIXED), "multi_tensor_scale: tensor 1 of targets is torch.bfloat16"),
        (
            lambda: tex.multi_tensor_scale_tensor(2048, flag(), [FULL, FULL], torch.ones(1).bfloat16()),
            "scale is 1 x torch.bfloat16; the kernel reads one number as torch.float32",
        ),
        (norm, "the lists are empty"),
        (lambda: norm(ones(), torch.ones(0)), "no elements"),
        (lambda: norm(torch.ones(4, 6)[:, :3]), "strides"),
        (lambda: scale([torch.ones(3, 4)], [torch.ones(4, 3).t()]), "targets has strides"),
        (lambda: scale([torch.ones(1)], FULL), "has 4 elements, .* first list's tensor has: 1"),
        (lambda: scale(2 * FULL, FULL), "targets has 1 tensors, sources 2"),
        (lambda: tex.multi_tensor_l2norm(2048, flag(), [FULL, FULL]), "expected 1 tensor"),
        (lambda: adam(FULL, HALF_WIDTH, FULL, FULL, HALF_WIDTH), "masters is torch.bfloat16: expected torch.float32"),
        (lambda: adam(FULL, FULL, FULL, [ones(torch.float16)]), "squares is torch.float16"),
        (
            lambda: tex.multi_tensor_sgd(2048, flag(), [HALF_WIDTH] * 3, 0, 0.9, 0, 0.1, False, True, False, 1.0),
            "multi_tensor_sgd: tensor 0 of gradients is torch.bfloat16",
        ),
    ],
)
def test_what_the_kernels_refuse_or_misread_is_refused(call, problem):
    with pytest.raises(RuntimeError, match=problem):
        call()


def test_tensors_of_one_layout_need_not_be_contiguous():
    sources, targets = [torch.randn(3, 4).t()], [torch.zeros(3, 4).t()]
    scale(sources, targets)
    assert torch.equal(targets[0], sources[0] * 0.5)
    total, _ = norm(*sources)
    torch.testing.assert_close(total, sources[0].norm().view(1))
