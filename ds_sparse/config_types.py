"""What settings are made of: the base of every block, and the types of their values."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt


def _finite_number(value: float) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("a finite number")
    return float(value)


Number = Annotated[StrictInt | StrictFloat, AfterValidator(_finite_number)]
Density = Annotated[Number, Field(gt=0.0, le=1.0)]


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a valid regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_regex)]


class Settings(BaseModel):
    """Base of every block: unknown keys are errors, values are never coerced, nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
