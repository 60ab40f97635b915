"""Random changes to training images: one typed variant each, applied in the order listed in `data.augment`."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, PositiveFloat, model_validator

from paceline.recipe.schema.section import Section


def _rising(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"{list(ends)} falls (write {list(ends[::-1])})")
    return ends


Range = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_rising)]


class PadCrop(Section):
    """Pad every side, then cut the original size out at a random place."""

    name: Literal["pad_crop"] = "pad_crop"
    padding: int = Field(4, ge=1)
    """Pixels added to each side."""
    mode: Literal["zeros", "reflect"] = "zeros"
    """What the padding holds."""


class Flip(Section):
    """Mirror left to right."""

    name: Literal["flip"] = "flip"
    p: float = Field(0.5, gt=0, le=1)
    """Probability."""


class Rotate(Section):
    """Turn by an angle drawn evenly from [-degrees, degrees]."""

    name: Literal["rotate"] = "rotate"
    degrees: float = Field(15.0, gt=0, le=180)
    """Largest angle."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """How pixels between pixels are read."""


class Affine(Section):
    """Shear along x and zoom, about the centre."""

    name: Literal["affine"] = "affine"
    shear_degrees: float = Field(0.0, ge=0, lt=90)
    """Largest shear angle, drawn evenly from both signs."""
    scale: Range = (1.0, 1.0)
    """Smallest and largest zoom."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    """How pixels between pixels are read."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.shear_degrees == 0 and self.scale == (1.0, 1.0):
            raise ValueError("affine has no effect without shear or zoom (set shear_degrees or scale)")
        return self


class ColorJitter(Section):
    """Change brightness, contrast, saturation and hue, in a random order."""

    name: Literal["color_jitter"] = "color_jitter"
    brightness: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - b, 1 + b]."""
    contrast: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - c, 1 + c]."""
    saturation: float = Field(0.4, ge=0, le=1)
    """Factor drawn from [1 - s, 1 + s]."""
    hue: float = Field(0.0, ge=0, le=0.5)
    """Shift drawn from [-hue, hue], in turns of the colour wheel."""


class RandomResizedCrop(Section):
    """Cut a random area and aspect ratio out of the image and resize it to `data.image_size`."""

    name: Literal["random_resized_crop"] = "random_resized_crop"
    scale: Range = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    ratio: Range = (0.75, 4 / 3)
    """Smallest and largest width : height."""


class Resize(Section):
    """Resize the whole image to `data.image_size`, whatever its shape."""

    name: Literal["resize"] = "resize"


class _OrItsName:
    """Have the JSON schema take the bare name of a variant, as `_named` does."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        variants = handler(schema)
        return {"anyOf": [{"enum": list(variants["discriminator"]["mapping"])}, variants]}


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


AugmentSection = Annotated[
    Annotated[
        PadCrop | Flip | Rotate | Affine | ColorJitter | RandomResizedCrop | Resize,
        Field(discriminator="name"),
    ],
    BeforeValidator(_named),
    _OrItsName(),
]
