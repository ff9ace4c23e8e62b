#!/usr/bin/env python3
"""`shoal bench step` and `shoal sim step` as a user sees them. (test_step_profile and test_step_replay test profiles, the
bound and the schedule.)"""
import atexit
import csv
import io
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree

from tap import Skip, call, expect, free_port, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
IS_SANITIZED = os.environ.get("SHOAL_TEST_BUILD") == "asan"  # few hosts show it as much as hundreds
SVG = "{http://www.w3.org/2000/svg}"
LEAKS = pathlib.Path(__file__).resolve().parents[1] / "libfabric.supp"
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-step-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)

# Twelve tensors of half a MiB, two to a buffer, ready at equal intervals.
TENSORS, ELEMENTS = 12, 1 << 17
SMALL = ROOT / "small.json"
SMALL.write_text(json.dumps([{"name": f"layer.{TENSORS - 1 - i}", "elements": ELEMENTS, "ready": (i + 1) / TENSORS}
                             for i in range(TENSORS)]))
BUFFERS = ("--buffer", "1M", "--first", "1M", "--rank-bytes", "64K")
RANK_FIELDS = ["record", "rank", "host", "step_us", "backward_us", "exposed_us", "bytes_sent", "bytes_received", "bytes_network",
               "bytes_wire_sent", "bytes_wire_received", "cpu_s", "balance", "pack_us", "unpack_us", "callback_us", "optimizer_us", "optimizer_bytes", "bytes_copied", "flight_buffers", "errors"]


def refused(*words, about):
    code, out, err = call(SHOAL, *words)
    expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, words, code, out, err)


# ---- Predicted ------------------------------------------------------------------------------------------------------------------


def sim(*words):
    code, out, err = call(SHOAL, "sim", "step", *words, timeout=240)  # 200 and 256 hosts take 12 seconds of CPU time
    said = [line for line in err.splitlines() if not line.endswith(" s so far")]  # printed after 30 s, as on a crowded machine
    expect(code == 0 and not said, words, code, out, err)
    return out


def predicted(*words):
    return [json.loads(line) for line in sim(*words, "--format", "json").splitlines()]


def measured_passes_are_those_of_the_profile():
    file = ROOT / "measured.json"
    facts = {"profile": "net", "batch": 3, "forward_ms": 1.5, "backward_ms": 20, "activation_bytes": 8, "batch_norms": 0}
    file.write_text(json.dumps([facts, {"name": "w", "elements": 1000, "ready": 1}]))
    for words, passes in (((), (1500, 20000)), (("--forward", "7"), (7000, 20000)), (("--backward", "10"), (5000, 10000))):
        (row,) = predicted("--profile", file, "--hosts", "2", *words)
        expect((row["forward_us"], row["backward_us"], row["profile"]) == (*passes, "net"), words, row)
    refused("sim", "step", "--profile", f"{file},gpt2", about="how long is the backward pass?")


def efficiency_is_of_as_many_single_workers():
    rows = predicted("--profile", "resnet50", "--backward", "120", "--hosts", "1-8", "--rate", "10gbit")
    expect([(row["hosts"], row["ranks"]) for row in rows] == [(1, 8), (2, 16), (4, 32), (8, 64)], rows)
    for row in rows:
        share = (row["forward_us"] + row["backward_us"]) / (row["forward_us"] + row["step_us"])
        expect(abs(row["efficiency"] - share) < 1e-9 and row["forward_us"] == 60e3 and row["backward_us"] == 120e3, row)
        expect(0 < row["efficiency"] < row["bound_efficiency"] <= 1 and row["step_us"] > row["bound_us"] >= 120e3, row)
        expect(abs(row["exposed_us"] - (row["step_us"] - 120e3)) < 1, row)
        expect((row["tensors"], row["bytes"]) == (161, 4 * 25557032) and row["wire_us"] <= row["sum_us"], row)
    (shorter,) = predicted("--profile", "resnet50", "--backward", "120", "--forward", "0", "--hosts", "8", "--rate", "10gbit")
    expect(shorter["step_us"] == rows[3]["step_us"] and shorter["efficiency"] < rows[3]["efficiency"], shorter)


def many_hosts_lose_little():
    """The published figure to beat is 85 % with 2,048 workers. Beyond 128 workers efficiency falls no further than
    docs/figures/predictions.md states; with 200 hosts, not a power of two, it falls by up to 5 points."""
    falls = {"resnet50": 0.035, "bert-large": 0.02, "gpt2": 0.02}
    words = ("--profile", "resnet50,bert-large,gpt2", "--backward", "120,400,250", "--rate", "100gbit", "--memory", "20GB/s")
    hosts = "16,64" if IS_SANITIZED else "16,64,200,256"
    rows = {(row["profile"], row["hosts"]): row for row in predicted(*words, "--hosts", hosts)}
    for (profile, hosts), row in rows.items():
        fall = rows[profile, 16]["efficiency"] - row["efficiency"]
        expect(fall < (0.05 if hosts == 200 else falls[profile]), fall, row)
        expect(profile != "bert-large" or row["efficiency"] > 0.9, row)
        expect(hosts == 16 or row["algorithm"] == ("halving" if hosts == 256 else "mesh"), row)


