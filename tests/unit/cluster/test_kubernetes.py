"""A job as manifests: both kinds run the same arguments on the same volumes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from torch.distributed.elastic.agent.server.local_elastic_agent import macros

from paceline.cluster.job import ClusterJob
from paceline.cluster.kubernetes import (
    build_manifests,
    dns_label,
    escape_expansion,
    kubectl_commands,
    short_digest,
    unique_label,
)
from paceline.cluster.site import KubernetesSite, Toleration
from paceline.core.errors import RecipeError, WorldError

RUN = Path("/home/me/runs/photos")
THERE = f"/claim/runs/photos-{short_digest(str(RUN))}"
RECIPE = "seed: 0\ncheckpoint:\n  grace: 90s\n"
JOB = ClusterJob(
    name="photos",
    args=("train", f"{RUN}/job/recipe-0123456789ab.yaml", "--run-dir", str(RUN), "--resume"),
    recipe_hash="0123456789ab",
    run_dir=RUN,
    folder=Path("/home/me"),
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
)
KINDS = ("trainjob", "job")


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same rules, in C


def site(**fields: Any) -> KubernetesSite:
    return KubernetesSite.model_validate({"image": "registry.example.org/paceline:1", "claim": "work", **fields})


def manifests(job: ClusterJob, settings: KubernetesSite, files: dict[Path, str]) -> list[dict[str, Any]]:
    """Return the manifests as the rules of YAML 1.1 read them, which are kubectl's."""
    return list(yaml.load_all(build_manifests(job, settings, files=files), Loader=LOADER))


def written(job: ClusterJob = JOB, *, recipe: str = RECIPE, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return the manifests by kind."""
    made = manifests(job, site(**fields), {job.frozen_recipe: recipe} if recipe else {})
    by_kind = {each["kind"]: each for each in made}
    assert len(by_kind) == len(made)
    return by_kind


def main_object(job: ClusterJob = JOB, **fields: Any) -> dict[str, Any]:
    return manifests(job, site(**fields), {job.frozen_recipe: RECIPE})[-1]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the pods' spec, or what a TrainJob lays over its runtime's."""
    if manifest["kind"] == "Job":
        return manifest["spec"]["template"]["spec"]
    (patch,) = manifest["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    return node["template"]["spec"]["template"]["spec"]


def program_of(manifest: dict[str, Any]) -> list[str]:
    """Return the container's command and arguments."""
    has_both = manifest["spec"]["trainer"] if manifest["kind"] == "TrainJob" else pod_of(manifest)["containers"][0]
    return [*has_both["command"], *has_both["args"]]


def environ_of(manifest: dict[str, Any]) -> dict[str, Any]:
    container = manifest["spec"]["trainer"] if manifest["kind"] == "TrainJob" else pod_of(manifest)["containers"][0]
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names))
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


