"""A SLURM cluster of one node, this machine, from the distribution's packages: started on loopback in a directory, and stopped.

Everything of it lies in that directory (key, sockets, state, spool, logs) and listens on ports that were free. It keeps no
accounts; finished jobs are written to a file. Its partitions are named as those of profiles/slurm. Memory, processors and one GPU
are declared, so that jobs are packed by what they ask for; nothing is enforced.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "setpriv")
# So that a daemon does not outlive a test that is killed.
WITH_US = ("setpriv", "--pdeathsig", "TERM")
PACKAGES = "slurmctld slurmd slurm-client munge"
SECONDS = 60
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmdPort={slurmd}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={place}/finished.txt
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 CoresPerSocket=2 RealMemory=16000 Gres=gpu:1 State=UNKNOWN
PartitionName=cpu Nodes={host} MaxTime=1440 State=UP OverSubscribe=NO
PartitionName=gpu Nodes={host} MaxTime=1440 State=UP OverSubscribe=NO
"""


def what_lacks() -> str | None:
    """Why a cluster cannot be started here, if it cannot."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM cluster is started by root on Linux"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install {PACKAGES})"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"the host name {socket.gethostname()} has no address"
    return None


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its directory, and the environment in which SLURM's commands find it."""

    place: Path
    environment: dict[str, str]

    @staticmethod
    def at(place: Path) -> Cluster:
        """With the settings in `place`. Steps of jobs lose the variables of SLURM, so a `srun` of ours says where these are."""
        conf, srun = place / "slurm.conf", place / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {shutil.which("srun")} "$@"\n')
        srun.chmod(0o755)
        own = {"SLURM_CONF": str(conf), "PATH": f"{srun.parent}:{os.environ['PATH']}"}
        return Cluster(place, os.environ | own)

    def ask(self, *command: str) -> str:
        """What a command of SLURM prints."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=SECONDS
        ).stdout

    def finished(self) -> list[dict[str, str]]:
        """The jobs that ended, whatever way: JobId, JobState, Partition, TimeLimit, Tres and more."""
        path = self.place / "finished.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in lines]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that is ready; when the body ends, its jobs are cancelled and its daemons are gone."""
    host = socket.gethostname().split(".")[0]
    # A short path, since those of sockets may not be long.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, ExitStack() as stack:
        place = Path(directory)
        write_settings(place, host)
        one = Cluster.at(place)
        for name, command in daemons(place, host).items():
            stack.enter_context(running(one, name, command))
        until(one, "has no idle node", lambda: "idle" in one.ask("sinfo", "-h", "-o", "%t"))
        stack.callback(cancel_all, one)
        yield one


def write_settings(place: Path, host: str) -> None:
    for name in ("state", "spool"):
        (place / name).mkdir()
    key = place / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    slurmctld, slurmd = free_ports(2)
    (place / "slurm.conf").write_text(CONF.format(host=host, place=place, slurmctld=slurmctld, slurmd=slurmd))
    (place / "gres.conf").write_text("Name=gpu File=/dev/null\n")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def daemons(place: Path, host: str) -> dict[str, list[str]]:
    """Commands that stay in the foreground, in the order in which they start."""
    files = {option: place / f"munge.{option}" for option in ("socket", "pid-file", "log-file", "seed-file")}
    munge = [f"--{option}={path}" for option, path in files.items()]
    conf = ["-f", str(place / "slurm.conf")]
    return {
        "munged": ["munged", "--foreground", "--force", f"--key-file={place / 'munge.key'}", *munge],
        "slurmctld": ["slurmctld", "-D", *conf],
        "slurmd": ["slurmd", "-D", "-N", host, *conf],
    }


@contextmanager
def running(one: Cluster, name: str, command: list[str]) -> Iterator[None]:
    """A daemon, which is asked to end after the body, and killed if it does not."""
    with (one.place / f"{name}.out").open("w") as out:
        daemon = subprocess.Popen([*WITH_US, *command], env=one.environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            daemon.terminate()
            try:
                daemon.wait(SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def until(one: Cluster, what: str, true: Callable[[], bool]) -> None:
    """Wait for something; a command that fails meanwhile, as while daemons start, is asked again."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(subprocess.SubprocessError):
            if true():
                return
        time.sleep(0.5)
    said = "\n".join(path.read_text()[-1000:] for path in one.place.glob("*.out"))
    raise RuntimeError(f"the cluster {what} after {SECONDS} s; its daemons said:\n{said}")


def cancel_all(one: Cluster) -> None:
    one.ask("scancel", "--user", "root")
    until(one, "has jobs left", lambda: not one.ask("squeue", "-h"))


def left_of(one: Cluster) -> list[str]:
    """Commands of processes that still name the cluster's directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text().replace("\0", " "))
    return [command for command in found if str(one.place) in command]