def a_single_buffer_takes_what_its_all_reduce_takes():
    one = ROOT / "one.json"
    one.write_text('[{"name": "all", "elements": 1048576, "ready": 1}]')
    words = ("--hosts", "2", "--ranks-per-host", "4", "--rate", "10gbit")
    (row,) = predicted("--profile", one, "--backward", "50", "--views", *words)
    code, out, err = call(SHOAL, "sim", "allreduce", "--bytes", "4M", "--operands", "shared", "--format", "json", *words)
    expect(abs(row["exposed_us"] - json.loads(out)["time_us"]) < 1e-3 and row["buffers"] == 1, row, out, err)
    (copied,) = predicted("--profile", one, "--backward", "50", "--memory", "5GB/s", *words)
    expect(abs(copied["step_us"] - row["step_us"] - 2 * 2 * 4194304 / 5e3) < 1e-3, copied, row)  # in and out, read and written


def gradients_on_gpus_pass_pcie():
    one = ROOT / "one.json"
    one.write_text('[{"name": "all", "elements": 1048576, "ready": 1}]')
    words = ("--hosts", "2", "--ranks-per-host", "4", "--rate", "10gbit", "--pcie", "gen3")
    for more in ((), ("--nvlink", "gen3")):
        (row,) = predicted("--profile", one, "--backward", "50", *words, *more)
        code, out, err = call(SHOAL, "sim", "allreduce", "--bytes", "4M", "--format", "json", *words, *more)
        expect(abs(row["exposed_us"] - json.loads(out)["time_us"]) < 1e-3 and row["pcie_gb_s"] == 12, row, out, err)
    expect("gradients are on GPUs" in sim("--profile", one, "--backward", "50", *words))


def late_tensors_bound_the_step_and_are_named():
    words = ("--hosts", "4", "--ranks-per-host", "1", "--rate", "1gbit")
    (row,) = predicted("--profile", "gpt2", "--backward", "5973", *words)
    expect(row["bound_tensor"] == "wte.weight" and row["bound_ready"] == 1 and 4 * 38597376 < row["bound_tail_bytes"] < 200e6, row)
    expect(abs(row["bound_us"] / row["backward_us"] - 1.33) < 0.006, row)
    text = sim("--profile", "gpt2", "--backward", "5973", *words)
    expect("wte.weight: 157.0 MiB after 100%" in text and max(map(len, text.splitlines())) <= 160, text)


def forms_of_prediction_agree():
    words = ("--profile", f"resnet50,{SMALL}", "--backward", "120,3.5", "--hosts", "1,3", "--ranks-per-host", "2")
    rows = predicted(*words)
    expect([(row["profile"], row["backward_us"]) for row in rows] == [("resnet50", 120e3)] * 2 + [("small.json", 3.5e3)] * 2, rows)
    table = list(csv.DictReader(io.StringIO(sim(*words, "--format", "csv"))))
    expect([list(row) for row in table] == [list(row) for row in rows], table, rows)
    expect(all(float(line["step_us"]) == row["step_us"] and line["limit"] == row["limit"] for row, line in zip(rows, table)), table)
    text = sim(*words)
    expect(all(f"{row['step_us'] / 1e3:.2f}" in text and f"{100 * row['efficiency']:.1f}%" in text for row in rows), text)


def longer_backward_passes_hide_more():
    words = ("--hosts", "4", "--ranks-per-host", "1")
    shares = [predicted("--profile", SMALL, *BUFFERS, *words, "--backward", ms, "--rate", "1gbit")[0]
              for ms in ("10", "60", "300")]
    expect(shares[0]["limit"] == "wire" and shares[2]["exposed_us"] < shares[0]["exposed_us"] / 4, shares)
    flights = [predicted("--profile", SMALL, *BUFFERS, *words, "--flight", size, "--backward", "10", "--latency", "2ms")[0]["step_us"]
               for size in ("1M", "100M")]
    expect(flights[0] > flights[1], flights)


def names_from_files_are_quoted():
    odd = ROOT / "odd.json"
    odd.write_text(json.dumps([{"name": 'a"b,\\c', "elements": 4194304, "ready": 1}]))
    words = ("--profile", odd, "--backward", "1", "--hosts", "2", "--ranks-per-host", "1")
    (row,) = predicted(*words)
    expect(row["bound_tensor"] == 'a"b,\\c', row)
    (line,) = csv.DictReader(io.StringIO(sim(*words, "--format", "csv")))
    expect(line["bound_tensor"] == 'a"b,\\c' and float(line["step_us"]) == row["step_us"], line)


