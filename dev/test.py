#!/usr/bin/env python3
"""Builds Shoal in several ways and runs every test. The last line reads "N passed, N failed, N skipped".

  dev/test.py                    everything
  dev/test.py --part main        most tests of the plain build, and the main ones of the Python front-ends: ten minutes on two cores
  dev/test.py --part rest        everything else
  dev/test.py plain asan         only these builds (plain, python, asan, aarch64, tsan)
  dev/test.py -k engine          only tests whose name contains "engine"
  dev/test.py -v                 print the output of every test
  dev/test.py --profile          print at the end where the time went
  dev/test.py --install COMMAND  run a command meanwhile; the tests of the build "python" wait for it
"""
import argparse
import collections
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

from interpreter import interpreter

TOP = pathlib.Path(__file__).resolve().parent.parent

# Stack traces of the sanitizers need lines but no variables, which would take a third of the compiler's time. Half of the
# rest is optimization; the lowest level that keeps variables in registers checks just as much. clang compiles both builds,
# because its instrumented programs run faster than gcc's. Its warnings are errors, so two compilers check the code.
SANITIZED = ["-Db_lundef=false", "-Doptimization=1", "-Ddebug=true", "-Dc_args=-g1"]
# name -> (directory, compiler, meson options). tests/meson.build defines which tests run in a build. "python" is the part
# of the plain build that runs separately. Builds are made in this order: the last has few tests, because everything waits
# for their end.
BUILDS = {
    "plain": ("build", "gcc", []),
    "python": ("build", "gcc", []),
    "asan": ("build-asan", "clang", ["-Db_sanitize=address,undefined", *SANITIZED]),
    "aarch64": ("build-aarch64", "aarch64-linux-gnu-gcc",
                ["--cross-file=build-aarch64/sysroot/place.ini", "--cross-file=dev/cross/aarch64.ini"]),
    "tsan": ("build-tsan", "clang", ["-Db_sanitize=thread", *SANITIZED]),
}
# Libraries for building tests. If one is missing when a build is configured, meson leaves its tests out, because `make
# build` does not need it.
NEEDED = {"cmocka": "libcmocka-dev", "openblas": "libopenblas-dev", "zlib": "zlib1g-dev"}
NOT_NEEDED = {"aarch64": {"openblas", "zlib"}}  # the tests of the example do not run there
SYSROOTS = {"aarch64": "build-aarch64/sysroot"}  # builds for another processor: the folder that runs their programs under qemu
MAIN_BUILDS = ("plain", "python")  # of the part "main": the first without REST_SUITES, and the suite "main" of the second
REST_SUITES = {"docs", "example", "install", "lanes", "layouts"}
ALL = {"plain"}  # compiled completely; of the other builds only the targets that their tests need (`depends`)
# Tests that are not `is_parallel` run one at a time. LANES_BESIDE of those that are run alongside, and LANES_WAITING more
# of the suite "waits", which hardly use a processor, as --profile shows.
LANES_BESIDE, LANES_WAITING = 1, 3
# Further lanes. Each starts a test after IDLE_CORES cores were idle for IDLE_S seconds, so that it slows nothing down.
LANES_IDLE, IDLE_S, IDLE_CORES = 3, 2, 0.5
FAILURE_LINES = 60  # of a failed case, repeated at the end


# Runs a command with a smaller share of the processor than tests get. The share is never zero, because the run waits for
# the command: at idle priority it would never run while other processes are busy. The kernel may group processes by
# session; then only the nice value of the group counts between sessions (sched(7)).
STEPPING_BACK = ["sh", "-c", 'echo 5 2>/dev/null >/proc/self/autogroup; exec nice -n 5 "$@"', "sh"]
BUILDING = set()  # process IDs, each the leader of its group


class Count:
    passed = failed = skipped = 0

    def __init__(self):
        self.failures = []
        self.spent = []  # (seconds, CPU seconds, name) of each build and test

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def configure(name):
    """Configures a build folder if it is new, has other options, or lacks dependencies of tests, which may have been
    installed since. Returns the dependencies that are still missing."""
    directory, compiler, options = BUILDS[name]
    path = TOP / directory

    def setup(*words):
        subprocess.run(["meson", "setup", *words, str(path), str(TOP), *options], check=True, stdout=subprocess.DEVNULL, cwd=TOP,
                       env={**os.environ, "CC": compiler})

    if not (path / "build.ninja").exists():
        setup()
    elif not has_options(path, options):  # `meson setup` does not change some of them, such as b_sanitize
        subprocess.run(["meson", "configure", str(path), *defined(options)], check=True, stdout=subprocess.DEVNULL, cwd=TOP)
    elif missing(name):
        setup("--reconfigure")
    # Meson's lists of tests and targets date from its last run, so a test added since would not be built.
    subprocess.run(["ninja", "-C", str(path), "--quiet", "build.ninja"], check=True, stdout=subprocess.DEVNULL)
    return missing(name)


