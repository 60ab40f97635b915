"""Check commands without running them: the verb, the options, and the recipe.

typer parses the options, and the recipe is loaded with the command's overrides.
"""

from collections.abc import Iterator
from typing import Any

import typer
import typer.core

from paceline.cli.app import app
from paceline.cli.args import split_recipe_args
from paceline.cli.submit_jobs import parse_submit_args
from paceline.cluster.site import load_site
from paceline.lab.ladder_file import load_ladder
from paceline.lab.script_ladder_file import load_script_ladder
from paceline.recipe.load import load

from .commands import MEASURING

VERBS = typer.main.get_group(app).commands


def parse(where: str, verb: str, cli_args: list[str]) -> None:
    command: Any = VERBS[verb]
    if isinstance(command, typer.core.TyperGroup):
        command, cli_args = command.commands[cli_args[0]], cli_args[1:]
    context = command.make_context(where, cli_args)
    if verb == "submit":
        submitted = parse_submit_args(context.params["args"] or [])
        VERBS[submitted.verb].make_context(where, [*submitted.args, *submitted.options])


def options_of(words: tuple[str, ...]) -> set[str]:
    """Return the options of the verb that `words` begin with. Raise `KeyError` if there is no such verb."""
    verb, *rest = words
    group: Any = VERBS[verb]
    if isinstance(group, typer.core.TyperGroup):
        commands = [group.commands[rest[0]]] if rest and rest[0].isalpha() else list(group.commands.values())
    elif verb == "submit":  # the options of the verb that it submits follow
        commands = [each for each in VERBS.values() if not isinstance(each, typer.core.TyperGroup)]
    else:
        commands = [group]
    names = {name for each in commands for param in each.params for name in (*param.opts, *param.secondary_opts)}
    return {*names, "--help"}


def load_recipe(cli_args: tuple[str, ...]) -> bool:
    """Load the recipe of a command if it is a shipped one; return whether it is."""
    verb, *rest = cli_args
    params = VERBS[verb].make_context(verb, list(rest)).params
    if verb == "submit":
        submitted = parse_submit_args(params["args"] or [])
        load_site(params["site"], submitted.site, None)
        verb, params = (
            submitted.verb,
            VERBS[submitted.verb].make_context(submitted.verb, [*submitted.args, *submitted.options]).params,
        )
    args = params.get("args") or []
    if verb not in MEASURING or (args and args[0].endswith((".yaml", ".pack"))):
        return False
    if params.get("script"):
        load_script_ladder(params["script"])
        return False
    if verb == "ladder":  # its first argument is a ladder, whose recipe the overrides are for
        name, *args = args or ["auto"]
        args = [params["recipe"] or load_ladder(name).recipe, *args]
    load(*split_recipe_args(list(args)))
    return True


def is_field(names: list[str], nodes: list[dict[str, Any]], schema: dict[str, Any]) -> bool:
    """Return whether `names` lead to a field from any of `nodes` of a JSON schema; below `args` any name does."""
    if not names:
        return True
    below = []
    for node in nodes:
        for each in variants(node, schema):
            if names[0] in each.get("properties", {}):
                below.append(each["properties"][names[0]])
            elif each.get("type") == "object" and "properties" not in each:
                return True
    return bool(below) and is_field(names[1:], below, schema)


def variants(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in node:
        yield from variants(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
        return
    yield node
    for each in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from variants(each, schema)
