#!/usr/bin/env python3
"""`shoal bench`, `shoal explain` and `shoal info` as a user sees them. (`shoal run` has test_run.py.)"""
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import struct
import subprocess
import tempfile
import termios

from tap import Skip, call, call_counted, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
FIELDS = ["collective", "ranks", "hosts", "bytes", "dtype", "memory", "in_place", "inputs", "algorithm", "iterations", "median_us",
          "p99_us", "algbw_gb_s", "busbw_gb_s", "exchange_ns", "cpu_us", "errors", "op", "loop_us"]
REDUCING = ["allreduce", "reduce", "reducescatter"]
MOVING = ["broadcast", "allgather", "gather", "scatter", "alltoall"]
OPERATORS = ["sum", "avg", "max", "min", "prod", "scaled-sum"]
TOP = pathlib.Path(__file__).resolve().parents[3]
INTEGERS = ["int64", "int32", "int8", "uint8"]
# AddressSanitizer's leak check takes half of a short run. Runs that differ only in a type leave that check to others.
LEAKS_ELSEWHERE = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}


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
                         "--iterations", "2", "--check", env=LEAKS_ELSEWHERE)
            expect(all((row["errors"], row["dtype"], row["op"]) == (0, name, operator) for row in rows), rows)
        for collective in MOVING:
            rows = bench(collective, "-n", "2", "--type", name, "--max", "20001", "--factor", "2000", "--iterations", "2",
                         "--check", env=LEAKS_ELSEWHERE)
            expect(all((row["errors"], row["op"]) == (0, None) for row in rows), rows)


def bench_measures_memory_of_a_device():
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"  # it has the stand-in for the driver
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "MOCK_CUDA": "devices=2,late=20"}
    for collective in REDUCING + MOVING:
        for words in (["-n", "2"], ["-n", "3", "--in-place", "--probe", "memory"]):
            rows = bench(collective, *words, "--memory", "gpu", "--max", "300001", "--factor", "97", "--iterations", "2", "--check", env=env)
            sizes = 6 if "--probe" in words else 3
            expect(len(rows) == sizes and all((row["errors"], row["memory"]) == (0, "gpu") for row in rows), collective, words, rows)
    rows = bench("allreduce", "-n", "2", "--memory", "gpu", "--min", "4", "--max", "300001", "--factor", "97", "--iterations", "2", "--check",
                 env={**env, "SHOAL_GPU_PEER_BYTES": "8"})
    expect([(row["errors"], row["algorithm"] == "peers") for row in rows] == [(0, row["bytes"] >= 8) for row in rows], rows)
    code, out, err = call(SHOAL, "bench", "allreduce", "-n", "2", "--memory", "gpu", env={**env, "MOCK_CUDA": "devices=0"})
    expect(code == 1 and "--memory gpu: " in err and "device" in err and not out.count("\n8 "), code, out, err)


def beside_nccl_a_table_is_made():
    """`make test-gpu` over stand-ins for CUDA's driver and NCCL."""
    stand_ins = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"
    if not (stand_ins / "libnccl.so").exists() or not (stand_ins.parents[1] / "bench/gpu_nccl").exists():
        raise Skip("the programs of bench, or the stand-ins, are not in this build")
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LD_LIBRARY_PATH": str(stand_ins), "MOCK_CUDA": "devices=2",
               "SHOAL_NCCL": str(stand_ins / "libnccl.so"), "SHOAL_BUILD": str(stand_ins.parents[1]), "SHOAL_BENCH_GPU": folder, "SHOAL_BENCH_GPU_SIZES": "4096 65536 16 2"}
        for words, names in (([], ("copies", "kernels", "allreduce-2")), (["allreduce", "3"], ("copies", "allreduce-3"))):
            code, out, err = call(TOP / "bench/bench_gpu.py", *words, env=env)
            expect(code == 0 and all((pathlib.Path(folder) / f"gpu-{name}.md").read_text() in out + "\n" for name in names), code, out, err)
        copies, kernels, pair, three = ((pathlib.Path(folder) / f"gpu-{name}.md").read_text()
                                        for name in ("copies", "kernels", "allreduce-2", "allreduce-3"))
    expect(copies.count("MiB |") >= 3 and "A write and a wait on a stream" in copies, copies)
    expect(len(re.findall(r"^\| sum of \d \w+ \| [\d.]+ \| [\d.]+ \|$", kernels, re.M)) == 7 and kernels.count("|  |") == 4, kernels)
    rows = re.findall(r"^\| (\d+ KiB) \|(?: [\d.]+ \|){8}$", pair, re.M)
    expect(rows == ["4 KiB", "64 KiB"], pair)
    expect("NCCL was not measured: ranks share a GPU" in three, three)
    expect(len(re.findall(r"^\| \d+ KiB \|(?: [\d.]+ \|){5}(?:  \|){3}$", three, re.M)) == 2, three)


def make_test_gpu_runs_where_there_is_a_driver():
    """The commands of `make test-gpu` in this build, with the stand-in as driver: a few cases and small sizes."""
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    build = pathlib.Path(SHOAL).parent
    code, out, err = call("make", "--no-print-directory", "--dry-run", "test-gpu", f"CUDA={folder}/libcuda.so.1",
                          "ARGS='every root, 2 ranks' 'an abort' 'many at once, 2 ranks'", cwd=TOP)
    commands = [line for line in out.splitlines() if re.match(r"(\w+=\S+ )?build/(tests|shoal)", line)]
    expect(code == 0 and len(commands) >= 3 and "shoal bench" in commands[-1], code, out, err)
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    for command in commands:
        small = " --steps 1" if "shoal bench step" in command else " --max 64K" if "shoal bench" in command else ""
        code, out, err = call("sh", "-c", re.sub(r"(^| )build/", rf"\1{build}/", command) + small, env=env)
        expect(code == 0 and "not ok" not in out, command, out, err)


