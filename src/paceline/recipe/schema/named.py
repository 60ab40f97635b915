"""An entry of a list of variants may be its bare name: `flip` says what `{name: flip}` does."""

from typing import Any

from pydantic import BeforeValidator, GetJsonSchemaHandler

from paceline.recipe.schema.own import IMPORT_PATH_FORM, PATH_PATTERN


class OrItsName:
    """Have the JSON schema take the bare name of a variant, or an import path, as `NAMED` does."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        variants = handler(schema)
        names = [name for name in variants["discriminator"]["mapping"] if name != IMPORT_PATH_FORM]
        return {"anyOf": [{"enum": names}, {"type": "string", "pattern": PATH_PATTERN}, variants]}


def _section_from_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


NAMED = BeforeValidator(_section_from_name)
OR_ITS_NAME = OrItsName()
