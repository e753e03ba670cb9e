"""What settings are made of: the base of every block, and the types of their values."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt


def _finite_number(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:  # a whole number with more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


Number = Annotated[StrictInt | StrictFloat, AfterValidator(_finite_number)]
Density = Annotated[Number, Field(gt=0.0, le=1.0)]


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # the latter for what is too large or too deep
        raise ValueError(f"a valid regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_regex)]


class Settings(BaseModel):
    """Base of every block: unknown keys are errors, values are never coerced, nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
