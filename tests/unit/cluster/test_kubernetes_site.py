"""Fields of a Kubernetes site, and values that are refused before a cluster would."""

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.cluster.site import KubernetesSite, Toleration
from paceline.recipe.schema.base import field_docs


def test_every_field_is_documented() -> None:
    fields = [(model, name) for model in (KubernetesSite, Toleration) for name in model.model_fields]
    assert len(fields) > 20
    assert [(model, name) for model, name in fields if not field_docs(model).get(name)] == []


@pytest.mark.parametrize(
    ("field", "value", "printed"),
    [
        ("memory", "8 gigs", "is not an amount"),
        ("memory", "-1Gi", "is not an amount"),
        ("shm", "0", "is not an amount"),
        ("image", "a b", "is not an image"),
        ("namespace", "Mine", "is not a name"),
        ("claim", "a_b", "is not a name"),
        ("queue", "-q", "is not a name"),
        ("mount", "work", "is not an absolute path"),
        ("mount", "/a/../etc", "is not an absolute path"),
        ("mount", "/a:b", "is not an absolute path"),
        ("mount", "/", "is a system folder"),
        ("mount", "/tmp/x", "is a system folder"),
        ("mount", "/claim/", "is a system folder"),
        ("labels", {"a b": "c"}, "is not a label's key"),
        ("labels", {"a": "c d"}, "is not a label's value"),
        ("node_selector", {"a": "c\n"}, "is not a label's value"),
        ("environ", {"1A": "x"}, "is not a variable's name"),
        ("environ", {"PET_NNODES": "2"}, "is set by torchrun"),
        ("kind", "pod", "trainjob"),
        ("cpus_per_rank", 0, "greater than 0"),
        ("user", 0, "greater than 0"),
        ("time", "3ep", "not a wall-clock time"),
        ("tolerations", [{"key": "a", "value": "b"}], "has no effect with operator Exists"),
    ],
)
def test_invalid_kubernetes_names_are_refused(field: str, value: Any, printed: str) -> None:
    with pytest.raises(ValidationError, match=printed):
        KubernetesSite.model_validate({field: value})


def test_numbers_and_switches_become_text_for_kubernetes() -> None:
    site = KubernetesSite.model_validate(
        {"environ": {"OMP_NUM_THREADS": 4, "A": True}, "node_selector": {"gpu": True}, "memory": 1000}
    )
    assert site.environ == {"OMP_NUM_THREADS": "4", "A": "true"}
    assert site.node_selector == {"gpu": "true"}
    assert site.memory == "1000"


def test_a_label_may_have_a_prefix_and_an_amount_a_fraction() -> None:
    site = KubernetesSite.model_validate({"node_selector": {"nvidia.com/gpu.product": "A100"}, "memory": "1.5Gi"})
    assert site.node_selector == {"nvidia.com/gpu.product": "A100"}
