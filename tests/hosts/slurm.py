"""Slurm over emulated hosts (cluster.py): munged, slurmctld on the first host, a slurmd on each, with their own folder,
independent of any Slurm of the machine. Needs root, and Debian's slurmctld, slurmd, slurm-client and munge or equivalents."""
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from cluster import IS_INSIDE, Impossible, clean_environment

READY_S = 30
SEARCHED = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")

CONFIGURATION = """
ClusterName=shoal
SlurmctldHost=h1({first})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def program(name):
    found = shutil.which(name, path=SEARCHED)
    if not found:
        raise Impossible(f"{name} is not here")
    return found


class Slurm:
    """A context manager. environment: for srun on the first host. Each host knows the others by name."""

    def __init__(self, cluster):
        if os.environ.get(IS_INSIDE):
            raise Impossible("Slurm's daemons need root")
        self.programs = {name: program(name) for name in ("munged", "slurmctld", "slurmd", "srun", "sinfo")}
        self.cluster, self.processes = cluster, []
        self.folder = Path(tempfile.mkdtemp())
        self.environment = {**clean_environment(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self):
        try:
            self.write_files()
            self.start_daemons()
            self.wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_files(self):
        addresses = {host.name: self.cluster.address(number) for number, host in enumerate(self.cluster.hosts)}
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=2" for name, address in addresses.items())
        self.folder.chmod(0o755)
        for name in addresses:
            (self.folder / f"tmp.{name}").mkdir()
        (self.folder / "munge.key-file").write_bytes(os.urandom(128))
        (self.folder / "munge.key-file").chmod(0o400)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(first=self.cluster.address(0), folder=self.folder, nodes=nodes))

    def start(self, *command):
        with open(self.folder / "daemons.log", "ab") as log:
            self.processes.append(subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                                                   stderr=log, start_new_session=True))

    def start_daemons(self):
        files = [f"--{word}={self.folder}/munge.{word}" for word in ("key-file", "socket", "pid-file", "log-file", "seed-file")]
        self.start(*DIE_WITH_US, self.programs["munged"], "--foreground", "--force", *files)
        self.wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.start(*self.cluster.hosts[0].enter(), self.programs["slurmctld"], "-D")
        for host in self.cluster.hosts:
            self.start(*host.enter(), "unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$1" -D',
                       str(self.folder / "hosts"), self.programs["slurmd"])

    def wait_until_idle(self):
        def is_idle():
            done = self.call(self.programs["sinfo"], "-h", "-o", "%T")
            return done.stdout.split() == ["idle"]
        self.wait_for(is_idle, "Slurm's hosts")

    def wait_for(self, question, what):
        end = time.monotonic() + READY_S
        while not question():
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {READY_S} s\n{(self.folder / 'daemons.log').read_text()}")
            time.sleep(0.1)

    def call(self, *command, timeout=READY_S, **variables):
        """Runs a command on the first host."""
        return subprocess.run([*self.cluster.hosts[0].enter(), *command], capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL, env={**self.environment, **variables})

    def srun(self, *words, timeout, **variables):
        return self.call(self.programs["srun"], *words, timeout=timeout, **variables)
