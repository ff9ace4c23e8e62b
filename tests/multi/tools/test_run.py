"""`shoal run` on real processes: prefixes, signals, first failures and exit codes. Nothing stays behind.

Prints TAP. SHOAL_COMMAND names the command. Exit code 0: none failed, 1: some did."""
import fcntl
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time

from tap import COUNT_A_KILL, Skip, call_counted, handles

SHOAL = os.environ.get("SHOAL_COMMAND", "")
DEADLINE_S = 60
PATIENCE_S = 30  # for events that take moments, on a busy machine; workers that wait for an end sleep about twice as long
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
             "SHOAL_SECRET", "SHOAL_SECRET_FILE", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")


class Done:
    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds


def environment(**more):
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env.update(more)
    return env


def start(*args, **options):
    options.setdefault("env", environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([SHOAL, "run", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process):
    begin = time.monotonic()
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("shoal run did not end within %d s" % DEADLINE_S)
    return Done(process.returncode, out, err, time.monotonic() - begin)


def run(*args, **options):
    return finish(start(*args, **options))


def sh(script, n=2, *options, **more):
    return run("-n", str(n), *options, "sh", "-c", script, **more)


# `after RANK` waits until that rank has ended and is a zombie.
MARKED = """
echo $$ >"$MARKS/$RANK"
after() {
    until [ -s "$MARKS/$1" ]; do sleep 0.02; done
    read pid <"$MARKS/$1"
    while { read number name state rest </proc/$pid/stat; } 2>/dev/null && [ "$state" != Z ]; do sleep 0.02; done
}
"""


def ordered(script, n):
    with tempfile.TemporaryDirectory() as marks:
        return sh(MARKED + script, n, env=environment(MARKS=marks))


def equal(got, wanted):
    if got != wanted:
        raise AssertionError("got %r, wanted %r" % (got, wanted))


def within(text, part):
    if part not in text:
        raise AssertionError("%r is not in %r" % (part, text[-2000:]))


def refused(done, code, *parts):
    """Expects one clear line on stderr and no other output."""
    equal(done.code, code)
    equal(done.out, "")
    equal(done.err.count("\n"), 1)
    for part in parts:
        within(done.err, part)


def beside_cores(err):
    """Removes the line about the workers' cores."""
    return re.sub(r"^shoal run: (each worker has .*|\d+ workers share .*)\n", "", err, count=1, flags=re.M)


def wait_for(question, what, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError("no %s within %g s" % (what, seconds))


def state_of(pid):
    """Returns the state letter in /proc, or None if there is no such process."""
    try:
        with open("/proc/%d/stat" % pid) as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_gone(pid):
    return state_of(pid) in (None, "Z", "X")


def all_gone(pids):
    wait_for(lambda: all(is_gone(pid) for pid in pids), "end of processes %r" % (pids,))


def lines_read(process, count):
    """Reads the first lines of a run's output as numbers: workers print their process IDs."""
    return [int(process.stdout.readline().split("|")[1]) for _ in range(count)]


# ---- environment and output ----


def environment_of_workers():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS",
             "CUDA_DEVICE_MAX_CONNECTIONS")
    done = sh("echo " + " ".join("$" + name for name in names), 3, "--bind", "none")
    equal(done.code, 0)
    equal(sorted(done.out.splitlines()), ["%d| %d %d 3 3 0 127.0.0.1 1 32" % (r, r, r) for r in range(3)])
    equal(done.err, "")


def environment_wins_over_inherited():
    env = environment(MASTER_ADDR="elsewhere", MASTER_PORT="1", RANK="9", WORLD_SIZE="99", OMP_NUM_THREADS="7",
                      CUDA_DEVICE_MAX_CONNECTIONS="1")
    done = sh("echo $RANK $WORLD_SIZE $MASTER_ADDR $OMP_NUM_THREADS $CUDA_DEVICE_MAX_CONNECTIONS", 1, env=env)
    equal(done.out, "0| 0 1 127.0.0.1 7 1\n")
    equal(sh("echo ${OMP_NUM_THREADS-none}", 1).out, "0| none\n")


def words_of_an_outer_launcher_are_not_handed_on():
    """Workers would take these variables for theirs: torch would wait for a store of torchrun that nobody opens. Variables
    with a rank's place stay."""
    outer = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
             "GROUP_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD",
             "MPI_LOCALRANKID", "HOROVOD_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_GTIDS")
    kept = ("SLURM_JOB_ID", "PMIX", "TORCHELASTIC_ENABLE_FILE_TIMER", "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_btl")
    env = environment(**{name: "1" for name in (*outer, *kept)})
    done = run("-n", "1", "--hosts", "1", "--no-prefix", "env", env=env)
    names = {line.partition("=")[0] for line in done.out.splitlines()}
    equal(sorted(names.intersection(outer)), [])
    equal(sorted(names.intersection(kept)), sorted(kept))


def secret_is_drawn_once_per_run():
    seen = set()
    for _ in range(2):
        lines = sh("echo $SHOAL_SECRET").out.splitlines()
        secrets = {line.split("| ")[1] for line in lines}
        equal(len(secrets), 1)
        seen |= secrets
    equal(len(seen), 2)
    for secret in seen:
        assert re.fullmatch("[0-9a-f]{64}", secret), secret
    equal(sh("echo $SHOAL_SECRET", 1, env=environment(SHOAL_SECRET="mine")).out, "0| mine\n")
    equal(sh("echo ${SHOAL_SECRET-none}", 1, env=environment(SHOAL_SECRET_FILE="/f")).out, "0| none\n")


def port_is_free_and_differs_between_runs():
    code = ("import os,socket,time\nfirst=int(os.environ['MASTER_PORT'])\nprint(first,flush=True)\n"
            "for port in range(first,first+17):\n socket.socket().bind(('127.0.0.1',port))\n"
            "while not os.path.exists(sys.argv[1]): time.sleep(0.02)")
    with tempfile.TemporaryDirectory() as folder:
        gate = os.path.join(folder, "gate")
        runs = [start("-n", "1", sys.executable, "-c", "import sys;" + code, gate) for _ in range(4)]
        ports = [process.stdout.readline() for process in runs]  # all of them run at the same time
        with open(gate, "w"):
            pass
        done = [finish(process) for process in runs]
    equal([d.code for d in done], [0] * 4)
    equal(len(set(ports)), 4)


def default_count_is_cores():
    done = run("sh", "-c", "echo $WORLD_SIZE")
    workers = len(done.out.splitlines())
    cores = int(re.search(r"^cores +(\d+) usable", command("info", "--topology").out, re.M).group(1))
    equal(workers, min(cores, 1024))
    assert workers <= len(os.sched_getaffinity(0)), workers


def streams_stay_apart():
    done = sh("echo out; echo err >&2", 1)
    equal((done.out, done.err), ("0| out\n", "0| err\n"))


def prefix_can_be_left_out():
    equal(sh("echo text", 1, "--no-prefix").out, "text\n")


def arguments_reach_the_program():
    equal(run("-n1", "printf", "%s,", "-n", "--help", "a b").out, "0| -n,--help,a b,\n")
    equal(run("-n", "1", "--", "echo", "--no-prefix").out, "0| --no-prefix\n")


def partial_last_line_is_flushed():
    equal(sh("printf 'one\\ntwo'", 1).out, "0| one\n0| two\n")


def bytes_of(*program):
    return subprocess.run([SHOAL, "run", "-n", "1", *program], capture_output=True, timeout=DEADLINE_S).stdout


def empty_lines_and_bytes_are_kept():
    equal(bytes_of("printf", "\\n\\000\\377\\n"), b"0| \n0| \0\xff\n")


def carriage_returns_are_kept_in_files():
    equal(bytes_of("printf", "1%%\\r2%%\\rdone\\n"), b"0| 1%\r2%\rdone\n")


def long_lines_stay_whole():
    code = ("import os,sys\nletter=os.environ['RANK']\n"
            "for i in range(8):\n sys.stdout.write(letter*1000000+'\\n')\n sys.stderr.write(letter*1000+'\\n')")
    done = run("-n", "4", sys.executable, "-c", code)
    equal(done.code, 0)
    equal(sorted(done.out.splitlines()), sorted("%d| %s" % (r, str(r) * 1000000) for r in range(4) for _ in range(8)))
    equal(sorted(beside_cores(done.err).splitlines()), sorted("%d| %s" % (r, str(r) * 1000) for r in range(4) for _ in range(8)))


def slow_reader_gets_everything():
    process = start("-n", "2", sys.executable, "-c", "for i in range(200000): print('line',i)")
    time.sleep(0.5)  # by then both pipes are usually full
    done = finish(process)
    equal(len(done.out.splitlines()), 400000)


def closed_reader_ends_the_run():
    script = '"$0" run -n 2 yes | head -n 1'
    done = subprocess.run(["sh", "-c", script, SHOAL], capture_output=True, text=True, timeout=DEADLINE_S)
    within(done.stdout, "| y\n")
    within(done.stderr, "killed by signal 13")


def output_files_hold_each_rank():
    with tempfile.TemporaryDirectory() as folder:
        logs = os.path.join(folder, "logs")
        done = sh("echo out$RANK; printf err$RANK >&2", 2, "--output", logs)
        equal(done.code, 0)
        within(done.out, "1| out1\n")
        for name, text in (("0.out", "out0\n"), ("1.out", "out1\n"), ("0.err", "err0"), ("1.err", "err1")):
            with open(os.path.join(logs, "rank-" + name)) as file:
                equal(file.read(), text)
        refused(sh("true", 1, "--output", os.path.join(folder, "no/such")), 2, "cannot make the directory")


def standard_input_goes_to_rank_0():
    with tempfile.TemporaryFile("w+") as file:
        file.write("question\n")
        file.seek(0)
        done = sh("cat", 2, stdin=file)
    equal(done.out, "0| question\n")


# ---- cores ----


def masks_of(workers, *options, cores=None):
    """Returns the cores of each worker, from the kernel, and the command's output on stderr."""
    def prepare():
        if cores:
            os.sched_setaffinity(0, cores)
    done = sh("grep Cpus_allowed_list /proc/self/status", workers, *options, preexec_fn=prepare)
    equal(done.code, 0)
    masks = {}
    for line in done.out.splitlines():
        rank, text = re.fullmatch(r"(\d+)\| Cpus_allowed_list:\s*(.*)", line).groups()
        ends = [part.split("-") for part in text.split(",")]
        masks[int(rank)] = {core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)}
    return [masks[rank] for rank in range(workers)], done.err


