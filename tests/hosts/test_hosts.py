"""Jobs over emulated hosts (cluster.py): exact results on many layouts, and faults that every surviving rank must name in time.

Prints TAP. SHOAL_HOST_RANK names the program of a rank, SHOAL_COMMAND the command, SHOAL_STRANGER a program outside any job.
Arguments select the cases whose group and name, such as faults/aborted_2x2, contain one of them. SHOAL_TEST_LAYOUT, such as
1x4, replaces the layout of every fault, because these cases must also pass on one host. Settings of the environment
(SHOAL_PROVIDER) reach all ranks; TEST_SHUFFLE, a seed, sets bad weather (tests/mock/shuffle.h). Exit code 0: none failed, 1:
some failed."""
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multi"))

from cluster import INTERFACE, IS_INSIDE, Cluster, Impossible, Job, Layout, clean_environment, require, tried  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

PROGRAM = os.environ.get("SHOAL_HOST_RANK", "")
COMMAND = os.environ.get("SHOAL_COMMAND", "")
SHUFFLED = PROGRAM + "_shuffled"  # the same in bad weather: TEST_SHUFFLE is its seed
ON_DEVICE = PROGRAM + "_device"  # the same, with operands on a device
STRANGER = os.environ.get("SHOAL_STRANGER", "")
EXACT_S = 90  # far longer than the cases take: it ends a hang
START_S = 30
# From a fault to the last survivor's last words. The README promises 10 (membership.c asserts that the sum of all waits is
# below 9), and this adds the delays of a busy machine. Deadlines are far longer, because they must not be what reports a fault.
TOLD_S = 15
GRACE_S = 15
SOME_GROUPS = ["rows", "megabytes", "roots", "messages", "exchanges", "asynchronous", "groups", "bits"]  # half the time of all


def case(name, function, *words, **more):
    def run():
        try:
            function(*words, **more)
        except Impossible as why:
            raise Skip(str(why))
    run.__name__ = name
    return run


def layout_of_fault(word):
    return Layout(os.environ.get("SHOAL_TEST_LAYOUT", word))


def wait_for(question, seconds, what):
    """Returns the answer as soon as it is true; what: a text for the failure, or a function that makes it."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    if answer:
        return answer
    raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")


# ---- Exact results ---------------------------------------------------------------------------------------------------------

def succeed(job, seconds):
    is_over = job.wait(seconds, GRACE_S)
    expect(is_over and not job.failed(), "" if is_over else f"no end within {seconds} s", job.told())


# On one host, ranks that outnumber its cores do not spin. Emulated hosts share the cores, and no host knows of the others'
# ranks.
SLEEP_AT_ONCE = {"SHOAL_SPIN_US": 0, "SHOAL_YIELD_US": 0}


def program_for(environment):
    return SHUFFLED if "TEST_SHUFFLE" in {**os.environ, **environment} else PROGRAM


def exact(word, groups=(), ipv6=False, of_rank=None, sleeps_at_once=None, **environment):
    """sleeps_at_once: the ranks neither spin nor yield; None: if they outnumber the cores of this machine."""
    layout = Layout(word)
    if sleeps_at_once if sleeps_at_once is not None else layout.size > len(os.sched_getaffinity(0)):
        environment = {**SLEEP_AT_ONCE, **environment}
    with Cluster(len(layout.sizes), ipv6=ipv6) as cluster:
        with Job(cluster, layout, [program_for(environment), "exact", *groups], environment, of_rank).start() as job:
            succeed(job, EXACT_S)
            for rank in job.ranks:
                expect(len(re.findall("^exact: ", rank.output(), re.M)) >= max(1, len(groups)), "too few groups", job.told())


def exact_on_device(word, *groups, **environment):
    """Runs over the stand-in driver, which refuses callbacks that post (tests/multi/device/test_device_faults.c). Among the devices
    of a host, only groups whose operands are on each rank's device are exact: other calls differ by contract."""
    if not os.access(ON_DEVICE, os.X_OK):
        raise Skip("the stand-in driver was not built")
    layout = Layout(word)
    with Cluster(len(layout.sizes)) as cluster:
        with Job(cluster, layout, [ON_DEVICE, "exact", *groups], {**SLEEP_AT_ONCE, **environment}).start() as job:
            succeed(job, EXACT_S)
            for rank in job.ranks:
                expect(len(re.findall("^exact: ", rank.output(), re.M)) >= len(groups), "too few groups", job.told())


def exact_by_messages(word):
    """Writes nothing into staging buffers, like providers that cannot, and the first adapters for EFA."""
    layout = Layout(word)
    environment = {**SLEEP_AT_ONCE, "SHOAL_WRITES": "no", "SHOAL_LOG": "info"}
    with Cluster(len(layout.sizes)) as cluster:
        with Job(cluster, layout, [PROGRAM, "exact", *SOME_GROUPS], environment).start() as job:
            succeed(job, EXACT_S)
            expect(all("sends everything as messages, because SHOAL_WRITES=no" in rank.output() for rank in job.ranks), job.told())


def filter_of_a_launcher_is_undone(word):
    """SageMaker's runners set FI_PROVIDER=efa on every machine, and libfabric would offer nothing here."""
    layout = Layout(word)
    filter = "sockets" if os.path.isdir("/sys/class/infiniband") else "efa"
    with Cluster(len(layout.sizes)) as cluster:
        with Job(cluster, layout, [PROGRAM, "exact", "rows"], {**SLEEP_AT_ONCE, "FI_PROVIDER": filter}).start() as job:
            succeed(job, EXACT_S)
            expect(job.told().count(f"FI_PROVIDER={filter} is ignored") == 1, "not one line", job.told())
            expect(f"FI_PROVIDER={filter} is ignored" in job.ranks[0].output(), job.told())


def provider_is_here(provider):
    """Returns true if libfabric has the provider on this machine."""
    with Cluster(1) as cluster:
        told = subprocess.run([*cluster.hosts[0].enter(), COMMAND, "info", "--providers"], capture_output=True, text=True,
                              timeout=30, env=clean_environment()).stdout
    return provider in told


def with_provider(provider, function, *words, **environment):
    if not provider_is_here(provider):
        raise Skip(f"libfabric has no {provider} here")
    function(*words, SHOAL_PROVIDER=provider, **environment)


# The algorithms that the table chooses between hosts for large jobs, or that only a rule chooses.
RULES = {
    "ring": "all-reduce=ring,all-gather=ring,reduce-scatter=ring",
    "mesh": "all-reduce=mesh,all-gather=mesh,reduce-scatter=mesh",
    "doubling_and_bruck": "all-reduce=doubling,all-gather=bruck",
    "halving_and_dissemination": "all-reduce=halving,barrier=dissemination",
    "rounds": "all-reduce=rounds,all-gather=rounds,barrier=rounds",
}


NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--", "env")  # setpriv itself may still all


