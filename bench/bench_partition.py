#!/usr/bin/env python3
"""Compares the partitions of `shoal explain pipeline` with those of other programs, on their own models. All partitions are timed
by the same prediction: 1F1B, four microbatches for each rank. Units of a graph with branches can run in several orders; Shoal
tries three of them, as a profile has one.

  bench/bench_partition.py --pipedream FOLDER --dnn-partitioning FOLDER
      folders with github.com/msr-fiddle/pipedream (14 measured profiles; its optimizer runs as it is) and
      github.com/msr-fiddle/dnn-partitioning (16 workloads; compiles throughput-dp/dp.cpp with g++ into a temporary folder);
      either may be left out. DeepSpeed's partition_balanced is another peer if deepspeed can be imported.
  -n RANKS      ranks for PipeDream's profiles (default 4; the workloads bring their own number)
  --seconds S   most that a peer may take for one model (default 120)

Prints a line for each model: the step of each peer divided by Shoal's, so that 1.00 is as good and more is worse; and the lower
bound, divided the same way. Exit code 1 if a peer is better by more than a tenth of a percent.
"""
import argparse
import heapq
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent
SHOAL = pathlib.Path(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal")).resolve()
BYTES_PER_US = 1000  # 8 Gbit/s
NETWORK = ("--rate", "8gbit", "--latency", "0")
MICROBATCHES_PER_RANK = 4

# PipeDream's optimizer imports graphviz for pictures that nobody looks at here.
OPTIMIZER = """
import sys, types
class Nothing:
    def __getattr__(self, name): return lambda *words, **more: Nothing()
stand_in = types.ModuleType("graphviz")
stand_in.Digraph = stand_in.Graph = lambda *words, **more: Nothing()
sys.modules["graphviz"] = stand_in
sys.setrecursionlimit(100000)
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


class Unit:
    def __init__(self, name):
        self.name = name
        self.forward_us = self.backward_us = 0.0
        self.parameter_bytes = self.kept_bytes = self.output_bytes = 0


class Model:
    """Units by their keys, and edges between keys."""

    def __init__(self, name, ranks):
        self.name, self.ranks = name, ranks
        self.units, self.edges = {}, set()

    def order(self, stages=None):
        """Returns the keys in an order in which they can run, by their stages if there are any. None: there is no such order."""
        waits = {key: 0 for key in self.units}
        readers = {key: [] for key in self.units}
        for one, other in self.edges:
            waits[other] += 1
            readers[one].append(other)
        place = {key: ((stages or {}).get(key, 0), i) for i, key in enumerate(self.units)}
        ready = [(place[key], key) for key, count in waits.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            _, key = heapq.heappop(ready)
            found.append(key)
            for other in readers[key]:
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready, (place[other], other))
        if stages and [stages[key] for key in found] != sorted(stages[key] for key in found):
            return None
        return found if len(found) == len(self.units) else None

    def depth_first(self, is_reversed):
        """Returns an order in which branches stay together."""
        keys = list(self.units)
        place = {key: i for i, key in enumerate(keys)}
        readers = {key: [] for key in keys}
        for one, other in self.edges:
            readers[one].append(other)

        def sort(found):
            return iter(sorted(found, key=place.get, reverse=not is_reversed))

        seen, ended = set(), []
        for root in sort(keys):
            work = [] if root in seen else [(root, sort(readers[root]))]
            seen.add(root)
            while work:
                key, rest = work[-1]
                other = next(rest, None)
                if other is None:
                    ended.append(key)
                    work.pop()
                elif other not in seen:
                    seen.add(other)
                    work.append((other, sort(readers[other])))
        return ended[::-1]

    def profile(self, order):
        at = {key: i for i, key in enumerate(order)}
        last = {}
        for one, other in self.edges:
            last[one] = max(last.get(one, 0), at[other])
        units = []
        for i, key in enumerate(order):
            unit = self.units[key]
            row = {"name": unit.name, "forward_us": unit.forward_us, "backward_us": unit.backward_us,
                   "parameter_bytes": unit.parameter_bytes, "kept_bytes": unit.kept_bytes}
            if last.get(key, 0) == i + 1:
                row["output_bytes"] = unit.output_bytes
            elif key in last:
                row["outputs"] = [{"to": self.units[order[last[key]]].name, "bytes": unit.output_bytes}]
            units.append(row)
        return {"name": self.name, "units": units}


# ---- Shoal -----------------------------------------------------------------------------------------------------------------------


def explain(model, order, folder, *words):
    path = folder / "profile.json"
    path.write_text(json.dumps(model.profile(order)))
    command = [SHOAL, "explain", "pipeline", "--profile", path, "--ranks", model.ranks, "--microbatches",
               MICROBATCHES_PER_RANK * model.ranks, *NETWORK, "--format", "json", *words]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{model.name}: {result.stderr.strip()}")
    return json.loads(result.stdout)


def step_of_stages(model, stages, folder):
    """Returns the step of a partition, from the stage of each unit. None: it is not a pipeline."""
    order = model.order(stages)
    if order is None:
        return None
    names = [model.units[key].name for key in order]
    numbers = [stages[key] for key in order]
    cuts = []
    for stage in range(1, model.ranks):
        begin = next((i for i, number in enumerate(numbers) if number >= stage), None)
        cuts.append("end" if begin is None else names[begin])
    return explain(model, order, folder, "--cuts", ",".join(cuts))["step_us"]


# ---- PipeDream -------------------------------------------------------------------------------------------------------------------


def number_of(text):
    """Returns the sum of a number, or of a list of them: "3.0" or "[1.0; 2.0]"."""
    return sum(float(part) for part in re.findall(r"[-+.\deE]+", text))


def read_graph(path, ranks):
    """Reads PipeDream's graph.txt, in milliseconds and bytes."""
    model = Model(path.parent.name, ranks)
    edges = []
    for line in path.read_text().splitlines():
        parts = line.strip().split(" -- ")
        if len(parts) == 2:
            edges.append(tuple(parts))
            continue
        values = dict(re.findall(r"(\w+)=(\[[^]]*\]|[^,\s]+)", parts[2]))
        unit = model.units[parts[0]] = Unit(parts[0])
        if parts[1].startswith("Input"):
            continue
        unit.forward_us = 1e3 * number_of(values["forward_compute_time"])
        unit.backward_us = 1e3 * number_of(values["backward_compute_time"])
        unit.parameter_bytes = round(number_of(values["parameter_size"]))
        unit.kept_bytes = unit.output_bytes = round(number_of(values["activation_size"]))
    model.units = dict(sorted(model.units.items(), key=lambda item: int(re.sub(r"\D", "", item[0]))))
    model.edges = {edge for edge in edges if edge[0] in model.units and edge[1] in model.units}
    return model


def pipedream_stages(model, checkout, path, folder, seconds):
    """Runs PipeDream's optimizer without replication. Returns the stage of each unit, or None."""
    command = [sys.executable, "-c", OPTIMIZER, checkout / "optimizer/optimizer_graph_hierarchical.py", "-f", path.resolve(), "-n",
               model.ranks, "-b", BYTES_PER_US * 1e6, "--straight_pipeline", "--activation_compression_ratio", 1, "-o", folder]
    try:
        subprocess.run([str(word) for word in command], cwd=checkout / "optimizer", capture_output=True, check=True, timeout=seconds,
                       env={**os.environ, "PYTHONHASHSEED": "0"})  # its choice among equals depends on the order of sets
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    stages = {}
    for line in (folder / f"gpus={model.ranks}.txt").read_text().splitlines():
        match = re.match(r"(\w+) -- .*stage_id=(\d+)", line.strip())
        if match:
            stages[match.group(1)] = int(match.group(2))
    for key in model.units:  # nodes that it removes run on the stage that reads them
        stages.setdefault(key, min((stages[other] for one, other in model.edges if one == key and other in stages),
                                   default=max(stages.values())))
    return stages


# ---- dnn-partitioning ------------------------------------------------------------------------------------------------------------


class Sets:
    """Disjoint sets."""

    def __init__(self):
        self.parent = {}

    def find(self, key):
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            self.parent[key] = key = self.parent[self.parent[key]]
        return key

    def join(self, one, other):
        self.parent[self.find(one)] = self.find(other)


def cycles_of(nodes, edges):
    """Returns the strongly connected components that have several nodes (Tarjan, without recursion)."""
    readers = {node: [] for node in nodes}
    for one, other in edges:
        readers[one].append(other)
    low, number, stack, found = {}, {}, [], []
    for root in nodes:
        work = [] if root in number else [(root, iter(readers[root]))]
        if work:
            low[root] = number[root] = len(number)
            stack.append(root)
        while work:
            node, rest = work[-1]
            other = next(rest, None)
            if other is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    for member in component:
                        low[member] = math.inf
                    if len(component) > 1:
                        found.append(component)
            elif other not in number:
                low[other] = number[other] = len(number)
                stack.append(other)
                work.append((other, iter(readers[other])))
            else:
                low[node] = min(low[node], low[other] if low[other] == math.inf else number[other])
    return found


def read_workload(path):
    """Reads a workload: nodes of one color are one unit, backward nodes belong to the forward nodes of their color, and those
    without one to the last unit. A transfer's time stands for its bytes. Returns the model, the unit of each node, the text."""
    text = json.loads(path.read_text())
    text["maxCPUs"] = 0  # accelerators only
    model = Model(f"{path.parent.name.removesuffix('s')}/{path.stem}", text["maxFPGAs"])
    nodes = {node["id"]: node for node in text["nodes"]}
    ahead = {number for number, node in nodes.items() if not node["isBackwardNode"]}
    sets = Sets()
    for number, node in nodes.items():
        sets.find(number)
        if "colorClass" in node:
            sets.join(number, ("color", node["colorClass"]))
    edges = [(edge["sourceId"], edge["destId"], edge["cost"]) for edge in text["edges"]]
    ahead_edges = [(one, other) for one, other, _ in edges if one in ahead and other in ahead]
    while True:
        between = {(sets.find(one), sets.find(other)) for one, other in ahead_edges if sets.find(one) != sets.find(other)}
        cycles = cycles_of({sets.find(number) for number in ahead}, between)
        if not cycles:
            break
        for cycle in cycles:
            for key in cycle[1:]:
                sets.join(cycle[0], key)
    unit_of = {number: sets.find(number) for number in nodes}
    for number in sorted(ahead):
        model.units.setdefault(unit_of[number], Unit(f"u{number}"))
    model.edges = between
    last = model.order()[-1]
    for number, node in nodes.items():
        unit_of[number] = unit_of[number] if unit_of[number] in model.units else last
        unit = model.units[unit_of[number]]
        if node["isBackwardNode"]:
            unit.backward_us += 1e3 * node["fpgaLatency"]
        else:
            unit.forward_us += 1e3 * node["fpgaLatency"]
    for one, other, cost in edges:
        if one in ahead and other in ahead and unit_of[one] != unit_of[other]:
            unit = model.units[unit_of[one]]
            unit.output_bytes = max(unit.output_bytes, round(1e3 * cost * BYTES_PER_US))
    return model, unit_of, text


def workload_stages(model, unit_of, text, program, words, seconds):
    """Runs the program, and returns the stage of each unit, or None if it has no result or the devices have no order."""
    try:
        result = subprocess.run([program, *words], input=json.dumps(text), capture_output=True, text=True, timeout=seconds)
        split = json.loads(result.stdout[result.stdout.index("{"):])
    except (subprocess.TimeoutExpired, ValueError):
        return None
    device_of = {}
    for device, part in enumerate(split["fpgas"]):
        for number in part["nodes"]:
            device_of.setdefault(unit_of[number], device)
    if set(device_of) != set(model.units):
        return None
    devices = Model("devices", model.ranks)
    devices.units = {device: Unit(str(device)) for device in sorted(set(device_of.values()))}
    devices.edges = {(device_of[one], device_of[other]) for one, other in model.edges if device_of[one] != device_of[other]}
    order = devices.order()
    return order and {key: order.index(device) for key, device in device_of.items()}


# ---- Peers of both ---------------------------------------------------------------------------------------------------------------


def deepspeed_stages(model):
    """DeepSpeed's method for a list of layers, with measured times instead of numbers of parameters."""
    try:
        from deepspeed.runtime.utils import partition_balanced
    except ImportError:
        return None
    order = model.order()
    parts = partition_balanced([model.units[key].forward_us + model.units[key].backward_us for key in order], model.ranks)
    return {key: max(stage for stage in range(model.ranks) if parts[stage] <= i) for i, key in enumerate(order)}


def report(model, peers, folder):
    """Prints a line. Returns the least of the peers' steps, divided by Shoal's."""
    orders = [model.order(), model.depth_first(False), model.depth_first(True)]
    own = min((explain(model, order, folder) for order in orders), key=lambda found: found["step_us"])
    steps = {"equal": own["equal_step_us"], "tree": own["tree_step_us"]}
    for name, stages in peers.items():
        steps[name] = step_of_stages(model, stages, folder) if stages else None
    cells = [f"{name} {step / own['step_us']:.3f}" if step else f"{name} -" for name, step in steps.items()]
    bound = own["lower_bound_us"] / own["step_us"]
    print(f"{model.name:<40} {len(model.units):>5} units {model.ranks:>2} ranks  step {own['step_us'] / 1e3:>9.1f} ms  "
          f"bound {bound:.3f}  {'  '.join(cells)}", flush=True)
    return min((step / own["step_us"] for step in steps.values() if step), default=1)


def pipedream_models(checkout, ranks, seconds, folder):
    paths = sorted(checkout.glob("profiler/*/profiles/*/graph.txt"))
    if not paths:
        sys.exit(f"{checkout}: no profiler/*/profiles/*/graph.txt: is this a checkout of msr-fiddle/pipedream?")
    for path in paths:
        model = read_graph(path, ranks)
        yield model, {"PipeDream": pipedream_stages(model, checkout, path, folder, seconds), "DeepSpeed": deepspeed_stages(model)}


def workload_models(checkout, seconds, folder):
    program = folder / "dp"
    source = checkout / "throughput-dp/dp.cpp"
    if not source.exists():
        sys.exit(f"{source} is missing: is this a checkout of msr-fiddle/dnn-partitioning?")
    subprocess.run([os.environ.get("CXX", "g++"), "-O3", "-std=c++17", source, "-o", program], check=True)
    for path in sorted(checkout.glob("throughput-inputs/*/*.json")):
        model, unit_of, text = read_workload(path)
        words = {"exact": (), "PipeDream": ("-pipeDream",), "local": ("-localSearch", "10")}
        peers = {name: workload_stages(model, unit_of, text, program, more, seconds) for name, more in words.items()}
        yield model, {**peers, "DeepSpeed": deepspeed_stages(model)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipedream", type=pathlib.Path)
    parser.add_argument("--dnn-partitioning", type=pathlib.Path)
    parser.add_argument("-n", type=int, default=4, dest="ranks")
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    if not options.pipedream and not options.dnn_partitioning:
        parser.error("name a folder: --pipedream, --dnn-partitioning, or both")
    least = 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if options.pipedream:
            for model, peers in pipedream_models(options.pipedream.resolve(), options.ranks, options.seconds, folder):
                least = min(least, report(model, peers, folder))
        if options.dnn_partitioning:
            for model, peers in workload_models(options.dnn_partitioning.resolve(), options.seconds, folder):
                least = min(least, report(model, peers, folder))
    sys.exit(0 if least > 0.999 else f"a peer is better: its step is {least:.3f} times as long")


if __name__ == "__main__":
    main()