def bench_counts_the_bytes_of_the_larger_operand():
    for collective in ("reduce-scatter", "all-gather", "all-to-all", "gather", "scatter"):
        rows = bench(collective, "-n", "3", "--min", "8", "--max", "512", "--factor", "8", "--iterations", "5")
        expect([row["bytes"] for row in rows] == [12, 60, 504], rows)
        expect(all(abs(row["busbw_gb_s"] - row["algbw_gb_s"] * 2 / 3) < 2e-4 for row in rows), rows)
    for collective, factor in (("all-reduce", 4 / 3), ("reduce", 1), ("broadcast", 1)):
        (row,) = bench(collective, "-n", "3", "--min", "512", "--max", "512", "--iterations", "5")
        expect(row["bytes"] == 512 and abs(row["busbw_gb_s"] - row["algbw_gb_s"] * factor) < 2e-4, row)


def bench_tables_fit_a_hundred_columns():
    """Times of seconds and sizes of megabytes have the same width as small ones. --wide prints all columns."""
    common = ["size", "median us", "p99 us", "algbw"]
    heads = {(): [*common, "busbw", "cpu us", "errors"], ("--probe", "memory"): [*common, "errors", "probe us", "of probe"],
             ("--wide", "--probe", "memory"): [*common, "busbw", "exchange ns", "loop us", "cpu us", "runs", "errors",
                                               "probe us", "of probe"]}
    sizes = ("--min", "32K", "--max", "1M", "--factor", "32")
    for words, names in heads.items():
        code, out, err = call(SHOAL, "bench", "allreduce", "-n", "2", *sizes, "--iterations", "3", *words)
        lines = out.splitlines()
        rows = [line for line in lines if not line.startswith("#")]
        expect(code == 0 and re.split(r"\s{2,}", rows[0].strip()) == [*names, "algorithm"], words, out, err)
        cells = [re.split(r"\s{2,}", row.strip()) for row in rows[1:]]
        expect([(row[0], row[-1], len(row)) for row in cells] ==
               [("32 KiB", "one-shot-staged", len(names) + 1), ("1 MiB", "owners-staged", len(names) + 1)], out)
        expect("--wide" in words or max(map(len, lines)) <= 100, words, out)
    code, out, err = call(SHOAL, "bench", "step", "-n", "2", "--profile", "resnet50", "--steps", "1", "--backward", "1")
    expect(code == 0 and max(map(len, out.splitlines())) <= 100, out, err)


def bench_names_the_algorithm_that_ran():
    (small,) = bench("allreduce", "-n", "2", "--min", "8", "--max", "8", "--iterations", "5")
    (middle,) = bench("allreduce", "-n", "2", "--min", "32K", "--max", "32K", "--iterations", "5")
    (staged,) = bench("allreduce", "-n", "2", "--min", "1M", "--max", "1M", "--iterations", "5")
    (shared,) = bench("allreduce", "-n", "2", "--min", "1M", "--max", "1M", "--iterations", "5", "--memory", "shared", "--in-place")
    expect([r["algorithm"] for r in (small, middle, staged, shared)] ==
           ["direct", "one-shot-staged", "owners-staged", "owners-shared"], small, middle, staged, shared)


def bench_runs_under_mpirun():
    if not shutil.which("mpirun.openmpi"):
        raise Skip("no Open MPI here")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    rows = bench("allreduce", "--min", "8", "--max", "64K", "--factor", "8192", "--iterations", "5", "--check",
                 prefix=["mpirun.openmpi", *root, "--oversubscribe", "-n", "2"],
                 env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})  # libpmix leaks some bytes
    expect([row["ranks"] for row in rows] == [2, 2] and not any(row["errors"] for row in rows), rows)


def bench_binds_its_workers():
    """test_run.py tests the masks that --bind sets, for `shoal run`; the code is the same."""
    if len(os.sched_getaffinity(0)) < 2:
        raise Skip("this process may use one core only")
    small = ("bench", "barrier", "--iterations", "5", "--format", "json")
    for words, told in (((), "shoal bench: each worker has "), (("--bind", "core"), "shoal bench: each worker has "),
                        (("--bind", "none"), ""), (("--pin",), "")):
        code, out, err = call(SHOAL, *small, "-n", "2", *words)
        expect(code == 0 and err.startswith(told) and err.count("\n") == bool(told), words, out, err)
    code, out, err = call("taskset", "-c", str(min(os.sched_getaffinity(0))), SHOAL, *small, "-n", "2")
    expect(code == 0 and err == "shoal bench: 2 workers share 1 core: they are not bound\n", out, err)
    code, out, err = call(SHOAL, *small, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})  # its launcher has bound it
    expect(code == 0 and not err, out, err)


def lack_of_shared_memory_is_told_in_the_callers_numbers():
    limit = 64 << 20
    limited = f'cd /sys/fs/cgroup && echo {limit} | tee memory.max memory/memory.limit_in_bytes > /dev/null; exec "$@"'
    code, out, err = call_counted("sh", "-c", limited, "sh", SHOAL, "bench", "allreduce", "-n", "2", "--memory", "shared",
                                  "--in-place", "--min", "256M", "--max", "256M", "--iterations", "1")
    told = re.search(r"shoal_mem_alloc of (\d+) bytes needs (\d+) bytes of shared memory, but the container's limit leaves only "
                     r"(\d+); use less, or give the container more", err)
    expect(code == 1 and told, code, out, err)
    asked, needed, left = map(int, told.groups())
    expect(256 << 20 <= asked <= needed < asked + 4096 and left == limit, told.group())


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
    refused("bench", "allreduce", "--bind", "slices", about="one of slice, core, none")


def explain(*words, env=None):
    code, out, err = call(SHOAL, "explain", *words, env=env)
    expect(code == 0 and not err, words, out, err)
    return out


