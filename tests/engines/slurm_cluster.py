"""A Slurm on this host: munged, slurmctld and slurmd with one node, all in a folder of their own.

It needs root and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.engines.waiting import LIMIT, wait_for

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
_CONFIGURATION = """\
ClusterName=telegrad
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits until its credential has expired
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def hindrance() -> str:
    """Return the reason why Slurm cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "this test starts Slurm's daemons, which needs root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (`make test-slurm` installs them)"
    return ""


class SlurmCluster:
    """Three daemons. Programs of Slurm find them with `variables` in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        controller_port, node_port = _free_ports(2)
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                folder=folder,
                controller_port=controller_port,
                node_port=node_port,
            )
        )
        try:
            self._start_daemons(key)
        except BaseException:
            self.close()
            raise

    def _start_daemons(self, key: Path) -> None:
        files = [
            f"--key-file={key}",
            f"--socket={self.folder / 'munge.socket'}",
            f"--pid-file={self.folder / 'munged.pid'}",
            f"--log-file={self.folder / 'munged.log'}",
            f"--seed-file={self.folder / 'munge.seed'}",
        ]
        # --force: the folder belongs to pytest
        self._start("munged", "--foreground", "--force", "--num-threads=1", *files)
        wait_for((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_for(
            lambda: self.command("sinfo", "-h", "-o", "%T") == "idle", "an idle node", self.logs
        )

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.output", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.variables},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def command(self, *command: str) -> str:
        """Run a program of Slurm. Return what it wrote."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return done.stdout.strip()

    def logs(self) -> str:
        """Return the end of what the daemons wrote."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.output")]
        return "\n".join(f"{file.name}:\n{file.read_text()[-1500:]}" for file in files)

    def close(self) -> None:
        """End all jobs, then the daemons."""
        if len(self._daemons) > 1:
            self.command("scancel", "--user=root")
            deadline = time.monotonic() + 20
            while self.command("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(LIMIT)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
