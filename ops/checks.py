"""Argument checks of the public calls: each error names the argument, what was given and what is allowed."""

from __future__ import annotations

from torch import Tensor, bfloat16, dtype, float16, float32

from .types import Accumulation

GRAD_DTYPES = (float32, bfloat16, float16)
MAX_ELEMENTS = (1 << 31) - 1  # indices are int32


def check_vector(name: str, tensor: Tensor, dtypes: tuple[dtype, ...] = (float32,)) -> None:
    """A flat contiguous strided tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must be flat (1 dimension), got shape {tuple(tensor.shape)}: pass {name}.view(-1)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}")


def check_like(name: str, tensor: Tensor, residual_name: str, residual: Tensor) -> None:
    """Same length and device as the residual."""
    if tensor.numel() != residual.numel():
        raise ValueError(
            f"{name} must have as many elements as {residual_name} ({residual.numel()}), got {tensor.numel()}"
        )
    check_device(name, tensor, residual_name, residual)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name} ({other.device}), got {tensor.device}")


def check_int(name: str, value: int, low: int, high: int, high_meaning: str = "") -> None:
    """low <= value <= high; booleans and floats are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        meaning = f" ({high_meaning})" if high_meaning else ""
        raise ValueError(f"{name} must be in {low}..{high}{meaning}, got {value}")


def check_name(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_residual(residual: Tensor) -> None:
    check_vector("residual", residual)
    if residual.numel() > MAX_ELEMENTS:
        raise ValueError(f"residual must have at most {MAX_ELEMENTS} elements (int32 indices), got {residual.numel()}")


def check_accumulation(
    residual: Tensor, grad: Tensor, momentum: float | None, velocity: Tensor | None, decay: float
) -> Accumulation:
    """The checked accumulation arguments as one value."""
    check_vector("grad", grad, GRAD_DTYPES)
    check_like("grad", grad, "residual", residual)
    _check_fraction("decay", decay)
    if (momentum is None) != (velocity is None):
        raise ValueError(
            "momentum and velocity go together: got "
            f"momentum={momentum!r} and velocity={'a tensor' if velocity is not None else None}"
        )
    if momentum is not None and velocity is not None:
        _check_fraction("momentum", momentum)
        check_vector("velocity", velocity)
        check_like("velocity", velocity, "residual", residual)
    return Accumulation(
        grad.detach(),
        float(decay),
        None if momentum is None else float(momentum),
        None if velocity is None else velocity.detach(),
    )


def _check_fraction(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")
