#!/usr/bin/env python3
"""bench/bench_torch.py: what it measures, records and reports. The figures themselves do not matter here."""
import contextlib
import functools
import io
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
TOP = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "bench")]

import bench_report as report  # noqa: E402
import bench_torch  # noqa: E402
import torch  # noqa: E402, F401
import warm  # noqa: E402
from tap import Skip, call, expect, free_port, run_cases  # noqa: E402

BENCH = TOP / "bench/bench_torch.py"
LIBRARY = os.environ.get("SHOAL_LIBRARY", TOP / "build/libshoal.so")
ENVIRONMENT = {**os.environ, "SHOAL_LIBRARY": str(LIBRARY),
               "PYTHONPATH": os.pathsep.join([str(TOP / "python"), str(TOP / "bench"),
                                              os.environ.get("PYTHONPATH", "")])}
K, M = 1 << 10, 1 << 20
PYTHON = warm.start()


@functools.cache
def python_with(module):
    """Returns a Python that can import a module; skips the case if it cannot."""
    code, _, why = call(PYTHON, "-c", f"import {module}", env=ENVIRONMENT, timeout=300)
    if code:
        raise Skip(f"{module} cannot be imported: {(why.strip().splitlines() or ['no reason given'])[-1]}")
    return PYTHON


def bench(python, *words, folder):
    return call(sys.executable, BENCH, "--python", python, "--library", LIBRARY, "--out", folder, "--rounds", "1", *words,
                timeout=280, env=ENVIRONMENT)


def record_of(folder, suite):
    return report.record_read(pathlib.Path(folder), suite)


# ---- Judging, with invented figures ----------------------------------------------------------------------------------------

def point(size, gloo, deepspeed=None, shoal=10):
    results = {"shoal": shoal, "gloo": gloo} | ({"deepspeed": deepspeed} if deepspeed else {})
    results = {name: {"median_us": took, "loop_us": took, "exchange_ns": 60} for name, took in results.items()}
    one = {"round": 0, "bytes": size, "state": "near", "peer": "gloo", "ratio": gloo / shoal, "results": results}
    return bench_torch.points_judge([one])[0]


def judged(suite, points, left_out=None):
    """Returns the report of a suite with these points, by target; the exit code; and the table."""
    record = {"suite": suite, "kind": "curve" if "bytes" in points[0] else "cases", "title": "", "what": "", "command": "",
              "shoal_command": "", "machine": {"cpu": "", "cores": 2, "kernel": ""}, "is_judged": True, "points": points,
              "left_out": left_out or {}}
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(told):
        report.record_write(pathlib.Path(folder), record)
        code = report.targets_print(pathlib.Path(folder), [suite])
        table = report.markdown(report.record_read(pathlib.Path(folder), suite))
    return told.getvalue(), code, table


def what_meets_the_targets_is_met():
    told, code, table = judged("torch-all_reduce-2", [point(64, 51, 11), point(64 * K, 50, 10), point(M, 11, 10),
                                                      point(16 * M, 30, 20)])
    expect(code == 0 and "NOT MET" not in told and told.endswith("0 targets not met or without a figure\n"), told)
    expect("| >= 5, DeepSpeed >= 1 | yes |" in table and "| Gloo / Shoal |" in table and " no |" not in table, table)


def what_misses_a_target_is_named():
    for points, said in (([point(64, 49, 11), point(16 * M, 30, 20)], "up to 64 KiB: 64 B, near: 4.90"),
                         ([point(64, 51, 11), point(16 * M, 29, 20)], "from 16 MiB: 16 MiB, near: 2.90"),
                         ([point(64, 51, 11), point(M, 9, 20), point(16 * M, 30, 20)], "faster than Gloo: 1 MiB, near: 0.90"),
                         ([point(64, 51, 9), point(16 * M, 30, 20)], "never slower than DeepSpeed: 64 B, near: 0.90")):
        told, code, table = judged("torch-all_reduce-2", points)
        expect(code == 1 and told.count("NOT MET") == 1 and said in told.partition("NOT MET")[2], said, told)
        expect(table.count("| no |") == 1, table)


def zero_copy_tensors_have_more_to_reach():
    points = [point(64, 51), point(16 * M, 59)]
    expect(judged("torch-all_gather_into_tensor-4", points)[1] == 0)
    told, code, table = judged("torch-all_gather_into_tensor-4-zero-copy", points)
    expect(code == 1 and "| >= 6 | no |" in table, told, table)


def without_deepspeed_nothing_is_wanted_beside_it():
    points = [point(64, 51), point(16 * M, 30)]
    told, code, _ = judged("torch-all_reduce-2", points, {"deepspeed": "no module"})
    expect(code == 0 and "left out: no module" in told, told)
    told, code, _ = judged("torch-all_reduce-2", points)
    expect(code == 1 and "never slower than DeepSpeed: no figure on record" in told, told)


def cases_have_targets_of_their_own():
    def points(**values):
        return [bench_torch.case(0, "near", text.replace("_", " "), value) for text, value in values.items()]
    latency = {"Shoal, median, us": 25, "Gloo, median, us": 300}
    told, code, table = judged("torch-latency", points(**latency))
    expect(code == 0 and "| <= 25 | yes |" in table and "| - | - |" in table, told, table)
    expect(judged("torch-latency", points(**{**latency, "Shoal, median, us": 25.1}))[1] == 1)
    hidden = "communication not hidden over Gloo's"
    expect(judged("torch-ddp-gpt2", points(**{"step over Gloo's": 1, hidden: 0.25, "Gloo, step, ms": 900}))[1] == 0)
    expect(judged("torch-ddp-gpt2", points(**{"step over Gloo's": 1.1, hidden: 0.25}))[1] == 1)
    expect(judged("torch-ddp-gpt2", points(**{"step over Gloo's": 1, hidden: 0.3}))[1] == 1)
    expect(judged("torch-fsdp-gpt", points(**{"steps per second over Gloo's": 1.2}))[1] == 0)
    expect(judged("torch-fsdp-gpt", points(**{"steps per second over Gloo's": 1.1}))[1] == 1)