def cores_here(count):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise Skip("this process may use %d cores, not %d" % (len(cores), count))
    return set(cores)


def workers_have_cores_of_their_own():
    all_cores = cores_here(2)
    for options in ([], ["--bind", "slice"], ["--bind=core"]):
        masks, err = masks_of(2, *options)
        assert masks[0] and masks[1] and not masks[0] & masks[1] and masks[0] | masks[1] <= all_cores, masks
        if options != ["--bind=core"]:
            equal(masks[0] | masks[1], all_cores)
        assert re.fullmatch(r"shoal run: each worker has \d+ (or \d+ )?cores?( near its GPU)?: .*, .* \(--bind none leaves them unbound\)\n", err), err
    equal(masks_of(2, "--bind", "none"), ([all_cores] * 2, ""))
    equal(sh("echo ${OMP_NUM_THREADS-as many as there are}", 2).out.count("| as many as there are"), 2)
    equal(sh("echo $OMP_NUM_THREADS", 2, "--bind", "none").out.count("| 1"), 2)


def one_worker_keeps_all_cores():
    equal(masks_of(1), ([cores_here(1)], ""))


def mask_of_the_caller_counts():
    core = min(cores_here(2))
    masks, err = masks_of(2, cores={core})
    equal((masks, err), ([{core}] * 2, "shoal run: 2 workers share 1 core: they are not bound\n"))
    two = set(sorted(cores_here(2))[-2:])
    masks, err = masks_of(2, cores=two)
    equal(masks[0] | masks[1], two)


def more_workers_than_cores_are_not_bound():
    all_cores = cores_here(1)
    if len(all_cores) > 64:
        raise Skip("as many workers as %d cores are too many here" % len(all_cores))
    masks, err = masks_of(len(all_cores) + 1)
    equal(masks, [all_cores] * (len(all_cores) + 1))
    within(err, "shoal run: %d workers share %d core" % (len(all_cores) + 1, len(all_cores)))