def explain_prints_the_plan():
    code, out, err = call(SHOAL, "explain", "allreduce", "--ranks", "4", "--bytes", "3MiB", "--rank", "0")
    expect(code == 0, out, err)
    for word in ("owners-staged", "because", "reduce", "wait", "signal", "out[0]", "stg"):
        expect(word in out, word, out)


def explain_shows_one_exchange_for_two_ranks():
    for size in ("32KiB", "64KiB"):
        out = explain("allreduce", "--ranks", "2", "--bytes", size)
        expect("algorithm one-shot-staged, because a rank sends " in out and "; one exchange\n" in out, out)
        expect(len([step for step in steps(out) if " reduce " in step]) == 2 and "in[0] 0/1 + stg[1].0 0/1 -> out[0]" in out and
               "stg[0].0 0/1 + in[1] 0/1 -> out[1]" in out, out)
    for words in (["--bytes", "65540"], ["--bytes", "32KiB", "--memory", "shared"], ["--bytes", "32KiB", "--ranks", "3"]):
        expect("algorithm owners-" in explain("allreduce", *words), words)


def explain_knows_all_sizes_of_jobs():
    out = explain("allreduce", "--ranks", "4096", "--hosts", "256", "--bytes", "8")
    expect("all-reduce" in out, out)
    refused("explain", "allreduce", "--ranks", "4097", about="4096")
    refused("explain", "allreduce", "--hosts", "512", "--ranks-per-host", "9", about="more than 4096 ranks")


def steps(text):
    return [line for line in text.splitlines() if re.match(r" *\d+  ", line)]


def explain_shows_zero_copy_for_shared_memory():
    out = explain("allreduce", "--ranks", "2", "--bytes", "3MiB", "--memory", "shared")
    expect("owners-shared" in out and steps(out) and not any("stg[" in step for step in steps(out)), out)
    expect(any("stg[" in step for step in steps(explain("allreduce", "--ranks", "2", "--bytes", "3MiB"))))


def explain_names_the_gpus_of_operands():
    words = ("allgather", "--ranks", "2", "--bytes", "3MiB")
    plain, out = explain(*words), explain(*words, "--memory", "gpu")
    expect(out.startswith(plain) and "operands on GPUs: their copy engines" in out and "\nGPUs  " in out, out)
    words = ("allreduce", "--ranks", "2", "--bytes", "3MiB")
    out = explain(*words, "--memory", "gpu")
    expect("owners-lent" in out and "operands on GPUs: their copy engines" in out, out)
    expect(any("wait    to lend in, out" in step for step in steps(out)) and not any("stg[" in step for step in steps(out)), out)
    lent = json.loads(explain(*words, "--format", "json", "--memory", "gpu"))
    expect(lent["operands"] == "lent" and
           {"step": "wait", "for": "lending", "input": True, "output": True} in lent["plans"][0]["steps"], lent)
    told = [json.loads(explain(*words, "--format", "json", "--memory", memory))["on_gpus"] for memory in ("gpu", "shared")]
    expect(told == [True, False], told)


def explain_shows_sums_among_gpus():
    """explain chooses as a communicator over the stand-in for the driver does (test_device_peers): if GPUs cannot sum, it
    shows the usual plan."""
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    words = ("allreduce", "--memory", "gpu", "--bytes", "9M")
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "MOCK_CUDA": "devices=3", "SHOAL_GPU_PEER_BYTES": "1M"}
    out, told = explain(*words, "-n", "3", env=env), json.loads(explain(*words, "-n", "3", "--format", "json", env=env))
    expect("algorithm peers, because GPUs of this host reach each other's memory; SHOAL_GPU_PEER_BYTES is 1048576\n" in out, out)
    expect("rank 2: 3 chunks of up to 3145728 bytes, 4 under way" in out and "the GPUs copy and reduce" in out, out)
    expect(told["algorithm"] == "peers" and [(plan["chunks"], plan["chunk_bytes"]) for plan in told["plans"]] == [(3, 3 << 20)] * 3, told)
    out = explain(*words, env={**env, "SHOAL_ALGORITHMS": "all-reduce=owners"})
    expect("algorithm peers, " in out and "(owners) cannot serve this call: GPUs sum among themselves\n" in out, out)
    out = explain(*words, "-n", "8", "--hosts", "2", "--bytes", "8MiB", env=env)
    expect("algorithm peers, " in out and "only slices pass through host memory" in out, out)
    links = ("each GPU reads 12582912 bytes in its peers' memory", "copies 2097152 to host memory and 2097152 back", "each host sends 8388608 ")
    expect(all(link in out for link in links), out)
    copies = ("copy    gpu[7] 6/8+2 -> gpu[7].out 6/8+2", "copy    gpu[7].back 6/8+2 -> gpu[7] 6/8+2")
    expect(all(any(step.endswith(copy) for step in steps(out)) for copy in copies), out)
    for more, changed in ((["--bytes", "1020K"], {}), (["-n", "9"], {}), (["--hosts", "2"], {}), ([], {"SHOAL_GPU_PEER_BYTES": "0"}),
                          ([], {"MOCK_CUDA": "devices=3,peers=0"}), ([], {"MOCK_CUDA": "devices=3,values=0"}), ([], {"MOCK_CUDA": "devices=0"})):
        out = explain(*words, *more, env={**env, **changed})
        expect("algorithm peers" not in out and "through host memory" in out, more, changed, out)


