"""An Adam whose variance can be frozen."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import pytest
import torch

from ds_sparse.optim.two_phase_adam import VARIANCE_FLOOR, Place, TwoPhaseAdam

SHAPES = [(7, 3), (5,), (11,)]
DENSE_STEPS = 6
BETAS, EPS = (0.9, 0.95), 1e-8
DECAYS, RATES = (0.1, 0.0), (1e-2, 3e-3)  # of the two parameter groups


def build(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[list[torch.nn.Parameter], Any]:
    """The same parameters in two groups that differ in lr and weight decay, and a plain optimizer over them."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [
        {"params": params[:2], "lr": RATES[0], "weight_decay": DECAYS[0]},
        {"params": params[2:], "lr": RATES[1], "weight_decay": DECAYS[1]},
    ]
    return params, optimizer(groups, betas=BETAS, eps=EPS)  # type: ignore[call-arg]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def train(params: list[torch.nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def whole(params: list[torch.nn.Parameter], mean: float = 0.0) -> list[tuple[Place, float]]:
    return [(Place(param, 0, param.numel()), mean) for param in params]


def frozen() -> tuple[list[torch.nn.Parameter], Any, TwoPhaseAdam]:
    params, optimizer = build()
    two_phase = TwoPhaseAdam(optimizer)
    train(params, optimizer, range(DENSE_STEPS))
    two_phase.freeze(whole(params))
    return params, optimizer, two_phase


def same(params: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


# ---- the dense phase --------------------------------------------------------------------------------------------


def test_before_the_freeze_it_is_the_users_optimizer_bit_for_bit() -> None:
    (params, optimizer), (plain_params, plain) = build(), build()
    two_phase = TwoPhaseAdam(optimizer)
    for step in range(DENSE_STEPS):
        for each, its_params in ((optimizer, params), (plain, plain_params)):
            each.param_groups[0]["lr"] = 1e-2 / (step + 1)
            train(its_params, each, range(step, step + 1))
        assert same(params, plain_params)
    assert not two_phase.frozen


def test_the_moments_before_any_step_are_zeros() -> None:
    params, optimizer = build()
    two_phase = TwoPhaseAdam(optimizer)
    assert not two_phase.first_moment(params[0]).any() and not two_phase.second_moment(params[0]).any()
    assert two_phase.first_moment(params[0]).shape == two_phase.second_moment(params[0]).shape == SHAPES[0]


def test_the_second_moment_is_bias_corrected_and_the_first_is_not() -> None:
    """With one constant gradient g, v / (1 - beta2^t) is g^2 at every t, and m is g (1 - beta1^t)."""
    params, optimizer = build()
    two_phase = TwoPhaseAdam(optimizer)
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        optimizer.step()
    ones = torch.ones(SHAPES[0])
    # A handful of fp32 roundings each: 1e-6 is about eight units in the last place.
    torch.testing.assert_close(two_phase.second_moment(params[0]), 4.0 * ones, rtol=1e-6, atol=0)
    torch.testing.assert_close(two_phase.first_moment(params[0]), 2.0 * ones, rtol=1e-6, atol=0)


def test_lr_is_the_largest_of_the_groups() -> None:
    _, optimizer = build()
    two_phase = TwoPhaseAdam(optimizer)
    assert (two_phase.lr, two_phase.betas) == (max(RATES), BETAS)


# ---- the compressed phase ---------------------------------------------------------------------------------------


def by_hand(param: list[float], u: list[float], v: list[float], t: int, lr: float, decay: float) -> list[float]:
    """The documented step, entry by entry in double precision."""
    stepped = []
    for p, u_i, v_i in zip(param, u, v, strict=True):
        p -= lr * decay * p
        v_hat = v_i / (1.0 - BETAS[1] ** DENSE_STEPS)
        stepped.append(p - lr * u_i / (math.sqrt(v_hat) + EPS))
    return stepped


def test_after_the_freeze_it_steps_by_the_formula() -> None:
    dense_params, dense = build()
    train(dense_params, dense, range(DENSE_STEPS))
    variances = [dense.state[param]["exp_avg_sq"] for param in dense_params]  # as Adam leaves them
    params, optimizer, _ = frozen()
    for step in range(DENSE_STEPS, DENSE_STEPS + 4):
        optimizer.param_groups[0]["lr"] = 0.02 * (step + 1)  # as a scheduler does
        give_gradients(params, step)
        expected = []
        for param, v, group in zip(params, variances, (0, 0, 1), strict=True):
            lr, decay = optimizer.param_groups[group]["lr"], DECAYS[group]
            flat = (tensor.double().flatten().tolist() for tensor in (param.data, param.grad, v))
            expected.append(torch.tensor(by_hand(*flat, t=step + 1, lr=lr, decay=decay), dtype=torch.float64))
        optimizer.step()
        for param, wanted in zip(params, expected, strict=True):
            # Parameters and their changes are below 16; about six fp32 roundings of 2^-24 each.
            torch.testing.assert_close(param.double().flatten(), wanted, rtol=0, atol=6 * 16 * 2.0**-24)


def test_after_the_freeze_it_is_no_longer_adam() -> None:
    """The control of the test above: an Adam that went on would be far outside its tolerance."""
    (params, optimizer, _), (plain_params, plain) = frozen(), build()
    train(plain_params, plain, range(DENSE_STEPS))
    assert same(params, plain_params)  # freezing alone changes nothing
    train(params, optimizer, range(DENSE_STEPS, DENSE_STEPS + 1))
    train(plain_params, plain, range(DENSE_STEPS, DENSE_STEPS + 1))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(params, plain_params, strict=True))