def profiles_are_printed_as_files_have_them():
    for name in ("resnet50", "bert-large", "gpt2"):
        path = ROOT / f"{name}.json"
        path.write_text(sim("--profile", name, "--print-profile"))
        expect(all(set(row) == {"name", "elements", "ready", "index"} for row in json.loads(path.read_text())))
        words = ("--backward", "100", "--hosts", "2", "--ranks-per-host", "2")
        (built_in,), (read,) = predicted("--profile", name, *words), predicted("--profile", path, *words)
        expect(built_in | {"profile": f"{name}.json"} == read, built_in, read)


def optimizers_are_predicted():
    """Rates are those of the arithmetic: AdamW reads and writes 28 bytes for each element."""
    words = ("--profile", "gpt2", "--backward", "250", "--hosts", "4", "--ranks-per-host", "2", "--rate", "10gbit")
    elements = 124439808
    (none,), (after,) = predicted(*words), predicted(*words, "--optimizer", "adamw", "--update", "7GB/s")
    expect((none["optimizer"], none["optimizer_us"], none["optimizer_bytes"], none["shard"]) == ("none", 0, 0, "none"), none)
    expect(abs(after["optimizer_us"] - 28 * elements / 7e3) < 1 and after["optimizer_bytes"] == 8 * elements, after)
    expect(abs(after["step_us"] - none["step_us"] - after["optimizer_us"]) < 1 and after["limit"] == "optimizer", after, none)
    expect(abs(after["optimizer_share"] - after["optimizer_us"] / after["step_us"]) < 1e-9 and after["update_gb_s"] == 7, after)
    (buffers,) = predicted(*words, "--optimizer", "adamw", "--update", "7GB/s", "--when", "buffers")
    expect(none["step_us"] < buffers["step_us"] < after["step_us"] and buffers["when"] == "buffers", buffers)
    for shard, degree in (("all", 8), ("host", 2), ("2", 2), ("4", 4), ("1", 1), ("8", 8)):
        (row,) = predicted(*words, "--optimizer", "adamw", "--update", "7GB/s", "--shard", shard)
        expect(row["shard"] == shard and abs(row["optimizer_us"] - after["optimizer_us"] / degree) < 1, row)
        expect(8 * elements <= degree * row["optimizer_bytes"] < 1.001 * 8 * elements, row)
        expect(row["bound_us"] == none["bound_us"] < row["step_us"] < after["step_us"], row)
    late, early = (predicted(*words, "--optimizer", "adamw", "--update", "7GB/s", "--shard", "all", "--clip", way)[0] for way in ("late", "early"))
    (plain,) = predicted(*words, "--optimizer", "adamw", "--update", "7GB/s", "--shard", "all")
    expect(plain["step_us"] < early["step_us"] < late["step_us"] and (plain["clip"], late["clip"], early["clip"]) == ("none", "late", "early"), late, early)
    expect(2 * early["optimizer_bytes"] == 7 * late["optimizer_bytes"] == 7 * plain["optimizer_bytes"], late, early)
    (lamb,), (adam,) = (predicted(*words, "--optimizer", rule, "--shard", "all") for rule in ("lamb", "adam"))
    expect(lamb["step_us"] > adam["step_us"] and lamb["optimizer_us"] > 1.5 * adam["optimizer_us"], lamb, adam)