def quota_of_a_container_counts():
    """A quota of one core on a machine with more: workers that share it would wait for cores that they may not use."""
    if len(os.sched_getaffinity(0)) < 2:
        raise Skip("this process may use one core only")
    quota = ("cd /sys/fs/cgroup && mkdir cpu && echo 100000 | tee cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us > /dev/null && "
             "echo 100000 100000 > cpu.max && echo > cpu.stat && exec \"$@\"")
    code, out, err = call_counted("sh", "-c", quota, "sh", SHOAL, "run", "-n", "2", "true")
    equal((code, out, err), (0, "", "shoal run: 2 workers share 1 core (the quota of a container): they are not bound\n"))
    code, out, err = call_counted("sh", "-c", quota, "sh", SHOAL, "run", "sh", "-c", "echo $WORLD_SIZE")
    equal((code, out, err), (0, "0| 1\n", ""))


def waits_spin_where_each_worker_has_a_core():
    """The library must not take one worker's cores for all the cores of the workers together."""
    hello = os.path.join(os.environ["SHOAL_EXAMPLES"], "01_hello")
    cores = sorted(cores_here(2))[:2]
    for mask, spins in ((cores, True), (cores[:1], False)):
        done = run("-n", "2", hello, env=environment(SHOAL_LOG="info"), preexec_fn=lambda: os.sched_setaffinity(0, mask))
        equal(done.code, 0)
        equal([int(us) > 0 for us in re.findall(r"waits spin (\d+) us", done.err)], [spins] * 2)


# ---- many workers, few descriptors ----


def many_workers():
    done = sh("echo $RANK", 32)
    equal(done.code, 0)
    equal(sorted(done.out.splitlines()), sorted("%d| %d" % (r, r) for r in range(32)))


def descriptors_limited(count):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def few_descriptors_are_enough():
    with tempfile.TemporaryDirectory() as folder:
        done = sh("ls /proc/self/fd | wc -l", 32, "--output", folder, preexec_fn=descriptors_limited(256))
    equal(done.code, 0)
    # 0, 1, 2 and the one with which ls reads the folder; none of the launcher's
    equal({line.split("| ")[1].strip() for line in done.out.splitlines()}, {"4"})


def too_few_descriptors_are_named():
    done = sh("sleep 57", 32, preexec_fn=descriptors_limited(40))
    refused(done, 125, "ulimit -n", "32 workers")
    assert done.seconds < PATIENCE_S, done.seconds


def launcher_leaves_descriptors_closed():
    process = start("-n", "1", "sh", "-c", "echo $$; sleep 56")
    pid = lines_read(process, 1)[0]
    equal(sorted(os.listdir("/proc/%d/fd" % pid)), ["0", "1", "2"])
    process.send_signal(signal.SIGTERM)
    finish(process)


# ---- failures ----


def first_failure_is_reported():
    done = ordered("echo text of $RANK; [ $RANK = 1 ] || { after 1; exit 1; }; "
                   "for i in $(seq 30); do echo line $i; done; echo cause >&2; exit 3", 3)
    equal(done.code, 3)
    assert re.search(r"^shoal run: rank 1 \(pid \d+\) failed first: exited with code 3$", done.err, re.M), done.err
    # Its two streams are separate pipes, so their order is unknown.
    shown = [line.strip() for line in done.err.splitlines() if line.startswith("    ")]
    equal(len(shown), 20)
    within(shown, "cause")
    within(shown, "line 30")
    assert "line 11" not in shown, shown
    for rank in (0, 2):
        assert re.search(r"rank %d \(pid \d+\) ended after it: exited with code 1" % rank, done.err), done.err


def killed_worker_is_reported():
    done = ordered("[ $RANK = 2 ] && kill -9 $$; after 2; exit 1", 3)
    equal(done.code, 137)
    assert re.search(r"rank 2 \(pid \d+\) failed first: killed by signal 9 \(Killed\)", done.err), done.err


def limits_behind_a_signal_are_told():
    with tempfile.TemporaryDirectory() as folder:
        done = sh("ulimit -f 0; echo long > " + os.path.join(folder, "file"), 1)
    equal(done.code, 128 + signal.SIGXFSZ)
    assert re.search(r"killed by signal 25 \(.*\): it wrote past the limit on the size of files, 'ulimit -f'", done.err), done.err
    within(sh("kill -XCPU $$", 1).err, "it used more processor time than 'ulimit -t' allows")


def lack_of_memory_is_told():
    script = MARKED + "[ $RANK = 1 ] && { %s; kill -9 $$; }; after 1; exit 1"
    for count, told in ((COUNT_A_KILL, True), ("true", False)):
        with tempfile.TemporaryDirectory() as marks:
            code, _, err = call_counted(SHOAL, "run", "-n", "2", "sh", "-c", script % count, env=environment(MARKS=marks))
        equal(code, 137)
        assert re.search(r"rank 1 \(pid \d+\) failed first: killed by signal 9 \(Killed\)", err), err
        equal("for lack of memory" in err, told)


def cause_that_ranks_share_is_named():
    """They exit at once, in any order. The report names the cause that they print, not the rank that was first."""
    probe = os.path.join(os.environ["SHOAL_TESTS"], "blame_probe")
    for how, end in (("leave", "exited with code 0 while others still needed it"), ("abort", "exited with code 1"),
                     ("mismatch", "exited with code 1")):
        for odd in (0, 1, 2, 1):
            done = run("-n", "4", probe, how, str(odd))
            equal(done.code, 1)
            report = done.err[done.err.index("shoal run: the ranks report: communicator world is broken"):]
            cause = re.search(r" is broken[^:]*: (.*)", report).group(1)
            equal(done.err.count(cause), 2)
            blamed = {int(rank) for rank in re.findall(r" is broken(?: by|:) rank (\d+) \(process", done.err)}
            equal(len(blamed), 1)
            if how != "mismatch":
                equal(blamed, {odd})
            assert re.search(r"^shoal run: rank %d \(pid \d+\) failed first: %s$" % (*blamed, end), report, re.M), report
            equal(len(re.findall(r"^shoal run: rank \d \(pid \d+\) ended", report, re.M)), 3)
            for where in ("shoal trace", "SHOAL_TRACE_FILE", "docs/errors.md"):
                within(report.splitlines()[-1], where)


