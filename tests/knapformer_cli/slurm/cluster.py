"""A real Slurm on this machine: a controller, a daemon for each node, every file in a folder of its own.

The nodes are called n0 and n1 and have addresses of the loopback network. Their names resolve inside a mount
namespace only, where another hosts file lies over /etc/hosts, so the machine itself stays as it was. A third
node, n2 in the partition `lost`, has an address that Slurm knows and a name that nobody resolves.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = {"n0": "127.0.0.11", "n1": "127.0.0.12", "n2": "127.0.0.13"}
NAMELESS = "n2"

CONFIGURATION = """
ClusterName=knapformer
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
MinJobAge=3600
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=60
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=60 State=UP
PartitionName=lost Nodes=n2 MaxTime=60 State=UP
"""


@dataclass
class Cluster:
    """The running daemons; commands reach them through `environment`."""

    folder: Path
    environment: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *words: str, timeout: float = 60) -> str:
        """What a Slurm command printed; it must succeed."""
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=timeout)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, by the names of `scontrol show job`."""
        text = self.run("scontrol", "show", "job", "-o", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for the condition; an assertion that names it when the time is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError(f"{what} did not happen within {seconds:.0f} s; {self.tail()}")

    def tail(self) -> str:
        """The ends of the daemons' logs, for a test that failed."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)

    def stop(self) -> None:
        """End every job and every daemon, the last started first."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=30, capture_output=True)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    absent = [name for name in DAEMONS if find(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "mount namespaces are not allowed here"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def start(folder: Path, cpus: int = 4) -> Cluster:
    """Start munged, slurmctld and each slurmd, and wait until the nodes are idle."""
    host = socket.gethostname().split(".")[0]
    port, *ports = free_ports(1 + len(NODES))
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    nodes = "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={own} CPUs={cpus} State=UNKNOWN\n"
        for own, (name, address) in zip(ports, NODES.items(), strict=True)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=host, folder=folder, port=port).lstrip() + nodes)
    hosts = folder / "hosts"
    names = "".join(f"{address} {name}\n" for name, address in NODES.items() if name != NAMELESS)
    hosts.write_text(Path("/etc/hosts").read_text() + names)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    cluster = Cluster(folder, environment)
    try:
        start_munge(cluster)
        launch(cluster, "slurmctld", "-D", "-c")
        for name in NODES:
            inside = f"mount --bind {hosts} /etc/hosts && exec {find('slurmd')} -D -N {name}"
            launch(cluster, "unshare", "--mount", "sh", "-c", inside)
        cluster.until(lambda: nodes_idle(cluster), 60, "idle nodes")
    except BaseException:
        cluster.stop()
        raise
    return cluster


def start_munge(cluster: Cluster) -> None:
    key = cluster.folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    places = {
        "socket": cluster.folder / "munge.socket",
        "key-file": key,
        "pid-file": cluster.folder / "munged.pid",
        "log-file": cluster.folder / "munged.log",
        "seed-file": cluster.folder / "munged.seed",
    }
    # --force: the folders above are a test's, with permissions that munge would call unsafe.
    launch(cluster, "munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in places.items()))
    cluster.until(places["socket"].exists, 20, "munge")


def launch(cluster: Cluster, name: str, *words: str) -> None:
    path = find(name)
    assert path is not None
    output = (cluster.folder / f"{name}.out.log").open("ab")
    cluster.daemons.append(
        subprocess.Popen([path, *words], env=cluster.environment, stdout=output, stderr=output)
    )


def nodes_idle(cluster: Cluster) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        capture_output=True,
        text=True,
        env=cluster.environment,
        timeout=30,
    )
    return done.stdout.split() == ["idle"] * len(NODES)


def free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