def python_for_nobody():
    """Finds a Python for an ordinary user, who may not be allowed to read ours."""
    for python in (sys.executable, "/usr/bin/python3"):
        if tried(*NOBODY, python, "-c", "") is None:
            return python
    raise Skip("no python3 here that an ordinary user may start")


def copy_of_what_it_takes(folder):
    """Copies cluster.py, and the program with its library two folders above, as in the build."""
    place = folder / "tests" / "hosts"
    place.mkdir(parents=True)
    folder.chmod(0o755)
    for library in filter(Path.is_file, Path(COMMAND).resolve().parent.glob("libshoal.so*")):
        shutil.copy(library, folder)
    return [shutil.copy(file, place) for file in (Path(__file__).with_name("cluster.py"), PROGRAM)]


def exact_as_an_ordinary_user(word):
    """Ranks are root of a user namespace only: they have far fewer capabilities, and what they read has other owners."""
    if IS_INSIDE in os.environ:
        raise Skip("an ordinary user runs all of these already")
    python = python_for_nobody()
    with tempfile.TemporaryDirectory() as folder:
        cluster, program = copy_of_what_it_takes(Path(folder))
        done = subprocess.run([*NOBODY, python, cluster, "run", "--layout", word, "--", program, "exact", *SOME_GROUPS],
                              cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=EXACT_S)
    if done.returncode == 77:
        raise Skip(f"as an ordinary user: {done.stderr.strip().removeprefix('skipped: ')}")
    expect(done.returncode == 0 and done.stdout.count("exact: ") >= len(SOME_GROUPS), done.returncode, done.stdout, done.stderr)


# ---- Hosts are apart -------------------------------------------------------------------------------------------------------

def memory_files(pid):
    """Returns the shared memory of a process: its descriptors and mappings of memfds, as inode numbers."""
    mappings = Path(f"/proc/{pid}/maps").read_text()
    found = {int(inode) for inode in re.findall(r"^\S+ \S+ \S+ \S+ (\d+) +/memfd:", mappings, re.M)}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(path).startswith("/memfd:"):
                found.add(path.stat().st_ino)
        except FileNotFoundError:
            continue
    return found


def hosts_are_apart():
    """Memory is shared on a host and not between hosts, and the log contains the number of hosts."""
    layout = Layout("2x2")
    with Cluster(2) as cluster, Job(cluster, layout, [PROGRAM, "loop", "0"], {"SHOAL_LOG": "info"}).start() as job:
        wait_running(job)
        for rank in job.ranks:
            for line in ("on 2 hosts", rf"interface {INTERFACE} \([\d.]+\): the route to the others leaves there",
                         r"came together in [\d.]+ ms: store [\d.]+, .* control tree [\d.]+"):
                expect(re.search(line, rank.output()), f"no line says: {line}", job.told())
        files = [memory_files(rank.pid) for rank in job.ranks]
        expect(files[0] & files[1] and files[2] & files[3], "no memory is shared on a host", files)
        expect(not (files[0] | files[1]) & (files[2] | files[3]), "memory is shared between hosts", files)
        for number, host in enumerate(cluster.hosts):
            open_to_all = {address for address, _ in listeners(host) if not int(address, 16)}
            expect(not open_to_all, f"host {number + 1} listens on all its addresses", open_to_all)


def connections(host):
    """Counts connections to other hosts, of all processes in a host's namespace: the fourth field is the state, 01 is
    connected."""
    count = 0
    for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        count += fields[3] == "01" and fields[1].rpartition(":")[0] != fields[2].rpartition(":")[0]
    return count


def large_jobs_do_not_connect_all_to_all():
    """From 17 ranks on, ranks connect only to those in their plans: of 18 ranks on 6 hosts, to one on each other host, not
    to all 15."""
    layout = Layout("6x3")
    with Cluster(6) as cluster, Job(cluster, layout, [PROGRAM, "loop", "0"]).start() as job:
        wait_running(job)
        time.sleep(1)
        counts = [connections(host) for host in cluster.hosts]
        print(f"# connections of each host: {counts}")
        expect(max(counts) < 3 * 15 * 2 // 3, "too many connections", counts)


def topology_is_told():
    """Rank 0 of the ranks that request it logs which ranks are on which host."""
    for word, lines in (("2x2", ["4 on 2 hosts", "h1: ranks 0, 1", "h2: ranks 2, 3"]),
                        ("3+1:rr", ["4 on 2 hosts", "h1: ranks 0, 2, 3", "h2: rank 1"]),
                        ("3x1", ["3 on 3 hosts", "h1: rank 0", "h2: rank 1", "h3: rank 2"])):
        layout = Layout(word)
        with Cluster(len(layout.sizes)) as cluster, Job(cluster, layout, [COMMAND, "info", "--topology"]).start() as job:
            succeed(job, START_S)
            told = job.ranks[0].output()
            expect(all(re.search(rf"{line}$", told, re.M) for line in lines), word, told)
            expect(not any(rank.output() for rank in job.ranks[1:]), "another rank prints, too", job.told())


# ---- Several adapters ------------------------------------------------------------------------------------------------------

ALL_ADAPTERS = {**SLEEP_AT_ONCE, "SHOAL_ADAPTERS": 16, "SHOAL_LOG": "info"}  # a number is not tried, so every adapter is used
UNREACHED = r"\[fabric\] adapter eth1 \(10\.77\.1\.\d+\) does not lead to 10\.77\.1\.\d+:\d+, so data for there use other adapters: "


def received(host, interface):
    """Returns the bytes that the interface of the host has received."""
    for line in host.run("cat", "/proc/net/dev").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0])
    raise AssertionError(f"{host.name} has no {interface}")


def exact_on_rails(word, rails, shares, groups=("megabytes", "roots", "messages", "bits"), ipv6=False, **environment):
    """Each host has `rails` interfaces, or a list of them. shares: what each rank's log calls its adapters. Each interface that
    two hosts have carries megabytes to each host, if a rank there uses it."""
    layout = Layout(word)
    with Cluster(len(layout.sizes), ipv6=ipv6, rails=rails) as cluster:
        with Job(cluster, layout, [PROGRAM, "exact", *groups], {**ALL_ADAPTERS, **environment}).start() as job:
            succeed(job, EXACT_S)
            for rank, share in zip(job.ranks, shares, strict=True):
                expect(f"memory on {share}; progress" in rank.output(), f"rank {rank.number} does not say: on {share}", job.told())
            expect("does not lead to" not in job.told(), "an adapter leads nowhere", job.told())
            carried = {(host.name, rail): received(host, f"eth{rail}")
                       for number, host in enumerate(cluster.hosts) for rail in range(cluster.rails[number])}
            print(f"# bytes received: {carried}")
            common = sorted(cluster.rails)[-2]
            for (name, rail), count in carried.items():
                used = rail < common and f"eth{rail}" in " ".join(shares)
                expect((count > 1 << 20) == used, f"{name} has received {count} bytes at eth{rail}", carried, job.told())