def explain_tells_programs_the_same():
    """JSON has the same steps as the text."""
    def text_of(step):
        if step["step"] == "signal":
            return f"signal  {step['peer']}"
        if step["step"] == "wait":
            return "wait    puts" if step["for"] == "puts" else \
                f"wait    {step['peer']} " + ("credit" if step["for"] == "credit" else f"#{step['signal']}")
        return f"{step['step']:7} {' + '.join(step['from'])} -> {', '.join(step['to'])}"
    for words in (["allreduce", "--ranks", "4", "--bytes", "3MiB"], ["alltoall", "--ranks", "3", "--memory", "shared"],
                  ["allreduce", "--hosts", "4", "--ranks-per-host", "2", "--bytes", "64M", "--rank", "1"], ["barrier", "--ranks", "2"],
                  ["broadcast", "--ranks", "3", "--bytes", "64"], ["allgather", "--ranks", "1"],
                  ["reduce", "--hosts", "2", "--bytes", "4"]):
        text, told = explain(*words), json.loads(explain(*words, "--format", "json"))
        expect(re.search(f"^algorithm {told['algorithm']}[,:] ", text, re.M), told["algorithm"], text)
        if told["ranks"] > 1:
            expect(f"because {told['why']}" in text or f"because: {told['why']}" in text, told["why"], text)
            expect(f"\ncost: {told['cost']}\n" in text, told["cost"], text)
        lines = [text_of(step) for plan in told["plans"] for step in plan["steps"]]
        expect(lines == [line[5:] for line in text.splitlines() if re.match(r" *\d+  \w", line)], lines, text)
        expect([f"rank {p['rank']}:" for p in told["plans"]] == re.findall(r"^rank \d+:", text, re.M), told, text)
    told = json.loads(explain("reduce", "--bytes", "1M", "--format", "json", env={**os.environ, "SHOAL_ALGORITHMS": "reduce=owners"}))
    expect(told["is_by_override"] and told["why"] == "the tuning override SHOAL_ALGORITHMS:1", told)
    expect(told["bytes"] == 1 << 20 and told["count"] == 1 << 18 and told["element_bytes"] == 4, told)
    chunks = told["plans"][0]
    expect(chunks["chunks"] * chunks["chunk_bytes"] >= 1 << 20 and chunks["depth"] == 4, chunks)
    code, out, err = call(SHOAL, "explain", "allreduce", "--format", "xml")
    expect((code, out) == (2, "") and "--format takes text or json, not 'xml'" in err, code, out, err)
    code, out, err = call(SHOAL, "explain", "allreduce", "--hosts", "3", "--ranks", "2", "--format", "json")
    expect((code, out) == (2, "") and err.count("\n") == 1, code, out, err)


def explain_has_a_legend_for_its_steps():
    out = explain("allreduce", "--ranks", "3", "--bytes", "3MiB")
    legend, _, plans = out.partition("\nrank 0: ")
    for word in ("in[r]", "out[r]", "stg[r].p", "1/4: block 1 of 4", "copy: ", "wait 2 #1: ", "wait 2 credit: "):
        expect(word in legend and word not in plans, word, out)
    for shape in (r"\d  copy    in\[0\] 1/3 -> stg\[0\]\.0 1/3", r"wait    1 #1$", r"wait    1 credit$"):
        expect(re.search(shape, plans, re.M), shape, out)
    expect("block 1 of 4" not in explain("allreduce", "--bytes", "8") and max(map(len, out.splitlines())) <= 128, out)


def explain_knows_every_collective():
    rows = {"allreduce": "owners", "reduce": "owners", "reduce-scatter": "owners", "broadcast": "copies", "allgather": "copies",
            "gather": "copies", "scatter": "copies", "all-to-all": "copies"}
    for collective, row in rows.items():
        for memory, reach in (("plain", "staged"), ("shared", "shared")):
            out = explain(collective, "--ranks", "4", "--bytes", "3MiB", "--memory", memory)
            given = 786432 if collective in ("allgather", "gather") else 3145728
            expect(f"algorithm {row}-{reach}, because a rank sends {given} bytes, more than direct's" in out, out)
            expect("\ncost: " in out, out)
            plans = [line.split(":")[0] for line in out.splitlines() if line.startswith("rank ")]
            expect(plans == [f"rank {r}" for r in range(4)], out)
        small = explain(collective, "--ranks", "4", "--bytes", "1024")
        expect("algorithm direct, because a rank sends " in small and "no more than direct's" in small, small)
        expect("no plan: contributing ranks publish data next to their announcements; receiving ranks read them there\n" in small, small)
        expect("algorithm alone" in explain(collective, "--ranks", "1"), collective)
    expect("algorithm at-root-staged, because a rank sends 3145728 bytes, more than direct's 16384; up to 3 ranks, root's "
           "output not shared\n" in explain("reduce", "--ranks", "3", "--bytes", "3MiB"))


def explain_tells_the_limit_of_the_direct_way():
    share = "(up to 1/4 to 1 of SHOAL_INLINE_BYTES)\n"
    for ranks, limit in ((4, 8192), (8, 4096), (64, 4096)):
        at, above = (explain("allreduce", "-n", ranks, "--rank", "0", "--bytes", limit + more) for more in (0, 4))
        expect(f"direct, because a rank sends {limit} bytes, no more than direct's {limit} {share}" in at, at)
        expect(f"owners-staged, because a rank sends {limit + 4} bytes, more than direct's {limit} {share}" in above, above)
    at, above = (explain("allreduce", "-n", "2", "--bytes", size) for size in (8192, 8196))
    expect(f"direct, because a rank sends 8192 bytes, no more than direct's 8192 {share}" in at, at)
    expect("one-shot-staged, because a rank sends 8196 bytes, more than direct's 8192; 2 ranks, all staged, up to 64 KiB\n"
           in above, above)
    expect("no more than direct's 16384 (" in explain("allreduce", "--hosts", "2", "--bytes", "16K"))
    half = "(up to SHOAL_INLINE_BYTES per contributing rank; 2 ranks on one host: up to half of it)\n"
    for collective in ("allgather", "gather"):
        at, above = (explain(collective, "-n", "2", "--bytes", 2 * size) for size in (8192, 8196))
        expect(f"direct, because a rank sends 8192 bytes, no more than direct's 8192 {half}" in at, at)
        expect(f"copies-staged, because a rank sends 8196 bytes, more than direct's 8192 {half}" in above, above)
        expect("no more than direct's 16384 (" in explain(collective, "-n", "3", "--bytes", "48K"))
        expect("no more than direct's 16384 (" in explain(collective, "--hosts", "2", "--bytes", "32K"))
    env = {**os.environ, "SHOAL_INLINE_BYTES": "100"}
    expect("a rank sends 96 bytes, no more than direct's 100 (" in explain("broadcast", "--bytes", "96", env=env))
    expect("a rank sends 100 bytes, no more than direct's 100 (" in explain("allgather", "--ranks", "3", "--bytes", "300", env=env))
    expect("a rank sends 208 bytes, more than direct's 100 (" in explain("alltoall", "--bytes", "208", env=env))