def defined(options):
    return [option for option in options if option.startswith("-D")]


def has_options(path, options):
    """Returns true if a build folder was configured with these meson options. It may date from before a change of BUILDS."""
    had = {one["name"]: one["value"] for one in json.loads((path / "meson-info/intro-buildoptions.json").read_text())}

    def text(value):
        return ",".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
    wanted = dict(option[2:].split("=", 1) for option in defined(options))
    return all(name in had and text(had[name]) == value for name, value in wanted.items())


def missing(name):
    found = json.loads((TOP / BUILDS[name][0] / "meson-info/intro-dependencies.json").read_text())
    return set(NEEDED) - NOT_NEEDED.get(name, set()) - {one["name"] for one in found}


def is_incomplete(name):
    """Configures a build. Returns true, and prints the missing dependencies, if tests would be left out silently."""
    lacking = sorted(configure(name))
    if lacking:
        print(f"build {name}: meson finds no {', '.join(lacking)}, and tests would be left out; "
              f"install {' '.join(NEEDED[one] for one in lacking)} (dev/deps.sh build test)")
    return bool(lacking)


def why_impossible(name):
    """Returns why this machine cannot make a build, or None if it can. Makes the sysroot."""
    compiler = BUILDS[name][1]
    if name in SYSROOTS and os.uname().machine == name:
        return "this machine is no other: the plain build runs here"
    if not shutil.which(compiler):
        return f"{compiler} is not installed (dev/deps.sh)"
    if name in SYSROOTS:
        made = subprocess.run([TOP / "dev/cross/sysroot.sh", TOP / SYSROOTS[name]], capture_output=True, text=True)
        if made.returncode:
            return (made.stderr.strip().splitlines() or ["dev/cross/sysroot.sh failed"])[-1]
    return None


