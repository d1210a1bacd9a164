"""The place of a worker, from the environments that real engines make."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest

import telegrad.rpc as rpc
from telegrad import Agent, cluster
from telegrad.cluster import Rendezvous
from telegrad.cluster.detection import ENGINES
from telegrad.cluster.slurm_hosts import expand_hosts
from telegrad.errors import UsageError

TORCHRUN = {  # torchrun --nnodes 2 --nproc-per-node 2 --role trainer, restarted once
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "trainer",
    "ROLE_RANK": "3",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {  # srun -N 2 -n 4, in a job that was requeued once
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_RESTART_COUNT": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "PMIX_NAMESPACE": "1531576321",
    "PMIX_RANK": "3",
}
OPEN_MPI_5 = {
    **{name: text for name, text in OPEN_MPI_4.items() if name != "OMPI_MCA_orte_hnp_uri"},
    "PMIX_NAMESPACE": "prterun-node-0-4242@1",
}
KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "3",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
ENVIRONMENTS = {
    "torchrun": TORCHRUN,
    "Slurm": SLURM,
    "Open MPI": OPEN_MPI_4,
    "Kubeflow Trainer": KUBEFLOW,
    "Kubernetes": KUBERNETES,
}


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is a pod of an Indexed Job with a headless service."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-3.train.ns.svc.cluster.local")


@pytest.mark.parametrize(
    ("environment", "engine", "name", "local_rank", "restart", "host"),
    [
        (TORCHRUN, "torchrun", "trainer3", 1, 1, "node0"),
        (TORCHRUN | {"ROLE_NAME": "default"}, "torchrun", "worker3", 1, 1, "node0"),
        (SLURM, "Slurm", "worker3", 1, 1, "gpu07"),
        (SLURM | {"PMIX_RANK": "3"}, "Slurm", "worker3", 1, 1, "gpu07"),
        (OPEN_MPI_4, "Open MPI", "worker3", 1, 0, "10.96.0.1"),
        (OPEN_MPI_4 | SLURM, "Open MPI", "worker3", 1, 0, "10.96.0.1"),
        (OPEN_MPI_5, "Open MPI", "worker3", 1, 0, "node-0"),
        (
            OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            "Open MPI",
            "worker3",
            1,
            0,
            "127.0.0.1",
        ),
        (
            {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prte-node-0-1@1", "WORLD_SIZE": "4"},
            "PMIx",
            "worker3",
            None,
            0,
            "node-0",
        ),
        (KUBEFLOW, "Kubeflow Trainer", "worker3", None, 0, "job-node-0-0.job"),
        (KUBERNETES, "Kubernetes", "worker3", None, 0, "train-0.train.ns.svc.cluster.local"),
        (KUBEFLOW | TORCHRUN, "torchrun", "trainer3", 1, 1, "node0"),
        (SLURM | TORCHRUN, "torchrun", "trainer3", 1, 1, "node0"),
    ],
)
def test_each_engine(
    environment: dict[str, str],
    engine: str,
    name: str,
    local_rank: int | None,
    restart: int,
    host: str,
) -> None:
    place = cluster.detect(environment=environment)
    assert (place.engine, place.name, place.rank, place.world_size) == (engine, name, 3, 4)
    assert (place.local_rank, place.restart) == (local_rank, restart)
    assert place.rendezvous is not None
    assert place.rendezvous.host == host
    assert 1024 < place.rendezvous.port < 65536


def test_ipv6_address_of_mpirun() -> None:
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d::2]:43370"
    place = cluster.detect(environment=OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": uri})
    assert place.rendezvous is not None
    assert place.rendezvous.host == "fe80::b9b:ac5d:9cf0:b858"


def test_workers_of_one_job_use_one_port_and_those_of_another_step_another() -> None:
    ports = [
        cluster.detect(environment=SLURM | changed).rendezvous
        for changed in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"})
    ]
    assert ports[0] == ports[1] != ports[2]


def test_the_agent_of_torchrun_hosts_the_store_and_groups_before_a_restart_are_separate() -> None:
    one_node = cluster.detect(environment=TORCHRUN | {"GROUP_WORLD_SIZE": "1"})
    assert one_node.rendezvous == Rendezvous("node0", 29500, hosted=True, prefix="restart_1")
    assert cluster.detect(environment=TORCHRUN).rendezvous == Rendezvous("node0", 29500, True)


@pytest.mark.parametrize("engine", ENVIRONMENTS)
def test_every_value_can_be_overridden(engine: str) -> None:
    own = {
        "TELEGRAD_NAME": "ps0",
        "TELEGRAD_RANK": "0",
        "TELEGRAD_WORLD_SIZE": "8",
        "TELEGRAD_LOCAL_RANK": "5",
        "TELEGRAD_RESTART": "2",
        "TELEGRAD_STORE": "[::1]:4000",
    }
    place = cluster.detect(environment=ENVIRONMENTS[engine] | own)
    assert (place.name, place.rank, place.world_size) == ("ps0", 0, 8)
    assert (place.local_rank, place.restart) == (5, 2)
    assert place.rendezvous == Rendezvous("::1", 4000, hosted=True)
    place = cluster.detect("me", 1, 9, ENVIRONMENTS[engine] | own)
    assert (place.name, place.rank, place.world_size) == ("me", 1, 9)
    torchs = {"RANK": "2", "WORLD_SIZE": "7", "MASTER_ADDR": "there", "MASTER_PORT": "9"}
    place = cluster.detect(environment=ENVIRONMENTS[engine] | torchs)
    assert (place.rank, place.world_size) == (2, 7)
    assert place.rendezvous is not None
    assert (place.rendezvous.host, place.rendezvous.port) == ("there", 9)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        (TORCHRUN, ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        (SLURM, ["SLURM_PROCID", "SLURM_JOB_ID"]),
        (OPEN_MPI_5, ["OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"]),
        (KUBEFLOW, ["PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"]),
        (KUBERNETES, ["WORLD_SIZE"]),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], missing: list[str]) -> None:
    for name in missing:
        partial = {key: text for key, text in environment.items() if key != name}
        with pytest.raises(UsageError, match=rf"{name}( or \w+)? is missing: \w"):
            cluster.detect(environment=partial)


def test_a_pod_without_a_service_needs_the_address_of_index_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-3")
    with pytest.raises(UsageError, match=r"MASTER_ADDR is missing.*headless service"):
        cluster.detect(environment=KUBERNETES)
    place = cluster.detect(environment=KUBERNETES | {"MASTER_ADDR": "10.0.0.1"})
    assert place.rendezvous == Rendezvous("10.0.0.1", 29500)


def test_no_engine() -> None:
    place = cluster.detect(environment={})
    assert (place.engine, place.name, place.rank, place.world_size) == ("", None, None, None)
    assert place.rendezvous is None
    for name, other in (("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")):
        with pytest.raises(UsageError, match=f"{other} is missing"):
            cluster.detect(environment={name: "1"})


def test_a_batch_script_of_slurm_is_no_worker() -> None:
    script = {key: text for key, text in SLURM.items() if not key.startswith("SLURM_STEP")}
    assert cluster.detect(environment=script).engine == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("SLURM_PROCID", "first", "SLURM_PROCID must be a number, not 'first'"),
        ("TELEGRAD_STORE", "node0", "TELEGRAD_STORE must be HOST:PORT, not 'node0'"),
    ],
)
def test_a_value_of_the_wrong_form_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        cluster.detect(environment=SLURM | {name: text})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node3", ["node1", "node3"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,12]", ["node08", "node09", "node10", "node12"]),
        ("a-b[1,3],c[2-3]-ib", ["a-b1", "a-b3", "c2-ib", "c3-ib"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("node[1-2], other", ["node1", "node2", "other"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_markers_differ() -> None:
    assert len({engine.marker for engine in ENGINES}) == len(ENGINES)


# In `init_rpc` and `Agent`

Start = Callable[[], str]


def by_init_rpc() -> str:
    rpc.init_rpc()
    try:
        return rpc.get_worker_info().name
    finally:
        rpc.shutdown()


def by_agent() -> str:
    with Agent() as agent:
        assert agent.get_worker_info().id == 0
        return agent.name


@pytest.fixture(params=[by_init_rpc, by_agent])
def start(request: pytest.FixtureRequest) -> Start:
    start: Start = request.param
    return start


@pytest.mark.parametrize("engine", ["Slurm", "Kubernetes", "Open MPI"])
def test_a_worker_needs_no_arguments(
    engine: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
    for name, text in (ENVIRONMENTS[engine] | alone).items():
        monkeypatch.setenv(name, text)
    assert [start(), start()] == ["worker0", "worker0"]  # it may join again


def test_without_an_engine_the_error_says_what_to_do(start: Start) -> None:
    with pytest.raises(UsageError, match="telegrad launch"):
        start()


def test_a_batch_script_of_slurm_is_told_to_use_srun(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in SLURM.items():
        if not name.startswith("SLURM_STEP"):
            monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=r"SLURM_STEP_NUM_TASKS is missing.*srun"):
        start()


def test_an_agent_with_a_store_needs_a_name() -> None:
    with pytest.raises(UsageError, match="an agent needs a name"):
        Agent(store=object())