def cause_is_shown_once():
    """The ranks' log lines and exceptions repeat the cause, as do the last lines of the rank that failed first. The report
    may come much later, so it has the cause once more. Files and stdout contain each rank's output."""
    cause = "ranks called different operations as number 7 of communicator torch.0: rank 0 called this, rank 1 that"
    worker = (f"echo \"shoal: rank $RANK (host:$$) [engine] communicator torch.0 is broken: {cause}\" >&2;"
              f"echo \"[rank$RANK]: DistBackendError: shoal:all_reduce: {cause}. Bye\" >&2; echo \"result: {cause}\"; exit 1")
    with tempfile.TemporaryDirectory() as folder:
        done = sh(worker, 3, "--output", folder)
        equal((done.err.count(cause), done.out.count(cause)), (2, 3))
        equal(len(re.findall(r"^\d\| shoal: rank \d .* is broken: \(the cause that rank \d told above\)$", done.err, re.M)), 2)
        equal(len(re.findall(r"^\d\| .*all_reduce: \(the cause that rank \d told above\)\. Bye$", done.err, re.M)), 3)
        for rank in range(3):
            equal(open(os.path.join(folder, "rank-%d.err" % rank)).read().count(cause), 2)
    tail = sh(f"[ $RANK = 1 ] && exit 0; echo \"shoal: rank 0 (host:$$) [engine] communicator torch.0 is broken by rank 0 (process $$): {cause}\" >&2; exit 1")
    equal(tail.err.count(cause), 2)
    within(tail.err, "\n    shoal: rank 0 (host:")
    equal(sh(worker, 2, "--no-prefix").err.count(cause), 5)
    merged = subprocess.run([SHOAL, "run", "-n", "3", "sh", "-c", worker], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    equal(len(re.findall(rf"^\d\| .*all_reduce: {cause}\. Bye$", merged.stdout, re.M)), 3)


def absent_rank_is_named():
    """The others give up and exit. The absent rank comes too late and is the last to end."""
    probe = os.path.join(os.environ["SHOAL_TESTS"], "blame_probe")
    done = run("-n", "3", probe, "absent", "1", env=environment(SHOAL_TIMEOUT_MS="2500"))
    equal(done.code, 1)
    assert re.search(r"^shoal run: rank 1 \(pid \d+\) failed first: exited with code 1$", done.err, re.M), done.err


def first_death_wins_at_once():
    """Two deaths within one wake-up of the launcher, which is stopped meanwhile. The earlier one is reported first."""
    process = start("-n", "3", "sh", "-c", "echo $$; exec sleep 55")
    pids = lines_read(process, 3)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(process.pid) == "T", "stop")
    os.kill(pids[2], signal.SIGKILL)
    wait_for(lambda: is_gone(pids[2]), "end")
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: is_gone(pids[0]), "end")
    process.send_signal(signal.SIGCONT)
    done = finish(process)
    within(done.err, "(pid %d) failed first: killed by signal 9" % pids[2])


def success_beside_others_is_fine():
    equal(sh("[ $RANK = 0 ] && exit 0; sleep 0.5; echo late", 2).out, "1| late\n")
    equal(sh("[ $RANK = 0 ] && exit 0; sleep 0.3; exit 9", 2).code, 9)


def early_leavers_are_in_the_report():
    """A rank that exited with code 0 did not fail, but may be the reason why another did. The command cannot order two ends
    that it finds at the same look, so there is time for a look before rank 2 ends."""
    done = ordered("[ $RANK = 1 ] && exit 0; [ $RANK = 2 ] && { after 0; sleep 1.5; exit 0; }; after 1; exit 3", 3)
    equal(done.code, 3)
    report = [re.sub(r" \(pid \d+\)", "", line) for line in done.err.splitlines() if line.startswith("shoal run: rank")]
    equal(report, ["shoal run: rank 0 failed first: exited with code 3", "shoal run: rank 0 had printed nothing",
                   "shoal run: rank 1 had ended by then: exited with code 0",
                   "shoal run: rank 2 ended after it: exited with code 0"])


def survivors_are_ended():
    done = sh("[ $RANK = 1 ] && exit 5; exec sleep 58", 2)
    equal(done.code, 5)
    within(done.err, "rank 0 did not end within 3 s")
    within(done.err, "ended after it: killed by signal 15")
    assert 2.5 < done.seconds < PATIENCE_S, done.seconds


def stubborn_survivors_are_killed():
    done = sh("[ $RANK = 1 ] && exit 5; trap '' TERM; while :; do sleep 0.1; done", 2)
    equal(done.code, 5)
    within(done.err, "ended after it: killed by signal 9")
    assert 4 < done.seconds < PATIENCE_S, done.seconds


def stopped_survivors_are_ended():
    done = sh("[ $RANK = 1 ] && { sleep 0.2; exit 5; }; kill -STOP $$; sleep 59", 2)
    equal(done.code, 5)
    assert done.seconds < PATIENCE_S, done.seconds


def children_of_workers_are_ended():
    process = start("-n", "2", "sh", "-c", "sleep 61 & echo $!; [ $RANK = 1 ] && exit 4; sleep 0.5")
    children = lines_read(process, 2)
    equal(finish(process).code, 4)
    all_gone(children)


def left_children_do_not_hold_the_run():
    process = start("-n", "1", "sh", "-c", "sleep 62 & echo $!")
    child = lines_read(process, 1)
    done = finish(process)
    equal(done.code, 0)
    assert done.seconds < PATIENCE_S, done.seconds
    all_gone(child)


def missing_program_is_named():
    refused(run("-n", "2", "no-such-program"), 127, "no-such-program")
    with tempfile.TemporaryDirectory() as folder:
        plain = os.path.join(folder, "plain")
        with open(plain, "w") as file:
            file.write("#!/no/such/interpreter\n")
        refused(run("-n", "2", plain), 126, "not executable")
        os.chmod(plain, 0o755)
        refused(run("-n", "2", plain), 127, "interpreter")
        refused(run("-n", "2", "plain", cwd=folder), 127, "did you mean ./plain?")


# ---- signals, timeouts ----


def forwarded(number):
    """Each worker prints when it receives the signal, and exits with 0."""
    name = signal.Signals(number).name[3:]
    process = start("-n", "2", "sh", "-c", "trap 'echo got; exit 0' %s; echo $$; while :; do sleep 0.05; done" % name)
    lines_read(process, 2)
    process.send_signal(number)
    done = finish(process)
    equal(sorted(done.out.splitlines()), ["0| got", "1| got"])
    equal(done.code, 0)


def signals_are_forwarded():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        forwarded(number)