def one_adapter_is_enough(word):
    layout = Layout(word)
    with Cluster(len(layout.sizes), rails=2) as cluster:
        environment = {**ALL_ADAPTERS, "SHOAL_ADAPTERS": 1}
        with Job(cluster, layout, [PROGRAM, "exact", "megabytes"], environment).start() as job:
            succeed(job, EXACT_S)
            expect(all("memory on eth0, one of 2 that ranks divide; progress" in rank.output() for rank in job.ranks), job.told())
            expect(all(received(host, "eth1") < 100_000 for host in cluster.hosts), "eth1 was used", job.told())


def adapters_are_told():
    """`shoal info` and `shoal doctor` name the equal interfaces, unless the settings exclude them."""
    cases = (({}, True), ({"SHOAL_ADAPTERS": "1"}, False), ({"SHOAL_NIC": "eth0"}, False), ({"SHOAL_NIC": "^eth2"}, True))
    with Cluster(1, rails=2) as cluster:
        host = cluster.hosts[0]
        for environment, has_two in cases:
            told = [subprocess.run([*host.enter(), COMMAND, *words], capture_output=True, text=True, timeout=60,
                                   env={**clean_environment(), **environment}).stdout for words in (["info", "--providers"], ["doctor"])]
            expect(("equal interfaces, which ranks divide: eth0 (10.77.0.1), eth1 (10.77.1.1)\n" in told[0]) == has_two, told[0])
            expect(("eth1 (10.77.1.1) is equal to it" in told[1]) == has_two, told[1])


def isolate(cluster, rail=1):
    """The rail's links are up, but lead nowhere: nothing answers."""
    for number in range(1, len(cluster.hosts) + 1):
        cluster.switch.run("ip", "link", "set", f"p{rail}.{number}", "nomaster")


def give_all_one_address(cluster):
    """As bridges for containers do: each host has the address, and so reaches only itself there."""
    for number, host in enumerate(cluster.hosts, 1):
        host.run("ip", "address", "del", f"10.77.1.{number}/24", "dev", "eth1")
        host.run("ip", "address", "add", "10.77.1.200/24", "dev", "eth1")


def drop_on_rail(cluster):
    """A firewall on each host drops what comes through eth1."""
    for host in cluster.hosts:
        add_rules(host, "add pref 100 lookup local", "del pref 0", "add pref 50 iif eth1 ipproto tcp blackhole")


def refuse_on_rail(cluster):
    for host in cluster.hosts:
        add_rules(host, "add pref 50 to 10.77.1.0/24 prohibit")


def rail_leads_nowhere(word, break_rail, cause, **environment):
    """Results are exact through the first adapter. Each host's log warns once for each rank, not at each peer."""
    layout = Layout(word)
    with Cluster(len(layout.sizes), rails=2) as cluster:
        break_rail(cluster)
        environment = {**ALL_ADAPTERS, **environment}
        with Job(cluster, layout, [PROGRAM, "loop", "8"], environment).start() as job:
            succeed(job, EXACT_S)
            for rank in job.ranks:
                told = re.findall(UNREACHED + "(.*)", rank.output())
                expect(all(cause in text for text in told), f"the cause is not: {cause}", job.told())
                has_lane = bool(re.search("memory on .*eth1", rank.output()))
                expect(len(told) == has_lane, f"rank {rank.number} warns {len(told)} times", job.told())


def cut_rail(word, rail, statuses, **environment):
    """A link breaks in the middle. That of the first endpoint is a lost peer; with another, operations end at their deadline."""
    layout = Layout(word)
    with Cluster(len(layout.sizes), rails=2) as cluster:
        with Job(cluster, layout, [PROGRAM, "loop", "0"], {**ALL_ADAPTERS, **environment}).start() as job:
            wait_running(job)
            wait_for(lambda: all(received(host, "eth1") > 1 << 20 for host in cluster.hosts), START_S,
                     lambda: f"data through eth1\n{job.told()}")
            cluster.unplug(1, rail)
            wait_ended(job, job.ranks, TOLD_S + 5)
            for rank in job.ranks:
                expect(last_words(rank)[0] in statuses, f"rank {rank.number}: {last_words(rank)}", job.told())


def kill_on_rails(word, host):
    layout = Layout(word)
    with Cluster(len(layout.sizes), rails=2) as cluster:
        with Job(cluster, layout, [PROGRAM, "loop", "0"], ALL_ADAPTERS).start() as job:
            wait_running(job)
            wait_for(lambda: all(received(host, "eth1") > 1 << 20 for host in cluster.hosts), START_S,
                     lambda: f"data through eth1\n{job.told()}")
            gone = job.layout.ranks_on(host)
            for number in gone:
                job.ranks[number].signal(signal.SIGKILL)
            expect_blamed(job, others(job, gone), gone, LOST)


# ---- The failures that ranks report ----------------------------------------------------------------------------------------

def last_words(rank):
    """Returns (status, rank to blame, its host, text) from the one line that a failed rank prints."""
    found = re.findall(r"^failed: (\w+) rank (-?\d+) host (\S+): (.*)$", rank.output(), re.M)
    expect(len(found) == 1, f"rank {rank.number} printed {len(found)} last words")
    status, blamed, host, text = found[0]
    return status, int(blamed), host, text


def wait_running(job):
    def all_run():
        expect(not job.failed(), "a rank failed before the fault", job.told())
        return all(re.search("^running$", rank.output(), re.M) for rank in job.ranks)
    wait_for(all_run, START_S, lambda: f"all ranks running\n{job.told()}")


def wait_ended(job, ranks, seconds):
    """Each rank must end by itself, in time, with code 1 and not by a signal."""
    wait_for(lambda: all([rank.poll() for rank in ranks]), seconds, lambda: f"the end of all survivors\n{job.told()}")
    for rank in ranks:
        expect(rank.code == 1, f"rank {rank.number} ended with {rank.code}", job.told())


def expect_one_cause(job, ranks):
    """All ranks report the same cause, whichever host found a failure first."""
    words = {rank.number: last_words(rank) for rank in ranks}
    expect(len(set(words.values())) == 1, f"ranks were told different causes: {words}", job.told())


def expect_blamed(job, ranks, blamed, statuses, seconds=TOLD_S):
    """Each of the ranks names the same one of `blamed`, and that rank's host, within the seconds."""
    wait_ended(job, ranks, seconds)
    expect_one_cause(job, ranks)
    for rank in ranks:
        status, number, host, text = last_words(rank)
        whole = f"rank {rank.number} was told: {status} rank {number} host {host}: {text}\n{job.told()}"
        expect(status in statuses, f"not one of {statuses}", whole)
        expect(number in blamed and re.search(rf"\brank {number}\b", text), f"no rank of {blamed} is named", whole)
        expect(host == f"h{job.layout.host_of[number] + 1}", "the wrong host is named", whole)
        expect(re.search(rf"^shoal: .*\brank {number}\b", rank.output(), re.M), "no log line names the rank", whole)
        expect("ERR_INTERNAL" not in whole, "an internal error", whole)