def test_the_variance_stands_still_the_counter_goes_on_and_the_moment_is_what_was_applied() -> None:
    params, optimizer, _ = frozen()
    before = [optimizer.state[param]["exp_avg_sq"].clone() for param in params]
    train(params, optimizer, range(50, 53))
    for param, variance in zip(params, before, strict=True):
        state = optimizer.state[param]
        assert torch.equal(state["exp_avg_sq"], variance)
        assert torch.equal(state["exp_avg"], param.grad)
        assert int(state["step"]) == DENSE_STEPS + 3


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    params, optimizer, _ = frozen()
    give_gradients(params, 0)
    params[1].grad = None
    before = params[1].clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert int(optimizer.state[params[1]]["step"]) == DENSE_STEPS


def test_a_parameter_whose_variance_is_unknown_stays_as_it_is() -> None:
    params, optimizer = build()
    two_phase = TwoPhaseAdam(optimizer)
    params[2].requires_grad_(False)
    train(params[:2], optimizer, range(2))
    two_phase.freeze(whole(params))
    before = params[2].clone()
    train(params, optimizer, range(2, 3))  # unfrozen by the user only now
    assert torch.equal(params[2], before)


def test_a_group_without_parameters_does_no_harm() -> None:
    params, optimizer = build()
    optimizer.add_param_group({"params": []})  # such as "all biases" of a model that has none
    two_phase = TwoPhaseAdam(optimizer)
    train(params, optimizer, range(2))
    two_phase.freeze(whole(params))
    train(params, optimizer, range(2, 3))
    assert two_phase.frozen


@pytest.mark.parametrize("phase", ["dense", "compressed"])
def test_a_closure_is_evaluated_once_and_its_loss_returned(phase: str) -> None:
    params, optimizer, _ = frozen() if phase == "compressed" else (*build(), None)
    if phase == "dense":
        TwoPhaseAdam(optimizer)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(sum((param**2).sum() for param in params))
        losses[-1].backward()
        return losses[-1]

    assert optimizer.step(closure) is losses[0] and len(losses) == 1


def with_scheduler(built: str) -> tuple[list[torch.nn.Parameter], Any, TwoPhaseAdam, Any]:
    """A scheduler that halves the rates, built before or after the second phase is put behind the optimizer."""
    params, optimizer = build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if built == "before" else None
    two_phase = TwoPhaseAdam(optimizer)
    return params, optimizer, two_phase, schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.filterwarnings("ignore:Seems like:UserWarning")