def a_sharded_buffer_takes_what_its_operations_take():
    """One buffer, so that nothing overlaps: a reduce-scatter, the step of a shard, an all-gather; over teams an all-reduce."""
    one = ROOT / "one.json"
    one.write_text('[{"name": "all", "elements": 1048576, "ready": 1}]')

    def time_of(collective, size, *words):
        code, out, err = call(SHOAL, "sim", collective, "--bytes", str(size), "--operands", "shared", "--format", "json", *words)
        return json.loads(out)["time_us"]

    network = ("--rate", "8gbit", "--latency", "20us")
    words = ("--profile", one, "--backward", "50", "--views", "--hosts", "2", "--ranks-per-host", "4", *network,
             "--optimizer", "momentum", "--update", "5GB/s")
    size, update_us = 4 << 20, 20 * 1048576 / 5e3
    (row,) = predicted(*words, "--shard", "all")
    all_ranks = ("--hosts", "2", "--ranks-per-host", "4", *network)
    wanted = time_of("reducescatter", size, *all_ranks) + update_us / 8 + time_of("allgather", size, *all_ranks)
    expect(abs(row["exposed_us"] - wanted) < 1e-2, row, wanted)
    (row,) = predicted(*words, "--shard", "host")
    host = ("--hosts", "1", "--ranks-per-host", "4", *network)
    across = ("--hosts", "2", "--ranks-per-host", "1", "--rate", "2gbit", "--latency", "20us")  # four share an adapter
    wanted = time_of("reducescatter", size, *host) + time_of("allreduce", size // 4, *across) + update_us / 4 + \
        time_of("allgather", size, *host)
    expect(abs(row["exposed_us"] - wanted) < 1e-2, row, wanted)


def types_of_16_bits_halve_the_bytes():
    """Gradients and parameters have one type, so both directions of the wire carry half."""
    words = ("--profile", "gpt2", "--backward", "250", "--hosts", "4", "--ranks-per-host", "1", "--rate", "1gbit",
             "--optimizer", "adamw", "--shard", "all")
    (whole,), (half,) = predicted(*words), predicted(*words, "--type", "bfloat16")
    expect(whole["bytes"] == 2 * half["bytes"] and half["dtype"] == "bfloat16" and whole["dtype"] == "float32", whole, half)
    expect(abs((half["bound_us"] - 250e3) / (whole["bound_us"] - 250e3) - 0.5) < 0.02, whole, half)
    expect(0.49 < half["wire_us"] / whole["wire_us"] < 0.51 and half["step_us"] < 0.55 * whole["step_us"], whole, half)
    expect(1.49 < half["optimizer_bytes"] / whole["optimizer_bytes"] < 1.51, whole, half)  # a master for each element, with the two states


def predictions_that_make_no_sense_are_refused():
    refused("sim", "step", "--backward", "9", about="which model?")
    refused("sim", "step", "--profile", "gpt2", about="how long is the backward pass?")
    refused("sim", "step", "--profile", "resnet", "--backward", "9", about="no profile resnet (resnet50, bert-large and gpt2 are built in)")
    refused("sim", "step", "--profile", "gpt2", "--backward", "0", about="milliseconds above 0")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9,", about="milliseconds above 0")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9,9", about="one for each profile")
    refused("sim", "step", "--profile", "gpt2,gpt2,gpt2", "--backward", "9,9", about="one for each profile")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9", "--hosts", "0", about="1 to 4096")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9", "--hosts", "4096", "--ranks-per-host", "8", about="4096")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9", "--rate", "fast", about="bits per second")
    refused("sim", "step", "--profile", "gpt2", "--backward", "9", "--buffer", "0", about="above 0")
    refused("sim", "step", "allreduce", about="'allreduce' is not an option")
    refused("sim", "step", "--profil", "gpt2", about="did you mean --profile?")
    known = ("sim", "step", "--profile", "gpt2", "--backward", "9", "--hosts", "2", "--ranks-per-host", "3")
    refused(*known, "--shard", "all", about="which optimizer?")
    refused(*known, "--optimizer", "adamw", "--shard", "all", "--when", "after", about="leave it or --shard out")
    refused(*known, "--optimizer", "adamw", "--shard", "4", about="--shard 4 does not divide the 6 ranks of 2 hosts")
    refused(*known, "--optimizer", "adamw", "--shard", "2", about="takes parts of several hosts of 3 ranks")
    refused(*known, "--optimizer", "adamw", "--pcie", "gen4", about="--optimizer runs on the CPU")
    refused(*known, "--optimizer", "adamw", "--clip", "late", about="add --shard all")
    refused(*known, "--optimizer", "lamb", "--shard", "all", "--clip", "early", about="use --clip late")
    refused(*known, "--type", "int8", about="float32, bfloat16 or float16")
    refused(*known, "--update", "0GB/s", about="above 0")


# ---- Measured -------------------------------------------------------------------------------------------------------------------


def bench(*words, ranks=2, profile=SMALL, backward="40", prefix=(), code=0):
    given = ("-n", str(ranks)) if not prefix else ()
    came, out, err = call(*prefix, SHOAL, "bench", "step", "--profile", profile, "--backward", backward, "--steps", "3", *BUFFERS,
                          "--format", "json", *given, *words, timeout=120)
    expect(came == code, words, came, out, err)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    expect([row["record"] for row in rows] == ["rank"] * ranks + ["step"], rows)
    expect([row["rank"] for row in rows[:-1]] == list(range(ranks)) and not any(row["errors"] for row in rows), rows)
    return rows[:-1], rows[-1]


