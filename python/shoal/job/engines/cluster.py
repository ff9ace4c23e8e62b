"""One host's processes of TensorFlow's own strategies. `shoal run` starts this program once on each host.

    host 0: binds its ports, listens at MASTER_PORT <-- its ports, proof of SHOAL_SECRET -- host 1: binds its ports
                                                     -- address and ports of all hosts ->
            starts the script with TF_CONFIG                                                starts the script with TF_CONFIG

This process keeps its ports bound until the job ends, without listening. So the kernel gives them to no other process, while
TensorFlow's server can listen there, because both set SO_REUSEADDR.

With parameter_server each host also has a server, as in SageMaker's TensorFlow containers: a process of its own that runs no
script. The servers are needed until the master, which is the first host's script, has ended: host 0 keeps its connections to
the others open until then."""
from __future__ import annotations

import dataclasses
import hmac
import json
import os
import pathlib
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from shoal.job import processes
from shoal.job.document import distribution

# Starts this module in a Python process, whatever files the script's folder (the working directory) has.
BEGIN = ("import sys; sys.path[:] = [path for path in sys.path if path]; "
         "from shoal.job.engines import cluster; cluster.main(sys.argv[1:])")
SERVE = "--serve"  # starts a parameter server; replaces the argument `style`
MEET_S = 120.0  # for all hosts to send their ports; `shoal run` starts them at one time
TALK_S = 10.0  # from a connection to a host's complete message
LINE_MAX = 1 << 20
GUESTS_MAX = 64  # connections that have not yet proved the secret; further ones wait in the backlog
PORT_OF_SERVER = 2223  # as in distribution.tf_config; all other ports belong to scripts


class ClusterError(Exception):
    """The hosts cannot be joined. The message is one line."""


@dataclasses.dataclass
class Member:
    """What a host sends to the others."""

    address: str
    ports: List[int]  # the script's, and the parameter server's if there is one


@dataclasses.dataclass
class Meeting:
    """This host's index and the meeting point, from the variables of `shoal run`."""

    style: str
    index: int
    hosts: int
    address: str
    port: int
    secret: bytes

    @classmethod
    def of(cls, style: str, environment: Mapping[str, str]) -> "Meeting":
        return cls(style, int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"],
                   int(environment["MASTER_PORT"]), _secret(environment))

    def proof(self, *words: str) -> str:
        return hmac.new(self.secret, "\0".join(("shoal.job.cluster", self.style, *words)).encode(), "sha256").hexdigest()


def _secret(environment: Mapping[str, str]) -> bytes:
    """Reads the secret of the workers. Without one, every process computes the same proof."""
    path = environment.get("SHOAL_SECRET_FILE")
    text = environment.get("SHOAL_SECRET") or (pathlib.Path(path).read_text().strip() if path else "")
    return text.encode()


# ---- ports ----

def port_hold(family: int) -> socket.socket:
    """Binds a free port on all addresses of this host. Others get it only if they ask for this port by number."""
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))
    return held


def address_text(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# ---- the hosts meet ----

def meet(meeting: Meeting, ports: List[int]) -> Tuple[List[Member], List[socket.socket]]:
    """Returns all hosts in order, and the connections to keep open: at host 0 those to the others, at the others that to host
    0."""
    if meeting.hosts == 1:
        return [Member("127.0.0.1", ports)], []
    return _meet_as_first(meeting, ports) if meeting.index == 0 else _meet_as_other(meeting, ports)


def family_of(address: str) -> int:
    try:
        return int(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0])
    except OSError as error:
        raise ClusterError(f"{address}, where the hosts meet, is not a name or address: {error}") from error


def _meet_as_first(meeting: Meeting, ports: List[int]) -> Tuple[List[Member], List[socket.socket]]:
    where = address_text(meeting.address, meeting.port)
    try:
        listener = socket.create_server((meeting.address, meeting.port), family=family_of(meeting.address), backlog=128)
    except OSError as error:
        raise ClusterError(f"cannot listen at {where} (MASTER_ADDR, MASTER_PORT), where the hosts meet: {error}") from error
    with listener:
        found = _members_wait(meeting, listener, len(ports), where)
    own = found[1][1].getsockname()[0]
    members = [Member(own, ports), *(found[index][0] for index in range(1, meeting.hosts))]
    answer = json.dumps([dataclasses.asdict(member) for member in members])
    for index in range(1, meeting.hosts):
        _, connection, nonce = found[index]
        _send(connection, {"members": answer, "proof": meeting.proof("first", nonce, answer)})
    return members, [found[index][1] for index in range(1, meeting.hosts)]