def test_an_lr_scheduler_of_the_user_goes_on(built: str) -> None:
    params, optimizer, two_phase, schedule = with_scheduler(built)
    for step in range(2):
        train(params, optimizer, range(step, step + 1))
        schedule.step()
    two_phase.freeze(whole(params))
    optimizer.param_groups[1]["lr"] = 0.0
    before = [param.clone() for param in params]
    train(params, optimizer, range(2, 3))
    schedule.step()
    assert two_phase.lr == RATES[0] / 8
    assert torch.equal(params[2], before[2]) and not torch.equal(params[0], before[0])  # lr is read at every step


def test_an_lr_scheduler_finds_nothing_to_warn_of() -> None:
    """torch warns at the first step of a scheduler when it takes the optimizer's step for replaced or left out."""
    params, optimizer, _, schedule = with_scheduler("before")
    train(params, optimizer, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_a_saved_optimizer_comes_back_frozen_and_goes_on_bit_for_bit() -> None:
    params, optimizer, _ = frozen()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    new_params, new_optimizer = build()
    new = TwoPhaseAdam(new_optimizer)
    new_optimizer.load_state_dict(torch.load(file, weights_only=True))
    for param, saved in zip(new_params, params, strict=True):
        param.data.copy_(saved.data)
    assert new.frozen
    train(params, optimizer, range(80, 83))
    train(new_params, new_optimizer, range(80, 83))
    assert same(params, new_params)


class IntegerStepAdam(torch.optim.Optimizer):
    """Like DeepSpeed's fused and CPU Adams: `step` is a whole number, not a tensor."""

    def __init__(self, params: Any, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] += 1
            state["exp_avg"].lerp_(param.grad, 1 - BETAS[0])
            state["exp_avg_sq"].mul_(BETAS[1]).addcmul_(param.grad, param.grad, value=1 - BETAS[1])


def test_a_whole_number_of_steps_stays_one() -> None:
    params, optimizer = build(IntegerStepAdam)
    two_phase = TwoPhaseAdam(optimizer)
    train(params, optimizer, range(3))
    two_phase.freeze(whole(params))
    train(params, optimizer, range(3, 5))
    steps = [optimizer.state[param]["step"] for param in params]
    assert steps == [5, 5, 5] and all(type(step) is int for step in steps)
    assert [group["variance_frozen"] for group in optimizer.param_groups] == [True, True]


def test_entries_without_a_gradient_in_the_first_phase_do_not_blow_up() -> None:
    """The rows of rare tokens: their second moment is 0, and u / eps would be a step of some thousands."""
    row = torch.nn.Parameter(torch.zeros(4, 8))
    optimizer = torch.optim.AdamW([row], lr=1e-2, betas=BETAS, weight_decay=0.0)
    two_phase = TwoPhaseAdam(optimizer)
    for _ in range(DENSE_STEPS):
        row.grad = torch.full_like(row, 1e-3)
        row.grad[0] = 0.0
        optimizer.step()
    two_phase.freeze(whole([row], mean=1e-6))
    row.grad = torch.full_like(row, 1e-3)
    optimizer.step()
    # lr * 1e-3 / (sqrt(1e-6) + 1e-8), a usual step; eps adds 1e-5 of it.
    torch.testing.assert_close(row[0].detach(), torch.full((8,), -0.01), rtol=1e-4, atol=0)


def test_unseen_entries_get_the_mean_and_rare_ones_a_floor_in_each_part_of_a_tensor() -> None:
    flat = torch.nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.AdamW([flat], betas=BETAS)
    two_phase = TwoPhaseAdam(optimizer)
    flat.grad = torch.tensor([1.0, 1e-3, 0.0, 1e-3, 1e-3, 0.0])
    optimizer.step()
    two_phase.freeze([(Place(flat, 0, 3), 0.5), (Place(flat, 3, 3), 1e-6)])
    variance = optimizer.state[flat]["exp_avg_sq"]
    expected = torch.tensor([1.0, VARIANCE_FLOOR * 0.5, 0.5, 1e-6, 1e-6, 1e-6])
    torch.testing.assert_close(variance, expected, rtol=1e-6, atol=0)  # a few fp32 roundings