def gradients_on_a_device_are_averaged():
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"  # it has the stand-in for the driver
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    driver = ("env", f"LD_LIBRARY_PATH={folder}", "MOCK_CUDA=devices=2,late=20")
    for words in ([], ["--views", "--busy"]):
        ranks, step = bench("--memory", "gpu", "-n", "2", *words, backward="5", prefix=driver)
        expect(step["memory"] == "gpu" and not step["thread"] and step["exposed_us"] > 0, words, step)
        expect(all((rank["bytes_copied"] > 0) == ("--views" not in words) for rank in ranks), words, ranks)
    summing = (*driver, "SHOAL_GPU_PEER_BYTES=1", "SHOAL_LOG=info")
    code, out, err = call(*summing, SHOAL, "bench", "step", "--profile", SMALL, "--backward", "5", "--steps", "3", *BUFFERS, "--memory", "gpu",
                          "-n", "2", timeout=120)
    expect(code == 0 and "GPUs sum all-reduces of 1 bytes and more among themselves" in err and "do not sum" not in err, code, out, err)
    for words in (["--shard", "all"], ["--shard", "all", "--clip", "early"]):
        ranks, step = bench("--memory", "gpu", "-n", "2", "--optimizer", "adamw", *words, backward="5", prefix=driver)
        states = 2 * 4 * TENSORS * ELEMENTS / 2
        most = 1.01 * states if "early" not in words else 4 * states  # room for a second attempt
        expect(all(states <= rank["optimizer_bytes"] < most and rank["errors"] == 0 for rank in ranks), words, ranks)
    gpu = ("bench", "step", "--profile", SMALL, "--backward", "1", "--memory", "gpu", "--optimizer", "sgd")
    refused(*gpu, about="--optimizer runs on the CPU: with --memory gpu it needs --shard")
    refused(*gpu, "--shard", "all", "--views", about="leave --views out")
    code, out, err = call("env", f"LD_LIBRARY_PATH={folder}", "MOCK_CUDA=devices=0", SHOAL, "bench", "step", "--profile", SMALL,
                          "--backward", "1", "--memory", "gpu")
    expect(code == 1 and "--memory gpu: " in err and "device" in err, code, out, err)


def every_rank_reports_its_step():
    for ranks in (1, 2, 3):
        rows, step = bench(ranks=ranks)
        size = 4 * TENSORS * ELEMENTS
        for row in rows:
            expect(list(row) == RANK_FIELDS, row)
            expect(row["backward_us"] >= 40e3 and row["step_us"] >= row["backward_us"] and row["exposed_us"] >= 0, row)
            sent = 2 * (ranks - 1) / ranks * size
            expect(sent <= row["bytes_sent"] <= 1.01 * sent and row["bytes_received"] == row["bytes_sent"], row)
            expect(row["bytes_network"] == row["bytes_wire_sent"] == row["bytes_wire_received"] == 0, row)
            expect(1 <= row["balance"] < 1.01 and row["cpu_s"] > 0, row)
            expect(row["bytes_copied"] == 2 * size and row["pack_us"] > 0, row)
        expect((step["profile"], step["tensors"], step["bytes"], step["ranks"], step["hosts"], step["steps"]) ==
               ("small.json", TENSORS, size, ranks, 1, 3) and step["buffers"] == 6, step)
        hidden = max(0, 1 - step["exposed_us"] / step["alone_us"])
        expect(abs(step["hidden_alone"] - hidden) < 1e-2 and 0 <= step["hidden"] <= 1, step)
        slowest = max(row["step_us"] for row in rows)
        expect(step["step_us"] >= 0.5 * slowest and step["bound_us"] >= step["backward_us"] >= 40e3, step, rows)


def every_way_of_a_step_gives_the_averages():
    """Each variant's first step is compared element by element."""
    size = 4 * TENSORS * ELEMENTS
    for words in (["--busy"], ["--views"], ["--no-thread"], ["--optimizer", "sgd"], ["--optimizer", "adamw", "--when", "buffers"],
                  ["--views", "--optimizer", "lion", "--when", "buffers", "--no-thread"], ["--compress", "bf16"], ["--compress", "int8", "--views"],
                  ["--flight", "1M"]):
        rows, step = bench(*words, backward="5")
        expect(step["busy"] == ("--busy" in words) and step["thread"] == ("--no-thread" not in words), words, step)
        copied = 0 if "--views" in words else 2 * size
        expect(all(row["bytes_copied"] == copied for row in rows), words, rows)
        expect(all((row["callback_us"] > 0) == ("buffers" in words) for row in rows), words, rows)