def looping(word, verb=("loop", "0"), ipv6=False, **environment):
    """Returns a cluster and a job in the middle of its work, for a with statement."""
    layout = layout_of_fault(word)
    return Cluster(len(layout.sizes), ipv6=ipv6), lambda cluster: Job(cluster, layout, [program_for(environment), *verb], environment).start()


def others(job, gone):
    return [rank for rank in job.ranks if rank.number not in gone]


# ---- Faults in the middle of a job -----------------------------------------------------------------------------------------

LOST = ("SHOAL_ERR_PEER_LOST",)


def kill_rank(word, victim):
    hosts, start = looping(word)
    with hosts as cluster, start(cluster) as job:
        wait_running(job)
        time.sleep(random.random() / 5)
        job.ranks[victim].signal(signal.SIGKILL)
        expect_blamed(job, others(job, [victim]), [victim], LOST)


def kill_host(word, host, **more):
    hosts, start = looping(word, **more)
    with hosts as cluster, start(cluster) as job:
        wait_running(job)
        gone = job.layout.ranks_on(host)
        for number in gone:
            job.ranks[number].signal(signal.SIGKILL)
        expect_blamed(job, others(job, gone), gone, LOST)


def pull_cable(word, host, cut=Cluster.unplug, **more):
    """Both sides remain alive, and each must give up the other."""
    hosts, start = looping(word, **more)
    with hosts as cluster, start(cluster) as job:
        wait_running(job)
        cut(cluster, host)
        apart = job.layout.ranks_on(host)
        rest = [rank.number for rank in others(job, apart)]
        began = time.monotonic()
        expect_blamed(job, others(job, apart), apart, LOST)
        expect_blamed(job, others(job, rest), rest, LOST, began + TOLD_S - time.monotonic())


def take_down(cluster, host):
    """Takes down the interface from its own host."""
    cluster.hosts[host].run("ip", "link", "set", INTERFACE, "down")


def take_address(cluster, host):
    """Removes the interface's addresses and keeps the interface."""
    cluster.hosts[host].run("ip", "address", "flush", "dev", INTERFACE)


def stop_rank(word, victim):
    """A warning names the stopped rank first, then the failure at the deadline. The rank learns that when it continues."""
    hosts, start = looping(word, SHOAL_WARN_MS=1000, SHOAL_TIMEOUT_MS=5000)
    with hosts as cluster, start(cluster) as job:
        wait_running(job)
        job.ranks[victim].signal(signal.SIGSTOP)
        wait_for(lambda: all(re.search(rf"^shoal: .*\brank {victim}\b", rank.output(), re.M) for rank in others(job, [victim])),
                 4, lambda: f"a warning on every rank that names rank {victim}\n{job.told()}")
        expect(not any(rank.poll() for rank in job.ranks), "a rank ended before the deadline", job.told())
        expect_blamed(job, others(job, [victim]), [victim], ("SHOAL_ERR_TIMEOUT",))
        job.ranks[victim].signal(signal.SIGCONT)
        wait_ended(job, [job.ranks[victim]], TOLD_S)
        last_words(job.ranks[victim])


def busy_rank(word):
    """The last rank is named, although rank 0, the first to give up, waits for another that waits for it."""
    layout = layout_of_fault(word)
    busy = layout.size - 1

    def patience(rank):
        return {"SHOAL_TIMEOUT_MS": 9000 if rank else 3000}
    with Cluster(len(layout.sizes)) as cluster, Job(cluster, layout, [PROGRAM, "busy", "5"], {}, patience).start() as job:
        expect_blamed(job, others(job, [busy]), [busy], ("SHOAL_ERR_TIMEOUT",), START_S)
        wait_ended(job, job.ranks, TOLD_S)


def deadlines_together(word):
    """All hosts except one pass their deadline within milliseconds, and the busy rank learns that when it arrives."""
    layout = layout_of_fault(word)
    busy = layout.size - 1
    with Cluster(len(layout.sizes)) as cluster, \
            Job(cluster, layout, [PROGRAM, "busy", "6"], {"SHOAL_TIMEOUT_MS": 3000}).start() as job:
        expect_blamed(job, others(job, [busy]), [busy], ("SHOAL_ERR_TIMEOUT",), START_S)
        wait_ended(job, job.ranks, TOLD_S)
        expect_one_cause(job, job.ranks)


def kill_two(word, victims):
    hosts, start = looping(word)
    with hosts as cluster, start(cluster) as job:
        wait_running(job)
        for victim in victims:
            job.ranks[victim].signal(signal.SIGKILL)
        expect_blamed(job, others(job, victims), victims, LOST)


def abort_job(word):
    hosts, start = looping(word, ["abort"])
    with hosts as cluster, start(cluster) as job:
        expect_blamed(job, job.ranks, [job.layout.size - 1], ("SHOAL_ERR_ABORTED",), START_S)


def roots_differ(word):
    """Each rank gathers to the next one, which does not meet it: all ranks report the calls that a rank knows, and who made
    them. No two ranks made the same call, so no rank is named."""
    hosts, start = looping(word, ["roots"], SHOAL_TIMEOUT_MS=10 * START_S * 1000)
    with hosts as cluster, start(cluster) as job:
        wait_ended(job, job.ranks, START_S)
        expect_one_cause(job, job.ranks)
        for rank in job.ranks:
            status, number, host, text = last_words(rank)
            calls = re.findall(r"\brank (\d+)\b[^;]*? called gather of 16384 float32 per rank, root (\d+)", text)
            expect(status == "SHOAL_ERR_MISMATCH" and len(calls) >= 2, "not told both calls", job.told())
            expect(all(int(root) == (int(one) + 1) % job.layout.size for one, root in calls), "a wrong call", job.told())
            expect(number == -1 and host == "-", f"rank {number} is named", job.told())


# ---- Broken links ----------------------------------------------------------------------------------------------------------

# Below the ports that Linux assigns to connections. Lanes and the control tree have the next ports, and the host's next rank the
# tenth after it.
PORT_OF_DATA = 20000


def ports_of(layout):
    def of_rank(rank):
        first = PORT_OF_DATA + 10 * layout.local_of(rank)
        return {"SHOAL_PORTS": f"{first}-{first + 9}"}
    return of_rank


def add_rules(host, *rules):
    for rule in rules:
        if why := tried(*host.enter(), "ip", "rule", *rule.split()):
            raise Impossible(f"no firewall: ip rule {rule}: {why}")


