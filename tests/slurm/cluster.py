"""A real SLURM on this machine: one controller and four virtual nodes, in a directory of its own, as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
NODES = ("n1", "n2", "n3", "n4")
_LONGEST_S = 120.0

_CONFIG = """
ClusterName=parts
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=2
{nodes}
PartitionName=all Nodes={names} Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> str | None:
    """Return why SLURM cannot run here; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not installed (apt install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "its daemons need root"


class Cluster:
    """Starts and ends it.

    Args:
        home: an empty directory, with a short path.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._running = home, list[subprocess.Popen[bytes]]()
        self.env = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}

    def __enter__(self) -> Cluster:
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.home / name).mkdir(parents=True)
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        names = ",".join(NODES)
        config = _CONFIG.format(
            host=socket.gethostname(), home=self.home, controller=ports[0], nodes=nodes, names=names
        )
        (self.home / "slurm.conf").write_text(config)
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(self.home / "slurm.conf"))
            for node in NODES:
                self._start("slurmd", "-D", "-N", node, "-f", str(self.home / "slurm.conf"))
            self.wait(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._end()

    def _start_munge(self) -> None:
        place = self.home / "munge"
        place.chmod(0o755)
        (place / "key").write_bytes(os.urandom(1024))
        (place / "key").chmod(0o400)
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={place}/key", f"--socket={place}/socket"),
            *(f"--pid-file={place}/pid", f"--log-file={place}/log", f"--seed-file={place}/seed"),
        )
        self.wait((place / "socket").exists)

    def _start(self, *command: str) -> None:
        quiet = subprocess.DEVNULL
        self._running.append(subprocess.Popen(command, env=self.env, stdout=quiet, stderr=quiet))

    def _end(self) -> None:
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._running):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, *command: str) -> str:
        """Run one of SLURM's commands; return what it printed, empty where it failed."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=self.home)
        return done.stdout if done.returncode == 0 else ""

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so.

        Raises:
            TimeoutError: it did not become so; says what the controller has logged.
        """
        until = time.monotonic() + _LONGEST_S
        while not is_so():
            if time.monotonic() > until:
                log = self.home / "slurmctld.log"
                raise TimeoutError(
                    "\n".join(log.read_text().splitlines()[-20:]) if log.exists() else "no log"
                )
            time.sleep(0.1)

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; return the job's number."""
        path = self.home / "script.sbatch"
        path.write_text(script)
        job = self.ask("sbatch", "--parsable", *options, str(path)).strip()
        assert job, (self.home / "slurmctld.log").read_text()[-2000:]
        return job

    def wait_for(self, job: str) -> None:
        """Wait until no task of a job is queued or runs."""
        self.wait(lambda: not self.ask("squeue", "-h", "-j", job).strip())


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
