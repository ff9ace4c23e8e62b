#!/usr/bin/env python3
"""Builds Shoal in several ways and runs every test. The last line reads "N passed, N failed, N skipped".

  dev/test.py                    everything
  dev/test.py plain asan         only these builds (plain, clang, asan, tsan)
  dev/test.py -k engine          only tests whose name contains "engine"
  dev/test.py -v                 print the output of every test
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent

# name -> (directory, compiler, meson options, suites that run there)
BUILDS = {
    "plain": ("build", "gcc", [], None),
    "clang": ("build-clang", "clang", [], {"unit", "sim", "contract"}),
    "asan": ("build-asan", "gcc", ["-Db_sanitize=address,undefined", "-Dbuildtype=debugoptimized"],
             {"unit", "sim", "contract", "multi", "fault", "fuzz"}),
    "tsan": ("build-tsan", "gcc", ["-Db_sanitize=thread", "-Dbuildtype=debugoptimized"], {"threads", "contract"}),
}
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


class Count:
    passed = failed = skipped = 0

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def build(name):
    directory, compiler, options, _ = BUILDS[name]
    path = TOP / directory
    if not (path / "build.ninja").exists():
        subprocess.run(["meson", "setup", str(path), str(TOP), *options], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "CC": compiler})
    start = time.time()
    result = subprocess.run(["ninja", "-C", str(path), "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"# build {name}: {time.time() - start:.0f} s", flush=True)
    if result.returncode:
        print(result.stdout)
    return result.returncode == 0


def tests_of(name, pattern):
    directory, _, _, suites = BUILDS[name]
    listing = subprocess.run(["meson", "introspect", "--tests", str(TOP / directory)], check=True, capture_output=True, text=True)
    for test in json.loads(listing.stdout):
        labels = {suite.split(":")[-1] for suite in test["suite"]}
        if (suites is None or labels & suites) and pattern in test["name"]:
            yield test


def run(test, directory):
    """Runs one program in its own process group, so that nothing is left of it; returns (exit code or None, output)."""
    environment = {**os.environ, **SANITIZERS, **test["env"], "CMOCKA_MESSAGE_OUTPUT": "TAP"}
    process = subprocess.Popen(test["cmd"], cwd=test.get("workdir") or directory, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=test["timeout"] or 600)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(0.2)
        code = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        output, _ = process.communicate()
    return code, output.decode(errors="replace")


def count_cases(code, output):
    """Counts TAP lines; a program that ends badly counts as one more failure, one without TAP as one case."""
    count, skips, has_cases = Count(), [], False
    # cmocka has no place for a reason: our programs print "skipped: REASON" themselves, in the order of the cases.
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
    if code == 77:
        count.skipped += 1
        skips.append(output.strip().splitlines()[-1] if output.strip() else "no reason given")
    elif not has_cases and code == 0:
        count.passed += 1
    elif code != 0 and not count.failed:
        count.failed += 1
    return count, skips


def run_build(name, options, total):
    for test in tests_of(name, options.k):
        start = time.time()
        code, output = run(test, TOP / BUILDS[name][0])
        count, skips = count_cases(code, output)
        total.add(count)
        verdict = "FAILED" if count.failed else "ok"
        reason = "" if code in (0, 77) else f" (no end within {test['timeout']} s)" if code is None else f" (exit code {code})"
        print(f"{verdict:7}{name}/{test['name']}: {count.passed} passed, {count.failed} failed, {count.skipped} skipped, "
              f"{time.time() - start:.1f} s{reason}", flush=True)
        for skip in skips:
            print(f"       skipped: {skip}")
        if count.failed or options.verbose:
            print("    | " + "\n    | ".join(output.strip().splitlines()[-200:]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="BUILD", help="plain, clang, asan, tsan; all if none is named")
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose name contains TEXT")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the output of every test")
    options = parser.parse_args()
    for name in options.builds:
        if name not in BUILDS:
            parser.error(f"there is no build \"{name}\"; there are {', '.join(BUILDS)}")
    total = Count()
    for name in options.builds or BUILDS:
        if BUILDS[name][1] == "clang" and not shutil.which("clang"):
            print(f"       skipped: build {name}: clang is not installed")
            total.skipped += 1
        elif build(name):
            run_build(name, options, total)
        else:
            print(f"FAILED build {name}")
            total.failed += 1
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
