"""Types of the fields that a manifest is made of, and the base of all its parts."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

MOST_MEMBERS = 1024

Size = Annotated[int, Field(gt=0, le=1 << 24)]  # one side of a tensor; beyond it a header lies
Members = Annotated[int, Field(gt=0, le=MOST_MEMBERS)]  # each costs time to build, even one without storage
Share = Annotated[float, Field(gt=0, lt=1)]
PositiveFinite = Annotated[FiniteFloat, Field(gt=0)]


class Strict(BaseModel):
    """Unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
