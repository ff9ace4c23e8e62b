#!/usr/bin/env python3
"""Measures operands on this machine's GPUs, with Shoal, with NCCL and by bare copies: docs/figures/gpu-NAME.{md,jsonl}.

  bench/bench_gpu.py              copies, kernels, then all-reduces of 2, 4, ... ranks and of all GPUs;
                                  2 ranks if there is one GPU
  bench/bench_gpu.py copies       only the copy engines of the first GPU
  bench/bench_gpu.py kernels      only the rates of Shoal's kernels on it
  bench/bench_gpu.py allreduce 4  only an all-reduce of that many ranks
  bench/bench_gpu.py torch 2      only training steps of that many ranks through PyTorch (bench/torch_gpu.py), if
                                  SHOAL_TEST_PYTHON, or python3, has a torch that was built for CUDA

NCCL comes from the file that SHOAL_NCCL names, or from build/nccl (`make test-gpu` puts it there). It needs one GPU per
rank: if ranks share a GPU, NCCL is left out, and the page says so. GPUs sum among themselves only if they reach each other's
memory.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from statistics import median

TOP = pathlib.Path(__file__).resolve().parent.parent
FIGURES = pathlib.Path(os.environ.get("SHOAL_BENCH_GPU", TOP / "docs/figures"))
BUILD = pathlib.Path(os.environ.get("SHOAL_BUILD", TOP / "build"))
SHOAL = BUILD / "shoal"
# Smallest, largest, factor, iterations.
SIZES = [int(size) for size in os.environ.get("SHOAL_BENCH_GPU_SIZES", f"{4 << 10} {256 << 20} 4 20").split()]
sys.path.insert(0, str(TOP / "bench"))

from bench_report import size_text  # noqa: E402


def output_of(words, env, limit_s):
    """Returns what a command prints to stdout; its stderr goes to the terminal. Exits if it fails or takes longer than the
    limit, and then ends all its processes."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        out = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        sys.exit(f"bench_gpu: no end after {limit_s:.0f} s of {' '.join(words)}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        sys.exit(f"bench_gpu: exit code {process.returncode} of {' '.join(words)}")
    return out


def rows_of(*words, limit_s=None, **settings):
    """Returns the JSON objects that a command prints. None removes a variable from its environment."""
    env = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    return [json.loads(line) for line in output_of([*map(str, words)], env, limit_s).splitlines() if line.startswith("{")]


def record(name, rows, lines):
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / f"gpu-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (FIGURES / f"gpu-{name}.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


# ---- Copies ----------------------------------------------------------------------------------------------------------------

def name_of(gpu):
    driver = gpu["driver"]
    return f"{gpu['devices']} x {gpu['device']}, driver of CUDA {driver // 1000}.{driver % 1000 // 10}"


def copies():
    """Measures copies, and counts the streams that share a queue. Returns the row that names the GPU."""
    gpu, *rows = rows_of(BUILD / "bench/gpu_copies")
    queues = rows_of(BUILD / "bench/gpu_queues")
    units = [row for row in rows if "unit_bytes" in row]
    values = [f"A write and a wait on a stream: {row['pair_us']:.2f} us, of which the caller {row['call_us']:.2f} us."
              for row in rows if "pair_us" in row]
    values += [f"{row['held_up']} of the {row['pairs']} ordered pairs of {row['streams']} streams share a queue "
               f"(CUDA_DEVICE_MAX_CONNECTIONS={row['connections']}; `bench/gpu_queues.c`)." for row in queues]
    cells = [[size_text(row["unit_bytes"]), *(f"{row[way]:.1f}" for way in ("from_gb_s", "to_gb_s", "both_gb_s"))] for row in units]
    record("copies", [gpu, *rows, *queues], [f"# Copies of the first of {name_of(gpu)}", "",
           "Between the device and registered host memory, by `bench/gpu_copies.c`, GB/s of 10^9 bytes.", "",
           *table(["unit", "from the device", "to it", "both ways at once, together"], cells), "", *values])
    return gpu


def kernels(gpu):
    rows = rows_of(BUILD / "bench/gpu_rates", min(SIZES[1], 32 << 20))
    cells = [[row["kernel"], f"{row['own_gb_s']:.1f}", f"{row['peer_gb_s']:.1f}" if "peer_gb_s" in row else ""] for row in rows]
    record("kernels", [gpu, *rows], [f"# Kernels on the first of {name_of(gpu)}", "",
           f"At most 8 blocks, arrays of up to {size_text(rows[0]['bytes'])}, by `bench/gpu_rates.c`; what a kernel reads and writes, GB/s",
           "of 10^9 bytes. In the last column all sources but the first lie in the memory of the next GPU.", "",
           *table(["kernel", "own memory", "a peer's"], cells)])


# ---- All-reduces -----------------------------------------------------------------------------------------------------------

def nccl():
    """Returns the path of NCCL's library, or None if this machine does not have it."""
    found = [os.environ["SHOAL_NCCL"]] if "SHOAL_NCCL" in os.environ else sorted(
        map(str, TOP.glob("build/nccl/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2")))
    return found[0] if found else None


def of_shoal(ranks, *more, sizes=SIZES, build=BUILD, limit_s=None, **settings):
    least, most, factor, iterations = sizes
    return rows_of(build / "shoal", "bench", "allreduce", "-n", ranks, "--memory", "gpu", "--inputs", "warm", "--min", least,
                   "--max", most, "--factor", factor, "--iterations", iterations, "--format", "json", *more, limit_s=limit_s,
                   **settings)


