#!/usr/bin/env python3
"""`shoal bench scaling` as a user sees it: numbers of workers, throughput and efficiency next to the prediction, the plot."""
import atexit
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree

from tap import Skip, call, expect, free_port, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
SVG = "{http://www.w3.org/2000/svg}"
LEAKS = pathlib.Path(__file__).resolve().parents[1] / "libfabric.supp"
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-scaling-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)

# Odd sizes; passes and batch as shoal.torch.profile measures them.
FACTS = {"profile": "net", "batch": 6, "forward_ms": 4, "backward_ms": 12, "activation_bytes": 8, "batch_norms": 0}
TENSORS = [{"name": f"layer.{9 - i}", "elements": 10007, "ready": (i + 1) / 10} for i in range(10)]
MEASURED, PLAIN = ROOT / "measured.json", ROOT / "plain.json"
MEASURED.write_text(json.dumps([FACTS, *TENSORS]))
PLAIN.write_text(json.dumps(TENSORS))
SHORT = ("--rounds", "2", "--steps", "3")


def rows_of(out):
    *points, all_of_it = [json.loads(line) for line in out.splitlines()]
    expect(all(point["record"] == "point" for point in points) and all_of_it["record"] == "scaling", out)
    return points, all_of_it


def scaling(*words):
    code, out, err = call(SHOAL, "bench", "scaling", *words, *SHORT, "--format", "json", timeout=120)
    expect(code == 0, words, code, out, err)
    return rows_of(out)


def refused(*words, about):
    code, out, err = call(SHOAL, "bench", "scaling", *words, timeout=60)
    expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, words, code, out, err)


def figures_agree(points, batch, is_strong=False):
    """Throughput, efficiency and the difference to the prediction follow from the steps that are printed."""
    first = points[0]
    for point in points:
        samples = batch if is_strong else batch * point["workers"]
        for step, throughput, efficiency in (("step_us", "throughput", "efficiency"),
                                             ("predicted_us", "predicted_throughput", "predicted_efficiency")):
            expect(abs(point[throughput] / (samples / point[step] * 1e6) - 1) < 1e-3, point)
            wanted = point[throughput] / point["workers"] / (first[throughput] / first["workers"])
            expect(abs(point[efficiency] - wanted) < 1e-3, point, first)
        expect(abs(point["off"] - (point["predicted_us"] / point["step_us"] - 1)) < 1e-3, point)
        expect(point["step_p10_us"] <= point["step_us"] <= point["step_p90_us"], point)
    expect(first["efficiency"] == first["predicted_efficiency"] == 1, first)


def workers_double_up_to_all():
    points, told = scaling("--profile", MEASURED, "-n", "3")
    expect([(point["workers"], point["hosts"], point["samples"]) for point in points] == [(1, 1, 6), (2, 1, 6), (3, 1, 6)], points)
    figures_agree(points, 6)
    expect(all(point["step_us"] >= 16e3 and point["predicted_us"] >= 16e3 for point in points), points)
    wanted = {"profile": "net", "scaling": "weak", "unit": "samples", "batch": 6, "forward_us": 4000, "backward_us": 12000, "busy": 0,
              "rounds": 2, "steps": 3, "ranks_per_host": 3, "rate_from": "assumed", "latency_from": "assumed", "memory_from": "measured"}
    expect({name: told[name] for name in wanted} == wanted and told["memory_gb_s"] > 0, told)
    points, told = scaling("--profile", PLAIN, "--backward", "10", "--count", "3,2,3", "-n", "3", "--copy-rate", "7GB/s", "--busy")
    expect([(point["workers"], point["samples"]) for point in points] == [(2, 0), (3, 0)], points)
    figures_agree(points, 1)  # steps of workers
    expect((told["unit"], told["forward_us"], told["memory_from"], told["memory_gb_s"], told["busy"]) == ("steps", 5000, "given", 7, 1), told)
    (point,), _ = scaling("--profile", MEASURED, "-n", "1", "--copy-rate", "10GB/s")
    expect(point["workers"] == 1 and abs(point["predicted_us"] - 16e3) < 500, point)


def a_global_batch_is_divided():
    """With 7 samples on 2 and 3 workers the slowest computes 4 and 3; its passes are as much shorter."""
    points, told = scaling("--profile", MEASURED, "--strong", "--batch", "7", "--backward", "70", "--forward", "14", "-n", "3",
                            "--copy-rate", "10GB/s")
    expect([point["samples"] for point in points] == [7, 4, 3] and told["scaling"] == "strong", points)
    figures_agree(points, 7, is_strong=True)
    for point, passes_us in zip(points, (84e3, 48e3, 36e3)):
        expect(passes_us <= point["predicted_us"] < passes_us + 5e3 and point["step_us"] >= passes_us, point)
    refused("--profile", MEASURED, "--strong", "--batch", "2", "-n", "3", about="--batch 2 cannot be divided among 3 workers")
    refused("--profile", PLAIN, "--backward", "9", "--strong", about="--strong divides a batch")


def ranks_on_hosts(layout, *words):
    """Runs ranks on this machine that claim to be on hosts: layout has the host of each rank."""
    port = free_port()
    ranks = [subprocess.Popen([SHOAL, "bench", "scaling", "--profile", MEASURED, *SHORT, *words],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(layout)), "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(port), "SHOAL_SECRET": "scaling of a test", "SHOAL_HOST_ID": f"scale-{host}",
                                   "LSAN_OPTIONS": f"suppressions={LEAKS}:print_suppressions=0"})
             for rank, host in enumerate(layout)]
    came = [rank.communicate(timeout=120) for rank in ranks]
    if any("SHOAL_ERR_UNSUPPORTED" in err for _, err in came):
        raise Skip("no network between hosts here: " + came[0][1].strip())
    return [rank.returncode for rank in ranks], came