def explain_of_a_barrier_knows_no_bytes():
    out = explain("barrier", "--bytes", "1K")
    expect(out == "barrier over 2 ranks on one host\nalgorithm direct, because: always\ncost: one exchange of cache lines\n"
           "no plan: every rank publishes an announcement and waits for those of all others\n", out)


def explain_counts_the_elements_of_each_rank():
    expect("all-gather of 3145728 bytes (262144 elements for each rank) over 3 ranks" in
           explain("allgather", "--ranks", "3", "--bytes", "3MiB"))
    expect("broadcast of 3145728 bytes (786432 elements) over 3 ranks" in explain("broadcast", "--ranks", "3", "--bytes", "3MiB"))
    expect("reduce-scatter of 96 bytes (8 elements for each rank) over 3 ranks" in
           explain("reduce-scatter", "-n", "3", "--bytes", "100"))
    expect("all-to-all of 1048572 bytes (87381 elements for each rank) over 3 ranks" in explain("alltoall", "-n", "3"))
    expect("broadcast of 4 bytes (1 element) over 1 rank on one host\n" in explain("broadcast", "-n", "1", "--bytes", "4"))
    expect("gather of 1 byte (1 element for each rank) over 1 rank" in
           explain("gather", "-n", "1", "--bytes", "1", "--type", "i8"))


def explain_sends_an_all_to_all_in_place_through_staging_buffers():
    for memory in ("plain", "shared"):
        out = explain("alltoall", "--in-place", "--memory", memory)
        expect("operands: an all-to-all in place goes through staging buffers\n" in out and "copies-staged" in out, out)
    out = explain("allgather", "--in-place", "--memory", "shared")
    expect("operands: all operands that peers can use are in shared memory\n" in out, out)


def options_have_one_name_in_all_commands():
    for name in ("--type", "--dtype"):
        expect("of 1048576 bytes (524288 elements)" in explain("allreduce", name, "bf16"), name)
    for command in ("explain", "bench"):
        code, out, err = call(SHOAL, command, "--help")
        expect(code == 0 and "--type TYPE" in out and "--dtype" not in out, out)


def explain_refuses_what_makes_no_sense():
    refused("explain", "allreduce", "--ranks", "0", "--bytes", "8", about="0")
    refused("explain", "allreduce", "--ranks", "2", "--bytes", "7", about="7")
    refused("explain", "reduce-scatter", "--ranks", "3", "--bytes", "8",
            about="bytes is 8, less than one element for each of 3 ranks")
    refused("explain", "allgathr", "--ranks", "2", "--bytes", "8", about="allgathr")
    refused("explain", about="which collective?")
    refused("explain", "reduce", "gather", about="one collective too many")
    refused("explain", "sort", about="there is no collective 'sort'")
    refused("explain", "gather", "--ranks", "4097", about="4097")
    refused("explain", "gather", "--ranks", "2", "--rank", "2", about="rank 2 is out of range: there are 2 ranks")
    refused("explain", "gather", "--memory", "soft", about="plain, shared or gpu")
    refused("explain", "gather", "--dtype", "f8", about="f8")
    refused("explain", "gather", "--bytes", "12Q", about="12Q")
    refused("explain", "gather", "--hosts", "3", "--ranks", "2", about="--hosts 3 is more than --ranks 2")
    refused("explain", "gather", "--hosts", "3", "--ranks-per-host", "2", "--ranks", "5", about="--ranks 5 is not 3 times")
    refused("explain", "gather", "--hosts", "64", "--ranks-per-host", "65", about="more than 4096 ranks")
    refused("explain", "gather", "--host", "2", about="--host")
    refused("explain", "gather", "--byte", "8", about="--byte")


def explain_shows_plans_over_hosts():
    out = explain("allreduce", "--hosts", "4", "--ranks-per-host", "8", "--bytes", "512K", "--rank", "9")
    expect("all-reduce of 524288 bytes (131072 elements) over 32 ranks on 4 hosts\n" in out, out)
    expect("algorithm mesh, because on several hosts direct serves up to 16 ranks; several hosts\n" in out, out)
    expect("\nrank 9: " in out and "\nrank 8: " not in out and "put" in out and "bins; for each chunk:" in out, out)
    for line in steps(out):  # rank 9 is on host 1 (ranks 8 to 15) and puts to ranks of its local number on other hosts
        peer = re.search(r"put .* -> stg\[(\d+)\]", line)
        expect(not peer or int(peer.group(1)) in (1, 17, 25), line)
    expect(max(map(len, out.partition("\nrank 9")[0].splitlines())) <= 128, out)
    out = explain("barrier", "--hosts", "3", "--ranks-per-host", "8")
    expect("algorithm rounds, because: several hosts" in out and "in rounds between hosts\n" in out, out)
    out = explain("allreduce", "--hosts", "4", "--bytes", "16K")
    expect("algorithm rounds, because there are 16384 bytes, no more than 16384; several hosts" in out, out)
    expect("algorithm direct" in explain("barrier", "--hosts", "3"), "a barrier of 3 ranks")
    expect("over 3 ranks on 3 hosts\n" in explain("broadcast", "--hosts", "3"))
    expect("over 5 ranks on 2 hosts\n" in explain("broadcast", "--hosts", "2", "--ranks", "5"))
    expect("algorithm ring, because on several hosts" in explain("allreduce", "--hosts", "4", "--ranks-per-host", "8", "--bytes", "4M"))
    expect("algorithm doubling, because on" in explain("allreduce", "--hosts", "20", "--bytes", "32K"))