def each_optimizer_steps_its_shard():
    """The parameters after the first step are compared element by element. Two float32 states of AdamW take twice the bytes of
    the parameters, divided by the ranks that share them."""
    size = 4 * TENSORS * ELEMENTS
    for rule, states in (("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("adagrad", 1), ("lion", 1)):
        rows, step = bench("--optimizer", rule, "--shard", "all", backward="5", ranks=3)
        expect((step["optimizer"], step["shard"]) == (rule, "all") and step["errors"] == 0, step)
        most = {name: max(row[name] for row in rows) for name in ("optimizer_us", "optimizer_bytes")}
        expect(most == {name: step[name] for name in most} and abs(step["optimizer_share"] * step["step_us"] - step["optimizer_us"]) < 10, step)
        expect(all(states * size / 3 <= row["optimizer_bytes"] <= 1.02 * states * size / 3 for row in rows), rule, rows)
    for clip, values in (("late", 2), ("early", 7)):  # for each element of a shard, as in gradients.h
        rows, step = bench("--optimizer", "adamw", "--shard", "all", "--clip", clip, backward="5", ranks=3)
        expect(step["clip"] == clip and step["errors"] == 0, step)
        expect(all(values * size / 3 <= row["optimizer_bytes"] <= 1.02 * values * size / 3 for row in rows), rows)
    for shard, sharers, words in (("2", 2, []), ("host", 4, ["--views"]), ("1", 1, ["--no-thread"])):
        rows, step = bench("--optimizer", "adamw", "--shard", shard, *words, backward="5", ranks=4)
        expect(step["shard"] == shard and all(2 * size / sharers <= row["optimizer_bytes"] <= 2.04 * size / sharers for row in rows), rows)
        expect(all(row["optimizer_us"] > 0 for row in rows), rows)
    rows, _ = bench("--optimizer", "adamw", backward="5")
    expect(all(row["optimizer_bytes"] >= 2 * size and row["optimizer_us"] > 0 for row in rows), rows)
    for words, about in ((["--shard", "all"], "which optimizer"), (["--when", "after"], "which optimizer"),
                         (["--optimizer", "adam", "--shard", "none"], "none"), (["--optimizer", "rmsprop"], "rmsprop"),
                         (["--optimizer", "adam", "--shard", "all", "--when", "after"], "--when is for"),
                         (["--optimizer", "adam", "--shard", "all", "--compress", "int8"], "full precision")):
        refused("bench", "step", "--profile", SMALL, "--backward", "1", *words, about=about)
    code, out, err = call(SHOAL, "bench", "step", "--profile", SMALL, "--backward", "3", "--steps", "1", "--optimizer", "adamw", "--shard", "all")
    expect(code == 0 and re.search(r"^optimizer adamw, each rank steps its shard: ", out, re.M), code, out, err)
    code, out, err = call(SHOAL, "bench", "step", "--profile", SMALL, "--backward", "3", "--optimizer", "adamw", "--shard", "3", "-n", "2")
    expect(code == 1 and "does not divide the 2 ranks" in err, code, out, err)


def optimizers_are_measured_on_one_core():
    for kind in ("float32", "bfloat16", "float16"):
        code, out, err = call(SHOAL, "bench", "optimizer", "--size", "1M", "--rounds", "2", "--type", kind, "--format", "json")
        rows = [json.loads(line) for line in out.splitlines()]
        expect(code == 0 and not err, code, out, err)
        expect([row["optimizer"] for row in rows] == ["sgd", "momentum", "adam", "adamw", "adagrad", "lion", "memcpy"], rows)
        expect(all(row["gb_s"] > 0 and row["type"] == kind for row in rows[:-1]), rows)
    code, out, err = call(SHOAL, "bench", "optimizer", "--size", "64K", "--rounds", "1")
    expect(code == 0 and re.search(r"^adamw +float32 +\d", out, re.M), out, err)
    for words, about in ((["--size", "1"], "at least 4K"), (["--type", "int8"], "int8"), (["--rounds", "0"], "--rounds"), (["adam"], "adam")):
        refused("bench", "optimizer", *words, about=about)


def busy_ranks_compute():
    busy, _ = bench("--busy", "--bind", "none", backward="200")
    expect(all(row["cpu_s"] > 0.03 and row["backward_us"] > 60e3 for row in busy), busy)


def buffers_are_averaged_while_the_backward_pass_goes_on():
    path = ROOT / "trace.json"
    drawing = ROOT / "step.svg"
    rows, step = bench("--trace", path, "--timeline", drawing, ranks=3, backward="600")
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(3):
        own = [event for event in events if event["pid"] == rank + 1]
        names = [event["args"]["name"] for event in own if event["ph"] == "M"]
        expect(names[:2] == [f"rank {rank}, host 0", "backward pass"] and len(names) == 2 + step["buffers"], names)
        spans = [event for event in own if event["ph"] == "X"]
        passed = [span for span in spans if span["tid"] == 1]
        expect([span["name"] for span in passed] == [f"layer.{TENSORS - 1 - i}" for i in range(TENSORS)], passed)
        ready = max(span["ts"] + span["dur"] for span in passed)
        summed = {span["tid"]: span["ts"] + span["dur"] for span in spans if span["name"] == "is averaged"}
        expect(len(summed) == step["buffers"] and ready >= 600e3, summed)
        # The first buffer is full after a sixth of the pass; the last one cannot be summed before its end.
        expect(summed[2] < ready and summed[1 + step["buffers"]] > 600e3, summed, ready)
    root = xml.etree.ElementTree.parse(drawing).getroot()
    labels = [text.text for text in root.findall(f"{SVG}text")]
    expect("backward pass" in labels and sum(label.startswith("buffer ") for label in labels) == step["buffers"], labels)
    expect(any("3 ranks on 1 host" in label for label in labels), labels)


def tables_say_what_bounds_the_step():
    code, out, err = call(SHOAL, "bench", "step", "--profile", SMALL, "--backward", "30", "--steps", "2", *BUFFERS)
    expect(code == 0, out, err)
    for pattern in (r"small\.json: 12 tensors, 6 MiB in 6 buffers of up to 1 MiB, 2 ranks on 1 host", r"^ +1 +0 +\d+\.\d\d ",
                    r"^step +\d+\.\d\d ms", r"^hidden ", r"^bound +\d+\.\d\d ms for any library: layer\.\d+ is ready after \d+ %", r"^balance +1\.0"):
        expect(re.search(pattern, out, re.M), pattern, out)
    expect(max(map(len, out.splitlines())) <= 128, out)
    code, out, err = call(SHOAL, "bench", "step", "--profile", SMALL, "--backward", "3", "--steps", "1", "-n", "1")
    expect(code == 0 and "one rank has nobody to average with" in out, out, err)


def models_run_as_they_are():
    rows, step = bench("--views", profile="resnet50", backward="30")
    expect((step["profile"], step["tensors"], step["bytes"]) == ("resnet50", 161, 4 * 25557032), step)


def launchers_start_the_ranks():
    rows, step = bench(prefix=(SHOAL, "run", "-n", "2", "--no-prefix"))
    expect(step["ranks"] == 2, step)


def ranks_on_two_hosts(*words):
    """Runs four ranks on this machine that claim to be on two hosts. They reach the other host's ranks over the network."""
    port = free_port()
    ranks = [subprocess.Popen([SHOAL, "bench", "step", "--profile", SMALL, "--backward", "30", "--steps", "2", *BUFFERS, "--format",
                               "json", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(port), "SHOAL_SECRET": "steps of a test", "SHOAL_HOST_ID": f"step-{rank // 2}",
                                   "LSAN_OPTIONS": f"suppressions={LEAKS}:print_suppressions=0"})
             for rank in range(4)]
    came = [rank.communicate(timeout=120) for rank in ranks]
    if any("SHOAL_ERR_UNSUPPORTED" in err for _, err in came):
        raise Skip("no network between hosts here: " + came[0][1].strip())
    expect(not any(rank.returncode for rank in ranks), [rank.returncode for rank in ranks], came)
    return [json.loads(line) for line in came[0][0].splitlines()]


def hosts_send_less_where_gradients_are_compressed():
    size, sent = 4 * TENSORS * ELEMENTS, {}
    for word in ("none", "fp16", "bf16", "int8"):
        *rows, step = ranks_on_two_hosts("--compress", word, "--rate", "10gbit")
        expect((step["hosts"], step["compress"], step["errors"]) == (2, word, 0) and not any(row["errors"] for row in rows), step)
        expect([row["host"] for row in rows] == [0, 0, 1, 1] and len({row["bytes_network"] for row in rows}) == 1, rows)
        sent[word] = rows[0]["bytes_network"]
        for row in rows:  # transports count the gradients and a few thousand bytes of messages
            for way in ("bytes_wire_sent", "bytes_wire_received"):
                expect(sent[word] < row[way] < 1.05 * sent[word], word, way, row)
        for way in ("bytes_wire_sent", "bytes_wire_received"):
            expect(max(row[way] for row in rows) < 1.01 * min(row[way] for row in rows), word, way, rows)
        most = max(row["bytes_wire_sent"] for row in rows) * len(rows) / sum(row["bytes_wire_sent"] for row in rows)
        expect(most - 1e-5 <= step["balance"] < 1.01, word, step, rows)
        # Each of the two hosts sends every byte once; the bound counts the bytes after compression.
        ratio = {"none": 1, "int8": 4 / (1 + 4 / 256)}.get(word, 2)
        expect(abs(step["wire_us"] - size * 8e-3 / 10 / ratio) < 1 and step["bound_us"] >= step["wire_us"], word, step)
    expect(size / 2 <= sent["none"] < 0.51 * size and sent["fp16"] == sent["bf16"], sent)
    expect(1.9 < sent["none"] / sent["bf16"] < 2.1 and 3.7 < sent["none"] / sent["int8"] < 4, sent)


def long_measurements_say_what_they_are_at():
    screen, terminal = pty.openpty()
    process = subprocess.Popen([SHOAL, "bench", "step", "--profile", SMALL, "--backward", "300", "--steps", "1000"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal)
    text, end = "", time.monotonic() + 60
    try:
        while not re.search(r"step ([2-9]|\d\d+) of 1000", text) and time.monotonic() < end:
            if select.select([screen], [], [], 0.2)[0]:
                text += os.read(screen, 4096).decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(screen)
    expect(re.search(r"\rshoal bench: step \d+ of 1000, about \d+ s left\x1b\[K", text), repr(text))


def children_of(pid):
    return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_until(screen, pattern, text):
    """Returns the terminal's output until the pattern appears; with None, until the terminal is closed."""
    end = time.monotonic() + 60
    while not (pattern and re.search(pattern, text)) and time.monotonic() < end:
        if select.select([screen], [], [], 0.2)[0]:
            try:
                text += os.read(screen, 4096).decode()
            except OSError:  # all processes have closed it
                break
    return text


def a_killed_worker_is_named_by_the_others():
    screen, terminal = pty.openpty()  # progress lines go to this terminal and show that the steps have begun
    process = subprocess.Popen([SHOAL, "bench", "step", "--profile", SMALL, "--backward", "300", "--steps", "1000", "-n", "3"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    try:
        err = read_until(screen, r"step ([2-9]|\d\d+) of 1000", "")
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        err = read_until(screen, None, err)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    err = err.replace("\x1b[K", "\n").replace("\r", "\n")
    expect(process.returncode == 137 and "rank 1" in err and "was ended by signal 9" in err, process.returncode, out, err)
    told = [line for line in err.splitlines() if re.match(r"shoal bench: rank [02]: SHOAL_ERR_PEER_LOST: ", line)]
    expect(len(told) == 2, err)


def measurements_that_make_no_sense_are_refused():
    refused("bench", "step", "--backward", "9", about="which model?")
    refused("bench", "step", "--profile", "gpt2", about="how long is the backward pass?")
    refused("bench", "step", "--profile", "gpt3", "--backward", "9", about="no profile gpt3")
    refused("bench", "step", "--profile", "gpt2", "--profile", "resnet50", about="one profile at a time")
    refused("bench", "step", "--profile", "gpt2", "--backward", "-1", about="a number of milliseconds")
    refused("bench", "step", "--profile", "gpt2", "--backward", "9", "--compress", "int4", about="one of none, fp16, bf16, int8")
    refused("bench", "step", "--profile", "gpt2", "--backward", "9", "--steps", "0", about="--steps")
    refused("bench", "step", "--profile", "gpt2", "--backward", "9", "--rate", "0gbit", about="a rate above 0")
    refused("bench", "step", "--profile", "gpt2", "--backward", "9", "allreduce", about="'allreduce' is not an option")
    bad = ROOT / "bad.json"
    bad.write_text('[{"name": "a", "elements": 1,\n  "ready": 2}]')
    refused("bench", "step", "--profile", bad, "--backward", "9", about="bad.json:2:13: \"ready\" is not a number from 0 to 1")
    for option in ("--trace", "--timeline"):
        code, out, err = call(SHOAL, "bench", "step", "--profile", "gpt2", "--backward", "1e6", option, ROOT / "none/step", timeout=20)
        expect(code == 1 and not out and "cannot write" in err and len(err.splitlines()) == 1, code, out, err)


def help_teaches():
    expect("Figures:" in call(SHOAL, "bench", "optimizer", "--help")[1])
    for words in (("bench", "step", "--help"), ("sim", "step", "--help")):
        code, out, err = call(SHOAL, *words)
        expect(code == 0 and not err and len(out.splitlines()) > 40 and max(map(len, out.splitlines())) <= 128, out)
        expect(all(word in out for word in ("Usage:", "Examples:", "Exit codes:", "--profile", "--backward")), out)
    for command in ("bench", "sim"):
        expect(f"shoal {command} step --help" in call(SHOAL, command, "--help")[1])
        expect(re.search(rf"^ +shoal {command} step  +\w", call(SHOAL, "--help")[1], re.M))
    expect(call(SHOAL, "help", "sim", "step")[1] == call(SHOAL, "sim", "step", "--help")[1])


if __name__ == "__main__":
    run_cases([measured_passes_are_those_of_the_profile, efficiency_is_of_as_many_single_workers, many_hosts_lose_little, gradients_on_gpus_pass_pcie, a_single_buffer_takes_what_its_all_reduce_takes,
               late_tensors_bound_the_step_and_are_named, forms_of_prediction_agree, longer_backward_passes_hide_more,
               names_from_files_are_quoted, profiles_are_printed_as_files_have_them,
               optimizers_are_predicted, a_sharded_buffer_takes_what_its_operations_take, types_of_16_bits_halve_the_bytes,
               predictions_that_make_no_sense_are_refused, gradients_on_a_device_are_averaged, every_rank_reports_its_step, every_way_of_a_step_gives_the_averages,
               each_optimizer_steps_its_shard, optimizers_are_measured_on_one_core,
               busy_ranks_compute, buffers_are_averaged_while_the_backward_pass_goes_on,
               tables_say_what_bounds_the_step, models_run_as_they_are, launchers_start_the_ranks, hosts_send_less_where_gradients_are_compressed,
               long_measurements_say_what_they_are_at, a_killed_worker_is_named_by_the_others, measurements_that_make_no_sense_are_refused, help_teaches])
