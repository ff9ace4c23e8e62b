#!/usr/bin/env python3
"""`shoal bench`, `shoal explain` and `shoal info` as a user meets them. (`shoal run` has test_run.py.)"""
import json
import os
import shutil

from tap import Skip, call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
FIELDS = ["collective", "ranks", "hosts", "bytes", "dtype", "memory", "in_place", "inputs", "algorithm", "iterations", "median_us",
          "p99_us", "algbw_gb_s", "busbw_gb_s", "exchange_ns", "cpu_us", "errors"]


def bench(*words, prefix=(), timeout=120, env=None):
    code, out, err = call(*prefix, SHOAL, "bench", *words, "--format", "json", timeout=timeout, env=env)
    expect(code == 0, out, err)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def refused(*words, about):
    code, out, err = call(SHOAL, *words)
    expect(code == 2, f"exit code {code}", out, err)
    lines = (out + err).strip().splitlines()
    expect(len(lines) == 1 and about in lines[0], out, err)


def bench_prints_one_object_per_size_with_the_agreed_fields():
    rows = bench("allreduce", "-n", "2", "--min", "8", "--max", "512", "--factor", "8", "--iterations", "20")
    expect([row["bytes"] for row in rows] == [8, 64, 512], rows)
    expect(all(list(row)[:len(FIELDS)] == FIELDS for row in rows), rows[0])


def bench_checks_results_of_every_kind():
    for words in (["--memory", "plain"], ["--memory", "shared"], ["--memory", "shared", "--in-place"], ["--dtype", "bf16"],
                  ["--dtype", "i64", "--op", "max"], ["--op", "avg", "--dtype", "f64"], ["--offset", "4"]):
        for ranks in ("2", "3"):
            rows = bench("allreduce", "-n", ranks, "--min", "8", "--max", "2M", "--factor", "512", "--iterations", "5", "--check", *words)
            expect(all(row["errors"] == 0 for row in rows), words, rows)


def bench_names_the_algorithm_that_ran():
    (small,) = bench("allreduce", "-n", "2", "--min", "8", "--max", "8", "--iterations", "5")
    (staged,) = bench("allreduce", "-n", "2", "--min", "1M", "--max", "1M", "--iterations", "5")
    (shared,) = bench("allreduce", "-n", "2", "--min", "1M", "--max", "1M", "--iterations", "5", "--memory", "shared", "--in-place")
    expect([r["algorithm"] for r in (small, staged, shared)] == ["direct", "owners-staged", "owners-shared"], small, staged, shared)


def bench_runs_under_mpirun():
    if not shutil.which("mpirun.openmpi"):
        raise Skip("no Open MPI here")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    rows = bench("allreduce", "--min", "8", "--max", "64K", "--factor", "8192", "--iterations", "5", "--check",
                 prefix=["mpirun.openmpi", *root, "--oversubscribe", "-n", "2"],
                 env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})  # libpmix leaks some bytes
    expect([row["ranks"] for row in rows] == [2, 2] and not any(row["errors"] for row in rows), rows)


def bench_refuses_what_makes_no_sense():
    refused("bench", "allreduce", "-n", "0", about="0")
    refused("bench", "allreduse", about="allreduse")
    refused("bench", "allreduce", "--mim", "8", about="--mim")
    refused("bench", "allreduce", "--min", "x", about="x")


def explain_prints_the_plan():
    code, out, err = call(SHOAL, "explain", "allreduce", "--ranks", "4", "--bytes", "3MiB", "--rank", "0")
    expect(code == 0, out, err)
    for word in ("owners-staged", "because", "reduce", "wait", "signal", "out[0]", "win"):
        expect(word in out, word, out)


def explain_shows_zero_copy_for_shared_memory():
    code, out, err = call(SHOAL, "explain", "allreduce", "--ranks", "2", "--bytes", "3MiB", "--memory", "shared")
    expect(code == 0 and "owners-shared" in out and "win[" not in out, out, err)


def explain_refuses_what_makes_no_sense():
    refused("explain", "allreduce", "--ranks", "0", "--bytes", "8", about="0")
    refused("explain", "allreduce", "--ranks", "2", "--bytes", "7", about="7")
    refused("explain", "allgathr", "--ranks", "2", "--bytes", "8", about="allgathr")


def info_prints_settings_machine_and_algorithms():
    for option, word in (("--settings", "SHOAL_TIMEOUT_MS"), ("--topology", "kernels"), ("--algorithms", "owners-staged")):
        code, out, err = call(SHOAL, "info", option)
        expect(code == 0 and word in out, option, out, err)


def info_shows_a_setting_from_the_environment_and_hides_the_secret():
    code, out, err = call(SHOAL, "info", "--settings", env={**os.environ, "SHOAL_WARN_MS": "1234", "SHOAL_SECRET": "hush"})
    expect(code == 0 and "1234" in out and "hush" not in out, out, err)


def help_teaches():
    for words in (["--help"], ["run", "--help"], ["bench", "--help"], ["explain", "--help"], ["info", "--help"]):
        code, out, err = call(SHOAL, *words)
        expect(code == 0 and len(out.splitlines()) > 5, words, out, err)


run_cases([bench_prints_one_object_per_size_with_the_agreed_fields, bench_checks_results_of_every_kind,
           bench_names_the_algorithm_that_ran, bench_runs_under_mpirun, bench_refuses_what_makes_no_sense, explain_prints_the_plan,
           explain_shows_zero_copy_for_shared_memory, explain_refuses_what_makes_no_sense, info_prints_settings_machine_and_algorithms,
           info_shows_a_setting_from_the_environment_and_hides_the_secret, help_teaches])
