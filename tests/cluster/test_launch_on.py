"""`telegrad launch --on slurm`, `--on k8s` and `--on ray`: what is submitted, and that it is valid.

The engines run in `tests/engines`; here, the script of Slurm runs with stand-ins for its
programs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import telegrad.cli
from telegrad import cluster
from telegrad.cluster.roles import format_roles, role_of_rank
from telegrad.errors import UsageError
from telegrad.group.secret import own_secret
from telegrad.launcher.workers import job_environment

ROLES = ("--role", "ps=1", "--role", "trainer=2")
SECRET = "sixteen characters or more"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "Train_it.py"
    path.write_text(
        "import os, sys\n"
        "names = ('ROLES', 'STORE', 'SECRET', 'LISTEN', 'RESTART')\n"
        "print(sys.argv[1:], [os.environ['TELEGRAD_' + name] for name in names])\n"
        "sys.exit(int(os.environ['TELEGRAD_RESTART']) < 2)\n"
    )
    return path


def launch(*arguments: Any) -> int:
    return telegrad.cli.main(["launch", *map(str, arguments)])


def test_the_role_of_a_rank() -> None:
    text = format_roles({"ps": 1, "trainer": 2})
    assert [role_of_rank(text, rank) for rank in range(3)] == [
        ("ps", 0),
        ("trainer", 0),
        ("trainer", 1),
    ]
    with pytest.raises(UsageError, match="has 3 workers, and none of rank 3"):
        role_of_rank(text, 3)
    with pytest.raises(UsageError, match="must be of the form ROLE=N,ROLE=N"):
        role_of_rank("ps", 0)
    place = cluster.detect(environment={"TELEGRAD_ROLES": text, "RANK": "2", "WORLD_SIZE": "3"})
    assert (place.name, place.role, place.role_rank) == ("trainer1", "trainer", 1)


# Slurm


def fake_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o700)


def test_a_slurm_script(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sbatch=--partition=gpu", "--gpus", 2, "--name", "job1")
    assert launch("--on", "slurm", "--dry-run", *ROLES, *options, program, "it's") == 0
    script = capsys.readouterr().out
    for line in ("--job-name=job1", "--ntasks=3", "--partition=gpu", "--gpus-per-task=2"):
        assert f"#SBATCH {line}\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)  # its syntax is valid


def test_a_slurm_job_runs_the_program_and_again_if_it_fails(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`sbatch` and `srun` only run what they get, on this host."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TELEGRAD_SECRET", SECRET)
    fake_program(tmp_path, "sbatch", f"SLURM_JOB_ID=7 bash > {tmp_path}/out; echo submitted $?")
    fake_program(tmp_path, "srun", 'while [[ "$1" == --* ]]; do shift; done; "$@"')
    logs = tmp_path / "logs"
    assert launch("--on", "slurm", *ROLES, "--restarts", 2, "--logs", logs, program, "it's") == 0
    assert capsys.readouterr().out == f"submitted 0\noutput in {logs}\n"
    lines = (tmp_path / "out").read_text().splitlines()
    store = f"{os.uname().nodename}:{61440 + 7}"
    assert lines == [
        str(["it's"]) + " " + str(["ps=1,trainer=2", store, SECRET, "0.0.0.0", str(life)])
        for life in range(3)
    ]


def test_slurm_says_why_it_refuses_a_job(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for complaint in ("there is no sbatch here", "sbatch refused the job: invalid partition"):
        with pytest.raises(SystemExit):
            launch("--on", "slurm", "-n", 1, "--logs", tmp_path, program)
        assert complaint in capsys.readouterr().err
        fake_program(tmp_path, "sbatch", "echo invalid partition >&2; exit 1")


# Kubernetes


def manifest(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert launch("--on", "k8s", "--image", "example/train:1", *arguments) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    return {
        document["kind"]: document for document in documents
    }  # of two Services, that of the Job


def test_a_manifest_for_kubernetes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_SECRET", SECRET)
    made = manifest(capsys, *ROLES, "--restarts", 3, "--gpus", 1, "src/Train_it.py", "a: 'b'", "-n")
    assert made["Secret"]["stringData"] == {"secret": SECRET}
    assert made["Service"]["spec"]["clusterIP"] == "None"
    job = made["Job"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert job["backoffLimitPerIndex"] == 3
    (waiting,) = (
        each["value"]
        for each in job["template"]["spec"]["containers"][0]["env"]
        if each["name"] == "TELEGRAD_RESTART_TIMEOUT"
    )
    assert float(waiting) > 0
    pod = job["template"]["spec"]
    assert pod["subdomain"] == made["Service"]["metadata"]["name"] == "train-it"
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-u", "src/Train_it.py", "a: 'b'", "-n"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_the_manifest_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for restarts in (0, 2):
        arguments = ("-n", 2, "--restarts", restarts, "-m", "project.train")
        assert launch("--on", "k8s", "--image", "example/train:1", *arguments) == 0
        documents = list(yaml.safe_load_all(capsys.readouterr().out))
        assert len(documents) == (5 if restarts else 3)
        for document in documents:
            validate.validate(document, "1.31", strict=True)


def test_with_restarts_a_pod_of_its_own_hosts_the_store(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the group would be lost with the pod of rank 0."""
    made = manifest(capsys, *ROLES, "--restarts", 1, "train.py")
    (store,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert store["command"] == ["python", "-m", "telegrad.launcher.store", "29500"]
    variables = made["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]
    environment = {each["name"]: each["value"] for each in variables if "value" in each}
    place = cluster.detect(environment={**environment, "JOB_COMPLETION_INDEX": "0"})
    assert place.rendezvous == cluster.Rendezvous("train-store", 29500, hosted=True)


def test_a_worker_in_a_pod_of_the_manifest_knows_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = manifest(capsys, *ROLES, "train.py")["Job"]
    variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    environment = {each["name"]: each["value"] for each in variables if "value" in each}
    environment |= {"JOB_COMPLETION_INDEX": "2", "TELEGRAD_RESTART": "1"}
    monkeypatch.setattr("socket.getfqdn", lambda: "train-2.train.default.svc.cluster.local")
    place = cluster.detect(environment=environment)
    assert (place.name, place.rank, place.world_size, place.restart) == ("trainer1", 2, 3, 1)
    assert place.rendezvous is not None
    assert place.rendezvous.host == "train-0.train.default.svc.cluster.local"


def test_kubernetes_needs_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch("--on", "k8s", "-n", 1, "train.py")
    assert "--on k8s needs --image" in capsys.readouterr().err


# Ray


def test_without_ray_it_says_what_to_install(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("telegrad.launcher.ray_actors.ray", None)
    with pytest.raises(SystemExit):
        launch("--on", "ray", "-n", 1, program)
    assert "pip install 'telegrad[ray]'" in capsys.readouterr().err


# On this host


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dry-run",), "--dry-run needs --on slurm"),
        (("--sbatch=--time=1",), "--sbatch needs --on slurm"),
        (("--image", "x"), "--image needs --on k8s"),
        (("--gpus", 1), "--gpus needs --on slurm or --on k8s or --on ray"),
        (("--restarts", -1), "'-1' is not a number of at least 0"),
        (("--logs", "/proc/none"), "cannot write into --logs /proc/none"),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[Any, ...], message: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch("-n", 1, *options, program)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_workers_have_the_secret_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `telegrad status` finds them. If the key file cannot be written, they have their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert job_environment({}, 2, 0)["TELEGRAD_SECRET"] == own_secret()
    assert job_environment({"TELEGRAD_SECRET": SECRET}, 2, 0)["TELEGRAD_SECRET"] == SECRET
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(UsageError, match="no secret"):
        own_secret()
    assert len(job_environment({}, 2, 0)["TELEGRAD_SECRET"]) == 64
