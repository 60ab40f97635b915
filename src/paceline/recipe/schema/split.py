"""The recipe's section `data.split`: one fold of a cross-validation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.schema.base import Off, Section, Switch


class Split(Section):
    """One fold of a cross-validation: the training images of the source are divided into folds, of which one is for
    validation and the others are for training. Each image is in exactly one fold of a division."""

    folds: Annotated[int, Field(ge=2)] | Literal["groups"] = 5
    """Number of folds; `groups` makes a fold of each group (leave-one-group-out)."""
    fold: int = Field(0, ge=0)
    """The fold to validate on, from 0. The others are trained on."""
    repeat: int = Field(0, ge=0)
    """Number of the division, from 0: each divides the images differently."""
    stratified: Switch = "on"
    """Give each fold the same share of each class, as far as whole images and groups allow."""
    groups: Off | Annotated[str, Field(min_length=1)] = "off"
    """Column that names the group of each image, such as the patient; all images of a group are in one fold."""
    groups_file: Off | Annotated[str, Field(min_length=1)] = "off"
    """CSV file with the column of `groups`, if the source has none."""
    pool: Literal["train", "all"] = "train"
    """Images to divide: `train` leaves the validation images of the source out, as a test set; `all` divides both."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the divisions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.groups == "off":
            if self.folds == "groups":
                raise ValueError("folds groups makes a fold of each group, and there are none (set groups=COLUMN)")
            if self.groups_file != "off":
                raise ValueError(f"groups_file {self.groups_file} has no effect without groups (set groups=COLUMN)")
        if self.folds != "groups":
            if self.fold >= self.folds:
                raise ValueError(f"fold {self.fold} is not one of {self.folds} folds (set 0 to {self.folds - 1})")
            return self
        for name in ("repeat", "stratified", "seed"):
            if self.is_set(name):
                raise ValueError(f"{name} has no effect with folds groups, which divide in one way (leave it out)")
        return self