# ---- Tuning overrides ----

def overrides(text):
    return {**os.environ, "SHOAL_ALGORITHMS": text}


def explain_follows_the_rules():
    env = {**overrides("all-reduce=direct,reduce=owners@64K-128K,gather=copies"), "SHOAL_INLINE_BYTES": "0"}
    expect("algorithm owners-staged, because of the tuning override SHOAL_ALGORITHMS:2\n" in explain("reduce", "--bytes", "64K", env=env))
    expect("algorithm owners-staged, because of the tuning override SHOAL_ALGORITHMS:2\n" in explain("reduce", "--bytes", "128K", env=env))
    expect("algorithm at-root-staged, because a rank sends " in explain("reduce", "--bytes", "65532", env=env))
    expect("algorithm at-root-staged, because a rank sends " in explain("reduce", "--bytes", "131076", env=env))
    expect("algorithm copies-staged, because of the tuning override SHOAL_ALGORITHMS:3\n" in explain("gather", "--bytes", "64", env=env))
    expect("algorithm direct, because of the tuning override SHOAL_ALGORITHMS:1\n" in explain("allreduce", "--bytes", "16K", env=env))
    expect("algorithm one-shot-staged, because a rank sends 16388 bytes, more than direct's 0; 2 ranks, all staged" in
           explain("allreduce", "--bytes", "16388", env=env))
    expect("because of the tuning override" not in explain("gather", "--bytes", "0", env=env))


def explain_over_hosts_follows_the_rules():
    env = overrides("allreduce=owners,allreduce=direct,allreduce=ring,allgather=mesh")
    out = explain("allreduce", "--hosts", "3", "--ranks-per-host", "6", "--bytes", "4K", "--rank", "0", env=env)
    expect("the tuning override SHOAL_ALGORITHMS:1 (owners) cannot serve this call: it serves one host\n" in out, out)
    expect("the tuning override SHOAL_ALGORITHMS:2 (direct) cannot serve this call: on several hosts it serves up to 16 ranks\n" in out, out)
    expect("algorithm ring, because of the tuning override SHOAL_ALGORITHMS:3\n" in out, out)
    out = explain("allgather", "--bytes", "1M", env=env)
    expect("(mesh) cannot serve this call: it serves several hosts\n" in out and "algorithm copies-staged" in out, out)
    out = explain("allreduce", "--hosts", "3", "--bytes", "4K", "--rank", "0", env=env)
    expect("(owners) cannot serve" in out and "algorithm direct, because of the tuning override SHOAL_ALGORITHMS:2\n" in out, out)
    expect("algorithm dissemination, because of the tuning override SHOAL_ALGORITHMS:1\n" in
           explain("barrier", "--hosts", "3", env=overrides("barrier=dissemination")))
    env = overrides("allreduce=rounds,allgather=mesh")
    expect("(rounds) cannot serve this call: it serves parts of one length, together up to 16384 bytes\n" in
           explain("allreduce", "--hosts", "4", "--bytes", "1M", env=env))
    expect("(rounds) cannot serve this call: it serves several hosts\n" in explain("allreduce", "--bytes", "1K", env=env))


def explain_names_rules_that_cannot_serve():
    said = "the tuning override SHOAL_ALGORITHMS:{} (direct) cannot serve this call: a rank sends more than 16384 bytes\n"
    env = overrides("reduce=owners,allreduce=direct,allreduce=direct@-1K,all-reduce=direct@32K-,allreduce=owners@1M-,"
                "allreduce=direct")
    out = explain("allreduce", "--bytes", "1M", env=env)
    expect([said.format(n) in out for n in range(1, 7)] == [False, True, False, True, False, False], out)
    expect("because of the tuning override SHOAL_ALGORITHMS:5\n" in out, out)
    out = explain("allreduce", "--bytes", "64K", env=env)
    expect([said.format(n) in out for n in range(1, 7)] == [False, True, False, True, False, True], out)
    expect("because a rank sends 65536 bytes, more than direct's 8192; 2 ranks, all staged" in out, out)
    expect("cannot serve" not in explain("allreduce", "--bytes", "16K", env=env))
    expect("cannot serve" not in explain("reduce", "--bytes", "1M", env=env))


def explain_and_info_follow_a_file_of_rules():
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks\n# so\nreduce,at-root,,,5,8\n")
        file.flush()
        expect(f"because of the tuning override {file.name}:3\n" in explain("reduce", "--ranks", "5", env=overrides(file.name)))
        for ranks in ("4", "9"):
            expect("algorithm owners-staged, because a rank sends " in explain("reduce", "--ranks", ranks, env=overrides(file.name)))
        code, out, err = call(SHOAL, "info", "--algorithms", env=overrides(file.name))
        wanted = ["reduce", "at-root", "0", "-", "5", "8", f"{file.name}:3"]
        expect(code == 0 and out.splitlines()[-1].split() == wanted, out, err)


def info_prints_the_rules_after_the_table():
    code, out, err = call(SHOAL, "info", "--algorithms", env=overrides("reduce=owners@4K-1M,allgather=direct"))
    table, _, own = out.partition("These tuning overrides are tried first")
    expect(code == 0 and "SHOAL_ALGORITHMS:" not in table, out, err)
    expect([line.split() for line in own.splitlines()[1:]] ==
           [["bytes", "ranks"], ["collective", "algorithm", "from", "to", "from", "to", "where"],
            ["reduce", "owners", "4096", "1048576", "1", "-", "SHOAL_ALGORITHMS:1"],
            ["all-gather", "direct", "0", "-", "1", "-", "SHOAL_ALGORITHMS:2"]], out)
    code, out, err = call(SHOAL, "info", "--algorithms")
    expect(code == 0 and "These tuning overrides" not in out, out, err)
    expect(max(map(len, (table + own + out).splitlines())) <= 128, out)


