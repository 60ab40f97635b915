"""Manifests as text: whatever is in them comes back, by the rules of YAML 1.1 and of 1.2."""

from typing import Any

import pytest
import yaml as yaml_1_1
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from paceline.cluster.kubernetes import manifests_to_yaml


def back(text: str) -> list[list[Any]]:
    """Return what the readers of 1.1 (kubectl's rules) and of 1.2 make of it."""
    return [list(yaml_1_1.safe_load_all(text)), list(YAML(typ="safe", pure=True).load_all(text))]


NASTY = [
    *("yes", "No", "ON", "off", "y", "N", "true", "False", "null", "Null", "~", "", " ", "NaN", ".inf", "-.INF"),
    *("1", "1.0", "1e3", "0o7", "010", "0x1F", "1_000", "12:30:45", "2026-11-22", "1.", "+1", "="),
    *("- a", "-a", "? a", "a: b", "a:", "a #b", "#a", "{{ a }}", "[a]", "&a", "*a", "!a", "|", ">", "@a", "`a`", "%a"),
    *(
        "'",
        '"',
        "\\",
        "\\n",
        "a'b\"c",
        "a\nb",
        "a\n\nb\n",
        "\n",
        "\n\n",
        " a\nb",
        "a \nb\n",
        "a\nb",
        "a\tb",
        "\ta\nb\n",
    ),
    *("a\r\nb", "a\rb", "\x85", "a\u2028b", "\u2029", "\ufeffa", "\x07", "\x7f", "é", "😀", "a\n# b\n", "a\n---\nb\n"),
    *("...", "---", "a\n...\n", "<<", "$(x)", "a,b", "/claim/a", "photos.yaml", "a" * 300 + " " + "b" * 300),
]


@pytest.mark.parametrize("text", NASTY)
def test_ambiguous_text_survives_a_round_trip(text: str) -> None:
    manifest = {"value": text, "list": [text, [text]], "map": {text: text}}
    assert back(manifests_to_yaml([manifest])) == [[manifest], [manifest]]


_VALUES = st.recursive(
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.integers()
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab: {}-#'\"", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text("abyno: -", max_size=4), _VALUES, max_size=3), min_size=1, max_size=3))
@example([{"a": []}, {"b": {}}, {}])
def test_every_manifest_comes_back(manifests: list[dict[str, Any]]) -> None:
    assert back(manifests_to_yaml(manifests)) == [manifests, manifests]


def test_people_can_read_it() -> None:
    manifest = {
        "kind": "ConfigMap",
        "metadata": {"name": "photos-0a1b2c", "labels": {"team": "on"}},
        "data": {"photos.yaml": "seed: 0\n\ntrain:\n  epochs: 3\n"},
        "args": ["--resume", "a: b"],
    }
    assert manifests_to_yaml([manifest, {"kind": "Job"}]) == (
        "kind: ConfigMap\n"
        "metadata:\n"
        "  name: photos-0a1b2c\n"
        "  labels:\n"
        '    team: "on"\n'
        "data:\n"
        "  photos.yaml: |\n"
        "    seed: 0\n"
        "\n"
        "    train:\n"
        "      epochs: 3\n"
        "args:\n"
        '  - "--resume"\n'
        '  - "a: b"\n'
        "---\n"
        "kind: Job\n"
    )


def test_nothing_is_written_as_a_reference_to_something_else() -> None:
    same = {"cpu": "4"}
    assert "&" not in manifests_to_yaml([{"requests": same, "limits": same}])