def signal_reaches_children():
    process = start("-n", "2", "sh", "-c", "sleep 63 & echo $!; wait")
    children = lines_read(process, 2)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    equal(done.code, 143)
    within(done.err, "ended by signal 15 (Terminated)")
    assert "failed first" not in done.err, done.err
    all_gone(children)


STUBBORN = "trap '' INT TERM; echo $$; while :; do sleep 0.05; done"


def second_interrupt_kills():
    process = start("-n", "2", "--grace", "50", "sh", "-c", STUBBORN)
    pids = lines_read(process, 2)
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    while said.startswith("shoal run: ") and "told to end" not in said:
        said = process.stderr.readline()
    assert re.search(r"told to end \(Interrupt\), and ranks 0, 1 had not ended yet: killing in \d+ s, or at a second Ctrl-C$",
                     said), said
    assert process.poll() is None and not any(is_gone(pid) for pid in pids)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    equal(done.code, 130)
    within(done.err, "asked again to end: killing ranks 0, 1")
    assert done.seconds < PATIENCE_S, done.seconds
    all_gone(pids)


def grace_passes_once():
    """Uses the given time, not the one without --grace; the best of some runs counts."""
    took = []
    while not took or min(took) > 3 and len(took) < 5:
        process = start("-n", "2", "--grace", "0.5", "sh", "-c", STUBBORN)
        pids = lines_read(process, 2)
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        equal(done.code, 143)
        within(done.err, "ranks 0, 1 did not end when told to: killing")
        took.append(done.seconds)
        all_gone(pids)
    assert 0.3 < min(took) < 3, took


SAVES = ('import os, signal, sys, time\n'
         'def save(*_):\n    time.sleep(%s)\n    print("saved", flush=True)\n    os._exit(0)\n'
         'signal.signal(signal.SIGTERM, save)\nprint("training", flush=True)\n'
         'if len(sys.argv) > 1:\n    open(sys.argv[1], "w").close()\ntime.sleep(60)\n')


def behind_a_shell(seconds, *options):
    """The shell ends at SIGTERM, but its child takes some time to save."""
    process = start(*options, "sh", "-c", '"$0" -c "$1"; echo "not reached"', sys.executable, SAVES % seconds)
    equal(process.stdout.readline(), "0| training\n")
    process.send_signal(signal.SIGTERM)
    return finish(process)


def program_behind_a_shell_has_its_grace():
    done = behind_a_shell(1.5, "-n", "1", "--grace", "30")
    equal((done.code, done.out), (143, "0| saved\n"))
    assert done.seconds < 20, done.seconds
    done = behind_a_shell(30, "-n", "1", "--grace", "1")
    equal((done.code, done.out), (143, ""))
    within(done.err, "what the workers have started did not end when told to: killing")


def second_interrupt_kills_behind_a_shell():
    script = SAVES.replace("SIGTERM", "SIGINT") % 30
    process = start("-n", "1", "--grace", "60", "sh", "-c", '"$0" -c "$1" & trap "exit 3" INT; wait', sys.executable, script)
    equal(process.stdout.readline(), "0| training\n")
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    while said.startswith("shoal run: ") and "what the workers have started had not ended yet" not in said:
        said = process.stderr.readline()
    within(said, "what the workers have started had not ended yet")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    within(done.err, "asked again to end: killing what the workers have started")
    assert done.seconds < 20, done.seconds


def given_grace_counts_after_a_failure():
    """Without --grace it is 1.5 s."""
    script = 'if [ $RANK = 1 ]; then until [ -e "$2" ]; do sleep 0.02; done; exit 5; fi; exec "$0" -c "$1" "$2"'
    for options, is_saved in ((["--grace", "30"], True), ([], False)):
        with tempfile.TemporaryDirectory() as folder:
            done = run("-n", "2", *options, "sh", "-c", script, sys.executable, SAVES % 3, os.path.join(folder, "saves"))
        equal(done.code, 5)
        equal("0| saved" in done.out, is_saved)


def ends_are_told_at_once():
    """--ends reports each failed worker once, the first of them seconds before the final report."""
    script = ("case $RANK in 0) exec sleep 63;; 1) until [ -e \"$MARKS/3\" ]; do sleep 0.02; done; kill -KILL $$;; 2) exit 0;;"
              " 3) echo >\"$MARKS/3\"; exit 137;; esac")
    with tempfile.TemporaryDirectory() as marks:
        done = sh(script, 4, "--ends", env=environment(MARKS=marks))
    lines = done.err.splitlines()
    told = [re.sub(r"pid \d+", "pid", line) for line in lines if "has ended: " in line]
    equal(sorted(told), ["shoal run: rank 0 (pid) has ended: killed by signal 15 (Terminated)",
                         "shoal run: rank 1 (pid) has ended: killed by signal 9 (Killed)",
                         "shoal run: rank 3 (pid) has ended: exited with code 137"])
    assert max(lines.index(line) for line in lines if re.match(r"shoal run: rank [13] .*has ended", line)) < min(
        at for at, line in enumerate(lines) if "did not end within 3 s" in line), done.err
    assert "has ended: " not in sh("exit 3").err


def events_of(script, n, *options):
    with tempfile.TemporaryFile() as file:
        done = run("-n", str(n), "--events", str(file.fileno()), *options, "sh", "-c", script, pass_fds=(file.fileno(),))
        file.seek(0)
        events = [json.loads(line) for line in file]
    for event in events:
        assert event.pop("host") == 0 and abs(event.pop("time") - time.time()) < DEADLINE_S, event
        assert event.pop("pid", 1) > 0
    return done, events


def keep_going_lets_the_others_continue():
    with tempfile.TemporaryDirectory() as folder:
        # Rank 1 is killed at once; the others end only after that was reported, and one of them fails.
        script = f"[ $RANK = 1 ] && kill -9 $$; while [ ! -e {folder}/go ]; do sleep 0.05; done; echo done; exit $(($RANK / 2))"
        process = start("-n", "3", "--keep-going", "sh", "-c", script)
        line = process.stderr.readline()
        while "rank 1" not in line or "has ended: killed by signal 9" not in line:
            assert line, "no line about rank 1"
            line = process.stderr.readline()
        open(f"{folder}/go", "w").close()
        done = finish(process)
    equal(done.code, 0)
    equal(sorted(done.out.splitlines()), ["0| done", "2| done"])
    assert "rank 2" in done.err and "exited with code 1" in done.err, done.err