def drop(host, ports):
    """Drops what arrives for these ports, without an answer. The rules must come first: otherwise a host first checks
    whether an address is its own."""
    add_rules(host, "add pref 100 lookup local", "del pref 0",
              *[f"add pref 50 iif {INTERFACE} ipproto tcp dport {port} blackhole" for port in ports])


def reject(host, ports):
    """Refuses what is sent to these ports, at once."""
    add_rules(host, *[f"add pref 50 ipproto tcp dport {port} prohibit" for port in ports])


def broken_link(word, break_link, cause, **environment):
    """The first message does not arrive, though all else does: each rank names both hosts, their addresses, and the cause,
    long before the deadline."""
    layout = Layout(word)
    with Cluster(len(layout.sizes)) as cluster:
        for host in cluster.hosts:
            break_link(host, [PORT_OF_DATA + 10 * local for local in range(max(layout.sizes))])
        environment = {"SHOAL_TIMEOUT_MS": 60000, "SHOAL_LOG": "info", **environment}
        with Job(cluster, layout, [PROGRAM, "loop", "0"], environment, ports_of(layout)).start() as job:
            wait_for(lambda: all("communicator world" in rank.output() for rank in job.ranks), START_S,
                     lambda: f"a communicator\n{job.told()}")
            expect_blamed(job, job.ranks, range(layout.size), LOST)
            for rank in job.ranks:
                expect_link_named(job, rank, cause)


def expect_link_named(job, rank, cause):
    blamed, host, text = last_words(rank)[1:]
    port = PORT_OF_DATA + 10 * job.layout.local_of(blamed)
    there = f"{job.cluster.address(job.layout.host_of[blamed])}:{port}"
    match = re.search(rf"on {host}\) cannot be reached at {re.escape(there)} from (h\d+) \(([\d.]+):\d+\)", text)
    expect(match and match[1] != host, "the two hosts and addresses are not named", job.told())
    expect(match[2] == job.cluster.address(int(match[1][1:]) - 1), "the wrong address is named", job.told())
    expect(all(word in text for word in (f"port {port}: {cause}", "firewall", "SHOAL_PORTS")), "the cause is not named",
           job.told())


# ---- Faults at the start ---------------------------------------------------------------------------------------------------

MEETING_MS = 4000
MEETING_S = MEETING_MS / 1000 + TOLD_S / 2


def refused(word, statuses, of_rank=None, **environment):
    """Starts a job whose ranks cannot join; returns the text that each rank reports, all in time."""
    layout = layout_of_fault(word)
    with Cluster(len(layout.sizes)) as cluster:
        environment = {"SHOAL_BOOTSTRAP_TIMEOUT_MS": MEETING_MS, **environment}
        with Job(cluster, layout, [PROGRAM, "loop", "0"], environment, of_rank).start() as job:
            wait_ended(job, job.ranks, MEETING_S)
            for rank in job.ranks:
                expect(last_words(rank)[0] in statuses, f"rank {rank.number} has none of {statuses}", job.told())
            return [last_words(rank)[3] for rank in job.ranks]


def on_last_rank(word, **variables):
    last = layout_of_fault(word).size - 1
    return lambda rank: variables if rank == last else {}


def wrong_secret(word):
    texts = refused(word, ("SHOAL_ERR_AUTH", "SHOAL_ERR_TIMEOUT"), on_last_rank(word, SHOAL_SECRET="another"))
    expect("secret" in texts[-1], texts[-1])
    expect(all(re.search(rf"\b{len(texts) - 1}\b", text) for text in texts[:-1]), "the missing rank is not named", *texts)


def settings_differ(word):
    texts = refused(word, ("SHOAL_ERR_AUTH", "SHOAL_ERR_TIMEOUT"), on_last_rank(word, SHOAL_CHUNK_BYTES="8192"))
    expect("SHOAL_CHUNK_BYTES" in texts[-1], texts[-1])


def versions_differ(word):
    """One rank loads a library with another version number: a copy in which the number is changed."""
    library = Path(COMMAND).resolve().parent / "libshoal.so.0"
    version = subprocess.run([COMMAND, "--version"], capture_output=True, check=True).stdout.split()[-1]
    image, here, there = library.read_bytes(), b"\0" + version + b"\0", b"\0" + b"9" + version[1:] + b"\0"
    expect(here in image, f"{library} does not hold its version")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, library.name).write_bytes(image.replace(here, there))
        texts = refused(word, ("SHOAL_ERR_AUTH", "SHOAL_ERR_TIMEOUT"), on_last_rank(word, LD_LIBRARY_PATH=folder))
    both = (version.decode(), "9" + version.decode()[1:], "install one version everywhere")
    expect(all(part in texts[-1] for part in both), texts[-1])
    expect(all(re.search(rf"\b{len(texts) - 1}\b", text) for text in texts[:-1]), "the missing rank is not named", *texts)


def no_master(word):
    nowhere = "10.77.0.99"
    texts = refused(word, ("SHOAL_ERR_TIMEOUT", "SHOAL_ERR_SYSTEM", "SHOAL_ERR_ARGUMENT"), MASTER_ADDR=nowhere)
    expect(all(nowhere in text for text in texts), "the address is not named", *texts)


def unknown_choice(word, name):
    texts = refused(word, ("SHOAL_ERR_ARGUMENT", "SHOAL_ERR_UNSUPPORTED"), **{name: "nonsense"})
    expect(all("nonsense" in text and name in text for text in texts), "neither name nor value is named", *texts)


def unknown_choice_on_one(word, name):
    """Ranks that can continue must not wait for ever for the one that cannot."""
    texts = refused(word, ("SHOAL_ERR_ARGUMENT", "SHOAL_ERR_UNSUPPORTED", "SHOAL_ERR_TIMEOUT", "SHOAL_ERR_PEER_LOST"),
                    on_last_rank(word, **{name: "nonsense"}))
    expect("nonsense" in texts[-1], texts[-1])
    expect(all(re.search(rf"\b{len(texts) - 1}\b", text) for text in texts[:-1]), "the rank is not named", *texts)


def two_jobs(word, are_told_apart):
    """Runs two jobs at one address and port. With different names both run; otherwise each runs or reports why not, and one
    of them runs."""
    layout = layout_of_fault(word)
    with Cluster(len(layout.sizes)) as cluster:
        jobs = []
        try:
            for number in (1, 2):
                environment = {"SHOAL_BOOTSTRAP_TIMEOUT_MS": MEETING_MS}
                if are_told_apart:
                    environment["TORCHELASTIC_RUN_ID"] = f"job-{number}"
                jobs.append(Job(cluster, layout, [PROGRAM, "loop", "1", str(100 * number)], environment))
            for rank in range(layout.size):
                for job in jobs:
                    job.start([rank])
            for job in jobs:
                expect(job.wait(START_S), "no end", *[one.told() for one in jobs])
            told = [one.told() for one in jobs]
            runs = [not job.failed() for job in jobs]
            expect(any(runs) and (all(runs) or not are_told_apart), *told)
            for rank in [rank for job in jobs for rank in job.failed()]:
                expect(rank.code == 1 and last_words(rank), *told)
        finally:
            for job in jobs:
                job.close()


