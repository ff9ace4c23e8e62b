#!/usr/bin/env python3
"""`shoal sim` as a user sees it: lists, formats, the model, refusals. (test_simulate tests its predictions.)"""
import csv
import io
import json
import os
import pty
import re
import select
import subprocess
import time

from tap import call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]


def sim(*words, env=None):
    code, out, err = call(SHOAL, "sim", *words, env=env)
    expect(code == 0 and not err, code, out, err)
    return out


def objects(*words, env=None):
    return [json.loads(line) for line in sim(*words, "--format", "json", env=env).splitlines()]


def refused(*words, about):
    code, out, err = call(SHOAL, "sim", *words)
    expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, code, out, err)


def lists_and_ranges_are_asked_in_turn():
    rows = objects("allreduce", "--hosts", "1,3-20,7", "--bytes", "1K,1M", "--factor", "3")
    expect([row["hosts"] for row in rows[::2]] == [1, 3, 9, 20, 7], rows)
    expect([row["bytes"] for row in rows] == 5 * [1 << 10, 1 << 20], rows)
    rows = objects("reduce-scatter", "--bytes", "8-1000")
    expect([row["bytes"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1000], rows)


def formats_agree():
    words = ("allreduce", "--hosts", "2,4", "--ranks-per-host", "2", "--bytes", "4M")
    rows = objects(*words)
    table = list(csv.DictReader(io.StringIO(sim(*words, "--format", "csv"))))
    expect([list(row) for row in table] == [list(row) for row in rows], table, rows)
    expect(all(str(row["algorithm"]) == line["algorithm"] and float(line["time_us"]) == row["time_us"]
               for row, line in zip(rows, table)), rows, table)
    text = sim(*words)
    expect(all(f"{row['time_us']:.2f}" in text and f"{100 * row['share_of_bound']:.1f}%" in text for row in rows), text)
    for parameter in ("25 Gbit/s", "latency 30 us", "2 us CPU", "64 header bytes", "64 KiB", "5 GB/s", "signal 0.2 us"):
        expect(parameter in text, parameter, text)


def units_say_the_same_in_other_words():
    words = ("allreduce", "--bytes", "1M")
    usual = objects(*words)
    for same in ("--rate 25000mbit", "--rate 3.125GB/s", "--latency 0.03ms", "--latency 30", "--stack 0", "--message-us 2000ns",
                 "--memory 5000MB/s", "--frame 65536", "--cores 1", "--dtype f32"):
        expect(objects(*words, *same.split()) == usual, same)
    expect(objects(*words, "--rate", "1gbit")[0]["time_us"] > usual[0]["time_us"])


def bursts_and_one_machine_are_asked_for():
    words = ("allreduce", "--hosts", "4", "--bytes", "64K", "--rate", "1gbit")
    times = [objects(*words, *more.split())[0]["time_us"] for more in
             ("", "--burst 8K", "--burst 1M --pause 100us", "--burst 1M --burst-rate 2gbit", "--burst 1M --burst-rate 10gbit",
              "--burst 1M", "--burst 1M --cores 1 --one-machine")]
    expect(times[:6] == sorted(times[:6], reverse=True) and len(set(times)) == 7 and times[6] > times[5], times)
    rows = objects(*words, *"--burst 72K --burst-rate 10gbit --pause 7 --cores 3 --one-machine".split())
    expect([rows[0][name] for name in ("burst_bytes", "burst_gbit_s", "pause_us", "cores", "one_machine")] ==
           [72 << 10, 10, 7, 3, 1], rows)
    expect("after a pause 72 KiB go in no time" in sim(*words, "--burst", "72K"))
    expect(objects(*words)[0]["threads"] == 1 and objects(*words, "--threads", "12")[0]["threads"] == 12)
    expect(objects(*words)[0]["network_threads"] == 1 and objects(*words, "--network-threads", "4")[0]["network_threads"] == 4)
    expect("4 threads of each rank send and receive" in sim(*words, "--network-threads", "4"))
    expect("12 threads of each rank" in sim(*words, "--threads", "12") and "threads of each" not in sim(*words))
    text = sim(*words, "--burst", "72K", "--burst-rate", "10gbit", "--cores", "1", "--one-machine")
    expect("after a pause 72 KiB go at 10 Gbit/s" in text and "1 core for all hosts" in text, text)
    out = sim("--explain-model", "--rate", "1gbit", "--burst", "8K")
    expect(re.search(r"\b4 KiB +34\.00 us", out) and re.search(r"\b64 KiB +493\.26 us", out), out)  # 2 + 2 + 30; the rest


def gpus_are_asked_for():
    words = ("allreduce", "--ranks-per-host", "8", "--bytes", "16M", "--rate", "400gbit")
    usual, gen4, gen3, switch, adapters, slices, host = (objects(*words, *more.split())[0] for more in (
        "", "--pcie gen4", "--pcie 12GB/s", "--pcie gen3 --pcie-switch gen3 --switch-gpus 4",
        "--pcie gen3 --pcie-switch gen3 --switch-gpus 4 --switch-adapters", "--pcie gen3 --nvlink gen3",
        "--pcie gen3 --host-memory 20GB/s"))
    times = [row["time_us"] for row in (slices, gen4, gen3, switch, adapters)]
    expect(times == sorted(times) and host["time_us"] > gen3["time_us"], times, host)
    expect(gen4["time_us"] < usual["time_us"], "sums of a host pass staging buffers", gen4, usual)
    expect([gen3[name] for name in ("pcie_gb_s", "switch_gb_s", "unit_bytes", "copy_us")] == [12, 0, 1 << 20, 7], gen3)
    expect([slices[name] for name in ("nvlink_gb_s", "ranks", "bytes")] == [160, 16, 16 << 20], slices)
    expect(usual["copying"] == 0 and 0 < gen3["copying"] < 1, usual, gen3)
    text = sim(*words, *"--pcie gen3 --pcie-switch 13GB/s --switch-gpus 2 --nvlink gen4 --unit 256K --ring 8M --copy-us 3".split())
    for said in ("GPUs: PCIe 12 GB/s each way, switches 13 GB/s each way for 2 GPUs,", "units of 256 KiB, ring of 8 MiB, 3 us",
                 "NVLink 320 GB/s each way", " copying "):
        expect(said in text, said, text)
    expect("copying" not in sim(*words).splitlines()[-2] and "memory of a host 99 GB/s" in sim(*words, "--host-memory", "99GB/s"))
    expect(max(map(len, text.splitlines()[:8])) <= 128, text)


def algorithms_are_chosen_by_name_and_by_the_environment():
    words = ("allreduce", "--hosts", "16", "--bytes", "1M")
    expect(objects(*words)[0]["algorithm"] == "mesh")
    ring = objects(*words, "--algorithm", "ring")
    expect(ring[0]["algorithm"] == "ring", ring)
    expect(objects(*words, env={**os.environ, "SHOAL_ALGORITHMS": "all-reduce=ring"}) == ring)


LONG = ("sim", "allreduce", "--hosts", "256", "--ranks-per-host", "8", "--bytes", "1G", "--every-chunk")


def long_predictions_say_what_they_are_at():
    screen, terminal = pty.openpty()
    process = subprocess.Popen([SHOAL, *LONG], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal)
    text, end = "", time.monotonic() + 60
    try:
        while len(set(re.findall(r"\), (\d+) s so far", text))) < 2 and time.monotonic() < end:
            if select.select([screen], [], [], 0.2)[0]:
                text += os.read(screen, 4096).decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(screen)
    told = re.findall(r"\r\x1b\[Kshoal sim: 256 hosts, 1 GiB \(row 1 of 1\), (\d+) s so far", text)  # a stall skips some
    expect(len(set(told)) > 1 and 0 < int(told[0]) and sorted(told, key=int) == told, repr(text))


def model_explains_itself():
    out = sim("--explain-model", "--rate", "8gbit", "--latency", "50us", "--message-us", "3", "--memory", "4GB/s")
    expect(re.search(r"\b8 B +56\.07 us", out), out)  # 3 + 3 + 50, and 72 bytes
    expect("--message-us 3 twice + --latency 50us" in out and "memcpy at 2 GB/s" in out, out)
    expect(re.search(r"1 MiB +0\.9999 GB/s", out), out)
    expect(len(sim("--help").splitlines()) > 30 and max(map(len, (sim("--help") + out).splitlines())) <= 128, out)


def what_makes_no_sense_is_refused():
    refused(about="which collective?")
    refused("alreduce", about="did you mean allreduce?")
    refused("allreduce", "gather", about="one collective too many")
    refused("allreduce", "--hosts", "0", about="1 to 4096")
    refused("allreduce", "--hosts", "8-2", about="from a smaller number above 0")
    refused("allreduce", "--hosts", "1,", about="--hosts")
    refused("allreduce", "--bytes", "0-64", about="from a smaller number above 0")
    refused("allreduce", "--bytes", ",".join(["8"] * 65), about="64 values")
    refused("allreduce", "--bytes", "7", about="bytes is 7, which is not a whole number of elements")
    refused("allreduce", "--rate", "25", about="such as 1gbit")
    refused("allreduce", "--rate", "0gbit", about="rate_gbit_s is 0")
    refused("allreduce", "--latency", "soon", about="a time")
    refused("allreduce", "--burst-rate", "9gbit", about="burst_gbit_s is 9, but may be 25 to")
    refused("allreduce", "--burst", "some", about="a size")
    refused("allreduce", "--pause", "long", about="a time")
    refused("allreduce", "--memory", "5", about="bytes per second")
    for link, about in (("gen6", "gen3, gen4 or gen5"), ("pcie", "gen3, gen4 or gen5"), ("0GB/s", "above 0"), ("12", "GB/s")):
        refused("allreduce", "--pcie", link, about=about)
        refused("allreduce", "--pcie", "gen3", "--pcie-switch", link, about=about)
    for link, about in (("gen5", "gen2, gen3 or gen4 (V100, A100, H100)"), ("0GB/s", "above 0"), ("fast", "gen2, gen3")):
        refused("allreduce", "--pcie", "gen3", "--nvlink", link, about=about)
    refused("allreduce", "--nvlink", "gen3", about="set pcie_gb_s also")
    refused("broadcast", "--pcie", "gen3", "--nvlink", "gen3", about="only all-reduces go over NVLink")
    refused("allreduce", "--pcie", "gen3", "--switch-gpus", "0", about="1 to 4096")
    refused("allreduce", "--pcie", "gen3", "--switch-gpus", "2", about="need switch_gb_s")
    refused("allreduce", "--pcie", "gen3", "--unit", "8", about="unit_bytes is 8, but may be 4096 to")
    refused("allreduce", "--pcie", "gen3", "--ring", "much", about="a size")
    refused("allreduce", "--pcie", "gen3", "--copy-us", "soon", about="a time")
    refused("allreduce", "--pcie", "gen3", "--operands", "shared", about="cannot map operands on GPUs")
    refused("allreduce", "--threads", "0", about="--threads")
    refused("allreduce", "--threads", "65", about="threads is 65")
    refused("allreduce", "--network-threads", "17", about="network_threads is 17")
    refused("allreduce", "--host-memory", "0GB/s", about="above 0")
    refused("allreduce", "--operands", "soft", about="plain or shared")
    for name, about in (("ringg", "--algorithm: allreduce has no 'ringg'; did you mean ring? It has direct, rounds"),
                        ("sort", "--algorithm: allreduce has no 'sort'; it has direct, rounds")):
        refused("allreduce", "--algorithm", name, about=about)
    refused("reduce-scatter", "--algorithm", "halving", about="reducescatter has no 'halving'")
    refused("allreduce", "--format", "xml", about="table, json or csv")
    refused("allreduce", "--hosts", "512", "--ranks-per-host", "9", about="more than 4096 ranks")
    refused("allreduce", "--host", "2", about="did you mean --hosts?")


run_cases([lists_and_ranges_are_asked_in_turn, formats_agree, units_say_the_same_in_other_words,
           bursts_and_one_machine_are_asked_for, gpus_are_asked_for, algorithms_are_chosen_by_name_and_by_the_environment,
           long_predictions_say_what_they_are_at, model_explains_itself, what_makes_no_sense_is_refused])