def keep_going_fails_if_no_worker_succeeds():
    done = sh("exit $((7 + $RANK))", 1, "--keep-going")
    equal(done.code, 7)
    done = sh("exit 9", 3, "--keep-going", "--restarts", "1")
    equal(done.code, 9)
    assert "restart 1 of 1" in done.err, done.err


def keep_going_ends_by_a_signal():
    process = start("-n", "2", "--keep-going", "sh", "-c", "[ $RANK = 1 ] && exit 3; echo ready; exec sleep 100")
    assert process.stdout.readline() == "0| ready\n"
    process.send_signal(signal.SIGTERM)
    equal(finish(process).code, 128 + signal.SIGTERM)


def events_report_a_failure_and_the_restart():
    done, events = events_of("[ $RANK = 1 ] && kill -9 $$; exit 0", 2, "--restarts", "1")
    equal(done.code, 137)
    killed, text = {"event": "worker_ended", "rank": 1, "signal": 9}, "killed by signal 9 (Killed)"
    cause = {"event": "cause", "kind": "worker", "at_host": 0, "rank": 1, "code": 137, "text": text}
    for attempt in range(2):
        begin = next(i for i, event in enumerate(events) if event["event"] == "started")
        equal(events[begin:begin + 3], [
            {"event": "started", "attempt": attempt, "restarts": 1, "first_rank": 0, "workers": 2, "ranks": 2},
            {"event": "worker_started", "rank": 0}, {"event": "worker_started", "rank": 1}])
        equal(sorted(events[begin + 3:begin + 5], key=lambda event: event["rank"]),
              [{"event": "worker_ended", "rank": 0, "code": 0, "text": "exited with code 0"}, {**killed, "text": text}])
        assert events[begin + 5].pop("at_host_name")
        equal(events[begin + 5], cause)
        del events[:begin + 6]
        equal(events[0], {"event": "ended", "code": 137} if attempt else {"event": "restart", "attempt": 1, "restarts": 1})


def events_tell_why_nothing_began():
    with tempfile.TemporaryFile() as file:
        done = run("-n", "1", "--events", str(file.fileno()), "./missing", pass_fds=(file.fileno(),))
        file.seek(0)
        events = [json.loads(line) for line in file]
    equal([event["event"] for event in events], ["error", "cause", "ended"])
    equal(events[0]["text"], "there is no program './missing'")
    equal((events[1]["kind"], events[2]["code"], done.code), ("unstarted", 127, 127))


def events_report_an_end_before_the_start():
    """Host 1 of 2 searches for host 0, and finds this test instead."""
    with tempfile.TemporaryFile() as file, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        meet = "127.0.0.1:%d" % (listener.getsockname()[1] - 16)  # host 0's first port
        process = start("-n", "1", "--hosts", "2", "--host-index", "1", "--meet", meet, "--events", str(file.fileno()), "true",
                        pass_fds=(file.fileno(),))
        wait_for(lambda: select.select([listener], [], [], 0)[0] or process.poll(), "try to find host 0")
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        file.seek(0)
        cause, ended = [json.loads(line) for line in file]
    equal((cause["event"], cause["kind"], cause["signal"], cause["code"], cause["at_host"]), ("cause", "signal", 15, 143, 1))
    equal(cause["at_host_name"], os.uname().nodename)
    equal((ended["event"], ended["code"], done.code), ("ended", 143, 143))


def events_are_not_for_workers():
    done, events = events_of("ls -l /proc/self/fd; for fd in 3 4 5 6 7 8 9; do echo forged >&$fd; done 2>/dev/null; exit 3", 1)
    equal((done.code, [event["event"] for event in events]),
          (3, ["started", "worker_started", "worker_ended", "cause", "ended"]))


def events_need_an_open_descriptor():
    refused(run("--events", "999", "true"), 2, "--events takes an open descriptor, such as 3", "999")
    refused(run("--events", "1", "true"), 2, "--events takes a number from 3")


def events_that_are_not_read_hold_nobody():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"x" * 4096):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    process = start("-n", "1", "--events", str(writing), "sh", "-c", "echo begun; sleep 30", pass_fds=(writing,))
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        equal(finish(process).code, 143)
    finally:
        os.close(reading)
        os.close(writing)


def stuck_reader_does_not_hold_signals():
    process = start("-n", "2", "yes")
    wait_for(lambda: handles(process.pid, signal.SIGTERM), "launcher that handles signals")
    time.sleep(0.5)  # by then the pipe is usually full
    process.send_signal(signal.SIGTERM)
    equal(process.wait(timeout=DEADLINE_S), 143)
    process.communicate()


def timeout_ends_the_run():
    done = run("-n", "2", "--timeout", "0.5", "sleep", "64")
    equal(done.code, 124)
    within(done.err, "0.5 s have passed (--timeout) and ranks 0, 1 had not ended")
    assert done.seconds < PATIENCE_S, done.seconds
    equal(run("-n", "1", "--timeout=30", "true").code, 0)


def timeout_that_passes_during_a_failure_ends_the_restart():
    done = sh("[ $SHOAL_RESTART = 0 ] && [ $RANK = 0 ] && exit 1; exec sleep 60", 2, "--timeout", "2.5", "--restarts", "1")
    equal(done.code, 124)
    within(done.err, "starting all workers again: restart 1 of 1")
    assert done.seconds < PATIENCE_S, done.seconds


def killed_launcher_takes_workers_along():
    process = start("-n", "4", "sh", "-c", "echo $$; exec sleep 65")
    pids = lines_read(process, 4)
    process.kill()
    process.wait()
    all_gone(pids)
    process.communicate()


