"""A step of a GPT with an expert bias that learns from a teacher with half as many experts."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start

EXPECTED = "a step"


def reproduce():
    start()
    student, teacher = (make_moe_config(experts) for experts in (4, 2))
    model = make_gpt(student)
    model.teacher = make_gpt(teacher).eval().requires_grad_(False)
    compute_gradients(make_ddp(student, model))
    return EXPECTED, EXPECTED


def make_moe_config(experts):
    bias = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return make_config(num_moe_experts=experts, moe_router_topk=2, add_bias_linear=False, **bias)