def rules_that_are_wrong_are_named():
    env = overrides("reduce=owners,gather=ring")
    said = "SHOAL_ALGORITHMS, tuning override 2: gather has no algorithm \"ring\"; it has direct, copies, pairs"
    refused("explain", "gather", about=said, env=env)
    code, out, err = call(SHOAL, "info", "--algorithms", env=env)
    expect(code == 2 and err == f"shoal info: {said}\n", out, err)
    expect(out == call(SHOAL, "info", "--algorithms")[1], "the table without the tuning overrides", out)
    refused("explain", "gather", about="cannot open the file \"/no/such/file\"", env=overrides("/no/such/file"))


def info_prints_settings_machine_and_algorithms():
    for option, word in (("--settings", "SHOAL_TIMEOUT_MS"), ("--topology", "kernels"), ("--algorithms", "at-root")):
        code, out, err = call(SHOAL, "info", option)
        expect(code == 0 and word in out, option, out, err)


def info_counts_the_threads_of_a_rank():
    plain = {name: value for name, value in os.environ.items()
             if name not in ("SHOAL_THREADS", "SHOAL_NETWORK_THREADS", "OMP_NUM_THREADS")}

    def lines(**env):
        code, out, err = call(SHOAL, "info", "--topology", env={**plain, **env})
        expect(code == 0 and not err, out, err)
        return dict(re.findall(r"^(cores|threads|network threads) +(.*)$", out, re.M))

    name = "network threads"
    expect(lines(SHOAL_NETWORK_THREADS="5", SHOAL_THREADS="1")[name] == "5 for each rank over TCP (SHOAL_NETWORK_THREADS)")
    expect(lines(SHOAL_THREADS="1", OMP_NUM_THREADS="1")[name] == "1 over TCP for a rank with all of these cores")
    told = lines(OMP_NUM_THREADS="1")
    few = min(max(int(told["cores"].split()[0]) - 1, 1), 8)
    expect(told[name].startswith(f"{few} over TCP for a rank with all of these cores") and ("if that is faster" in told[name]) == (few > 1),
           told)
    expect(lines(SHOAL_THREADS="7", OMP_NUM_THREADS="1")["threads"] == "7 for each rank (SHOAL_THREADS)")
    told = lines(OMP_NUM_THREADS="1")
    wanted = min(max(int(told["cores"].split()[0]) - 1, 1), 64)
    expect(told["threads"] == f"{wanted} for a rank with all of these cores; 1 left to the framework (OMP_NUM_THREADS)", told)
    told = lines()["threads"]
    expect(told.endswith("1 left to the framework (it computes on a GPU)") if os.path.exists("/dev/nvidiactl") else
           told.startswith("1 for each rank: the framework may use all cores"), told)


def info_tells_of_wrong_values_and_prints_the_rest():
    env = {**os.environ, "SHOAL_DEPTH": "99", "SHOAL_STORES": "ice", "SHOAL_WARN_MS": "1234"}
    code, out, err = call(SHOAL, "info", "--settings", env=env)
    expect(code == 2 and err.splitlines() == ["shoal info: SHOAL_DEPTH is 99, but may be 1 to 16",
                                              'shoal info: SHOAL_STORES is "ice", but may be auto, cached, streaming'], err)
    shown = dict(re.findall(r"^(SHOAL_\w+) +(\S+)", out, re.M))
    expect((shown["SHOAL_DEPTH"], shown["SHOAL_STORES"], shown["SHOAL_WARN_MS"]) == ("4", "auto", "1234"), out)
    code, out, err = call(SHOAL, "info", "--topology", "--algorithms", env=env)
    expect(code == 2 and err == "shoal info: SHOAL_DEPTH is 99, but may be 1 to 16\n", err)
    expect("kernels" in out and "at-root" in out, out)


def providers(**env):
    return call(SHOAL, "info", "--providers", env={**os.environ, **env})


def info_names_the_interface_and_the_providers():
    """If libfabric is loaded; over loopback, which every machine has."""
    code, out, err = providers(MASTER_ADDR="127.0.0.1")
    if "built without libfabric" in err:
        raise Skip(err.strip())
    lines = out.splitlines()
    expect(code == 0 and lines[0] == "interface to other hosts: lo (127.0.0.1), the route to the others leaves there", out, err)
    expect(re.fullmatch(r"libfabric \d+\.\d+ \(/.*libfabric\.so\S*\)", lines[1]), out)
    taken = [line.split()[1] for line in lines if line.startswith("* ")]
    expect(len(taken) == 1 and lines[-1] == f"chosen: {taken[0]}, the best one here", out)
    expect(len(lines) == 2 + 6 + 2 and all(len(line) <= 128 for line in lines), out)
    code, out, err = providers(MASTER_ADDR="127.0.0.1", SHOAL_PROVIDER=taken[0])
    expect(code == 0 and out.endswith(f"chosen: {taken[0]}, SHOAL_PROVIDER names it\n"), out, err)


def info_says_why_no_provider_is_taken():
    for env, said in (({"SHOAL_LIBFABRIC": "/no/such/file"}, "SHOAL_LIBFABRIC cannot be loaded: /no/such/file"),
                      ({"SHOAL_PROVIDER": "smoke"}, 'SHOAL_PROVIDER is "smoke", but may be efa'),
                      ({"SHOAL_NIC": "smoke0"}, "no interface that is up is left by SHOAL_NIC=smoke0"),
                      ({"SHOAL_NIC": "10.0.0.0/99"}, 'SHOAL_NIC has "10.0.0.0/99"')):
        code, out, err = providers(**env)
        expect(code == 1 and said in err and len(err.splitlines()) == 1, env, out, err)