def _members_wait(meeting: Meeting, listener: socket.socket, ports: int, where: str) -> Dict[int, "Found"]:
    """Returns the other hosts by index. Each connection has its own thread, so a slow stranger delays nobody."""
    found: Dict[int, Found] = {}
    guests, deadline = threading.BoundedSemaphore(GUESTS_MAX), time.monotonic() + MEET_S
    listener.settimeout(0.05)

    def talk(connection: socket.socket) -> None:
        try:
            _member_take(meeting, connection, ports, found)
        finally:
            guests.release()

    while len(found) < meeting.hosts - 1:
        if time.monotonic() > deadline:
            missing = [str(index) for index in range(1, meeting.hosts) if index not in found]
            raise ClusterError(f"no ports from host {', '.join(missing)} within {MEET_S:.0f} s at {where}: does a firewall keep hosts "
                               "from that port?")
        if guests.acquire(timeout=0.05):
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                guests.release()
                continue
            threading.Thread(target=talk, args=(connection,), name="shoal-cluster", daemon=True).start()
    return found


Found = Tuple[Member, socket.socket, str]  # the host, its connection, the nonce that it sent


def _member_take(meeting: Meeting, connection: socket.socket, ports: int, found: Dict[int, Found]) -> None:
    """Takes one host's ports. A connection that does not prove the secret, or sends nothing, is not from a host of this job."""
    nonce = secrets.token_hex(16)
    try:
        connection.settimeout(TALK_S)
        _send(connection, {"nonce": nonce})
        told = _receive(connection, time.monotonic() + TALK_S)
        said = json.dumps([told["index"], told["ports"]])
        if not hmac.compare_digest(meeting.proof("other", nonce, told["nonce"], said), told["proof"]):
            raise ValueError("another secret")
        if not 0 < int(told["index"]) < meeting.hosts or len(told["ports"]) != ports:
            raise ValueError("no host of this job")
        member = Member(connection.getpeername()[0], told["ports"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        sys.stderr.write(f"shoal job: refused a connection to {address_text(meeting.address, meeting.port)}: {error}\n")
        connection.close()
        return
    found[int(told["index"])] = (member, connection, told["nonce"])


def _meet_as_other(meeting: Meeting, ports: List[int]) -> Tuple[List[Member], List[socket.socket]]:
    where = address_text(meeting.address, meeting.port)
    deadline = time.monotonic() + MEET_S
    connection = _connect(meeting, deadline)
    nonce, said = secrets.token_hex(16), json.dumps([meeting.index, ports])
    try:
        theirs = _receive(connection, deadline)["nonce"]
        _send(connection, {"index": meeting.index, "ports": ports, "nonce": nonce,
                           "proof": meeting.proof("other", theirs, nonce, said)})
        told = _receive(connection, deadline)
        if not hmac.compare_digest(meeting.proof("first", nonce, told["members"]), told["proof"]):
            raise ValueError("it knows another SHOAL_SECRET")
        members = [Member(**one) for one in json.loads(told["members"])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ClusterError(f"no answer from host 0 at {where}, so the other hosts' addresses are unknown: "
                           f"{error or type(error).__name__}") from error
    return members, [connection]


def _connect(meeting: Meeting, deadline: float) -> socket.socket:
    """Connects to host 0, which may begin to listen later."""
    while True:
        try:
            return socket.create_connection((meeting.address, meeting.port), timeout=max(deadline - time.monotonic(), 0.1))
        except OSError as error:
            if time.monotonic() >= deadline:
                where = address_text(meeting.address, meeting.port)
                raise ClusterError(f"cannot reach host 0 at {where} within {MEET_S:.0f} s: {error}") from error
            time.sleep(0.05)


def _send(connection: socket.socket, message: Dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> Dict[str, Any]:
    """Receives one line. Each side sends its next message only after an answer, so nothing may follow the line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(1 << 16)
        line += piece
        if not piece or len(line) > LINE_MAX or b"\n" in piece[:-1]:
            raise ValueError("the connection was closed" if not piece else "not a message of ours")
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError("not a message of ours")
    return told


# ---- TF_CONFIG ----

def configs_of(style: str, index: int, members: List[Member]) -> Tuple[Optional[str], Optional[str]]:
    """Returns TF_CONFIG of a host's script and of its parameter server; None for one that does not exist."""
    hosts = [str(number) for number in range(len(members))]

    def address(host: str, port: int) -> str:
        member = members[int(host)]
        return address_text(member.address, member.ports[1 if port == PORT_OF_SERVER else 0])

    script = distribution.tf_config(style, hosts, hosts[index], address=address)
    server = None
    if style == "parameter_server":
        server = distribution.tf_config(style, hosts, hosts[index], is_server=True, address=address)
    return script and json.dumps(script), server and json.dumps(server)


# ---- the processes ----

class Processes:
    """The script and the parameter server of this host."""

    def __init__(self, script: List[str], configs: Tuple[Optional[str], Optional[str]]):
        self.is_stopping = False
        self.wake, wake_writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # `shoal run` sends them to all processes of the worker
            signal.signal(number, self._stop)
        self.server = configs[1] and self._start([sys.executable, "-c", BEGIN, SERVE], configs[1])
        self.script = self._start(script, configs[0])

    def _stop(self, *_: Any) -> None:
        self.is_stopping = True

    def _start(self, command: List[str], config: Optional[str]) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **({"TF_CONFIG": config} if config else {})}
        return subprocess.Popen(command, env=environment, preexec_fn=processes.end_with_parent)

    def script_wait(self) -> int:
        """Waits until the script has ended; returns Popen.returncode. If the server ends first, also ends the script."""
        self._wait_until(lambda: self.script.poll() is not None, None)
        return self.script.returncode

    def master_wait(self, connection: socket.socket) -> None:
        """Waits until host 0 has closed the connection: its script has ended and no longer needs a server."""
        connection.setblocking(True)
        self._wait_until(lambda: False, connection)

    def _wait_until(self, is_over: Callable[[], bool], connection: Optional[socket.socket]) -> None:
        while not is_over():
            if self.server and self.server.poll() is not None and not self.is_stopping:
                self._end(self.script)
                raise ClusterError(f"the parameter server of this host {processes.ending_text(self.server.returncode)}")
            readable, _, _ = select.select([self.wake, *([connection] if connection else [])], [], [])
            if self.wake in readable:
                os.read(self.wake, 4096)
            if connection in readable or (self.is_stopping and connection):
                return

    def close(self) -> None:
        if self.server:
            self._end(self.server)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Kills a process. A server has nothing to save."""
        process.kill()
        process.wait()


def run(style: str, script: List[str]) -> int:
    """Runs this host's part; returns Popen.returncode of its script."""
    meeting = Meeting.of(style, os.environ)
    family = family_of(meeting.address)
    held = [port_hold(family) for _ in range(2 if style == "parameter_server" else 1)]
    members, connections = meet(meeting, [one.getsockname()[1] for one in held])
    running = Processes(script, configs_of(style, meeting.index, members))
    try:
        code = running.script_wait()
        if code == 0 and running.server and meeting.index:
            running.master_wait(connections[0])
    finally:
        running.close()
        for one in [*held, *connections]:
            one.close()
    return code


def serve() -> None:
    """Runs a parameter server as SageMaker's TensorFlow containers do: without GPUs, which the script uses."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    config = json.loads(os.environ["TF_CONFIG"])
    try:
        import tensorflow
    except ImportError as error:
        raise ClusterError(f"distribution.parameter_server: the server needs TensorFlow for "
                           f"{sys.executable}: {error}") from error
    spec = tensorflow.train.ClusterSpec(config["cluster"])
    tensorflow.distribute.Server(spec, job_name="ps", task_index=config["task"]["index"]).join()


def main(words: List[str]) -> None:
    """Ends as the script does, by the same signal if it was killed."""
    try:
        if words == [SERVE]:
            serve()
            return
        code = run(words[0], words[1:])
    except (ClusterError, OSError) as error:
        sys.exit(f"shoal job: {error}")
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(processes.exit_code(code))
