#!/usr/bin/env python3
"""`shoal bench`, `shoal explain` and `shoal info` as a user meets them. (`shoal run` has test_run.py.)"""
import json
import os
import shutil
import tempfile

from tap import Skip, call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
FIELDS = ["collective", "ranks", "hosts", "bytes", "dtype", "memory", "in_place", "inputs", "algorithm", "iterations", "median_us",
          "p99_us", "algbw_gb_s", "busbw_gb_s", "exchange_ns", "cpu_us", "errors", "op", "loop_us"]
REDUCING = ["allreduce", "reduce", "reducescatter"]
MOVING = ["broadcast", "allgather", "gather", "scatter", "alltoall"]
OPERATORS = ["sum", "avg", "max", "min", "prod", "scaled-sum"]
INTEGERS = ["int64", "int32", "int8", "uint8"]


def bench(*words, prefix=(), timeout=120, env=None):
    code, out, err = call(*prefix, SHOAL, "bench", *words, "--format", "json", timeout=timeout, env=env)
    expect(code == 0, out, err)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def refused(*words, about, env=None):
    code, out, err = call(SHOAL, *words, env=env)
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


def bench_checks_every_collective():
    for collective in REDUCING + MOVING:
        for words in (["-n", "2"], ["-n", "3", "--in-place"], ["-n", "3", "--memory", "shared"],
                      ["-n", "2", "--memory", "shared", "--in-place"]):
            rows = bench(collective, *words, "--max", "300001", "--factor", "97", "--iterations", "3", "--check")
            expect(len(rows) == 3 and all(row["errors"] == 0 for row in rows), collective, words, rows)


def bench_checks_every_type_and_operator():
    types = {"float32": OPERATORS, "float64": OPERATORS, "bfloat16": OPERATORS, "float16": OPERATORS}
    types |= {name: OPERATORS + ["bitand", "bitor", "bitxor"] for name in INTEGERS}
    for name, operators in types.items():
        for operator in operators:
            rows = bench("allreduce", "-n", "3", "--type", name, "--op", operator, "--max", "20001", "--factor", "2000",
                         "--iterations", "2", "--check")
            expect(all((row["errors"], row["dtype"], row["op"]) == (0, name, operator) for row in rows), rows)
        for collective in MOVING:
            rows = bench(collective, "-n", "2", "--type", name, "--max", "20001", "--factor", "2000", "--iterations", "2",
                         "--check")
            expect(all((row["errors"], row["op"]) == (0, None) for row in rows), rows)


def bench_counts_the_bytes_of_the_larger_operand():
    for collective in ("reduce-scatter", "all-gather", "all-to-all", "gather", "scatter"):
        rows = bench(collective, "-n", "3", "--min", "8", "--max", "512", "--factor", "8", "--iterations", "5")
        expect([row["bytes"] for row in rows] == [12, 60, 504], rows)
        expect(all(abs(row["busbw_gb_s"] - row["algbw_gb_s"] * 2 / 3) < 2e-4 for row in rows), rows)
    for collective, factor in (("all-reduce", 4 / 3), ("reduce", 1), ("broadcast", 1)):
        (row,) = bench(collective, "-n", "3", "--min", "512", "--max", "512", "--iterations", "5")
        expect(row["bytes"] == 512 and abs(row["busbw_gb_s"] - row["algbw_gb_s"] * factor) < 2e-4, row)


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
    refused("bench", "all_gather", about="did you mean allgather")
    refused("bench", "sort", about="it measures allreduce")
    refused("bench", "gather", "scatter", about="one too many")
    refused("bench", "allgather", "--op", "max", about="allgather reduces nothing")
    refused("bench", "allreduce", "--op", "bitor", about="takes integers, not float32")
    refused("bench", "allreduce", "--op", "mean", about="mean")
    refused("bench", "allreduce", "--type", "f8", about="f8")
    refused("bench", "allreduce", "--seconds", "0", about="--seconds")


def explain(*words, env=None):
    code, out, err = call(SHOAL, "explain", *words, env=env)
    expect(code == 0 and not err, words, out, err)
    return out


def explain_prints_the_plan():
    code, out, err = call(SHOAL, "explain", "allreduce", "--ranks", "4", "--bytes", "3MiB", "--rank", "0")
    expect(code == 0, out, err)
    for word in ("owners-staged", "because", "reduce", "wait", "signal", "out[0]", "win"):
        expect(word in out, word, out)


def explain_shows_zero_copy_for_shared_memory():
    code, out, err = call(SHOAL, "explain", "allreduce", "--ranks", "2", "--bytes", "3MiB", "--memory", "shared")
    expect(code == 0 and "owners-shared" in out and "win[" not in out, out, err)


def explain_knows_every_collective():
    rows = {"allreduce": "owners", "reduce": "owners", "reduce-scatter": "owners", "broadcast": "copies", "allgather": "copies",
            "gather": "copies", "scatter": "copies", "all-to-all": "copies"}
    for collective, row in rows.items():
        for memory, reach in (("plain", "staged"), ("shared", "shared")):
            out = explain(collective, "--ranks", "4", "--bytes", "3MiB", "--memory", memory)
            expect(f"algorithm {row}-{reach}, because: otherwise\n" in out and "cost: " in out, out)
            plans = [line.split(":")[0] for line in out.splitlines() if line.startswith("rank ")]
            expect(plans == [f"rank {r}" for r in range(4)], out)
        small = explain(collective, "--ranks", "4", "--bytes", "1024")
        expect("algorithm direct, because: up to SHOAL_DIRECT_BYTES" in small and "no plan: " in small, small)
        expect("algorithm alone" in explain(collective, "--ranks", "1"), collective)
    expect("algorithm direct, because: always\n" in explain("barrier"))
    expect("algorithm at-root-staged" in explain("reduce", "--ranks", "3", "--bytes", "3MiB"))