# ---- Strangers -------------------------------------------------------------------------------------------------------------

def listeners(host):
    """Returns (address, port) of all listening sockets in a host's namespace (proc(5): the fourth field is the state, 0A
    listens). Addresses are in hexadecimal, as in the file."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{host.pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


def listening_ports(host):
    return sorted({port for _, port in listeners(host)})


CONNECTIONS = 30  # of each kind, to each port
CONNECTING_S = 4  # in total: a port that does not let strangers in makes them wait


def connect(address, port):
    try:
        return socket.create_connection((address, port), timeout=1)
    except OSError:
        return None


def send(connection, data):
    try:
        connection.setblocking(False)
        return connection.send(data)
    except OSError:
        return 0


def attack(address, ports):
    """Acts as strangers: some connect and leave, some send garbage, some send a byte now and then, until this process is
    killed. Prints how many connected."""
    slow, got_in, end = [], 0, time.monotonic() + CONNECTING_S
    for port, kind in [(int(port), kind) for kind in ("leave", "rubbish", "slow") for port in ports] * CONNECTIONS:
        connection = connect(address, port) if time.monotonic() < end else None
        if not connection:
            continue
        got_in += 1
        if kind == "rubbish":
            send(connection, random.randbytes(random.choice([1, 4, 60, 3000])))
        if kind != "leave":
            slow.append(connection)
    print(got_in, flush=True)
    while True:
        time.sleep(0.2)
        for connection in slow:
            send(connection, b"\0")


class Strangers:
    """They attack every port of every host, each from the next host, or from the same host if there is only one."""

    def __init__(self, cluster):
        self.processes = []
        for number, host in enumerate(cluster.hosts):
            ports = listening_ports(host)
            origin = cluster.hosts[(number + 1) % len(cluster.hosts)]
            self.processes.append(subprocess.Popen(
                [*origin.enter(), sys.executable, __file__, "attack", cluster.address(number), *map(str, ports)],
                stdout=subprocess.PIPE, text=True))

    def __enter__(self):
        self.got_in = sum(int(process.stdout.readline()) for process in self.processes)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


def strangers_in_the_middle(word):
    layout = layout_of_fault(word)
    with Cluster(len(layout.sizes)) as cluster, Job(cluster, layout, [PROGRAM, "loop", "6"]).start() as job:
        wait_running(job)
        with Strangers(cluster) as strangers:
            succeed(job, START_S)
            expect(strangers.got_in or len(layout.sizes) == 1, "no stranger could connect: the test asked nothing")


def strangers_at_the_start(word):
    """Strangers attack while rank 0 waits for the last rank, which they must not keep out."""
    layout = layout_of_fault(word)
    with Cluster(len(layout.sizes)) as cluster, Job(cluster, layout, [PROGRAM, "loop", "1"]) as job:
        job.start(range(layout.size - 1))
        wait_for(lambda: listening_ports(cluster.hosts[0]), START_S, "rank 0 listens")
        time.sleep(0.3)
        with Strangers(cluster) as strangers:
            expect(strangers.got_in, "no stranger could connect: the test asked nothing")
            time.sleep(1)
            job.start([layout.size - 1])
            succeed(job, START_S)


# ---- Strangers at the meeting of a host's ranks ----------------------------------------------------------------------------

MEETING_TRIES = 10  # the sockets are open for some milliseconds
CALLS = 40  # at each of them; every silent one once cost a second


def meetings():
    """Returns addresses of the abstract Unix sockets on this host at which ranks that share memory meet."""
    return {"\0" + name for name in re.findall(r"@(shoal-\w+)$", Path("/proc/net/unix").read_text(), re.M)}


def call_silently(address):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    return connection if connection.connect_ex(address) == 0 else None


def call_at_meetings():
    """Connects to each socket as soon as it exists, reports that, and remains silent until this process is killed."""
    known, callers = meetings(), []
    print("ready", flush=True)
    while True:
        for address in meetings() - known:
            known.add(address)
            made = [caller for caller in (call_silently(address) for _ in range(CALLS)) if caller]
            callers += made
            print("called" if len(made) == CALLS else "late", flush=True)
        time.sleep(0.001)


def strangers_where_ranks_of_a_host_meet(word):
    layout, told = layout_of_fault(word), ""
    for _ in range(MEETING_TRIES):
        with Cluster(len(layout.sizes)) as cluster:
            strangers = subprocess.Popen([*cluster.hosts[0].enter(), sys.executable, __file__, "call_at_meetings"],
                                         stdout=subprocess.PIPE, text=True)
            try:
                expect(strangers.stdout.readline() == "ready\n")
                with Job(cluster, layout, [PROGRAM, "loop", "0.1"]).start() as job:
                    succeed(job, START_S)
            finally:
                strangers.kill()
                told += strangers.communicate()[0]
        if "called" in told:
            return
    expect(told, "no socket was seen at which ranks meet: has its name changed?")
    raise Skip(f"{CALLS} strangers did not call in time in {MEETING_TRIES} tries")


# ---- Strangers at the endpoint ---------------------------------------------------------------------------------------------

SEAL_AND_HEAD = 72  # bytes of the shortest message
FLOOD_S = 3


def sniff(seconds):
    """Prints, in hexadecimal, messages that arrive at a host: segments of TCP that contain one message of libfabric's
    provider over TCP. Its header of 16 bytes identifies a message (byte 1 is 0) and contains the total length (the last 8)."""
    found, end = {}, time.monotonic() + float(seconds)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as packets:
        packets.settimeout(0.2)
        while time.monotonic() < end and len(found) < 40:
            try:
                packet = packets.recv(70000)[14:]
            except TimeoutError:
                continue
            segment = packet[4 * (packet[0] & 15):int.from_bytes(packet[2:4], "big")]
            data = segment[4 * (segment[12] >> 4):] if len(segment) >= 20 else b""
            is_one = len(data) >= 16 + SEAL_AND_HEAD and data[1] == 0 and int.from_bytes(data[8:16], "little") == len(data)
            if packet[9] == socket.IPPROTO_TCP and is_one:
                found[data[16:].hex()] = True
    print("\n".join(found))


def capture(host, folder):
    """Returns a file of messages that the host received, and their number."""
    done = subprocess.run([*host.enter(), sys.executable, __file__, "sniff", "2"], capture_output=True, text=True, check=True,
                          timeout=30)
    file = Path(folder) / "captured"
    file.write_text(done.stdout)
    return file, len(done.stdout.split())


def start_strangers(cluster, captured):
    """Starts two for each port at which the last host listens, one of which writes; they run on the first host."""
    host, port_of = cluster.hosts[0], listening_ports(cluster.hosts[-1])
    words = [(str(port), str(FLOOD_S), *how) for port in port_of for how in (("messages", captured), ("writes",))]
    return [subprocess.Popen([*host.enter(), STRANGER, cluster.address(len(cluster.hosts) - 1), *more],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment())
            for more in words]


def rejections(folder):
    """Returns each rank's rejections in its flight recorder, by reason."""
    told = {}
    for file in Path(folder).glob("flight.*"):
        for reason, count in re.findall(r'"rejected_(\w+)":(\d+)', file.read_text()):
            told.setdefault(reason, []).append(int(count))
    return told