def ignored_signals_stay_ignored():
    process = start("-n", "1", "sh", "-c", "echo $$; read line; sleep 0.3; echo end", stdin=subprocess.PIPE,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    lines_read(process, 1)
    process.send_signal(signal.SIGHUP)
    done = finish(process)
    equal((done.code, done.out), (0, "0| end\n"))


def workers_get_default_signals():
    done = sh("awk '/^Sig(Blk|Ign)/ { print $2 }' /proc/self/status", 1)
    blocked, ignored = (int(line.split()[1], 16) for line in done.out.splitlines())
    own_of_libc = 1 << 31 | 1 << 32  # signals 32 and 33 may be inherited as ignored; libc does not let a program change that
    equal((blocked, ignored & ~own_of_libc), (0, 0))


def tests_hold_under_nohup():
    """Inherited signal dispositions must not matter: nohup ignores SIGHUP; a background job of a shell ignores SIGINT and
    SIGQUIT."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
    done = subprocess.run([sys.executable, __file__, "signals_are_forwarded", "workers_get_default_signals"],
                          capture_output=True, text=True, timeout=DEADLINE_S,
                          preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored])
    assert done.returncode == 0 and done.stdout.count("\nok ") == 2, done.stdout + done.stderr


def stop_and_continue():
    process = start("-n", "2", "--timeout", "9", "sh", "-c", "echo $$; sleep 6; echo end",
                    preexec_fn=lambda: os.setpgid(0, 0))
    pids = lines_read(process, 2)
    wait_for(lambda: all(state_of(pid) == "S" for pid in pids), "sleep")  # not in the middle of starting it
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(state_of(pid) == "T" for pid in [process.pid, *pids]), "stop")
    time.sleep(9)  # the timeout's clock is stopped
    process.send_signal(signal.SIGCONT)
    done = finish(process)
    equal((done.code, beside_cores(done.err)), (0, ""))
    equal(sorted(done.out.splitlines()), ["0| end", "1| end"])


# ---- on a terminal ----


class Terminal:
    """A run on a pseudo-terminal of 40 columns. Leaves out the line about cores, which is wider."""

    SIZE = struct.pack("HHHH", 24, 40, 0, 0)

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            for name in VARIABLES:
                os.environ.pop(name, None)
            while fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)) != self.SIZE:
                time.sleep(0.01)
            os.execv(SHOAL, [SHOAL, "run", "--bind", "none", *args])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, self.SIZE)
        self.text = ""

    def read(self, seconds=0.1):
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def expect(self, text):
        def found():
            self.read(0.05)
            return text in self.text
        try:
            wait_for(found, text)
        except AssertionError:
            raise AssertionError("%r did not come: %r" % (text, self.text))

    def write(self, text):
        os.write(self.fd, text.encode())

    def finish(self):
        end = time.monotonic() + DEADLINE_S
        while self.read() and time.monotonic() < end:
            pass
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)

    def screen(self):
        """Returns the text that a person sees at the end: \\r moves to the start of the line, ESC [ K erases to its end."""
        rows, column = [""], 0
        for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", self.text):
            row = rows[-1]
            if part == "\r":
                column = 0
            elif part == "\n":
                rows.append("")
                column = 0
            elif part == "\x1b[K":
                rows[-1] = row[:column]
            else:
                rows[-1] = row[:column] + part + row[column + len(part):]
                column += len(part)
                assert len(rows[-1]) <= 40, rows[-1]
        return rows


def terminal_shows_the_bar():
    code = ("import os,sys,time\nr=int(os.environ['RANK'])\nfor i in range(5):\n"
            " sys.stderr.write('\\r%d0%% %s' % (i,'#'*10*i)); sys.stderr.flush()\n"
            " if i==2 and r==1: print('hello',flush=True)\n time.sleep(0.1)\n"
            " while i==1 and not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
            "sys.stderr.write('\\rdone\\n')")
    with tempfile.TemporaryDirectory() as folder:
        seen = os.path.join(folder, "seen")
        terminal = Terminal("-n", "2", sys.executable, "-c", code, seen)
        terminal.expect("0| 10% ##########")  # before it is drawn over
        open(seen, "w").close()
        equal(terminal.finish(), 0)
    assert "1| 10%" not in terminal.text
    equal(sorted(terminal.screen()), ["", "0| done", "1| done", "1| hello"])


def terminal_input_reaches_rank_0():
    terminal = Terminal("-n", "2", "sh", "-c", "if [ $RANK = 0 ]; then printf 'name? '; read name; echo hello $name; fi")
    terminal.expect("0| name? ")
    terminal.write("fish\n")
    equal(terminal.finish(), 0)
    equal(terminal.screen(), ["0| name? fish", "0| hello fish", ""])


def terminal_interrupt_ends_all():
    terminal = Terminal("-n", "2", "sh", "-c", "echo up; exec sleep 66")
    terminal.expect("0| up")
    terminal.expect("1| up")
    terminal.write("\x03")
    equal(terminal.finish(), 130)
    within(terminal.text, "ended by signal 2 (Interrupt)")


# ---- the command line ----


def wrong_arguments_get_one_line():
    refused(run("-n", "0", "true"), 2, "-n takes a number from 1", "'0'")
    refused(run("-n", "x", "true"), 2, "'x'")
    refused(run("-n", "5000", "true"), 2, "'5000'")
    refused(run("-n", "2", "--bind", "slices", "true"), 2, "--bind takes one of slice, core, none, not 'slices'")
    refused(run("-n"), 2, "-n wants a value")
    refused(run(), 2, "no program given")
    refused(run("-n", "2"), 2, "no program given")
    refused(run("--timeout", "soon", "true"), 2, "'soon'")
    refused(run("--timeout", "0", "true"), 2, "more than 0")
    refused(run("--no-prefix=1", "true"), 2, "takes no value")
    refused(run("--zebra", "true"), 2, "there is no option '--zebra'")


def mistyped_words_get_a_suggestion():
    refused(run("--no-prefx", "true"), 2, "did you mean --no-prefix?")
    refused(run("--gracee", "3", "true"), 2, "did you mean --grace?")
    refused(command("rnu", "-n", "2"), 2, "did you mean 'shoal run'?")
    refused(command("info", "--setings"), 2, "did you mean --settings?")
    refused(command("explain", "allreduc"), 2, "did you mean allreduce?")
    refused(run("-np", "2", "true"), 2, "there is no option '-np'; did you mean -n?")
    refused(command("ru", "-n", "2"), 2, "did you mean 'shoal run'?")


def other_words_get_none():
    """At most a third of the letters may be wrong."""
    for words in (["run", "--frob"], ["run", "-x", "2"], ["bench", "--frob"], ["trace", "--frob"], ["trace", "-x"], ["sailor"],
                  ["explain", "sort"], ["bench", "--most", "8"]):
        done = command(*words)
        refused(done, 2, words[-1] if words[-1][0] == "-" or len(words) == 1 else words[1])
        assert "did you mean" not in done.err, done.err


def command(*args):
    done = subprocess.run([SHOAL, *args], capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    return Done(done.returncode, done.stdout, done.stderr, 0)


def help_teaches():
    for words in (["--help"], ["run", "--help"], ["info", "--help"], ["explain", "--help"], ["help", "run"]):
        done = command(*words)
        equal((done.code, done.err), (0, ""))
        within(done.out, "Usage")
    for part in ("Examples:", "MASTER_PORT", "124", "--grace"):
        within(command("run", "--help").out, part)
    equal(command().code, 2)
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", command("--version").out)


def info_prints_the_tables():
    for words in ([], ["--topology"], ["--settings"], ["--algorithms"], ["--settings", "--algorithms"]):
        done = command("info", *words)
        equal((done.code, done.err), (0, ""))
        assert done.out.strip(), words
    assert command("info").out.startswith("shoal "), command("info").out
    refused(command("info", "extra"), 2, "'extra'")


def explain_answers_and_refuses():
    for words in (["--ranks", "4", "--bytes", "3MiB"], ["--memory", "shared", "--in-place", "--type", "bf16", "--rank", "1"]):
        done = command("explain", "allreduce", *words)
        equal((done.code, done.err), (0, ""))
        assert done.out.strip(), words
    refused(command("explain", "allreduce", "--bytes", "7"), 2, "not a whole number of float32")
    refused(command("explain", "allreduce", "--rank", "2"), 2, "rank 2 is out of range: there are 2 ranks")
    refused(command("explain", "allreduce", "--memory", "fast"), 2, "plain, shared or gpu")
    refused(command("explain", "allreduce", "--type", "f8"), 2, "float32")
    refused(command("explain"), 2, "which collective?")


def full_disk_is_reported():
    if not os.path.exists("/dev/full"):
        raise Skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([SHOAL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    equal(done.returncode, 1)
    within(done.stderr, "cannot write")


def idle_launcher_uses_no_time():
    process = start("-n", "2", "sleep", "54")

    def ticks():
        with open("/proc/%d/stat" % process.pid) as stat:
            fields = stat.read().rpartition(")")[2].split()
        with open("/proc/%d/status" % process.pid) as status:
            switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read(), re.M).group(1)
        return int(fields[11]) + int(fields[12]), int(switches)
    def is_idle():
        """The process may be busy at the start. One that polls now and then is never idle."""
        before = ticks()
        time.sleep(0.7)
        return ticks() == before
    wait_for(is_idle, "time without a wake-up")
    process.send_signal(signal.SIGTERM)
    equal(finish(process).code, 143)


TESTS = [
    environment_of_workers, environment_wins_over_inherited, words_of_an_outer_launcher_are_not_handed_on, secret_is_drawn_once_per_run,
    port_is_free_and_differs_between_runs, default_count_is_cores, streams_stay_apart, prefix_can_be_left_out,
    arguments_reach_the_program, partial_last_line_is_flushed, empty_lines_and_bytes_are_kept,
    carriage_returns_are_kept_in_files, long_lines_stay_whole, slow_reader_gets_everything,
    closed_reader_ends_the_run, output_files_hold_each_rank, standard_input_goes_to_rank_0,
    workers_have_cores_of_their_own, one_worker_keeps_all_cores, mask_of_the_caller_counts,
    more_workers_than_cores_are_not_bound, quota_of_a_container_counts, waits_spin_where_each_worker_has_a_core, many_workers,
    few_descriptors_are_enough, too_few_descriptors_are_named, launcher_leaves_descriptors_closed,
    first_failure_is_reported, killed_worker_is_reported, limits_behind_a_signal_are_told, lack_of_memory_is_told, cause_that_ranks_share_is_named, cause_is_shown_once,
    absent_rank_is_named, first_death_wins_at_once, success_beside_others_is_fine,
    early_leavers_are_in_the_report, survivors_are_ended, stubborn_survivors_are_killed, stopped_survivors_are_ended,
    children_of_workers_are_ended,
    left_children_do_not_hold_the_run, missing_program_is_named, signals_are_forwarded, signal_reaches_children,
    second_interrupt_kills, program_behind_a_shell_has_its_grace, second_interrupt_kills_behind_a_shell,
    given_grace_counts_after_a_failure, grace_passes_once, ends_are_told_at_once, keep_going_lets_the_others_continue,
    keep_going_fails_if_no_worker_succeeds, keep_going_ends_by_a_signal, events_report_a_failure_and_the_restart, events_tell_why_nothing_began,
    events_report_an_end_before_the_start, events_are_not_for_workers, events_need_an_open_descriptor, events_that_are_not_read_hold_nobody, stuck_reader_does_not_hold_signals, timeout_ends_the_run,
    timeout_that_passes_during_a_failure_ends_the_restart, killed_launcher_takes_workers_along, ignored_signals_stay_ignored, workers_get_default_signals,
    tests_hold_under_nohup,
    stop_and_continue, terminal_shows_the_bar, terminal_input_reaches_rank_0, terminal_interrupt_ends_all,
    wrong_arguments_get_one_line, mistyped_words_get_a_suggestion, other_words_get_none, help_teaches, info_prints_the_tables,
    explain_answers_and_refuses, full_disk_is_reported, idle_launcher_uses_no_time,
]


def verdict(number, test):
    name = "run_" + test.__name__
    begin = time.monotonic()
    try:
        test()
    except Skip as reason:
        print("ok %d - %s # SKIP %s" % (number, name, reason), flush=True)
        return True
    except Exception as fault:
        print("not ok %d - %s" % (number, name))
        print("".join("# %s\n" % line for line in ("%s: %s" % (type(fault).__name__, fault)).splitlines()), end="", flush=True)
        return False
    print("ok %d - %s (%.1f s)" % (number, name, time.monotonic() - begin), flush=True)
    return True


def signals_default():
    """`shoal run` rightly keeps the signals ignored or blocked that this program's launcher has ignored or blocked."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):  # Python itself ignores these two
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main():
    global SHOAL
    signals_default()
    if not shutil.which(SHOAL):
        print("1..0 # SKIP SHOAL_COMMAND does not name the command shoal")
        return 0
    SHOAL = os.path.abspath(shutil.which(SHOAL))
    chosen = [test for test in TESTS if len(sys.argv) < 2 or test.__name__ in sys.argv[1:]]
    print("1..%d" % len(chosen), flush=True)
    return 0 if all([verdict(i + 1, test) for i, test in enumerate(chosen)]) else 1


if __name__ == "__main__":
    sys.exit(main())