def explain_counts_the_elements_of_each_rank():
    expect("all-gather of 3145728 bytes (262144 elements for each rank) over 3 ranks" in
           explain("allgather", "--ranks", "3", "--bytes", "3MiB"))
    expect("broadcast of 3145728 bytes (786432 elements) over 3 ranks" in explain("broadcast", "--ranks", "3", "--bytes", "3MiB"))


def explain_refuses_what_makes_no_sense():
    refused("explain", "allreduce", "--ranks", "0", "--bytes", "8", about="0")
    refused("explain", "allreduce", "--ranks", "2", "--bytes", "7", about="7")
    refused("explain", "allgathr", "--ranks", "2", "--bytes", "8", about="allgathr")
    refused("explain", about="which collective?")
    refused("explain", "reduce", "gather", about="one collective too many")
    refused("explain", "sort", about="there is no collective 'sort'")
    refused("explain", "gather", "--ranks", "1025", about="1025")
    refused("explain", "gather", "--ranks", "2", "--rank", "2", about="no rank 2 among 2 ranks")
    refused("explain", "gather", "--memory", "soft", about="plain or shared")
    refused("explain", "gather", "--dtype", "f8", about="f8")
    refused("explain", "gather", "--bytes", "12Q", about="12Q")
    refused("explain", "gather", "--hosts", "2", about="one host")
    refused("explain", "gather", "--byte", "8", about="--byte")


# ---- Rules ----

def rules(text):
    return {**os.environ, "SHOAL_ALGORITHMS": text}


def explain_follows_the_rules():
    env = {**rules("all-reduce=direct,reduce=owners@64K-128K,gather=copies"), "SHOAL_DIRECT_BYTES": "0"}
    expect("algorithm owners-staged, because of the rule SHOAL_ALGORITHMS:2\n" in explain("reduce", "--bytes", "64K", env=env))
    expect("algorithm owners-staged, because of the rule SHOAL_ALGORITHMS:2\n" in explain("reduce", "--bytes", "128K", env=env))
    expect("algorithm at-root-staged, because: " in explain("reduce", "--bytes", "65532", env=env))
    expect("algorithm at-root-staged, because: " in explain("reduce", "--bytes", "131076", env=env))
    expect("algorithm copies-staged, because of the rule SHOAL_ALGORITHMS:3\n" in explain("gather", "--bytes", "64", env=env))
    expect("algorithm direct, because of the rule SHOAL_ALGORITHMS:1\n" in explain("allreduce", "--bytes", "16K", env=env))
    expect("algorithm owners-staged, because: otherwise\n" in explain("allreduce", "--bytes", "16388", env=env))


def explain_and_info_follow_a_file_of_rules():
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\n# so\nreduce,at-root,,,5,8\n")
        file.flush()
        expect(f"because of the rule {file.name}:3\n" in explain("reduce", "--ranks", "5", env=rules(file.name)))
        expect("because: otherwise\n" in explain("reduce", "--ranks", "4", env=rules(file.name)))
        expect("because: otherwise\n" in explain("reduce", "--ranks", "9", env=rules(file.name)))
        code, out, err = call(SHOAL, "info", "--algorithms", env=rules(file.name))
        wanted = ["reduce", "at-root", "0", "-", "5", "8", f"{file.name}:3"]
        expect(code == 0 and out.splitlines()[-1].split() == wanted, out, err)


def info_prints_the_rules_after_the_table():
    code, out, err = call(SHOAL, "info", "--algorithms", env=rules("reduce=owners@4K-1M,allgather=direct"))
    table, _, own = out.partition("These rules come first")
    expect(code == 0 and "SHOAL_ALGORITHMS:" not in table, out, err)
    expect([line.split() for line in own.splitlines()[2:]] ==
           [["reduce", "owners", "4096", "1048576", "1", "-", "SHOAL_ALGORITHMS:1"],
            ["all-gather", "direct", "0", "-", "1", "-", "SHOAL_ALGORITHMS:2"]], out)
    code, out, err = call(SHOAL, "info", "--algorithms")
    expect(code == 0 and "These rules" not in out, out, err)


def rules_that_are_wrong_are_named():
    env = rules("reduce=owners,gather=ring")
    said = "SHOAL_ALGORITHMS, rule 2: gather has no algorithm \"ring\"; it has direct, copies"
    refused("explain", "gather", about=said, env=env)
    code, out, err = call(SHOAL, "info", "--algorithms", env=env)
    expect(code == 0 and said in out, out, err)
    refused("explain", "gather", about="cannot open the file \"/no/such/file\"", env=rules("/no/such/file"))


def info_prints_settings_machine_and_algorithms():
    for option, word in (("--settings", "SHOAL_TIMEOUT_MS"), ("--topology", "kernels"), ("--algorithms", "at-root")):
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
           bench_checks_every_collective, bench_checks_every_type_and_operator, bench_counts_the_bytes_of_the_larger_operand,
           bench_names_the_algorithm_that_ran, bench_runs_under_mpirun, bench_refuses_what_makes_no_sense, explain_prints_the_plan,
           explain_shows_zero_copy_for_shared_memory, explain_knows_every_collective, explain_counts_the_elements_of_each_rank,
           explain_refuses_what_makes_no_sense, explain_follows_the_rules, explain_and_info_follow_a_file_of_rules,
           info_prints_the_rules_after_the_table, rules_that_are_wrong_are_named, info_prints_settings_machine_and_algorithms,
           info_shows_a_setting_from_the_environment_and_hides_the_secret, help_teaches])