def strangers_at_the_endpoint(word):
    """They send garbage, guesses and messages that they have captured, and write: sums remain right, and only a count
    changes."""
    layout = layout_of_fault(word)
    if len(layout.sizes) == 1:
        raise Skip("one host has no endpoint")
    with tempfile.TemporaryDirectory() as folder, Cluster(len(layout.sizes)) as cluster:
        environment = {"SHOAL_TRACE_FILE": f"{folder}/flight.%r"}
        with Job(cluster, layout, [PROGRAM, "loop", str(FLOOD_S + 6)], environment).start() as job:
            wait_running(job)
            captured, count = capture(cluster.hosts[-1], folder)
            expect(count or os.environ.get("SHOAL_PROVIDER"), "nothing was overheard: the test asks less than it should")
            strangers = start_strangers(cluster, captured)
            told = [process.communicate(timeout=60)[0] for process in strangers]
            succeed(job, START_S)
            counts = rejections(folder)
            whole = f"{told}\n{counts}\n{job.told()}"
            for reason in ("short", "unknown", *(("forged", "replayed") if count else ())):
                expect(max(counts.get(reason, [0])) > 10, f"few were rejected as {reason}", whole)
            expect(max(counts["foreign"]) == max(counts["unexpected"]) == 0, "a stranger was believed", whole)
            subprocess.run([COMMAND, "trace", "-o", "/dev/null", *Path(folder).glob("flight.*")], check=True, capture_output=True)
            last = job.ranks[-1].output()
            for text in ("too short for a header", "unknown sender"):
                lines = re.findall(f"rejected at .*{text}", last)
                expect(0 < len(lines) < 40, f"{len(lines)} lines say: {text}", whole)


# ---- The list --------------------------------------------------------------------------------------------------------------

RANKS_OF_TWO_RAILS = ["eth0, one of 2 that ranks divide", "eth0 (messages only), eth1, one of 2 that ranks divide"]
CLAIM = {"LOCAL_WORLD_SIZE": 4}  # as if all ranks were on one host

