"""Sites are read from files and overrides like recipes, with the same errors."""

import re
from pathlib import Path

import pytest

from paceline.cluster.job import ClusterJob
from paceline.cluster.site import SITES, load_site, site_names
from paceline.cluster.slurm import build_script
from paceline.core.errors import RecipeError


@pytest.fixture
def write(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work(text: str, name: str = "site.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return work


def test_an_empty_site_has_the_defaults():
    site = load_site(None, ())
    assert (site.slurm.partition, site.slurm.time, site.slurm.requeue) == ("auto", "auto", "on")


def test_numbers_and_switches_become_text():
    site = load_site(None, ("slurm.account=12", "slurm.environ={A: true, B: 1.5}"))
    assert (site.slurm.account, site.slurm.environ) == ("12", {"A": "true", "B": "1.5"})


def test_overrides_take_precedence_over_a_named_site_and_that_over_the_users(write):
    own = Path(write("slurm: {account: mine, qos: low}", "own.yaml"))
    named = write("slurm: {account: course, partition: gpu}")
    assert load_site(None, (), own).slurm.account == "mine"
    site = load_site(named, ("slurm.partition=dev", "slurm.time=2h"), own).slurm
    assert (site.account, site.partition, str(site.time), site.qos) == ("course", "dev", "2h", "auto")


def test_a_file_may_extend_a_shipped_site_or_another_file(write):
    write("slurm: {account: base, reservation: day}", "base.yaml")
    site = load_site(write("extends: base.yaml\nslurm: {account: 1234}"), ()).slurm
    assert (site.account, site.reservation) == ("1234", "day")
    site = load_site(write("extends: perlmutter\nslurm: {account: m1}"), ()).slurm
    assert (site.account, site.constraint, site.environ) == ("m1", "gpu", {"SLURM_CPU_BIND": "cores"})


def test_every_shipped_site_makes_a_script():
    assert site_names() == ["juwels-booster", "perlmutter", "plain"]
    job = ClusterJob(
        "name", ("train", "r.yaml"), Path("/run"), Path("/here"), nodes=2, ranks_per_node=4, gpus_per_node=4
    )
    for name in site_names():
        assert (SITES / f"{name}.yaml").read_text().startswith("# ")
        assert build_script(job, load_site(name, ()).slurm).endswith('exit "$code"\n')


def test_juwels_booster_follows_its_documentation():
    job = ClusterJob(
        "name", ("train", "r.yaml"), Path("/run"), Path("/here"), nodes=2, ranks_per_node=4, gpus_per_node=4
    )
    text = build_script(job, load_site("juwels-booster", ()).slurm, "python")
    for line in ("#SBATCH --partition=booster", "#SBATCH --gres=gpu:4", "export GLOO_SOCKET_IFNAME=ib0"):
        assert f"\n{line}\n" in text
    assert '\nexport MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)i"\n' in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=24 python -P -m paceline train" in text


@pytest.mark.parametrize(("ranks", "printed", "cpus"), [(4, (), 24), (1, (), 96), (1, ("slurm.cpus_per_rank=12",), 12)])
def test_the_ranks_of_a_whole_node_share_its_cpus(ranks: int, printed: tuple[str, ...], cpus: int):
    """The course's job of one GPU has all 96 CPUs, and each of four ranks 24."""
    job = ClusterJob(
        "name", ("train", "r.yaml"), Path("/run"), Path("/here"), ranks_per_node=ranks, gpus_per_node=ranks
    )
    text = build_script(job, load_site("juwels-booster", printed).slurm, "python")
    assert f"\n#SBATCH --cpus-per-task={cpus}\n" in text
    assert f"srun --kill-on-bad-exit=1 --cpus-per-task={cpus} " in text


BAD = {
    "an unknown engine": ("lsf: {queue: a}", "site.yaml:1: lsf: no such field (one of slurm, kubernetes)"),
    "a misspelled field": (
        "slurm:\n  acount: me",
        "site.yaml:2: slurm.acount: no such field (did you mean 'slurm.account'?)",
    ),
    "an unknown field below": (
        "slurm:\n  container: {runtime: apptainer, image: a, mount: b}",
        "site.yaml:2: slurm.container.mount: no such field (did you mean 'slurm.container.mounts'?)",
    ),
    "no length of time": ("slurm: {time: 02:00:00}", "site.yaml:1: slurm.time: '02:00:00'"),
    "a length of training": ("slurm: {time: 5ep}", "site.yaml:1: slurm.time: '5ep'"),
    "too late a signal": ("slurm: {time: 1min, lead: 60s}", "site.yaml:1: slurm: lead 60s is not before"),
    "an account of two lines": ('slurm: {account: "a\\n#SBATCH -N9"}', "site.yaml:1: slurm.account: 'a\\n#SBATCH -N9'"),
    "an empty account": ("slurm: {account: ''}", "site.yaml:1: slurm.account: '' cannot be on a line"),
    "a short option": (
        "slurm: {options: [-N 9]}",
        "site.yaml:1: slurm.options[0]: '-N 9' is not an option in its long",
    ),
    "an option of ours": ("slurm: {srun: [--nodes=9]}", "site.yaml:1: slurm.srun[0]: '--nodes=9' is set by --nodes"),
    "no variable": ("slurm: {environ: {a-b: 1}}", "slurm.environ"),
    "no image": ("slurm: {container: {runtime: pyxis}}", "site.yaml:1: slurm.container: pyxis needs an image"),
    "no runtime": ("slurm: {container: {image: a}}", "site.yaml:1: slurm.container: image and mounts have no effect"),
    "half a mount": (
        "slurm: {container: {runtime: apptainer, image: a, mounts: [/data]}}",
        "site.yaml:1: slurm.container: mounts: '/data' is not HERE:THERE",
    ),
    "itself": ("extends: site.yaml", "site.yaml: extends itself"),
    "no site": ("extends: perlmuter", "site.yaml:1: extends: 'perlmuter' is not a site (did you mean 'perlmutter'?)"),
    "no file": ("extends: no.yaml", "site.yaml:1: extends: 'no.yaml': there is no such file"),
    "no name": ("extends: [a]", "site.yaml:1: extends: ['a'] is not a site"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_an_invalid_field_is_refused_with_its_line(write, text: str, message: str):
    with pytest.raises(RecipeError, match=re.escape(message)) as refused:
        load_site(write(text), ())
    assert len(str(refused.value).splitlines()) == 1


def test_an_invalid_override_is_refused_with_its_field():
    with pytest.raises(RecipeError, match=r"^slurm\.acount: no such field"):
        load_site(None, ("slurm.acount=me",))
    with pytest.raises(RecipeError, match=r"^slurm\.cpus_per_rank: 0 should be "):
        load_site(None, ("slurm.cpus_per_rank=0",))
    with pytest.raises(RecipeError, match=r"^--site: 'nowhere' is not a site \(write juwels-booster, "):
        load_site("nowhere", ())