@pytest.mark.parametrize(
    ("kind", "expected"), [("trainjob", ["ConfigMap", "TrainJob"]), ("job", ["ConfigMap", "Service", "Job"])]
)
def test_objects_are_created_from_recipe_to_pods(kind: str, expected: list[str]) -> None:
    assert list(written(kind=kind)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_several_nodes_run_the_agent_with_paths_as_pods_see_them(kind: str) -> None:
    program = program_of(main_object(kind=kind))
    assert program[:3] == ["python", "-m", "paceline.parallel.torchrun_agent"]
    start = program.index("paceline")
    assert program[start - 1] == "-m"
    assert program[start + 1 :] == [
        *("train", "/etc/paceline/photos.yaml", "--run-dir", THERE, "--resume"),
    ]


def test_pods_of_a_job_rendezvous_at_the_first() -> None:
    made = written(kind="job")
    name = made["Job"]["metadata"]["name"]
    options = program_of(made["Job"])
    assert {f"--rdzv-endpoint={name}-0.{name}:29400", "--nnodes=2", "--nproc-per-node=4"} <= set(options)
    pod = made["Job"]["spec"]["template"]
    assert pod["spec"]["subdomain"] == made["Service"]["metadata"]["name"] == name
    assert made["Service"]["spec"]["clusterIP"] == "None"
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True  # a name is needed before a pod can be ready
    assert made["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_pods_of_a_trainjob_rendezvous_at_the_runtimes_address() -> None:
    made = main_object(kind="trainjob")
    options = program_of(made)
    assert "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)" in options
    assert not any(each.startswith(("--nnodes", "--nproc")) for each in options)  # PET_NNODES, PET_NPROC_PER_NODE
    assert (made["spec"]["trainer"]["numNodes"], made["spec"]["trainer"]["numProcPerNode"]) == (2, 4)


def test_variables_of_the_runtime_are_not_set_again() -> None:
    """The webhook of Kubeflow Trainer refuses a TrainJob that has one of its variables."""
    assert not [name for name in environ_of(main_object(kind="trainjob")) if name.startswith("PET_")]
    assert "PET_NODE_RANK" in environ_of(main_object(kind="job"))


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_starts_its_own_ranks_without_rendezvous(kind: str) -> None:
    made = written(replace(JOB, nodes=1), kind=kind)
    assert "Service" not in made
    *_, last = made.values()
    assert program_of(last)[:2] == ["paceline", "train"]
    assert program_of(last)[-2:] == ["--ranks=4", "--max-restarts=3"]
    assert "subdomain" not in pod_of(last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_verb_that_starts_its_own_ranks_gets_no_ranks_option(kind: str) -> None:
    words = ("ladder", "cpu", "--run-dir", str(RUN))
    made = main_object(replace(JOB, args=words, nodes=1, starts_ranks=False), kind=kind)
    assert program_of(made) == ["paceline", "ladder", "cpu", "--run-dir", THERE]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_not_read_addresses_of_an_earlier_start_and_have_their_grace(kind: str) -> None:
    last = list(written(replace(JOB, grace_s=90.5), kind=kind).values())[-1]
    assert environ_of(last)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environ_of(last)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "91"


def test_a_pod_has_a_longer_grace_period_than_its_ranks() -> None:
    last = list(written(replace(JOB, grace_s=90), kind="job").values())[-1]
    assert pod_of(last)["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("kind", KINDS)
def test_resources_cover_all_ranks_of_a_node(kind: str) -> None:
    made = main_object(kind=kind, cpus_per_rank=3, memory="64Gi", gpu_resource="amd.com/gpu")
    has = made["spec"]["trainer"]["resourcesPerNode"] if kind == "trainjob" else None
    given = has or pod_of(made)["containers"][0]["resources"]
    assert given["requests"] == given["limits"] == {"cpu": "12", "memory": "64Gi", "amd.com/gpu": "4"}


@pytest.mark.parametrize("kind", KINDS)
def test_without_gpus_none_is_requested(kind: str) -> None:
    assert "nvidia.com/gpu" not in str(main_object(replace(JOB, gpus_per_node=0), kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_volume_is_mounted_and_shared_memory_is_memory(kind: str) -> None:
    pod = pod_of(main_object(kind=kind, shm="3Gi", mount="/mnt/all"))
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"work": "/mnt/all", "shm": "/dev/shm", "scratch": "/tmp", "recipe": "/etc/paceline"}
    assert set(volumes) == set(mounts)
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "work"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_no_rights_to_speak_of(kind: str) -> None:
    pod = pod_of(main_object(kind=kind, user=4242))
    assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 4242, "fsGroup": 4242}.items()
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_job_gets_no_token_of_the_cluster() -> None:
    assert pod_of(main_object(kind="job"))["automountServiceAccountToken"] is False


def test_a_job_decides_by_the_documented_exit_codes() -> None:
    spec = main_object(kind="job", retries=2)["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert codes == {2: "FailJob", 3: "FailJob", 75: "Ignore", 143: "Ignore"}
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    (container,) = pod_of(main_object(kind="job"))["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules[1:]} == {container["name"]}
    assert pod_of(main_object(kind="job"))["restartPolicy"] == "Never"  # a policy needs it
    assert spec["backoffLimit"] == 2 * JOB.nodes


def test_an_indexed_job_has_a_pod_a_node() -> None:
    spec = main_object(kind="job")["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_gets_the_job_suspended(kind: str) -> None:
    made = main_object(kind=kind, queue="research")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert made["spec"]["suspend"] is True
    assert "suspend" not in main_object(kind=kind)["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_time_is_a_limit_of_the_job_in_seconds(kind: str) -> None:
    assert main_object(kind=kind, time="1.5h")["spec"]["activeDeadlineSeconds"] == 5400
    assert "activeDeadlineSeconds" not in main_object(kind=kind)["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_node_selector_and_tolerations_are_passed_on(kind: str) -> None:
    taints = (Toleration(key="nvidia.com/gpu"), Toleration(key="team", operator="Equal", value="a", effect="NoExecute"))
    pod = pod_of(main_object(kind=kind, node_selector={"zone": "b"}, tolerations=taints, pull_secrets=("s",)))
    assert pod["nodeSelector"] == {"zone": "b"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
    ]
    assert pod["imagePullSecrets"] == [{"name": "s"}]


@pytest.mark.parametrize("kind", KINDS)
def test_the_sites_environment_takes_precedence(kind: str) -> None:
    assert environ_of(main_object(kind=kind, environ={"HOME": "/claim/me", "NCCL_DEBUG": "INFO"})).items() >= {
        ("HOME", "/claim/me"),
        ("NCCL_DEBUG", "INFO"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_all_objects_of_a_run_have_its_name_its_namespace_and_its_labels(kind: str) -> None:
    made = written(kind=kind, namespace="me", labels={"team": "a"})
    assert len({each["metadata"]["name"] for each in made.values()}) == 1
    for each in made.values():
        assert each["metadata"]["namespace"] == "me"
        assert each["metadata"]["labels"].items() >= {"team": "a", "app.kubernetes.io/name": "paceline"}.items()


def test_two_runs_of_a_recipe_have_names_of_their_own_and_one_run_always_the_same() -> None:
    other = replace(JOB, run_dir=Path("/home/me/runs/photos-2"))
    names = [main_object(job)["metadata"]["name"] for job in (JOB, JOB, other)]
    assert names[0] == names[1] != names[2]


def test_the_config_map_names_the_recipe_as_the_command_does() -> None:
    config = written()["ConfigMap"]
    assert config["data"] == {"photos.yaml": RECIPE}
    assert config["immutable"] is True


def test_a_ladder_travels_beside_its_recipe_by_its_own_name() -> None:
    words = ("ladder", f"{RUN}/job/ladder-ab/16 bits.yaml", str(JOB.frozen_recipe), "--run-dir", str(RUN))
    job = replace(JOB, args=words, nodes=1, starts_ranks=False, ladder="ladder-ab/16 bits.yaml")
    config, made = manifests(job, site(kind="job"), {job.frozen_ladder: "rungs: []\n", job.frozen_recipe: RECIPE})
    assert config["data"] == {"16-bits.yaml": "rungs: []\n", "photos.yaml": RECIPE}
    assert program_of(made)[1:4] == ["ladder", "/etc/paceline/16-bits.yaml", "/etc/paceline/photos.yaml"]


def test_without_a_recipe_there_is_no_config_map() -> None:
    made = manifests(replace(JOB, args=("eval", str(RUN), "--classes"), nodes=1), site(kind="job"), {})
    assert [each["kind"] for each in made] == ["Job"]
    assert program_of(made[0]) == ["paceline", "eval", THERE, "--classes", "--ranks=4"]
    assert "recipe" not in {each["name"] for each in pod_of(made[0])["volumes"]}


def test_a_run_directory_on_the_claim_is_unchanged() -> None:
    run = Path("/claim/experiments/a")
    made = main_object(replace(JOB, run_dir=run, args=("train", "digits", "--run-dir", str(run))), kind="job")
    assert program_of(made)[-1] == str(run)


def test_run_directories_of_one_name_are_two_on_the_claim() -> None:
    def there(run: Path) -> str:
        words = ("train", "digits", "--run-dir", str(run))
        return program_of(main_object(replace(JOB, run_dir=run, args=words), kind="job"))[-1]

    mine, other = there(RUN), there(Path("/home/you/runs/photos"))
    assert mine == there(RUN) != other
    assert all(each.startswith("/claim/runs/photos-") for each in (mine, other))


def test_only_whole_paths_of_the_run_are_moved() -> None:
    words = ("train", "digits", f"{RUN}-2", f"{RUN}/checkpoints", f"data.source.root={RUN}")
    program = program_of(main_object(replace(JOB, args=words), kind="job"))
    assert program[-3:] == [f"{RUN}-2", f"{THERE}/checkpoints", f"data.source.root={RUN}"]


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_does_not_expand_arguments(kind: str) -> None:
    """Of `$(NAME)` Kubernetes would make the value of a variable, of `$$` one `$`."""
    words = (*JOB.args, "data.source.root=/claim/$(HOME)/a$$b$")
    made = main_object(replace(JOB, args=words, nodes=1, starts_ranks=False), kind=kind, environ={"A": "$(HOME)"})
    assert program_of(made)[-1] == "data.source.root=/claim/$$(HOME)/a$$$$b$$"
    assert environ_of(made)["A"] == "$$(HOME)"


@pytest.mark.parametrize("kind", KINDS)
def test_torchrun_does_not_expand_arguments(kind: str) -> None:
    """Beyond what Kubernetes takes of it, torchrun makes a rank's number of `${local_rank}`, and one `$` of `$$`."""
    word = "data.source.root=/claim/${local_rank}/$(HOME)/a$$b$"
    given = program_of(main_object(replace(JOB, args=(*JOB.args, word)), kind=kind))[-1]
    unfolded = given.replace("$$", "$")  # as the kubelet does; nothing else is left for it to expand
    assert "$(" not in given.replace("$$", "")
    assert macros.substitute([unfolded], "3") == [word]


@pytest.mark.parametrize("word", ["a\0b", "a\udcffb"])
def test_text_that_no_manifest_can_hold_is_refused(word: str) -> None:
    with pytest.raises(RecipeError, match=r"is not text, and cannot be part of a manifest \(write it as UTF-8\)"):
        main_object(replace(JOB, args=(*JOB.args, word)))


@pytest.mark.parametrize("field", ["image", "claim"])
def test_an_image_and_a_claim_have_to_be_named(field: str) -> None:
    with pytest.raises(RecipeError, match=rf"kubernetes\.{field}: is not set \("):
        main_object(**{field: ""})


def test_a_recipe_that_no_config_map_can_hold_is_refused() -> None:
    largest = "#" * (1_048_576 - 1) + "\n"
    assert written(recipe=largest)
    with pytest.raises(RecipeError, match=r"recipe: 1\.0 MiB does not fit"):
        written(recipe=largest + "#")


def test_ladders_over_several_nodes_and_arrays_are_refused() -> None:
    with pytest.raises(WorldError, match="--nodes: 2, but scale starts its own ranks"):
        main_object(replace(JOB, args=("scale",), starts_ranks=False))
    with pytest.raises(WorldError, match="--array: 3 tasks, but"):
        main_object(replace(JOB, tasks=(0, 1, 2)))


def test_the_typed_command_is_an_annotation() -> None:
    made = main_object(replace(JOB, comments=("paceline submit photos", "recipe 0123456789ab")))
    assert made["metadata"]["annotations"]["paceline/command"] == "paceline submit photos\nrecipe 0123456789ab\n"


def test_the_next_steps_name_the_file_the_namespace_and_the_pods() -> None:
    steps = kubectl_commands(JOB, site(namespace="me"), Path("runs/photos/job/job.yaml"))
    name = main_object()["metadata"]["name"]
    assert steps[0] == "kubectl create -n me -f runs/photos/job/job.yaml"
    assert all(f"-l app.kubernetes.io/instance={name}" in step for step in steps[1:3])


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
def test_ambiguous_text_is_the_same_to_every_reader(text: str) -> None:
    job = replace(JOB, args=(*JOB.args, text), comments=(text,), nodes=1, starts_ranks=False)
    settings = site(environ={"A": text})
    made = build_manifests(job, settings, files={job.frozen_recipe: text})
    read = list(yaml.safe_load_all(made))
    assert read == list(YAML(typ="safe", pure=True).load_all(made))
    config, main = read
    assert program_of(main)[-1] == environ_of(main)["A"] == text.replace("$", "$$")
    assert config["data"] == {"photos.yaml": text}
    assert main["metadata"]["annotations"] == {"paceline/command": f"{text}\n"}


@settings(max_examples=40)  # the manifests of one cost a tenth of a second
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
@example("yes")
def test_any_recipe_comes_back(text: str) -> None:
    assert written(recipe=text + "\n")["ConfigMap"]["data"] == {"photos.yaml": text + "\n"}


def test_people_can_read_the_recipe_of_a_config_map() -> None:
    made = build_manifests(JOB, site(), files={JOB.frozen_recipe: "seed: 0\n\ntrain:\n  epochs: 3\n"})
    assert "  photos.yaml: |\n    seed: 0\n\n    train:\n      epochs: 3\n---\n" in made


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
