"""`shoal run` on each of several emulated hosts (cluster.py): all workers join, and the first failure ends them everywhere.

Prints TAP. SHOAL_HOST_RANK names the program of a rank, SHOAL_COMMAND the command. Arguments: only cases whose names contain
one. Exit code 0: none failed, 1: some failed, 77: hosts cannot be emulated here."""
import json
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
ENDED_S = 60  # not a promise, because this machine may be busy
LINES = ["sh", "-c", "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"]
AS_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []


class Hosts:
    """`shoal run` with these words on each host. on_host(index): additional words and variables for one host."""

    def __init__(self, cluster, words, program, on_host=None, count=None, **variables):
        self.agents, self.strangers = [], []
        for index, host in enumerate(cluster.hosts[:count]):
            own, more = on_host(index) if on_host else ([], {})
            environment = {**clean_environment(), "SHOAL_SECRET": "secret", **variables, **more}
            self.agents.append(Rank(index, host, [COMMAND, "run", *words, *own, *program], environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for one in self.agents + self.strangers:
            one.close()

    def told(self):
        return "\n".join(f"--- host {agent.number} {agent.state()}\n{agent.output()}" for agent in self.agents)

    def wait(self, seconds, agents=None):
        waited = self.agents if agents is None else agents
        end = time.monotonic() + seconds
        while not all([agent.poll() for agent in waited]):
            expect(time.monotonic() < end, f"no end within {seconds} s", self.told())
            time.sleep(0.02)

    def wait_for(self, text, times, on=all):
        """Waits until each host has printed the text that many times; on=any: until one host has."""
        end = time.monotonic() + JOINED_S
        while not on(agent.output().count(text) >= times for agent in self.agents):
            expect(time.monotonic() < end, f"no {text!r} within {JOINED_S} s", self.told())
            time.sleep(0.02)


def by_options(cluster, hosts, workers):
    """Returns the words of each host, and no variables."""
    meet = f"[{cluster.address(0)}]:{PORT}" if cluster.ipv6 else f"{cluster.address(0)}:{PORT}"
    return lambda index: (["--hosts", str(hosts), "--host-index", str(index), "--meet", meet, "-n", str(workers)], {})


def by_pet(cluster, hosts, workers):
    return lambda index: ([], {"PET_NNODES": str(hosts), "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": str(workers),
                               "PET_MASTER_ADDR": cluster.address(0), "PET_MASTER_PORT": str(PORT)})


def by_sm(cluster, hosts, workers):
    """Uses the variables of SageMaker's containers. Their host names are addresses here, and the ranks meet at the first
    host."""
    addresses = [cluster.address(index) for index in range(hosts)]
    return lambda index: (["-n", str(workers)], {"SM_HOSTS": json.dumps(addresses), "SM_CURRENT_HOST": addresses[index],
                                                 "SM_MASTER_PORT": str(PORT)})


def by_dstack(cluster, hosts, workers):
    return lambda index: ([], {"DSTACK_NODES_NUM": str(hosts), "DSTACK_NODE_RANK": str(index), "DSTACK_GPUS_PER_NODE": str(workers),
                               "DSTACK_MASTER_NODE_IP": cluster.address(0)})


def expect_exact(told, code, hosts, workers):
    ranks = hosts * workers
    expect(code == 0, f"exit code {code}", told)
    for rank in range(ranks):
        expect(re.search(rf"(^|\D){rank}\| exact: groups ", told, re.M), f"rank {rank} has not done it", told)
    expect(f"{ranks} ranks on {hosts} hosts" in told, f"not {ranks} ranks on {hosts} hosts", told)
    for text in ("libfabric was loaded", "libfabric found its providers"):  # for bench/bench_launch.py
        expect(len(re.findall(rf"{text} in \d+\.\d ms$", told, re.M)) == ranks, f"not all ranks say when {text}", told)


def exact(hosts, workers, found, ipv6=False):
    with Cluster(hosts, ipv6=ipv6) as cluster:
        with Hosts(cluster, [], [PROGRAM, "exact", "groups"], found(cluster, hosts, workers), SHOAL_LOG="info") as job:
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
        done = slurm.srun("--mpi=none", "-N2", "-n2", COMMAND, "run", "-n", "2", PROGRAM, "exact", "groups", timeout=JOINED_S,
                          SHOAL_LOG="info", SHOAL_SECRET="secret")
        expect_exact(done.stdout + done.stderr, done.returncode, 2, 2)
        done = slurm.srun("--mpi=none", "-N2", "-n2", COMMAND, "run", "-n", "2", PROGRAM, "exact", "groups", timeout=JOINED_S)
        expect("without a secret" in done.stderr and "before srun: export SHOAL_SECRET=" in done.stderr, done)
        done = slurm.srun("--mpi=none", "-N2", "-n4", COMMAND, "run", "-n", "2", PROGRAM, "exact", "groups", timeout=JOINED_S)
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
                               f"{cluster.address(0)}:{PORT}", PROGRAM, "exact", "groups"],
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
# Workers that do not use Shoal, and end only by SIGKILL.
STUBBORN = ["sh", "-c", f'trap "" TERM INT; echo "{READY}, process $$"; while :; do sleep 0.2; done']
MEEK = ["sh", "-c", f'echo "{READY}, process $$"; exec sleep 1000']
# The promise is 5 s, which tools/run.c asserts of its constants; the rest is for a busy machine. Without a message from another
# host it would take for ever.
ENDED_WITHIN_S = 7


def process_of(job, host, rank):
    return int(re.search(rf"^{rank}\| {READY}, process (\d+)$", job.agents[host].output(), re.M)[1])


def started(cluster, on_host, program, ready, times, words=(), count=None, **variables):
    """Returns once each host has printed `ready` that many times."""
    job = Hosts(cluster, list(words), program, on_host, count, **variables)
    try:
        job.wait_for(ready, times)
        return job
    except BaseException:
        job.close()
        raise


def looping(cluster, hosts, workers):
    """Returns once every rank has joined and computes."""
    return started(cluster, by_options(cluster, hosts, workers), LOOP, "| running\n", workers)


def waiting(cluster, hosts, workers, program=STUBBORN, words=()):
    return started(cluster, by_options(cluster, hosts, workers), program, f"| {READY}", workers, words)


def nothing_is_left(cluster, job):
    """Checks that no worker outlives its `shoal run`."""
    end = time.monotonic() + ENDED_S
    while left := [pid for host in cluster.hosts for pid in host.processes()]:
        expect(time.monotonic() < end, f"processes are left: {left}", job.told())
        time.sleep(0.02)


def ended(cluster, job, code, *lines, agents=None):
    """All hosts end soon, with this code, and with these lines on each. Prints how long it took."""
    begin = time.monotonic()
    job.wait(ENDED_S, agents)
    seconds = time.monotonic() - begin
    for agent in agents or job.agents:
        expect(agent.code == code, f"host {agent.number} ended with {agent.code}, not {code}", job.told())
        for line in lines:
            expect(re.search(line, agent.output(), re.M), f"host {agent.number} does not say: {line}", job.told())
    if agents is None:
        nothing_is_left(cluster, job)
    print(f"# ended after {seconds:.2f} s")
    expect(seconds < ENDED_WITHIN_S, f"the end took {seconds:.1f} s", job.told())


def killed_worker(hosts, workers):
    """Every host names it, and prints its last line."""
    with Cluster(hosts) as cluster, looping(cluster, hosts, workers) as job:
        rank = hosts * workers - 1
        pid = process_of(job, hosts - 1, rank)
        os.kill(pid, signal.SIGKILL)
        ended(cluster, job, 128 + signal.SIGKILL,
              rf"^shoal run: rank {rank} \(pid {pid}\) on h{hosts} failed first: killed by signal 9",
              rf"^shoal run: the last lines of rank {rank}:\n    {READY}, process {pid}\n    running$")


def killed_stranger():
    """Workers that do not use Shoal also end, and so do those that ignore SIGTERM."""
    with Cluster(3) as cluster, waiting(cluster, 3, 2) as job:
        pid = process_of(job, 1, 3)
        os.kill(pid, signal.SIGKILL)
        ended(cluster, job, 128 + signal.SIGKILL, rf"^shoal run: rank 3 \(pid {pid}\) on h2 failed first: killed by signal 9",
              rf"^shoal run: the last lines of rank 3:\n    {READY}, process {pid}$")


def raising_worker():
    """At most the last 20 lines of both its streams are sent, and nothing in them controls a terminal."""
    script = ("fail() { for i in $(seq 30); do echo line $i; done; printf 'a\\033[2Jb\\n'; echo 'ValueError: no gradient' >&2; "
              "exit 3; }; "
              f'trap fail USR1; echo "{READY}, process $$"; while :; do sleep 0.05; done')
    with Cluster(2) as cluster, waiting(cluster, 2, 1, ["sh", "-c", script]) as job:
        pid = process_of(job, 1, 1)
        os.kill(pid, signal.SIGUSR1)
        ended(cluster, job, 3, rf"^shoal run: rank 1 \(pid {pid}\) on h2 failed first: exited with code 3$",
              r"^    ValueError: no gradient$", r"^    line 30$")
        told = job.agents[0].output()
        expect("line 11\n" not in told and "a?[2Jb" in told and "\033" not in told, told)


def blamed_worker():
    """The ranks agree on the cause: all hosts print it, whichever rank exits first."""
    with Cluster(3) as cluster:
        with Hosts(cluster, [], [PROGRAM, "abort"], by_options(cluster, 3, 2)) as job:
            job.wait_for("communicator world is broken", 1, on=any)
            ended(cluster, job, 1, r"^shoal run: rank 5 \(pid \d+\) on h3 failed first: exited with code 1$",
                  r"^shoal run: the ranks report: communicator world is broken")


def killed_agent(index):
    """The agent's workers end with it, and those of the other hosts are notified. Host 0's agent decides for all."""
    with Cluster(3) as cluster, waiting(cluster, 3, 2, MEEK) as job:
        job.agents[index].signal(signal.SIGKILL)
        rest = [agent for agent in job.agents if agent.number != index]
        name = cluster.address(0) if index == 0 else f"h{index + 1}"
        ended(cluster, job, 137, rf"^shoal run: host {index} \({name}\) is lost: its `shoal run` ended without a word$",
              agents=rest)
        nothing_is_left(cluster, job)


def killed_agent_of_waiting():
    """A host whose workers are done also learns that the others' will not be."""
    script = f'echo "{READY}, process $$"; [ $RANK = 1 ] && exit 0; exec sleep 1000'
    with Cluster(2) as cluster, waiting(cluster, 2, 1, ["sh", "-c", script]) as job:
        worker = process_of(job, 1, 1)
        end = time.monotonic() + JOINED_S
        while os.path.exists(f"/proc/{worker}"):
            expect(time.monotonic() < end, job.told())
            time.sleep(0.02)
        job.agents[0].signal(signal.SIGKILL)
        ended(cluster, job, 137, "host 0 .* is lost", agents=job.agents[1:])


def cut_off_host():
    """Each side gives up the other; the others agree."""
    with Cluster(3) as cluster, waiting(cluster, 3, 2) as job:
        cluster.unplug(1)
        ended(cluster, job, 137, r"^shoal run: host [01] \(.*\) is lost: it no longer answers$")
        for agent, host in zip(job.agents, (1, 0, 1)):
            expect(f"host {host} (" in agent.output(), job.told())


def stopped_agent():
    """A stopped agent is not lost: the kernel of its host answers."""
    with Cluster(2) as cluster, waiting(cluster, 2, 1, MEEK) as job:
        job.agents[1].signal(signal.SIGSTOP)
        time.sleep(5)
        expect(not job.agents[0].poll(), job.told())
        os.kill(process_of(job, 0, 0), signal.SIGKILL)
        time.sleep(0.5)
        job.agents[1].signal(signal.SIGCONT)
        ended(cluster, job, 137, r"^shoal run: rank 0 \(pid \d+\) on h1 failed first: killed by signal 9")


def silent_agent():
    """A stopped agent delays nobody: all others name it and end."""
    with Cluster(3) as cluster, waiting(cluster, 3, 1, MEEK) as job:
        job.agents[2].signal(signal.SIGSTOP)
        os.kill(process_of(job, 1, 1), signal.SIGKILL)
        first = r"^shoal run: rank 1 \(pid \d+\) on h2 failed first: killed by signal 9"
        ended(cluster, job, 137, first, r"^shoal run: host 2 \(h3\) of 3 does not answer: .* is stopped or starved; the other hosts end",
              agents=job.agents[:2])
        job.agents[2].signal(signal.SIGCONT)
        ended(cluster, job, 137, first)


def silent_host_0():
    with Cluster(2) as cluster, waiting(cluster, 2, 1, MEEK) as job:
        job.agents[0].signal(signal.SIGSTOP)
        os.kill(process_of(job, 1, 1), signal.SIGKILL)
        ended(cluster, job, 137, r"^shoal run: host 0 \(10\.77\.0\.1\) is lost: it does not answer: `shoal run` there is stopped",
              r"^shoal run: rank 1 \(pid \d+\) ended: killed by signal 9", agents=job.agents[1:])
        job.agents[0].signal(signal.SIGCONT)
        ended(cluster, job, 137)


def signalled_often(stopped):
    """A launcher may signal a hundred times while an agent cannot read: no word between agents is lost."""
    with Cluster(2) as cluster, waiting(cluster, 2, 1, STUBBORN, ["--grace", "2"]) as job:
        job.agents[stopped].signal(signal.SIGSTOP)
        for _ in range(100):
            job.agents[1 - stopped].signal(signal.SIGTERM)
            time.sleep(0.01)
        job.agents[stopped].signal(signal.SIGCONT)
        ended(cluster, job, 143, rf"^shoal run: ended by signal 15 \(Terminated\) on h{2 - stopped}$")


def signalled(number, index):
    """The signal reaches the workers of all hosts, which have the grace time."""
    with Cluster(2) as cluster, waiting(cluster, 2, 2, STUBBORN, ["--grace", "1"]) as job:
        job.agents[index].signal(number)
        ended(cluster, job, 128 + number, rf"^shoal run: ended by signal {int(number)} \(.*\) on h{index + 1}$",
              "did not end when told to: killing")


def signalled_on_all():
    """mpirun and srun signal all hosts: that is one signal, not a second Ctrl-C. Workers may save a checkpoint and end with
    0."""
    script = 'trap "sleep 0.5; echo saved; exit 0" INT; echo "' + READY + '"; while :; do sleep 0.1; done'
    with Cluster(2) as cluster, waiting(cluster, 2, 2, ["sh", "-c", script], ["--grace", "30"]) as job:
        for agent in job.agents:
            os.kill(agent.pid, signal.SIGINT)
        ended(cluster, job, 0, r"^shoal run: ended by signal 2 \(Interrupt\) on h[12]; all workers ended with code 0$")
        expect(job.told().count("| saved") == 4, job.told())


def interrupted_twice():
    with Cluster(2) as cluster, waiting(cluster, 2, 1, STUBBORN, ["--grace", "1000"]) as job:
        job.agents[1].signal(signal.SIGINT)
        job.wait_for("told to end (Interrupt)", 1)
        job.agents[1].signal(signal.SIGINT)
        ended(cluster, job, 130, "asked again to end: killing rank")


def timeout_of_one():
    def own(index):
        words, variables = by_options(cluster, 2, 1)(index)
        return [*words, *(["--timeout", "1", "--grace", "1"] if index else [])], variables
    with Cluster(2) as cluster:
        with Hosts(cluster, [], MEEK, own) as job:
            ended(cluster, job, 124)
            expect("host 1 (h2) has ended the run: its --timeout has passed" in job.agents[0].output(), job.told())


def unstarted_workers():
    """The program exists on one host only."""
    with Cluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        only = Path(folder, "only")
        only.write_text("#!/bin/sh\nexec sleep 1000\n")
        only.chmod(0o755)
        commands = [str(only), str(only) + "-not"]
        with Hosts(cluster, [], [], lambda index: ([*by_options(cluster, 2, 1)(index)[0], commands[index]], {})) as job:
            ended(cluster, job, 127)
            expect("host 1 (h2) could not start its workers" in job.agents[0].output(), job.told())
            expect("there is no program" in job.agents[1].output(), job.told())


def done_by_all():
    """A host whose workers are done waits for the others, and all end with 0."""
    with Cluster(3) as cluster:
        with Hosts(cluster, [], ["sh", "-c", "[ $RANK = 2 ] && sleep 2; exit 0"], by_options(cluster, 3, 1)) as job:
            ended(cluster, job, 0)


# ---- Restarts --------------------------------------------------------------------------------------------------------------

def restarted(times, code):
    """All workers start again from the script's checkpoint, as often as allowed."""
    script = ('echo "attempt $SHOAL_RESTART $TORCHELASTIC_RESTART_COUNT $SHOAL_JOB_ID"; "$0" exact groups > /dev/null || exit 9; '
              f'[ $RANK = 3 ] && [ $SHOAL_RESTART -lt {times} ] && exit 5; exit 0')
    with Cluster(2) as cluster:
        with Hosts(cluster, ["--restarts", "2"], ["sh", "-c", script, PROGRAM], by_options(cluster, 2, 2)) as job:
            job.wait(JOINED_S)
            nothing_is_left(cluster, job)
            attempts = min(times, 2)
            for agent in job.agents:
                told = agent.output()
                expect(agent.code == code, agent.code, job.told())
                found = re.findall(r"attempt (\d) (\d) (\S+)", re.sub(r"(?m)^    .*$", "", told))
                expect(sorted({pair[:2] for pair in found}) == [(str(i), str(i)) for i in range(attempts + 1)], found, told)
                expect(len({one[2] for one in found}) == attempts + 1, found, told)
                failed = len(re.findall(r"rank 3 \(pid \d+\) on h2 failed first: exited with code 5", told))
                expect(failed == attempts + (code != 0), failed, told)
                again = re.findall(r"starting all workers again: restart (\d) of 2", told)
                expect(again == [str(i + 1) for i in range(attempts)], again, told)


def restarted_with_a_stopped_agent():
    """It comes back when the others have begun again: its workers of before are killed and reaped first."""
    script = (f'[ $SHOAL_RESTART = 1 ] && {{ echo "again"; until [ -e "$0" ]; do sleep 0.1; done; exit 0; }}; echo "{READY}, process $$"; '
              'trap "exit 5" USR1; while :; do sleep 0.1; done')
    with tempfile.TemporaryDirectory() as folder, Cluster(2) as cluster, \
            waiting(cluster, 2, 1, ["sh", "-c", script, f"{folder}/end"], ["--restarts", "1", "--grace", "0"]) as job:
        worker = process_of(job, 1, 1)
        job.agents[1].signal(signal.SIGSTOP)
        os.kill(process_of(job, 0, 0), signal.SIGUSR1)
        job.wait_for("starting all workers again", 1, on=any)
        job.agents[1].signal(signal.SIGCONT)
        job.wait_for("| again", 1)
        expect(not os.path.exists(f"/proc/{worker}"), "the worker of before is a zombie", job.told())
        Path(folder, "end").touch()
        ended(cluster, job, 0, r"^shoal run: host 1 \(h2\) of 2 does not answer: .* waiting, as a restart needs all hosts$")


def not_restarted():
    """A requested end is not followed by a restart."""
    with Cluster(2) as cluster, waiting(cluster, 2, 1, MEEK, ["--restarts", "3"]) as job:
        job.agents[1].signal(signal.SIGTERM)
        ended(cluster, job, 143, "ended by signal 15")
        expect("starting all workers again" not in job.told(), job.told())


# ---- The meeting -----------------------------------------------------------------------------------------------------------

def uneven_workers():
    with Cluster(3) as cluster:
        def own(index):
            return by_options(cluster, 3, (2, 1, 3)[index])(index)
        with Hosts(cluster, [], [PROGRAM, "exact", "groups"], own, SHOAL_LOG="info") as job:
            job.wait(JOINED_S)
            told = job.told()
            expect(not any(agent.code for agent in job.agents) and "6 ranks on 3 hosts" in told, told)
            for host, ranks in enumerate(((0, 1), (2,), (3, 4, 5))):
                for rank in ranks:
                    expect(re.search(rf"(^|\D){rank}\| exact: groups ", job.agents[host].output(), re.M), rank, told)


def host_that_never_comes():
    """All hosts that came name the missing one, and start no worker."""
    with Cluster(4) as cluster:
        with Hosts(cluster, ["--meet-timeout", "3"], MEEK, by_options(cluster, 4, 1), count=3) as job:
            ended(cluster, job, 125, r"^shoal run: host 3 of 4 did not come within 3 s \(--meet-timeout\); "
                                     r"there are: host 0 \(h1\), host 1 \(h2\), host 2 \(h3\)$")
            expect(READY not in job.told(), job.told())


def host_0_that_never_comes():
    with Cluster(2) as cluster:
        def only(index):
            return by_options(cluster, 2, 1)(1)
        with Hosts(cluster, ["--meet-timeout", "2"], MEEK, only, count=1) as job:
            ended(cluster, job, 125, r"^shoal run: host 0 of 2 did not answer at 10\.77\.0\.1, ports 29501 to 29516, within 2 s")


def late_host():
    """The hosts come in any order."""
    with Cluster(2) as cluster:
        words, known = by_options(cluster, 2, 1), {**clean_environment(), "SHOAL_SECRET": "secret"}
        with Hosts(cluster, [], ["true"], lambda index: words(1), count=0) as job:
            for index in (1, 0):
                job.agents.append(Rank(index, cluster.hosts[index], [COMMAND, "run", *words(index)[0], "true"], known))
                time.sleep(2 * index)
            ended(cluster, job, 0)


def wait_for_meeting(agent):
    """Waits until the agent handles SIGINT and has a connection to host 0, and then a second for its identification."""
    end = time.monotonic() + JOINED_S
    while time.monotonic() < end:
        status = Path(f"/proc/{agent.pid}/status").read_text()
        heeded = sum(int(re.search(rf"^{name}:\s*(\w+)", status, re.M)[1], 16) for name in ("SigCgt", "SigBlk"))
        connections = [line.split() for line in Path(f"/proc/{agent.pid}/net/tcp").read_text().splitlines()[1:]]
        if heeded >> signal.SIGINT - 1 & 1 and any(state == "01" for _, _, _, state, *_ in connections):
            time.sleep(1)
            return
        time.sleep(0.02)
    raise AssertionError(f"host {agent.number} has no connection: {agent.output()}")


def interrupted_meeting():
    with Cluster(3) as cluster:
        with Hosts(cluster, [], MEEK, by_options(cluster, 3, 1), count=2) as job:
            wait_for_meeting(job.agents[1])
            job.agents[1].signal(signal.SIGINT)
            job.wait(ENDED_S)
            expect(job.agents[1].code == 130, job.told())
            expect(job.agents[0].code == 130, job.told())


def same_index_twice():
    with Cluster(3) as cluster:
        def own(index):
            return by_options(cluster, 3, 1)(min(index, 1))
        with Hosts(cluster, ["--meet-timeout", "4"], MEEK, own) as job:
            job.wait(ENDED_S)
            expect([agent.code for agent in job.agents] == [125] * 3, job.told())
            expect(re.search(r"h[23] is host 1 already; give each host its own --host-index", job.told()), job.told())


def hosts_that_disagree():
    with Cluster(2) as cluster:
        def own(index):
            return by_options(cluster, 2 + index, 1)(index)
        with Hosts(cluster, ["--meet-timeout", "4"], MEEK, own) as job:
            job.wait(ENDED_S)
            expect([agent.code for agent in job.agents] == [125] * 2, job.told())
            expect("it counts 2 hosts, and this host counts 3; set the same --hosts on all" in job.agents[1].output(), job.told())


def other_secrets():
    """A host with another secret, or none, does not join."""
    with Cluster(3) as cluster:
        words, secrets = by_options(cluster, 2, 1), ("secret", "", "another")
        def own(index):
            return words(min(index, 1))[0], {"SHOAL_SECRET": secrets[index]}
        with Hosts(cluster, ["--meet-timeout", "6"], ["true"], own) as job:
            job.wait(ENDED_S)
            expect(all(agent.code == 125 for agent in job.agents), job.told())
            expect("its secret is not this host's; set SHOAL_SECRET" in job.agents[2].output(), job.told())
            expect("it has a secret and this host has none" in job.agents[1].output(), job.told())
            expect("host 1 of 2 did not come" in job.agents[0].output(), job.told())


def version():
    return subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


STRANGE = r"""
import os, socket, struct, sys, time
where = sys.argv[1], int(sys.argv[2])
def put(data, keep=[]):
    try:
        one = socket.create_connection(where, 5)
        one.sendall(data)
        keep.append(one)
    except (ConnectionResetError, BrokenPipeError):
        pass  # refused while it speaks
def listens():
    try:
        return socket.create_connection(where, 5)
    except ConnectionRefusedError:
        return None
while not listens():
    time.sleep(0.05)
head = lambda kind, body: b"SHAL" + struct.pack("<BBHII", kind, 0, 0, len(body), 0) + body
unnamed = 14695981039346656037  # the number of a job without a name: FNV-1a of nothing
hello = struct.pack("<4I2Q16s16s64s2I2i", 2 << 16 | 3, 1, 2, 1, unnamed, 0, sys.argv[3].encode(), bytes(16), b"h2", 1, 0, 1, 0)
for _ in range(3):
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), head(1, hello), head(1, hello) + head(3, bytes(32)),
                 head(10, struct.pack("<7i", 1, 1, 1, 9, 0, 0, 0)), head(9, b""), head(1, b""), b"SHAL" + b"\xff" * 12):
        put(data)
for _ in range(100):
    put(b"S")
print("done", flush=True)
time.sleep(1000)
"""


def strangers():
    """A process without the secret changes nothing, neither before all have come nor after."""
    script = ["sh", "-c", f'echo "{READY}"; sleep 4; exit 0']
    with Cluster(3) as cluster:
        words, known = by_options(cluster, 2, 1), {**clean_environment(), "SHOAL_SECRET": "secret"}
        strange = [sys.executable, "-c", STRANGE, cluster.address(0), str(PORT + 16), version()]
        with Hosts(cluster, [], script, words, count=1) as job:
            before = Rank(2, cluster.hosts[2], strange, clean_environment())
            job.strangers.append(before)
            end = time.monotonic() + JOINED_S
            while before.output() != "done\n":
                expect(time.monotonic() < end and not before.poll(), before.output(), job.told())
                time.sleep(0.05)
            job.agents.append(Rank(1, cluster.hosts[1], [COMMAND, "run", *words(1)[0], *script], known))
            job.wait_for(f"| {READY}", 1)
            job.strangers.append(Rank(2, cluster.hosts[2], strange, clean_environment()))
            job.wait(ENDED_S)
            expect([agent.code for agent in job.agents] == [0, 0], job.told())
            expect("Traceback" not in job.strangers[1].output(), job.strangers[1].output())


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
    case("exact_of_2x2_by_sm", exact, 2, 2, by_sm),
    case("exact_of_2x2_by_dstack", exact, 2, 2, by_dstack),
    case("workers_are_told_their_place", workers_are_told_their_place),
    case("exact_of_2x2_by_srun", srun),
    case("exact_of_2x2_by_openmpi", openmpi),
    case("exact_of_2x2_by_mpich", mpich),
    case("killed_worker_of_2x2", killed_worker, 2, 2),
    case("killed_worker_of_8x1", killed_worker, 8, 1),
    case("killed_worker_without_shoal", killed_stranger),
    case("raising_worker", raising_worker),
    case("blamed_worker", blamed_worker),
    case("killed_agent_of_host_1", killed_agent, 1),
    case("killed_agent_of_host_0", killed_agent, 0),
    case("killed_agent_of_host_0_at_the_end", killed_agent_of_waiting),
    case("cut_off_host", cut_off_host),
    case("stopped_agent", stopped_agent),
    case("silent_agent", silent_agent),
    case("silent_agent_of_host_0", silent_host_0),
    case("signalled_often_while_host_1_is_stopped", signalled_often, 1),
    case("signalled_often_while_host_0_is_stopped", signalled_often, 0),
    case("interrupt_at_host_0", signalled, signal.SIGINT, 0),
    case("sigterm_at_host_1", signalled, signal.SIGTERM, 1),
    case("interrupt_at_all_hosts", signalled_on_all),
    case("interrupted_twice", interrupted_twice),
    case("timeout_of_one_host", timeout_of_one),
    case("unstarted_workers", unstarted_workers),
    case("done_by_all", done_by_all),
    case("restarted_once", restarted, 1, 0),
    case("restarted_in_vain", restarted, 3, 5),
    case("restarted_with_a_stopped_agent", restarted_with_a_stopped_agent),
    case("not_restarted_after_a_signal", not_restarted),
    case("uneven_workers", uneven_workers),
    case("host_that_never_comes", host_that_never_comes),
    case("host_0_that_never_comes", host_0_that_never_comes),
    case("late_host_0", late_host),
    case("interrupted_meeting", interrupted_meeting),
    case("same_index_twice", same_index_twice),
    case("hosts_that_disagree", hosts_that_disagree),
    case("other_secrets", other_secrets),
    case("strangers", strangers),
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
