"""Stands in for `docker compose` when the SageMaker Python SDK v2 starts a job in local mode. The services of its compose
file become emulated containers with the contents of image.py, whatever image they name. As with
`--abort-on-container-exit`, the first service that ends ends all, and its exit code is the command's."""
import array
import fcntl
import os
import pathlib
import sys
import termios
import time

import yaml

import image
from containers import Containers

READ_S = 60  # for the reader of our output, on a busy machine
KNOWN = {"command", "container_name", "environment", "image", "networks", "stdin_open", "tty", "volumes"}


def tell(line):
    """Writes one line and waits until it is read: once the SDK notices that we have ended, it reads no further lines."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    waiting, end = array.array("i", [1]), time.monotonic() + READ_S
    while waiting[0] and time.monotonic() < end:
        fcntl.ioctl(sys.stdout, termios.FIONREAD, waiting)
        time.sleep(0.001)


def one_has_ended(containers):
    return any(host.code is not None for host in containers.hosts)


def up(path):
    services = yaml.safe_load(pathlib.Path(path).read_text())["services"]
    first = next(iter(services.values()))
    for service in services.values():
        if set(service) != KNOWN or service["command"] != "train":
            raise SystemExit(f"docker: {path} asks for what this stand-in does not know: {service}")
    volumes = {name: service["volumes"] for name, service in services.items()}
    with Containers(sorted(services), image.SSHD, volumes, os.environ["TEST_WARM_PYTHON"]) as containers:
        given = dict(variable.split("=", 1) for variable in first["environment"])
        containers.run(image.START, {**image.variables(containers), **given}, image.RUN_S,
                       one_has_ended)
        for host in containers.hosts:
            for line in host.output().splitlines():
                tell(f"{services[host.name]['container_name']}  | {line}")
        ended = [host for host in containers.hosts if host.code is not None][0]
        tell(f"{services[ended.name]['container_name']} exited with code {ended.code}")
        return ended.code


def main(words):
    if words == ["compose", "version"]:
        print("Docker Compose version v2 (a stand-in)")
        return 0
    if words[:2] == ["compose", "-f"] and words[3:] == ["up", "--build", "--abort-on-container-exit"]:
        return up(words[2])
    raise SystemExit(f"docker: this stand-in does not know {words}")


sys.exit(main(sys.argv[1:]))
