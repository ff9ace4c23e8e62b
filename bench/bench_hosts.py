"""What bench/bench.py needs, besides its own code for one host, to measure over emulated hosts (tests/hosts/cluster.py).

Before each round iperf3 measures the wire between two hosts: one stream, then two opposite ones at the same time. The bytes
that every host must send bound an operation: 2 (H-1)/H of the vector for an all-reduce over H hosts, (H-1)/H of the larger
operand for an all-gather. The share of the wire is that bound's time divided by the measured time.
"""
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/hosts"))

import cluster as emulated  # noqa: E402

IPERF_S = 3
IPERF_PORT = 5201
TORCH_PYTHON = ROOT / "build/torch/bin/python3"
FACTORS = {"allreduce": 2, "allgather": 1}
# PyTorch would resolve its host's name, which no resolver knows. Naming the interface avoids that.
GLOO_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": emulated.INTERFACE}


def why_impossible():
    """None: hosts can be emulated. May begin the program anew, as root of a user namespace."""
    try:
        emulated.require()
    except emulated.Impossible as why:
        return str(why)
    return None


class Hosts:
    """The emulated hosts of a suite."""

    def __init__(self, layout, rate):
        self.layout = emulated.Layout(layout)
        self.cluster = emulated.Cluster(len(self.layout.sizes), rate)
        self.is_shaped = bool(rate)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cluster.close()

    # ---- the wire ----

    def sent_bytes(self, collective, size):
        """Returns the bytes that each host sends, at least."""
        hosts = len(self.layout.sizes)
        return FACTORS[collective] * size * (hosts - 1) / hosts

    def stream(self, start, end):
        """Starts a client on host `start` that sends to host `end` as fast as it can."""
        client = ["iperf3", "--json", "--time", str(IPERF_S), "--omit", "1", "--port", str(IPERF_PORT), "--client"]
        return subprocess.Popen([*self.cluster.hosts[start].enter(), *client, self.cluster.address(end)],
                                stdout=subprocess.PIPE, text=True)

    def streams(self, pairs):
        """Runs all streams at once; returns the GB/s that each receiver got."""
        servers = [subprocess.Popen([*self.cluster.hosts[end].enter(), "iperf3", "--server", "--port", str(IPERF_PORT)],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _, end in pairs]
        try:
            for _, end in pairs:
                self.server_wait(end)
            clients = [self.stream(*pair) for pair in pairs]
            told = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
        finally:
            for server in servers:
                server.kill()
                server.wait()
        if any("error" in one for one in told):
            sys.exit(f"bench: iperf3: {told}")
        return [one["end"]["sum_received"]["bits_per_second"] / 8e9 for one in told]

    def server_wait(self, host):
        """Waits until the server listens. It asks the kernel with ss, because a connection of ours would end the server's
        test."""
        for _ in range(200):
            if str(IPERF_PORT) in self.cluster.hosts[host].run("ss", "--listening", "--tcp", "--numeric"):
                return
        sys.exit("bench: iperf3 does not listen")

    def wire(self):
        """Measures the wire. On unshaped links both directions share the cores, so the rates are those of simultaneous
        streams."""
        one = self.streams([(0, 1)])[0]
        both = one if self.is_shaped else sum(self.streams([(0, 1), (1, 0)])) / 2
        return {"one_gb_s": round(one, 4), "both_gb_s": round(both, 4)}

    def judge(self, point, collective, wire):
        """Adds to a point, and to the result of each library, its share of the wire and its CPU time."""
        sent = self.sent_bytes(collective, point["bytes"])
        for result in point["results"].values():
            result["share"] = sent / wire["both_gb_s"] / 1e3 / result["median_us"]
            result["cpu_s_per_gb"] = result["cpu_us"] * 1e3 / (sent * len(self.layout.sizes))
        point["wire"] = wire

    # ---- libraries ----

    def openmpi_launch(self, folder):
        """Runs mpirun on the first host; `cluster.py rsh` starts its daemons on the others. Ranks are not bound: each host
        would bind its first rank to the first core, so all first ranks would share it."""
        hosts = Path(folder) / "hosts"
        sizes = self.layout.sizes
        hosts.write_text("".join(f"{self.cluster.address(i)} slots={size}\n" for i, size in enumerate(sizes)))
        subnet = f"{self.cluster.address(0).rpartition('.')[0]}.0/24"
        agent = f"{sys.executable} {ROOT / 'tests/hosts/cluster.py'} rsh"
        words = {"plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": "1", "pml": "ob1", "btl_tcp_if_include": subnet,
                 "btl": "tcp,self" if max(sizes) == 1 else "tcp,self,vader", "oob_tcp_if_include": subnet}
        environment = [f"{name}={value}" for name, value in self.cluster.environment().items()]
        return [*self.cluster.hosts[0].enter(), "env", *environment,
                "mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "--hostfile", str(hosts),
                *(word for name, value in words.items() for word in ("--mca", name, value))]


def openmpi_settings(collective, layout, cores):
    """Returns the settings of mpirun that are tried at each size: its own choice; rings, which it chooses too late; on hosts
    with several ranks, its collectives for such hosts. Ranks that share cores must yield: otherwise 64 B take a hundred
    times as long."""
    ring = {"allreduce": "4", "allgather": "4"}[collective]
    choices = [[], ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", f"coll_tuned_{collective}_algorithm", ring]]
    choices += [["--mca", "coll_han_priority", "100"]] if max(layout.sizes) > 1 else []
    return [[*choice, "--mca", "mpi_yield_when_idle", yields] for choice in choices
            for yields in (("1", "0") if layout.size <= cores else ("1",))]


@dataclass
class Launched:
    """A library whose ranks are started one by one on their hosts. command(suite, size): the command of each rank; rank 0
    prints the figure."""
    name: str
    hosts: Hosts
    command: object
    environment: dict
    limit_s: int

    def measure(self, suite, size):
        command = [str(word) for word in self.command(suite, size)]
        with emulated.Job(self.hosts.cluster, self.hosts.layout, command, self.environment).start() as job:
            if not job.wait(self.limit_s, emulated.GRACE_S) or job.failed():
                sys.exit(f"bench: {self.name} failed: {' '.join(command)}\n{job.told()}")
            return next(json.loads(line) for line in job.ranks[0].output().splitlines() if line.startswith("{"))


def gloo_is_here():
    tried = [TORCH_PYTHON, "-c", "import torch.distributed"]
    return TORCH_PYTHON.exists() and subprocess.run(tried, capture_output=True).returncode == 0


def gloo_open(hosts, limit_s):
    """Opens Gloo. Its all-gather writes into a list of tensors."""
    names = {"allreduce": "all_reduce", "allgather": "all_gather"}

    def command(suite, size):
        return [TORCH_PYTHON, ROOT / "bench/torch_worker.py", "gloo", names[suite.collective], size, "--seconds", suite.seconds]
    return Launched("gloo", hosts, command, {**GLOO_ENVIRONMENT, "OMP_NUM_THREADS": 1}, limit_s)


def scratch():
    return tempfile.TemporaryDirectory(prefix="shoal-bench-")