def of_nccl(ranks, library):
    return rows_of(SHOAL, "run", "--no-prefix", "-n", ranks, BUILD / "bench/gpu_nccl", library, *SIZES)


def by_bytes(rows):
    return {row["bytes"]: row for row in rows}


def time_and_rate(row):
    return [f"{row['median_us']:.1f}", f"{row['busbw_gb_s']:.2f}"] if row else ["", ""]


def line_of(bytes_, ours, among, copied, theirs):
    cells = [size_text(bytes_), *time_and_rate(ours), *time_and_rate(among), f"{copied['median_us']:.1f}", *time_and_rate(theirs)]
    best_us = min(row["median_us"] for row in (ours, among) if row)
    return [*cells, f"{theirs['median_us'] / best_us:.2f}" if theirs else ""]


def allreduce(gpu, ranks):
    library = nccl()
    is_shared = ranks > gpu["devices"]
    why = "ranks share a GPU, which it refuses" if is_shared else "it is not here (`make test-gpu` fetches it)"
    rows = of_shoal(ranks, "--probe", "memory", SHOAL_GPU_PEER_BYTES="0")
    among = [row for row in of_shoal(ranks, SHOAL_GPU_PEER_BYTES="1") if row["algorithm"] == "peers"]
    theirs = of_nccl(ranks, library) if library and not is_shared else []
    copied = by_bytes(row for row in rows if row["collective"] == "probe")
    cells = [line_of(row["bytes"], row, by_bytes(among).get(row["bytes"]), copied[row["bytes"]], by_bytes(theirs).get(row["bytes"]))
             for row in rows if row["collective"] != "probe"]
    record(f"allreduce-{ranks}", rows + among + theirs, [f"# All-reduce of {ranks} ranks on {name_of(gpu)}", "",
           "float32, sums, out of place; medians of the slowest rank; GB of 10^9 bytes. Among GPUs: `SHOAL_GPU_PEER_BYTES=1`; else",
           "everything passes through host memory. Copying: each rank's operand to the host and back, one after the other.",
           "NCCL / Shoal above 1: the faster of Shoal's two ways is faster than NCCL.",
           *([] if among else ["GPUs did not sum among themselves."]),
           *([] if theirs else [f"NCCL was not measured: {why}."]), "",
           *table(["size", "Shoal us", "busbw GB/s", "among GPUs us", "busbw GB/s", "copying us", "NCCL us", "busbw GB/s", "NCCL / Shoal"],
                  cells)])


def counts(devices):
    """Returns 2, 4, ... up to the number of GPUs, and that number."""
    return sorted({2, devices, *(1 << i for i in range(1, 8) if 1 << i <= devices)} - {1})


# ---- PyTorch ---------------------------------------------------------------------------------------------------------------

def can_run(python, text):
    return subprocess.run([python, "-c", text], stderr=subprocess.DEVNULL).returncode == 0


def python_with_cuda():
    """Returns a Python whose torch was built for CUDA, or None."""
    python = shutil.which(os.environ.get("SHOAL_TEST_PYTHON") or "python3")
    return python if python and can_run(python, "import sys, torch; sys.exit(not torch.cuda.is_available())") else None


def of_torch(ranks, python, *words, checkout=TOP, build=BUILD, limit_s=None, **settings):
    """Measures this checkout's bench/torch_gpu.py with the library and the packages of a checkout."""
    path = ":".join(filter(None, [str(checkout / "python"), os.environ.get("PYTHONPATH")]))
    return rows_of(build / "shoal", "run", "--no-prefix", "-n", ranks, python, TOP / "bench/torch_gpu.py", *words, limit_s=limit_s,
                   PYTHONPATH=path, SHOAL_LIBRARY=str(build / "libshoal.so"), **settings)


def torch_steps(gpu, ranks):
    python = python_with_cuda()
    if not python:
        print("bench_gpu: no python with a torch that was built for CUDA: SHOAL_TEST_PYTHON names one")
        return
    rows = of_torch(ranks, python)
    times = {}
    for row in rows:
        times.setdefault((row["model"], row["way"]), []).append(row["step_ms"])
    cells = [[*key, f"{median(each):.1f}", f"{min(each):.1f} .. {max(each):.1f}"] for key, each in times.items()]
    record(f"torch-{ranks}", [gpu, *rows], [f"# Training steps of {ranks} ranks on {name_of(gpu)}", "",
           f"torch {rows[0]['torch']}, autocast to bfloat16, by `bench/torch_gpu.py`; milliseconds of the slowest rank, medians of "
           f"{len(next(iter(times.values())))} rounds.", "Alone: each rank trains by itself beside the others.", "",
           *table(["model", "way", "step", "of the rounds"], cells)])


def main(words):
    gpu = copies()
    if words[:1] in (["allreduce"], ["torch"]) and words[1:]:
        measure = allreduce if words[0] == "allreduce" else torch_steps
        measure(gpu, int(words[1]))
    elif words == ["kernels"]:
        kernels(gpu)
    elif not words:
        kernels(gpu)
        for ranks in counts(gpu["devices"]):
            allreduce(gpu, ranks)
        torch_steps(gpu, max(2, gpu["devices"]))
    elif words != ["copies"]:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