EXACT = [
    *[case(f"exact_{word}", exact, word) for word in ("1x1", "1x4", "2x1", "3x1", "3+1")],
    case("exact_2x2", exact, "2x2", sleeps_at_once=False),
    *[case(f"exact_{word}", exact, word, [*SOME_GROUPS, "parts"]) for word in ("3x2", "4x1", "4x2")],
    case("exact_2x2_ipv6", exact, "2x2", SOME_GROUPS, ipv6=True),
    case("exact_2x2_round_robin", exact, "2x2:rr"),
    case("exact_4x2_round_robin", exact, "4x2:rr", SOME_GROUPS),
    case("exact_2x2_that_claims_to_be_one_host", exact, "2x2", SOME_GROUPS, of_rank=lambda rank: CLAIM),
    *[case(f"exact_{word}_by_messages", exact_by_messages, word) for word in ("2x2", "3x1")],
    case("exact_2x2_on_devices", exact_on_device, "2x2", "rows", "megabytes", "messages", "exchanges", "asynchronous", "groups", "bits"),
    case("exact_2x2_on_devices_in_other_forms", exact_on_device, "2x2", "roots", "parts", "tensors", "detached", "splits", "subsets",
         "threads"),
    case("exact_2x1_on_devices", exact_on_device, "2x1", "eager"),
    *[case(f"exact_{name}_among_devices", exact_on_device, word, "megabytes", "bits", SHOAL_GPU_PEER_BYTES=1)
      for name, word in (("2x2", "2x2"), ("2x2_round_robin", "2x2:rr"))],
    case("exact_3+1_round_robin_on_devices", exact_on_device, "3+1:rr", "asynchronous", "exchanges", "bits"),
    case("exact_3x1_on_devices_by_messages", exact_on_device, "3x1", "asynchronous", "messages", SHOAL_WRITES="no"),
    case("exact_2x2_as_an_ordinary_user", exact_as_an_ordinary_user, "2x2"),
    case("exact_2x2_without_secret", exact, "2x2", ["megabytes", "messages", "groups"], SHOAL_SECRET=None),
    case("exact_2x2_with_the_filter_of_a_launcher", filter_of_a_launcher_is_undone, "2x2"),
    adapters_are_told,
    hosts_are_apart,
    topology_is_told,
    large_jobs_do_not_connect_all_to_all,
]
WAYS = [
    *[case(f"exact_{word}_{provider}", with_provider, provider, exact, word, SOME_GROUPS)
      for provider in ("tcp;ofi_rxm", "udp;ofi_rxd") for word in ("2x2", "3x1")],
    *[case(f"exact_{word}_by_{name}", exact, word, ["rows", "megabytes", "asynchronous", "groups"], SHOAL_ALGORITHMS=rules)
      for word in ("3x2", "4x1") for name, rules in RULES.items()],
    *[case(f"exact_{word}_shuffled_{seed}", exact, word, SOME_GROUPS, TEST_SHUFFLE=seed)
      for word, seed in (("2x2", 1), ("3x1", 2), ("3+1:rr", 3))],
    case("exact_3x1_lanes", exact, "3x1", SOME_GROUPS, SHOAL_NETWORK_THREADS="3"),
    case("exact_2x2_lanes_shuffled", exact, "2x2", SOME_GROUPS, SHOAL_NETWORK_THREADS="2", TEST_SHUFFLE=5),
]
RAILS = [
    case("exact_2x1_rails", exact_on_rails, "2x1", 2, ["eth0, eth1, 2 of 2 that ranks divide"] * 2),
    case("exact_2x1_rails_ipv6", exact_on_rails, "2x1", 2, ["eth0, eth1, 2 of 2 that ranks divide"] * 2, ipv6=True),
    case("exact_3x1_rails_3", exact_on_rails, "3x1", 3, ["eth0, eth1, eth2, 3 of 3 that ranks divide"] * 3),
    case("exact_2x2_rails", exact_on_rails, "2x2", 2, RANKS_OF_TWO_RAILS * 2),
    case("exact_1+2_rails", exact_on_rails, "1+2", 2, ["eth0, eth1, 2 of 2 that ranks divide", *RANKS_OF_TWO_RAILS]),
    case("exact_2x1_rails_2_and_1", exact_on_rails, "2x1", [2, 1], ["eth0, eth1, 2 of 2 that ranks divide", "eth0"]),
    case("exact_2x1_rails_3_and_2", exact_on_rails, "2x1", [3, 2],
         ["eth0, eth1, eth2, 3 of 3 that ranks divide", "eth0, eth1, 2 of 2 that ranks divide"]),
    case("exact_2x1_rails_threads", exact_on_rails, "2x1", 2, ["eth0, eth1, 2 of 2 that ranks divide"] * 2, SHOAL_NETWORK_THREADS=4),
    case("exact_2x1_rails_ports", exact_on_rails, "2x1", 2, ["eth0, eth1, 2 of 2 that ranks divide"] * 2, SHOAL_PORTS="21000-21001"),
    case("exact_2x1_rails_tcp_ofi_rxm", with_provider, "tcp;ofi_rxm", exact_on_rails, "2x1", 2,
         ["eth0, eth1, 2 of 2 that ranks divide"] * 2),
    case("exact_2x2_rails_chosen_by_measurement", exact_on_rails, "2x2", 2, RANKS_OF_TWO_RAILS * 2, SHOAL_ADAPTERS="auto"),
    case("exact_2x2_rails_of_which_one_is_used", one_adapter_is_enough, "2x2"),
    *[case(f"rail_{name}_{word}", rail_leads_nowhere, word, break_rail, cause)
      for name, break_rail, cause in (("without_an_answer", isolate, "no route"), ("behind_a_firewall", drop_on_rail, "no answer"),
                                      ("forbidden", refuse_on_rail, "forbidden here"))
      for word in ("2x1", "2x2")],
    case("rail_to_itself_2x1", rail_leads_nowhere, "2x1", give_all_one_address, "refused"),
]
FAULTS = [
    *[case(f"killed_rank_{victim}_of_2x2", kill_rank, "2x2", victim) for victim in (0, 1, 3)],
    case("killed_rank_4_of_3x2", kill_rank, "3x2", 4),
    *[case(f"killed_host_{host + 1}_of_2x2", kill_host, "2x2", host) for host in (0, 1)],
    case("killed_host_2_of_3x1", kill_host, "3x1", 1),
    case("killed_host_3_of_3x1_ipv6", kill_host, "3x1", 2, ipv6=True),
    case("killed_host_1_of_2x2_shuffled", kill_host, "2x2", 0, TEST_SHUFFLE=1),
    case("killed_host_2_of_3x1_udp;ofi_rxd", with_provider, "udp;ofi_rxd", kill_host, "3x1", 1),
    case("pulled_cable_of_host_2_of_2x2_udp;ofi_rxd", with_provider, "udp;ofi_rxd", pull_cable, "2x2", 1),
    *[case(f"interface_down_on_host_{host + 1}_of_3x1", pull_cable, "3x1", host, take_down) for host in (0, 1)],
    case("address_gone_on_host_2_of_2x1", pull_cable, "2x1", 1, take_address),
    *[case(f"pulled_cable_of_host_{host + 1}_of_{word}", pull_cable, word, host) for word, host in (("2x2", 1), ("3x1", 0), ("3x1", 1), ("3x2", 1))],
    *[case(f"stopped_rank_{victim}_of_2x2", stop_rank, "2x2", victim) for victim in (0, 2)],
    case("killed_host_2_of_3x1_lanes", kill_host, "3x1", 1, SHOAL_NETWORK_THREADS="3"),
    case("pulled_cable_of_host_2_of_2x2_lanes", pull_cable, "2x2", 1, SHOAL_NETWORK_THREADS="3"),
    *[case(f"killed_host_2_of_{word}_rails", kill_on_rails, word, 1) for word in ("2x1", "3x2")],
    *[case(f"cut_rail_0_of_{word}", cut_rail, word, 0, LOST) for word in ("2x1", "2x2")],
    *[case(f"cut_rail_1_of_{word}", cut_rail, word, 1, ("SHOAL_ERR_TIMEOUT",), SHOAL_TIMEOUT_MS=5000) for word in ("2x1", "2x2")],
    case("busy_rank_of_2x2", busy_rank, "2x2"),
    *[case(f"deadlines_together_{word}", deadlines_together, word) for word in ("3x1", "3x2")],
    case("killed_ranks_of_two_hosts_of_3x2", kill_two, "3x2", [2, 5]),
    case("aborted_2x2", abort_job, "2x2"),
    *[case(f"firewall_that_drops_{word}", broken_link, word, drop, "no answer") for word in ("2x1", "3x2")],
    case("firewall_that_drops_2x2_tcp_ofi_rxm", broken_link, "2x2", drop, "no answer", SHOAL_PROVIDER="tcp;ofi_rxm"),
    case("firewall_that_rejects_2x1", broken_link, "2x1", reject, "forbidden here"),
    case("roots_differ_on_3x1", roots_differ, "3x1"),
    case("wrong_secret_on_one", wrong_secret, "2x1"),
    case("settings_differ", settings_differ, "2x1"),
    *[case(f"versions_differ_{word}", versions_differ, word) for word in ("2x1", "3x1")],
    case("master_out_of_reach", no_master, "2x1"),
    *[case(f"{name}_unknown", unknown_choice, "2x1", name) for name in ("SHOAL_PROVIDER", "SHOAL_NIC")],
    case("SHOAL_NIC_unknown_on_one", unknown_choice_on_one, "3x1", "SHOAL_NIC"),
    case("two_jobs_on_one_port", two_jobs, "2x1", False),
    case("two_named_jobs_on_one_port", two_jobs, "2x1", True),
    case("strangers_in_the_middle", strangers_in_the_middle, "2x2"),
    case("strangers_at_the_start", strangers_at_the_start, "2x2"),
    case("strangers_where_ranks_of_a_host_meet", strangers_where_ranks_of_a_host_meet, "1x4"),
    case("strangers_at_the_endpoint", strangers_at_the_endpoint, "2x1"),
]
GROUPS = (("exact", EXACT), ("ways", WAYS), ("rails", RAILS), ("faults", FAULTS))


def main():
    if sys.argv[1:2] == ["attack"]:
        return attack(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["call_at_meetings"]:
        return call_at_meetings()
    if sys.argv[1:2] == ["sniff"]:
        return sniff(sys.argv[2])
    try:
        if not all(os.access(program, os.X_OK) for program in (PROGRAM, SHUFFLED, COMMAND, STRANGER)):
            raise Impossible("SHOAL_HOST_RANK, SHOAL_COMMAND and SHOAL_STRANGER do not name programs")
        require()
    except Impossible as why:
        print(f"1..0 # SKIP {why}")
        return 0
    cases = [(f"{group}/{one.__name__}", one) for group, ones in GROUPS for one in ones]
    return run_cases([one for name, one in cases if not sys.argv[1:] or any(word in name for word in sys.argv[1:])])


if __name__ == "__main__":
    main()