def every_suite_has_a_target_and_every_target_a_suite():
    wanted = {target.suite for target in report.TARGETS if target.suite.startswith("torch-")}
    expect(wanted == set(bench_torch.SUITES), wanted ^ set(bench_torch.SUITES))


# ---- The command -----------------------------------------------------------------------------------------------------------

def help_lists_the_suites():
    code, out, err = call(sys.executable, BENCH, "--help")
    expect(code == 0 and not err and all(name in out for name in bench_torch.SUITES), out, err)


def what_is_wrong_is_refused():
    for words, said in ((["torch-allreduce"], "there is no suite torch-allreduce"),
                        (["--rounds", "0"], "--rounds: it takes a number from 1 on"),
                        (["--sizes", "x"], "--sizes"), (["--null", "--python", "/no/such", "torch-latency"], "no PyTorch: ")):
        code, _, err = call(sys.executable, BENCH, *words)
        expect(code != 0 and said in err, words, code, err)


def curves_are_measured_and_written(suite, *words, python):
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = bench(python, suite, "--sizes", "64,4K", *words, folder=folder)
        expect(code == 0, out, err)
        record = record_of(folder, suite)
        expect([row["bytes"] for row in record["summary"]] == [64, 4096] and "PyTorch" in record["what"], record)
        for one in record["points"]:
            names = [one["results"][name]["median_us"] for name in ("shoal", "gloo")]
            expect(min(names) > 0 and abs(one["ratio"] - names[1] / names[0]) < 1e-9 and one["peer"] == "gloo", one)
            for result in one["results"].values():
                expect(result["iterations"] >= 5 and result["p99_us"] >= result["median_us"], result)
                expect(result["exchange_ns"] > 0, result)
        expect(all(title in out for title in ("| Gloo / Shoal |", "| wants | met |", "| 64 B |", "| 4 KiB |")), out)
        expect(not report.record_path(pathlib.Path(folder), suite).with_suffix(".svg").exists(), "no plot was there to be drawn anew")


def gloo_can_stand_in_shoals_place():
    curves_are_measured_and_written("torch-reduce_scatter_tensor-2", "--null", python=python_with("torch.distributed"))


def shoal_is_measured_beside_gloo():
    curves_are_measured_and_written("torch-all_gather_into_tensor-2", python=python_with("shoal.torch"))


def a_wrong_result_stops_the_run():
    """The task leaves its output unchanged, which is right with one rank only."""
    python = python_with("torch.distributed")
    program = ("import sys, torch, torch_worker as worker\n"
               "task = worker.AllReduce(8, 0, int(sys.argv[1]), torch.empty, lambda data: data)\n"
               "worker.result_check(task, 'all_reduce')")
    for ranks, wanted in ((1, 0), (2, 1)):
        code, out, err = call(python, "-c", program, ranks, env=ENVIRONMENT)
        expect(code == wanted and ("a result of all_reduce of 32 bytes is wrong" in err) == bool(wanted), code, out, err)


def gradients_are_shaped_as_the_models():
    program = ("import math, torch_training as training\n"
               "for shapes in training.gpt2_shapes(), training.resnet50_shapes():\n"
               "    print(sum(map(math.prod, shapes)), len(shapes))")
    code, out, err = call(python_with("torch.distributed"), "-c", program, env=ENVIRONMENT)
    expect(code == 0 and out.split() == ["124439808", "148", "25557032", "161"], out, err)


def a_training_is_timed_with_and_without_communication():
    python = python_with("torch.distributed")
    words = [python, TOP / "bench/torch_worker.py", "gloo", "train", "--model", "tiny", "--steps", "2"]
    alone = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    code, out, err = call(*words, env=alone, timeout=200)
    expect(code == 0, out, err)
    result = json.loads(out)
    expect(abs(result["exposed_us"] - (result["median_us"] - result["alone_us"])) < 1e-6 and result["steps"] == 2, result)


def pipelines_are_measured_beside_torchs():
    python = python_with("torch.distributed.pipelining")
    command = os.environ.get("SHOAL_COMMAND", TOP / "build/shoal")
    words = ["--schedule", "zb-h1", "--layers", "4", "--width", "16", "--rows", "2", "--microbatches", "3", "--rounds", "2"]
    code, out, err = call(command, "run", "-n", "2", python, TOP / "bench/torch_pipeline.py", *words, env=ENVIRONMENT, timeout=200)
    expect(code == 0, out, err)
    result = json.loads(next(line[line.index("{"):] for line in out.splitlines() if "{" in line))
    names = {"shoal", "torch over shoal", "torch over gloo"}
    expect(set(result["median_ms"]) == set(result["ratio"]) == names and result["ratio"]["shoal"] == 1.0, result)
    expect(all(0 < result["best_ms"][name] <= result["median_ms"][name] for name in names), result)


run_cases([what_meets_the_targets_is_met, what_misses_a_target_is_named, zero_copy_tensors_have_more_to_reach,
           without_deepspeed_nothing_is_wanted_beside_it, cases_have_targets_of_their_own,
           every_suite_has_a_target_and_every_target_a_suite, help_lists_the_suites, what_is_wrong_is_refused,
           gloo_can_stand_in_shoals_place, shoal_is_measured_beside_gloo, a_wrong_result_stops_the_run,
           gradients_are_shaped_as_the_models, a_training_is_timed_with_and_without_communication,
           pipelines_are_measured_beside_torchs])
