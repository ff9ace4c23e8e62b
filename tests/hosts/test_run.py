"""`shoal run` on each of several emulated hosts (cluster.py): all workers join, and the first failure ends them everywhere.

Prints TAP. SHOAL_HOST_RANK names the program of a rank, SHOAL_COMMAND the command. Words: only cases whose names contain one.
Exit code 0: none failed, 1: some did, 77: hosts cannot be emulated here."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multi"))

from cluster import INTERFACE, Cluster, Impossible, Rank, clean_environment, require  # noqa: E402
from slurm import Slurm  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

PROGRAM = os.path.abspath(os.environ.get("SHOAL_HOST_RANK", ""))
COMMAND = os.path.abspath(os.environ.get("SHOAL_COMMAND", ""))
PORT = 29500
JOINED_S = 120
ENDED_S = 60  # not a promise: this machine may be busy
LINES = ["sh", "-c", "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"]
AS_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []


class Hosts:
    """`shoal run` with these words on each host. on_host(index): its own words and variables."""

    def __init__(self, cluster, words, program, on_host=None, count=None, **variables):
        self.agents = []
        for index, host in enumerate(cluster.hosts[:count]):
            own, more = on_host(index) if on_host else ([], {})
            environment = {**clean_environment(), "SHOAL_SECRET": "secret", **variables, **more}
            self.agents.append(Rank(index, host, [COMMAND, "run", *words, *own, *program], environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for agent in self.agents:
            agent.close()

    def told(self):
        return "\n".join(f"--- host {agent.number} {agent.state()}\n{agent.output()}" for agent in self.agents)

    def wait(self, seconds, agents=None):
        waited = self.agents if agents is None else agents
        end = time.monotonic() + seconds
        while not all([agent.poll() for agent in waited]):
            expect(time.monotonic() < end, f"no end within {seconds} s", self.told())
            time.sleep(0.02)

    def wait_for(self, text, times):
        """Until each host has told it so many times."""
        end = time.monotonic() + JOINED_S
        while not all(agent.output().count(text) >= times for agent in self.agents):
            expect(time.monotonic() < end, f"no {text!r} within {JOINED_S} s", self.told())
            time.sleep(0.02)


def by_options(cluster, hosts, workers):
    """The words of each host, and no variables."""
    meet = f"[{cluster.address(0)}]:{PORT}" if cluster.ipv6 else f"{cluster.address(0)}:{PORT}"
    return lambda index: (["--hosts", str(hosts), "--host-index", str(index), "--meet", meet, "-n", str(workers)], {})


def by_pet(cluster, hosts, workers):
    return lambda index: ([], {"PET_NNODES": str(hosts), "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": str(workers),
                               "PET_MASTER_ADDR": cluster.address(0), "PET_MASTER_PORT": str(PORT)})


def expect_exact(told, code, hosts, workers):
    ranks = hosts * workers
    expect(code == 0, f"exit code {code}", told)
    for rank in range(ranks):
        expect(re.search(rf"(^|\D){rank}\| exact: rows: ", told, re.M), f"rank {rank} has not done it", told)
    expect(f"{ranks} ranks on {hosts} hosts" in told, f"not {ranks} ranks on {hosts} hosts", told)


def exact(hosts, workers, found, ipv6=False):
    with Cluster(hosts, ipv6=ipv6) as cluster:
        with Hosts(cluster, [], [PROGRAM, "exact", "rows"], found(cluster, hosts, workers), SHOAL_LOG="info") as job:
            job.wait(JOINED_S)
            expect_exact(job.told(), sum(agent.code for agent in job.agents), hosts, workers)


def workers_are_told_their_place():
    with Cluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        with Hosts(cluster, ["--output", folder], LINES, by_options(cluster, 2, 2)) as job:
            job.wait(JOINED_S)
            expect(all(agent.code == 0 for agent in job.agents), job.told())
            for rank in range(4):
                line = f"{rank} 4 {rank % 2} 2 {rank // 2} {cluster.address(0)} {PORT}\n"
                expect(f"{rank}| {line}" in job.agents[rank // 2].output(), line, job.told())
                expect(Path(folder, f"rank-{rank}.out").read_text() == line, line, job.told())


def srun():
    with Cluster(2) as cluster, Slurm(cluster) as slurm:
        done = slurm.srun("--mpi=none", "-N2", "-n2", COMMAND, "run", "-n", "2", PROGRAM, "exact", "rows", timeout=JOINED_S,
                          SHOAL_LOG="info", SHOAL_SECRET="secret")
        expect_exact(done.stdout + done.stderr, done.returncode, 2, 2)
        done = slurm.srun("--mpi=none", "-N2", "-n4", COMMAND, "run", "-n", "2", PROGRAM, "exact", "rows", timeout=JOINED_S)
        expect(done.returncode and "start one `shoal run` for each host" in done.stderr, done)


def mpirun(command, words, exports):
    if not shutil.which(command):
        raise Skip(f"{command} is not here")
    variables = {"SHOAL_LOG": "info", "SHOAL_SECRET": "secret"}
    with Cluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        agent.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve().with_name("cluster.py")} rsh "$@"\n')
        agent.chmod(0o755)
        hosts = ",".join(f"{cluster.address(number)}:1" for number in range(2))
        done = subprocess.run([*cluster.hosts[0].enter(), command, *(word for name in variables for word in exports(name)), *words,
                               agent, "--host", hosts, "-n", "2", COMMAND, "run", "-n", "2", "--meet",
                               f"{cluster.address(0)}:{PORT}", PROGRAM, "exact", "rows"],
                              capture_output=True, text=True, timeout=JOINED_S, stdin=subprocess.DEVNULL,
                              env={**clean_environment(), **cluster.environment(), **variables})
        expect_exact(done.stdout + done.stderr, done.returncode, 2, 2)


def openmpi():
    mpirun("mpirun.openmpi", [*AS_ROOT, "--mca", "plm_rsh_agent"], lambda name: ["-x", name])


def mpich():
    mpirun("mpirun.mpich", ["-launcher", "rsh", "-iface", INTERFACE, "-launcher-exec"], lambda name: [])


# ---- Failures --------------------------------------------------------------------------------------------------------------

READY = "rank is running"
LOOP = ["sh", "-c", f'echo "{READY}, process $$"; exec "$0" loop 0', PROGRAM]


def process_of(job, host, rank):
    return int(re.search(rf"^{rank}\| {READY}, process (\d+)$", job.agents[host].output(), re.M)[1])


def looping(cluster, hosts, workers):
    """Returns once every rank has joined and computes."""
    job = Hosts(cluster, [], LOOP, by_options(cluster, hosts, workers))
    try:
        job.wait_for("| running\n", workers)
        return job
    except BaseException:
        job.close()
        raise


def nothing_is_left(cluster, job):
    """No worker outlives its `shoal run`."""
    end = time.monotonic() + ENDED_S
    while left := [pid for host in cluster.hosts for pid in host.processes()]:
        expect(time.monotonic() < end, f"processes are left: {left}", job.told())
        time.sleep(0.02)


def killed_worker(hosts, workers):
    """Its host names it with its last lines; the others say whom the ranks blame, and where."""
    with Cluster(hosts) as cluster, looping(cluster, hosts, workers) as job:
        rank = hosts * workers - 1
        pid = process_of(job, hosts - 1, rank)
        os.kill(pid, signal.SIGKILL)
        job.wait(ENDED_S)
        expect(all(agent.code != 0 for agent in job.agents), job.told())
        own = job.agents[-1]
        expect(own.code == 128 + signal.SIGKILL, f"exit code {own.code}", job.told())
        expect(f"shoal run: rank {rank} (pid {pid}) failed first: killed by signal 9" in own.output(), job.told())
        for agent in job.agents[:-1]:
            blamed = rf"shoal run: the ranks say: communicator world is broken: rank {rank} \(process {pid} on h{hosts}"
            expect(re.search(blamed, agent.output()), f"host {agent.number} blames otherwise", job.told())
            expect("the rank to blame is on another host" in agent.output(), job.told())
            first = agent.number * workers
            expect(any(f"the last lines of rank {rank}:" in agent.output() for rank in range(first, first + workers)), job.told())
        nothing_is_left(cluster, job)


def killed_agent():
    """Its workers end with it, and those of the other host are told."""
    with Cluster(2) as cluster, looping(cluster, 2, 2) as job:
        job.agents[1].signal(signal.SIGKILL)
        job.wait(ENDED_S)
        expect(job.agents[0].code not in (0, None), job.told())
        expect(re.search(r"the ranks say: communicator world is broken: rank [23] \(process \d+ on h2", job.agents[0].output()),
               job.told())
        nothing_is_left(cluster, job)


def cut_off_host():
    """Each side gives up the other."""
    with Cluster(2) as cluster, looping(cluster, 2, 2) as job:
        cluster.unplug(1)
        job.wait(ENDED_S)
        for agent, ranks, host in ((job.agents[0], "[23]", 2), (job.agents[1], "[01]", 1)):
            expect(agent.code not in (0, None), job.told())
            blamed = rf"the ranks say: communicator world is broken: rank {ranks} \(process \d+ on h{host}"
            expect(re.search(blamed, agent.output()), f"host {agent.number} blames otherwise", job.told())
        nothing_is_left(cluster, job)


def stopped_at_one_host():
    """Ctrl-C reaches one host: the others hear from Shoal that its ranks have left."""
    with Cluster(2) as cluster, looping(cluster, 2, 2) as job:
        job.agents[0].signal(signal.SIGINT)
        job.wait(ENDED_S)
        expect(job.agents[0].code == 128 + signal.SIGINT, job.told())
        expect(job.agents[1].code not in (0, None), job.told())
        expect(re.search(r"the ranks say: communicator world is broken: rank [01] \(process \d+ on h1", job.agents[1].output()),
               job.told())
        nothing_is_left(cluster, job)


def host_that_never_comes():
    """At the deadline its ranks are named."""
    with Cluster(2) as cluster:
        with Hosts(cluster, [], [PROGRAM, "exact", "rows"], by_options(cluster, 2, 2), count=1, SHOAL_BOOTSTRAP_TIMEOUT_MS="4000") as job:
            job.wait(JOINED_S)
            expect(job.agents[0].code == 1 and re.search(r"ranks? 2, 3|ranks 2 and 3|ranks 2-3|ranks 2 to 3", job.told()), job.told())


def case(name, function, *words, **more):
    def run():
        try:
            function(*words, **more)
        except Impossible as why:
            raise Skip(str(why))
    run.__name__ = name
    return run


CASES = [
    case("exact_of_2x2_by_options", exact, 2, 2, by_options),
    case("exact_of_2x2_by_options_ipv6", exact, 2, 2, by_options, ipv6=True),
    case("exact_of_2x2_by_pet", exact, 2, 2, by_pet),
    case("exact_of_8x1_by_pet", exact, 8, 1, by_pet),
    case("workers_are_told_their_place", workers_are_told_their_place),
    case("exact_of_2x2_by_srun", srun),
    case("exact_of_2x2_by_openmpi", openmpi),
    case("exact_of_2x2_by_mpich", mpich),
    case("killed_worker_of_2x2", killed_worker, 2, 2),
    case("killed_worker_of_8x1", killed_worker, 8, 1),
    case("killed_agent_of_2x2", killed_agent),
    case("cut_off_host_of_2x2", cut_off_host),
    case("stopped_at_one_host_of_2x2", stopped_at_one_host),
    case("host_that_never_comes", host_that_never_comes),
]


def main():
    try:
        if not os.path.isfile(PROGRAM) or not os.path.isfile(COMMAND):
            raise Impossible("SHOAL_HOST_RANK and SHOAL_COMMAND do not name programs")
        require()
    except Impossible as why:
        print(f"1..0 # SKIP {why}")
        return sys.exit(77)
    return run_cases([one for one in CASES if not sys.argv[1:] or any(word in one.__name__ for word in sys.argv[1:])])


if __name__ == "__main__":
    main()