def hosts_are_whole():
    codes, came = ranks_on_hosts([0, 0, 1, 1, 2, 2], "--format", "json")
    expect(codes == [0] * 6 and not any(out for out, _ in came[1:]), codes, came)
    points, told = rows_of(came[0][0])
    expect([(point["workers"], point["hosts"]) for point in points] == [(1, 1), (2, 1), (4, 2), (6, 3)], points)
    figures_agree(points, 6)
    expect(told["rate_from"] == told["latency_from"] == "measured" and told["rate_gbit_s"] > 0 and told["latency_us"] >= 1, told)
    codes, came = ranks_on_hosts([0, 1], "--format", "json", "--rate", "10gbit", "--latency", "50us", "-n", "3")
    expect(codes == [0, 0] and "-n 3 is not used: the launcher started 2" in came[0][1], codes, came)
    told = rows_of(came[0][0])[1]
    expect((told["rate_from"], told["rate_gbit_s"], told["latency_from"], told["latency_us"]) == ("given", 10, "given", 50), told)
    for layout, words, about in (([0, 0, 1], (), "every host needs equally many"), ([0, 1, 0, 1], (), "numbered host by host"),
                                 ([0, 0, 1, 1], ("--count", "3"), "3 workers are not whole hosts of 2"),
                                 ([0, 0, 1, 1], ("--count", "8"), "8 workers, but there are 4")):
        codes, came = ranks_on_hosts(layout, *words)
        expect(codes == [2] * len(layout) and about in came[0][1], layout, codes, came)
        expect(not any(out or err for out, err in came[1:]), came)


def the_table_and_the_plot_have_every_number_of_workers():
    path = ROOT / "scaling.svg"
    code, out, err = call(SHOAL, "bench", "scaling", "--profile", MEASURED, "-n", "3", *SHORT, "--plot", path, timeout=120)
    expect(code == 0 and "weak scaling, 6 samples for each worker" in out and "samples/s" in out, out, err)
    expect(re.findall(r"^ +([123]) +1  ", out, re.M) == ["1", "2", "3"] and max(map(len, out.splitlines())) <= 128, out)
    root = xml.etree.ElementTree.parse(path).getroot()
    circles = root.findall(f"{SVG}circle")
    expect(len(circles) == 3 and len(root.findall(f"{SVG}polyline")) == 2, path.read_text())
    expect(all(80 < float(c.get("cx")) < 690 and 84 <= float(c.get("cy")) < 384 for c in circles), path.read_text())
    texts = {text.text for text in root.iter(f"{SVG}text")}
    expect({"1", "2", "3", "100 %", "workers", "samples/s"} <= texts, texts)
    code, out, err = call(SHOAL, "bench", "scaling", "--profile", MEASURED, "--plot", ROOT / "none/plot.svg", timeout=20)
    expect(code == 1 and not out and "cannot write" in err and len(err.splitlines()) == 1, code, out, err)


def gradients_may_be_on_a_device():
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "unit"  # it has the stand-in for the driver
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    code, out, err = call("env", f"LD_LIBRARY_PATH={folder}", "MOCK_CUDA=devices=2", SHOAL, "bench", "scaling", "--profile", MEASURED,
                          "-n", "2", *SHORT, "--memory", "gpu", "--pcie", "gen4", "--format", "json", timeout=120)
    expect(code == 0, out, err)
    points, told = rows_of(out)
    expect([point["workers"] for point in points] == [1, 2] and told["pcie_gb_s"] > 0, out)


def what_makes_no_sense_is_refused():
    refused(about="which model?")
    refused("--profile", PLAIN, about="how long is the backward pass?")
    refused("--profile", PLAIN, "--backward", "-3", about="a number of milliseconds")
    refused("--profile", PLAIN, "--profile", PLAIN, about="one profile at a time")
    refused("--profile", ROOT / "none.json", about="none.json")
    refused("--profile", MEASURED, "--count", "1,4", about="4 workers, but there are 2; start more with -n")
    refused("--profile", MEASURED, "--count", "0", about="--count")
    refused("--profile", MEASURED, "--rounds", "0", about="--rounds takes a number from 1")
    refused("--profile", MEASURED, "--format", "csv", about="table or json")
    refused("--profile", MEASURED, "--memory", "gpu", about="how are the GPUs joined?")
    refused("--profile", MEASURED, "--bufer", "1M", about="did you mean --buffer?")
    refused("--profile", MEASURED, "step", about="'step' is not an option")


def help_teaches():
    code, out, err = call(SHOAL, "bench", "scaling", "--help")
    expect(code == 0 and not err and max(map(len, out.splitlines())) <= 128, out)
    expect(all(word in out for word in ("Usage:", "Examples:", "Exit codes:", "--strong", "Figures:")), out)
    expect("shoal bench scaling --help" in call(SHOAL, "bench", "--help")[1])
    expect(re.search(r"^ +shoal bench scaling  +\w", call(SHOAL, "--help")[1], re.M))


if __name__ == "__main__":
    run_cases([workers_double_up_to_all, a_global_batch_is_divided, hosts_are_whole, the_table_and_the_plot_have_every_number_of_workers,
               gradients_may_be_on_a_device, what_makes_no_sense_is_refused, help_teaches])