def build(name, is_beside):
    """Returns (is_built, seconds, CPU seconds). While tests run, the build gets a smaller share of the CPU."""
    if is_incomplete(name):
        return False, 0, 0
    start = time.time()
    process = subprocess.Popen([*(STEPPING_BACK if is_beside else []), "ninja", "-C", str(TOP / BUILDS[name][0]), "--quiet",
                                *targets_of(name)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    BUILDING.add(process.pid)
    output = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    BUILDING.discard(process.pid)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that its destructor does not wait for it
    print(f"# build {name}: {time.time() - start:.0f} s{' beside tests' if is_beside else ''}", flush=True)
    if process.returncode:
        print(output, flush=True)
    return process.returncode == 0, time.time() - start, usage.ru_utime + usage.ru_stime


def why_configured_again(name):
    """Returns why ninja would configure the build folder again, or None. That renews files which running tests use."""
    told = subprocess.run(["ninja", "-C", str(TOP / BUILDS[name][0]), "-n", "-d", "explain", "build.ninja"], capture_output=True, text=True)
    return None if "no work to do" in told.stdout + told.stderr else (told.stdout + told.stderr).strip()


def introspected(name, what):
    listing = subprocess.run(["meson", "introspect", f"--{what}", str(TOP / BUILDS[name][0])], check=True, capture_output=True, text=True)
    return json.loads(listing.stdout)


def targets_of(name):
    """Returns the ninja targets that the tests of this build need; an empty list means all targets."""
    if name in ALL:
        return []
    needed = {target for test in tests_of(name, "") for target in test["depends"]}
    return [os.path.relpath(file, TOP / BUILDS[name][0]) for target in introspected(name, "targets") if target["id"] in needed
            for file in target["filename"]]


def setup_of(name):
    """Returns a build's settings in tests/meson.build: the suites that it leaves out, and the environment variables."""
    lines = (TOP / BUILDS[name][0] / "tests/setup").read_text().splitlines()
    words = dict(line.partition(" ")[::2] for line in lines)
    return set(words.pop("left_out").split()), words


def suites_of(test):
    return {suite.split(":")[-1] for suite in test["suite"]}


def tests_of(name, pattern):
    directory = TOP / BUILDS[name][0]
    left_out, variables = setup_of(name)
    for test in introspected(name, "tests"):
        suites = suites_of(test)
        if suites & left_out or ("python" in suites) != (name == "python") or pattern not in test["name"]:
            continue
        if name in SYSROOTS and pathlib.Path(test["cmd"][0]).is_relative_to(directory):
            test["cmd"].insert(0, str(TOP / SYSROOTS[name] / "run"))
        test["env"] = {**variables, **test["env"]}
        yield test


def is_in_part(name, test, part):
    """Returns true if the test is in the part: "main", "rest", or None for all."""
    suites = suites_of(test)
    is_main = name == "plain" and not suites & REST_SUITES or name == "python" and "main" in suites
    return part is None or is_main == (part == "main")


def run(test, directory):
    """Runs one program in its own process group and leaves none of it behind. Returns (exit code or None, output, CPU
    seconds of the program and of all processes that it waited for)."""
    process = subprocess.Popen(test["cmd"], cwd=test.get("workdir") or directory, env={**os.environ, **test["env"]}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    output = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.read()))
    reader.start()
    ended = wait_for(process, reader, test["timeout"] or 600)
    if not ended:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(0.2)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that its destructor does not wait for it
    reader.join()
    process.stdout.close()
    return process.returncode if ended else None, output[0].decode(errors="replace"), usage.ru_utime + usage.ru_stime


def wait_for(process, reader, seconds):
    """Returns true if the process ended and closed its output in time. Does not reap it, so that its usage can still be
    read."""
    deadline = time.monotonic() + seconds
    reader.join(seconds)
    end = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([end], [], [], max(0, deadline - time.monotonic()))
    finally:
        os.close(end)
    return bool(ready) and not reader.is_alive()


def count_cases(code, output):
    """Counts TAP lines. A program with a bad exit code counts as one more failure, one without TAP as one case."""
    count, skips, has_cases = Count(), [], False
    # cmocka cannot print a reason: our programs print "skipped: REASON" themselves, in the order of the cases.
    reasons = re.findall(r"^skipped: (.*)", output, re.M)
    for verdict, rest in re.findall(r"^(not ok|ok)\b(.*)", output, re.M):
        has_cases = True
        skip = re.search(r"#\s*skip\s*(.*)", rest, re.I)
        if skip:
            count.skipped += 1
            name = rest[:skip.start()].strip(" -0123456789")
            skips.append(f"{name}: {skip.group(1)}" if name else f"{skip.group(1)}: {reasons.pop(0) if reasons else 'no reason given'}")
        elif verdict == "not ok":
            count.failed += 1
        else:
            count.passed += 1
    is_skipped = re.search(r"^1\.\.0\s*#\s*skip\s*(.*)", output, re.M | re.I)
    if is_skipped or code == 77:
        count.skipped += 1
        skips.append(is_skipped.group(1) if is_skipped else output.strip().splitlines()[-1] if output.strip() else "no reason given")
    elif not has_cases and code == 0:
        count.passed += 1
    if code not in (0, 77) and not count.failed:
        count.failed += 1
    return count, skips


def failures_of(output):
    """Returns each failed case with the lines around its result, because some programs print the reason first. Without such
    a line, returns the end of the output."""
    lines = output.strip().splitlines()
    verdicts = [number for number, line in enumerate(lines) if re.match(r"(not )?ok\b", line)]
    failed = [number for number in verdicts if lines[number].startswith("not")]
    if not failed:
        return ["\n    ".join(["no case failed; its last lines:", *lines[-FAILURE_LINES:]])]
    told = []
    for number in failed:
        before = max((other for other in verdicts if other < number), default=-1)
        after = min((other for other in verdicts if other > number), default=len(lines))
        told.append("\n    ".join([lines[number], *lines[before + 1:number][:FAILURE_LINES], *lines[number + 1:after][:FAILURE_LINES]]))
    return told


def idle_ticks():
    """Returns the idle time since boot of the cores that this process may use (proc(5): the fourth and fifth numbers of a
    core, idle and waiting for I/O)."""
    rows = (line.split() for line in pathlib.Path("/proc/stat").read_text().splitlines())
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    return sum(int(row[4]) + int(row[5]) for row in rows if row[0] in cores)


def idle_cores(seconds):
    """Measures for some seconds how many cores are idle."""
    ticks, start = idle_ticks(), time.monotonic()
    time.sleep(seconds)
    return (idle_ticks() - ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def run_timed(test, directory):
    start = time.time()
    return *run(test, directory), time.time() - start


def report(name, test, result, options, total):
    code, output, cpu, seconds = result
    total.spent.append((seconds, cpu, f"{name}/{test['name']}"))
    count, skips = count_cases(code, output)
    total.add(count)
    verdict = "FAILED" if count.failed else "ok"
    ending = f" (no end within {test['timeout']} s)" if code is None else f" (exit code {code})" if code else ""
    reason = ending if count.failed else ""
    print(f"{verdict:7}{name}/{test['name']}: {count.passed} passed, {count.failed} failed, {count.skipped} skipped, "
          f"{seconds:.1f} s, CPU {cpu:.1f} s{reason}", flush=True)
    for skip in skips:
        print(f"       skipped: {skip}")
    if count.failed:  # failures first, because a truncated log may lack the rest
        failures = failures_of(output)
        total.failures += [f"FAILED {name}/{test['name']}{ending}: {failure}" for failure in failures]
        print("       " + "\n       ".join(failures), flush=True)
    if count.failed or options.verbose:
        print("    | " + "\n    | ".join(output.strip().splitlines()[-200:]), flush=True)


class Plan:
    """The tests to run, in the order of the builds: one after the other, with parallel ones in other lanes. Meanwhile the
    next build is made."""

    def __init__(self, options, total):
        self.options, self.total = options, total
        self.alone, self.beside, self.waiting = collections.deque(), collections.deque(), collections.deque()
        names = list(self.options.builds or (MAIN_BUILDS if self.options.part == "main" else BUILDS))
        late = [name for name in names if name == "python" and self.options.install]
        self.makers = [[name for name in names if name not in late], *([late] if late else [])]  # each list has its own lane
        self.making = len(self.makers)
        self.is_complete = False  # no more tests will be added
        self.changed = threading.Condition()
        self.first_is_made = threading.Event()
        self.alone_runs = False  # a test that uses more than a core, or measures time
        self.looking = threading.Lock()  # at idle cores: by one lane at a time, so that each sees what the previous one started

    def make_builds(self, names):
        try:
            if names != self.makers[0]:
                self.install()
            for number, name in enumerate(names):
                self.make_build(name, is_beside=number > 0 or names != self.makers[0])
                self.first_is_made.set()
        finally:
            self.first_is_made.set()
            with self.changed:
                self.making -= 1
                self.is_complete |= not self.making
                self.changed.notify_all()

    def install(self):
        """Runs the command that installs what the tests of the next build use. That build uses the folder of the first
        build, so waits until the first one is made."""
        start = time.time()
        process = subprocess.Popen([*STEPPING_BACK, "sh", "-c", self.options.install], stdin=subprocess.DEVNULL, cwd=TOP, start_new_session=True)
        BUILDING.add(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        BUILDING.discard(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)  # so that its destructor does not wait for it
        print(f"# installed: {time.time() - start:.0f} s beside tests", flush=True)
        with self.changed:
            self.total.spent.append((time.time() - start, usage.ru_utime + usage.ru_stime, "install"))
        if self.makers[0]:
            self.first_is_made.wait()

    def make_build(self, name, is_beside):
        reason = why_impossible(name)
        if reason:
            print(f"       skipped: build {name}: {reason}")
        again = why_configured_again(name) if name == "python" and self.makers[0][:1] == ["plain"] else None
        if again:
            print(f"build {name}: the folder's tests run already, and would see half-written files:\n{again}")
        is_built, seconds, cpu = (False, 0, 0) if reason or again else build(name, is_beside)
        tests = [test for test in tests_of(name, self.options.k) if is_in_part(name, test, self.options.part)] if is_built else []
        tests.sort(key=lambda test: -test["priority"])
        with self.changed:
            self.total.spent.append((seconds, cpu, f"build {name}"))
            self.total.skipped += bool(reason)
            if not is_built and not reason:
                self.total.failures.append(f"FAILED build {name}")
                self.total.failed += 1
            for test in tests:  # tests that wait longest have the highest priority: started last, they would delay the end
                self.queue_for(test).append((name, test))
            self.changed.notify_all()

    def queue_for(self, test):
        return self.waiting if "waits" in suites_of(test) else self.beside if test["is_parallel"] else self.alone

    def take(self, *queues):
        """Returns the next test of the first queue that has one, or None when none will come."""
        with self.changed:
            while not any(queues) and not self.is_complete:
                self.changed.wait()
            return next((queue.popleft() for queue in queues if queue), None)

    def run_one(self, name, test):
        result = run_timed(test, TOP / BUILDS[name][0])
        with self.changed:
            report(name, test, result, self.options, self.total)

    def run_all(self, *queues):
        for name, test in iter(lambda: self.take(*queues), None):
            if self.queue_for(test) is self.alone:
                self.alone_runs = True
            self.run_one(name, test)
            if self.queue_for(test) is self.alone:
                self.alone_runs = False

    def run_while_idle(self, queue):
        """A lane that waits for idle cores before each test. It starts none while a test must run alone."""
        while queue or not self.is_complete:
            with self.looking:
                if idle_cores(IDLE_S) < IDLE_CORES or self.alone_runs:
                    continue
                with self.changed:
                    one = queue.popleft() if queue else None
            if one:
                self.run_one(*one)

    def run(self):
        queues = self.alone, self.beside, self.waiting
        with concurrent.futures.ThreadPoolExecutor(self.making + LANES_BESIDE + LANES_WAITING + LANES_IDLE) as pool:
            meanwhile = [*(pool.submit(self.make_builds, names) for names in self.makers),
                         *(pool.submit(self.run_all, *queues[1:]) for _ in range(LANES_BESIDE)),
                         *(pool.submit(self.run_all, self.waiting) for _ in range(LANES_WAITING)),
                         *(pool.submit(self.run_while_idle, self.beside) for _ in range(LANES_IDLE))]
            try:
                self.run_all(*queues)
            finally:  # after Ctrl-C nothing else starts
                with self.changed:
                    for queue in queues:
                        queue.clear()
                    is_over, self.is_complete = self.is_complete, True
                    self.changed.notify_all()
                for pid in () if is_over else BUILDING:
                    os.killpg(pid, signal.SIGTERM)
            for one in meanwhile:
                one.result()


def take_interpreter():
    """Makes `python3` the interpreter for virtual environments from here on."""
    if interpreter() == "python3":
        return
    link = TOP / "build/interpreter/python3"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(interpreter())
    os.environ["PATH"] = f"{link.parent}:{os.environ['PATH']}"


def hide_kernel_symbols():
    """Mounts an empty file over /proc/kallsyms, in a new mount namespace (unshare(2), mount(8)). Each process that loads
    libfabric 1.17 reads that file twice, to look for InfiniBand drivers: 90 ms, a thirtieth of the time of all tests.
    Without root nothing changes."""
    CLONE_NEWNS = 0x20000
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["sh", "-c", "mount --make-rprivate / && mount --bind /dev/null /proc/kallsyms"], stderr=subprocess.DEVNULL)


def profile(total):
    """Prints where the time went, longest first. A test whose CPU seconds are far below its seconds can run alongside
    others."""
    print(f"# {'seconds':>8} {'CPU s':>8} {'cores':>6}  of {sum(seconds for seconds, _, _ in total.spent):.0f} s one after the other")
    for seconds, cpu, what in sorted(total.spent, reverse=True):
        print(f"# {seconds:8.1f} {cpu:8.1f} {cpu / max(seconds, 0.1):6.2f}  {what}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="BUILD", help=f"{', '.join(BUILDS)}; all if none is named")
    parser.add_argument("--part", choices=("main", "rest"), help="half of the tests; see above")
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose name contains TEXT")
    parser.add_argument("--install", metavar="COMMAND", help="a command to run meanwhile, for which the tests of python wait")
    parser.add_argument("--profile", action="store_true", help="at the end: seconds, CPU seconds and cores of every build and test")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the output of every test")
    options = parser.parse_args()
    for name in options.builds:
        if name not in BUILDS:
            parser.error(f"there is no build \"{name}\"; there are {', '.join(BUILDS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started this behind it, and then in all
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)             # that is tested
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles its imports: four seconds for SageMaker's SDK
    take_interpreter()
    hide_kernel_symbols()
    total = Count()
    Plan(options, total).run()
    if options.profile:
        profile(total)
    for failure in total.failures:  # again, at the end of the output
        print(failure)
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