def info_shows_a_setting_from_the_environment_and_hides_the_secret():
    code, out, err = call(SHOAL, "info", "--settings", env={**os.environ, "SHOAL_WARN_MS": "1234", "SHOAL_SECRET": "hush"})
    expect(code == 0 and "1234" in out and "hush" not in out, out, err)


def help_teaches():
    for words in ([], ["run"], ["bench"], ["explain"], ["info"], ["doctor"], ["trace"], ["top"], ["advise"]):
        code, out, err = call(SHOAL, *words, "--help")
        expect(code == 0 and len(out.splitlines()) > 5, words, out, err)
        expect(re.search(r"^Usage:", out, re.M) and re.search(r"^Exit codes:", out, re.M), words, out)
        expect(max(map(len, out.splitlines())) <= 128, words, out)


def on_terminal(columns, *words):
    """Returns the lines that a terminal with this many columns receives."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([SHOAL, *words], stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.DEVNULL)
    os.close(terminal)
    text = b""
    try:
        while chunk := os.read(screen, 65536):
            text += chunk
    except OSError:  # all processes have closed it
        pass
    os.close(screen)
    expect(process.wait() == 0, words, text)
    return text.decode().replace("\r\n", "\n").splitlines()


def narrow_terminals_break_no_words():
    for words in (["info", "--algorithms"], ["info", "--settings"], ["explain", "allreduce"], ["sim", "allreduce"], ["--help"],
                  *([command, "--help"] for command in ("run", "bench", "sim", "explain", "info", "doctor", "advise"))):
        code, out, err = call(SHOAL, *words)
        for columns in (80, 60):
            lines = on_terminal(columns, *words)
            expect(" ".join(lines).split() == out.split(), columns, words, "\n".join(lines))
            expect(all(len(line) <= columns or " " not in line.strip() for line in lines), columns, words, "\n".join(lines))
        expect(on_terminal(200, *words) == out.splitlines(), words)
    rows = on_terminal(80, "info", "--algorithms")
    indents = {len(row) - len(row.lstrip()) for row in rows if row.startswith(" ")}
    expect(indents == {34, 38}, "the rest of a row goes on below its text:", "\n".join(rows))


def bench_help_names_the_states_of_the_machine():
    code, out, err = call(SHOAL, "bench", "--help")
    for word in ("near, about 60 ns", "far, about 260 ns", "(crowded)"):
        expect(code == 0 and word in out, word, out)


def make_build_says_what_it_built():
    """Runs make with a ninja that prints what the test wants."""
    make = shutil.which("make")
    if not make:
        raise Skip("no make here")
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        shutil.copy(TOP / "Makefile", tree)
        (tree / "build").mkdir()
        (tree / "build/build.ninja").write_text("")
        (tree / "ninja").write_text('#!/bin/sh\ncase "$*" in *-n*) echo "$SAYS";; *) echo "$*" >>ran; exit $CODE;; esac\n')
        (tree / "ninja").chmod(0o755)
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        env = {**outside, "PATH": f"{folder}:{os.environ['PATH']}", "CODE": "0", "SAYS": "ninja: no work to do."}
        code, out, err = call(make, "build", cwd=folder, env=env)
        expect((code, out, err) == (0, "built: build/shoal\n", "") and not (tree / "ran").exists(), code, out, err)
        code, out, err = call(make, "build", cwd=folder, env={**env, "SAYS": "[1/9] cc"})
        expect(code == 0 and out.startswith("building") and out.endswith("\nbuilt: build/shoal\n"), code, out, err)
        expect((tree / "ran").read_text() == "-C build --quiet\n")
        code, out, err = call(make, "build", cwd=folder, env={**env, "SAYS": "[1/9] cc", "CODE": "1"})
        expect(code != 0 and "built" not in out, code, out, err)


run_cases([bench_prints_one_object_per_size_with_the_agreed_fields, bench_tables_fit_a_hundred_columns,
           bench_checks_results_of_every_kind,
           bench_checks_every_collective, bench_checks_every_type_and_operator, bench_measures_memory_of_a_device,
           beside_nccl_a_table_is_made, make_test_gpu_runs_where_there_is_a_driver, bench_counts_the_bytes_of_the_larger_operand,
           bench_names_the_algorithm_that_ran, bench_runs_under_mpirun, bench_binds_its_workers,
           lack_of_shared_memory_is_told_in_the_callers_numbers,
           bench_refuses_what_makes_no_sense, explain_prints_the_plan, explain_shows_one_exchange_for_two_ranks,
           explain_shows_zero_copy_for_shared_memory, explain_knows_all_sizes_of_jobs, explain_names_the_gpus_of_operands,
           explain_shows_sums_among_gpus, explain_tells_programs_the_same,
           explain_has_a_legend_for_its_steps,
           explain_knows_every_collective,
           explain_tells_the_limit_of_the_direct_way, explain_of_a_barrier_knows_no_bytes,
           explain_counts_the_elements_of_each_rank, explain_sends_an_all_to_all_in_place_through_staging_buffers,
           options_have_one_name_in_all_commands,
           explain_refuses_what_makes_no_sense, explain_shows_plans_over_hosts, explain_follows_the_rules,
           explain_over_hosts_follows_the_rules, explain_names_rules_that_cannot_serve,
           explain_and_info_follow_a_file_of_rules, info_prints_the_rules_after_the_table, rules_that_are_wrong_are_named,
           info_prints_settings_machine_and_algorithms, info_counts_the_threads_of_a_rank,
           info_tells_of_wrong_values_and_prints_the_rest,
           info_names_the_interface_and_the_providers, info_says_why_no_provider_is_taken,
           info_shows_a_setting_from_the_environment_and_hides_the_secret, help_teaches,
           narrow_terminals_break_no_words,
           bench_help_names_the_states_of_the_machine, make_build_says_what_it_built])
