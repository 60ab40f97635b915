"""Names that Kubernetes takes, from names that people give."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.pod import dns_label, escape_expansion, unique_label

RFC_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wideresnet-fashion", "wideresnet-fashion"),
        ("course/WideResNet fashion", "course-wideresnet-fashion"),
        ("3-photos", "photos"),
        ("$(rm -rf /)", "rm-rf"),
        ("-x\n", "x"),
        ("---", "job"),
        ("写真", "job"),
        ("a" * 80, "a" * 33),
        ("a" * 32 + "-b", "a" * 32),
    ],
)
def test_a_name_becomes_a_label(text: str, expected: str) -> None:
    assert dns_label(text) == expected


@given(st.text(max_size=100), st.text(max_size=20))
def test_every_name_has_room_for_suffixes_of_controllers(text: str, key: str) -> None:
    label = unique_label(text, key)
    assert RFC_1035.fullmatch(label)
    assert len(f"{label}-node-0-99999-x7k2p") <= 63


def test_names_with_equal_labels_are_distinct() -> None:
    assert unique_label("a/b", "run") != unique_label("a-b", "run")


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand as a kubelet does: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/."""

    def value(match: "re.Match[str]") -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", value, text)


@given(st.text(alphabet="a$()Ab", max_size=30))
def test_text_comes_out_of_the_expansion_as_it_went_in(text: str) -> None:
    assert expanded(escape_expansion(text), {"A": "1", "a": "2", "Ab": "3"}) == text
