"""Emulated training containers: hosts algo-1, algo-2, ... like those of SageMaker's platform. Each has its own processes,
network address, /opt/ml, /etc, /tmp and /run, and sshd if the toolkit needs it. Nothing stays behind: everything lives in
namespaces of one process per host, which end with it and with this program.

Needs root, because sshd needs users of its own, which a user namespace for a single user cannot have."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/hosts"), str(TOP / "tests/multi")]

from cluster import HOST_OF_OUR_OWN, Host, Impossible, clean_environment, tried  # noqa: E402
from tap import Skip, expect  # noqa: E402

INTERFACE = "eth0"
INSTANCE_TYPE = "ml.p4d.24xlarge"  # one whose runners set FI_PROVIDER=efa
SSHD_ID = 74  # user ID of the user sshd
END_S = 60  # for killed processes to end on a busy machine
WARM = "/tmp/warm"  # in each container: its interpreter that has imported the modules that scripts need (warm.py)

# The first process of a container. Paths of the checkout stay the same, even below /tmp.
BEGIN = """
set -e
farm() {  # folder: shows what it shows, and takes more
    mkdir -p "/tmp/real$1"
    mount --bind "$1" "/tmp/real$1"
    mount -t tmpfs none "$1"
    for entry in "/tmp/real$1"/*; do [ ! -e "$entry" ] || ln -s "$entry" "$1/"; done
}
hostname "$NAME"
ip link set lo up
cd "$TOP"
mount -t tmpfs none /tmp
case $TOP in /tmp/*) mkdir -p "$TOP"; mount --no-canonicalize --bind . "$TOP"; cd "$TOP";; esac
cp -a /etc /tmp/etc
cp -a "$WORK/etc/." /tmp/etc/
mount --bind /tmp/etc /etc
mount -t tmpfs none /run
mkdir /run/sshd /tmp/home
[ ! -d "$WORK/home" ] || cp -a "$WORK/home/." /tmp/home/
farm /opt
mkdir -p /opt/ml
mount --bind "$BASE" /opt/ml
while IFS=: read -r from to; do
    [ -z "$from" ] || { mkdir -p "$from" "$to"; mount --bind "$from" "$to"; }
done <<VOLUMES
$VOLUMES
VOLUMES
farm /usr/sbin
[ ! -e "$SSHD" ] || cp "$WORK/sshd" /usr/sbin/sshd
echo up
read -r go
[ "$go" = go ]
cd /opt/ml
"$@" </dev/null >>"$WORK/log" 2>&1
"""

# Run by such an interpreter of ours: starts an interpreter in the namespaces of a process, and ends with it. A container
# ends when all of its processes have ended and their parents have reaped them.
ENTER = f"""
import ctypes, os, sys, warm
library = ctypes.CDLL(None, use_errno=True)
for kind in ("net", "uts", "pid_for_children", "mnt"):
    if library.setns(os.open(f"/proc/{{sys.argv[1]}}/ns/{{kind}}", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), f"setns {{kind}}")
print(warm.start("{WARM}"), flush=True)
os.wait()
os._exit(0)
"""


def need():
    """Skips the case if this machine cannot run such containers."""
    if os.getuid() != 0:
        raise Skip("emulated containers need root")
    why = tried(*HOST_OF_OUR_OWN) or tried("unshare", "--mount", "--pid", "--fork", "--mount-proc",
                                           "mount", "-t", "tmpfs", "none", "/run")
    if why:
        raise Skip(f"no emulated containers: {why}")


def resource_config(name, names):
    group = {"instance_group_name": "homogeneousCluster", "instance_type": INSTANCE_TYPE, "hosts": names}
    return {"current_host": name, "hosts": names, "current_instance_type": INSTANCE_TYPE, "instance_groups": [group],
            "current_group_name": group["instance_group_name"], "network_interface_name": INTERFACE}


class Container:
    """One host. `base` is its /opt/ml, `work` the folder of files for its /etc and home. `volumes` are "from:to", further
    folders of this machine to show in it."""

    def __init__(self, name, names, folder, sshd, volumes):
        self.name, self.work, self.base, self.code, self.sshd = name, folder / name, folder / name / "ml", None, sshd
        self.volumes = sorted(volumes, key=lambda volume: volume.split(":")[1])  # one may be inside another
        for part in ("ml/input/config", "ml/input/data", "ml/output/data", "ml/model", "etc"):
            (self.work / part).mkdir(parents=True)
        self.config("resourceconfig", resource_config(name, names))
        self.config("inputdataconfig", {})
        self.process = self.warm = None

    def config(self, name, content):
        (self.base / f"input/config/{name}.json").write_text(json.dumps(content))

    def start(self, command, environment):
        """Sets up the container. The command starts at go(), when the network is there."""
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child",
                 "--mount-proc", "sh", "-c", BEGIN, "sh", *command]
        own = {"NAME": self.name, "TOP": TOP, "WORK": self.work, "BASE": self.base, "SSHD": self.sshd or "/none",
               "VOLUMES": "\n".join(self.volumes)}
        with open(self.work / "log", "ab") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            env={**environment, **{key: str(value) for key, value in own.items()}},
                                            start_new_session=True)
        if self.process.stdout.readline() != b"up\n":
            raise Impossible(f"the container {self.name} could not be set up: {self.output()}")

    def enter(self, *command):
        subprocess.run(["nsenter", "-t", str(self.process.pid), "--net", *command], check=True, timeout=20)

    def warm_up(self, python):
        """Provides WARM/python3, which runs scripts in this container and has imported the same modules as `python`."""
        self.warm = subprocess.Popen([python, "-c", ENTER, str(self.process.pid)], stdin=subprocess.DEVNULL,
                                     stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(TOP / "tests/multi")})
        expect(self.warm.stdout.readline().decode() == f"{WARM}/python3\n", "the container has no warm interpreter")

    def go(self):
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def poll(self):
        if self.code is None and self.process.poll() is not None:
            self.code = self.process.returncode
        return self.code is not None

    def output(self):
        return (self.work / "log").read_text(encoding="utf-8", errors="replace")

    def file(self, path):
        """Returns the text of a file in its /opt/ml, or None if it does not exist."""
        place = self.base / path
        return place.read_text(errors="replace") if place.is_file() else None

    def close(self):
        if self.process and self.process.poll() is None:
            self.process.kill()  # it is their init, so all processes of the container end with it
            self.process.wait(END_S)
        if self.process:
            self.process.stdout.close()
        if self.warm:
            self.warm.wait(END_S)
            self.warm.stdout.close()


class Containers:
    """Hosts with these names on one bridge. `sshd` is the folder of the unpacked openssh-server packages, or None for no
    sshd. `volumes` has each name's volumes, if any. `python` is an interpreter of warm.py, for Container.warm_up()."""

    def __init__(self, names, sshd=None, volumes={}, python=None):
        need()
        self.python = python
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="containers-", dir=TOP / "build"))
        self.switch, self.hosts = None, []
        try:
            self.names = names
            self.hosts = [Container(name, names, self.folder, sshd and sshd / "usr/sbin/sshd", volumes.get(name, ()))
                          for name in names]
            for host in self.hosts:
                self.put_etc(host)
            if sshd:
                self.put_ssh(sshd)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def put_etc(self, host):
        etc = host.work / "etc"
        lines = ["127.0.0.1 localhost", *(f"10.78.0.{number + 1} {name}" for number, name in enumerate(self.names))]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        (etc / "environment").write_text("")
        users = pathlib.Path("/etc/passwd").read_text().splitlines()
        passwd = [line for line in users if line.split(":")[0] not in ("root", "sshd")]
        passwd += ["root:x:0:0:root:/tmp/home:/bin/bash", f"sshd:x:{SSHD_ID}:65534::/run/sshd:/usr/sbin/nologin"]
        (etc / "passwd").write_text("\n".join(passwd) + "\n")

    def put_ssh(self, sshd):
        """Installs one key for all: every host's own key, and root's, which may log in with it."""
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        config = ("HostKey /etc/ssh/key\nAuthorizedKeysFile /etc/ssh/key.pub\nUsePAM yes\nPermitRootLogin yes\nStrictModes no\n"
                  "PrintMotd no\nPidFile none\n")
        for host in self.hosts:
            ssh, home = host.work / "etc/ssh", host.work / "home/.ssh"
            ssh.mkdir()
            home.mkdir(parents=True)
            for folder, name in ((ssh, "key"), (home, "id_ed25519")):
                shutil.copy(key, folder / name)
                shutil.copy(f"{key}.pub", folder / f"{name}.pub")
            (ssh / "sshd_config").write_text(config)
            (ssh / "ssh_config").write_text("Host *\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n")
            (host.work / "etc/pam.d").mkdir()
            rules = (sshd / "etc/pam.d/sshd").read_text()
            (host.work / "etc/pam.d/sshd").write_text(re.sub("required( +pam_loginuid)", r"optional\1", rules))
            libraries = ":".join(shlex.quote(str(path.parent)) for path in sshd.rglob("libwrap.so.0"))
            (host.work / "sshd").write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {shlex.quote(str(host.sshd))} "$@"\n')
            (host.work / "sshd").chmod(0o755)

    def connect(self):
        self.switch = Host("switch")
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        self.switch.run("ip", "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts, 1):
            port = f"p{number}"
            end = ["name", INTERFACE, "netns", str(host.process.pid)]
            self.switch.run("ip", "link", "add", port, "type", "veth", "peer", *end)
            self.switch.run("ip", "link", "set", port, "master", "bridge")
            self.switch.run("ip", "link", "set", port, "up")
            host.enter("ip", "address", "add", f"10.78.0.{number}/24", "dev", INTERFACE)
            host.enter("ip", "link", "set", INTERFACE, "up")

    def run(self, command, environment, seconds, until=None):
        """Runs the command on all hosts at once, until all have ended or until(self) is true."""
        variables = {**clean_environment(), **environment}
        for host in self.hosts:
            host.start(command, variables)
        self.connect()
        for host in self.hosts:
            if self.python:
                host.warm_up(self.python)
            host.go()
        end = time.monotonic() + seconds
        while not all([host.poll() for host in self.hosts]) and not (until and until(self)):
            expect(time.monotonic() < end, f"no end within {seconds} s", self.told())
            time.sleep(0.05)

    def told(self):
        return "\n".join(f"--- {host.name}: {'runs' if host.code is None else f'ended with {host.code}'}\n{host.output()}\n"
                         f"failure: {host.file('output/failure')}" for host in self.hosts)

    def close(self):
        for host in self.hosts:
            host.close()
        if self.switch:
            self.switch.close()
        shutil.rmtree(self.folder, ignore_errors=True)
