#!/usr/bin/env python3
"""`shoal explain pipeline` as a user sees it. (test_partition tests the partitions.)"""
import atexit
import json
import os
import pathlib
import shutil
import sys
import tempfile

from tap import call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-explain-pipeline-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)

# Parameters of the models, without counting a tied weight twice, as PyTorch counts them.
PARAMETERS = {"gpt2": 124439808, "bert-large": 336226108, "resnet50": 25557032}


def explain(*words):
    code, out, err = call(SHOAL, "explain", "pipeline", *words)
    expect(code == 0 and not err, words, code, out, err)
    return out


def answer(*words):
    return json.loads(explain(*words, "--format", "json"))


def refused(*words, about):
    code, out, err = call(SHOAL, "explain", "pipeline", *words)
    expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, words, code, out, err)


def profile_of(*words):
    return json.loads(explain(*words, "--print-profile"))


def models_have_their_sizes():
    units = {"gpt2": ["embeddings"] + [f"h.{i}" for i in range(12)] + ["head"],
             "bert-large": ["embeddings"] + [f"layer.{i}" for i in range(24)] + ["head"]}
    for name, parameters in PARAMETERS.items():
        profile = profile_of("--profile", name)
        tied = sum(tie["bytes"] for tie in profile["ties"])
        expect(sum(unit.get("parameter_bytes", 0) for unit in profile["units"]) - tied == 4 * parameters, name, profile)
        expect(profile["name"] == name and [unit["name"] for unit in profile["units"]] == units.get(name, [u["name"] for u in profile["units"]]),
               profile)
    expect(len(profile["units"]) == 18 and profile["units"][0]["name"] == "stem" and not profile["ties"], profile)


def models_have_their_arithmetic():
    """ResNet-50 needs 4.09 G multiplications for an image of 224 x 224 (torchvision); a layer of width d with s positions
    24 s d^2 + 4 s^2 d FLOP (Narayanan et al. 2021). Products of attention have no weights."""
    flop = {unit["name"]: unit["forward_us"] * 1e6 for unit in profile_of("--profile", "resnet50", "--flops", "1tflop/s")["units"]}
    expect(abs(sum(flop.values()) / 2 - 4.09e9) < 0.01e9, flop)
    block = profile_of("--profile", "gpt2", "--flops", "1tflop/s")["units"][1]
    products, attention = 24 * 1024 * 768**2, 4 * 1024**2 * 768
    expect(abs(block["forward_us"] * 1e6 - products - attention) < 1, block)
    expect(abs(block["input_gradient_us"] * 1e6 - products - 2 * attention) < 1, block)
    expect(abs(block["weight_gradient_us"] * 1e6 - products) < 1, block)


def activations_are_those_of_the_shapes():
    """A block of a transformer keeps 16 d + a s floats for each position; ResNet's layer2.0 from its convolutions."""
    block = profile_of("--profile", "gpt2", "--batch", "3")["units"][1]
    expect(block["kept_bytes"] == 3 * 4 * 1024 * (16 * 768 + 12 * 1024) and block["output_bytes"] == 3 * 4 * 1024 * 768, block)
    units = {unit["name"]: unit for unit in profile_of("--profile", "resnet50")["units"]}
    inner = 56 * 56 * (256 + 128 + 128) + 28 * 28 * (128 + 128 + 512 + 512)
    expect(units["layer2.0"]["kept_bytes"] == 4 * inner and units["layer2.0"]["output_bytes"] == 4 * 28 * 28 * 512, units)
    expect(units["layer1.1"]["kept_bytes"] == 4 * 56 * 56 * (256 + 64 + 64 + 64 + 64 + 256), units)


def times_follow_the_batch_and_the_rate():
    one, many = profile_of("--batch", "1"), profile_of("--batch", "8", "--flops", "100tflops")
    for few, more in zip(one["units"], many["units"]):
        expect(abs(more["forward_us"] - 4 * few["forward_us"]) < 1e-6, few, more)
        expect(more.get("parameter_bytes") == few.get("parameter_bytes") and more["kept_bytes"] == 8 * few["kept_bytes"], more)


def formats_agree():
    words = ("--profile", "bert-large", "--ranks", "4", "--microbatches", "8", "--memory", "12G")
    text, told = explain(*words), answer(*words)
    expect(f"predicted step {told['step_us'] / 1e3:.2f} ms" in text and f"bubble {100 * told['bubble']:.1f} %" in text, text)
    expect((told["profile"], told["schedule"], told["ranks"], told["microbatches"]) == ("bert-large", "1f1b", 4, 8), told)
    expect(sum(stage["unit_count"] for stage in told["stages"]) == 26 and len(told["memory"]) == 4, told)
    expect(sum((stage["units"] for stage in told["stages"]), [])[::25] == ["embeddings", "head"], told)
    for stage in told["stages"]:
        expect(stage["reason"] in text and stage["reason"].startswith(f"stage {stage['stage']} "), stage, text)
    for memory in told["memory"]:
        parts = sum(memory[part + "_bytes"] for part in ("parameter", "gradient", "state", "activation", "buffer"))
        expect(abs(parts - memory["total_bytes"]) <= 3 and memory["total_bytes"] <= memory["limit_bytes"] == 12 << 30, memory)
    expect(0 < told["lower_bound_us"] <= told["step_us"] <= told["tree_step_us"], told)
    expect("50 TFLOP/s" in text and "25 Gbit/s" in text and max(map(len, text.splitlines())) <= 128, text)


def a_heavy_head_gets_fewer_layers():
    """GPT-2's head costs as much as four layers: equal numbers of units are at least 1.15 times as slow."""
    told = answer("--profile", "gpt2", "--ranks", "4", "--microbatches", "16", "--rate", "1000gbit")
    expect(told["is_optimal"] and told["step_us"] == told["lower_bound_us"], told)
    expect(told["equal_step_us"] > 1.15 * told["step_us"], told)
    expect(told["stages"][3]["units"] == ["head"], told)


def automatic_stages_beat_equal_numbers():
    """By at least 1.15 times, for models whose units are unequal, on networks that keep up."""
    for words in (("gpt2", "-n", "4"), ("gpt2", "-n", "8"), ("bert-large", "-n", "8"), ("resnet50", "-n", "4", "--batch", "32")):
        told = answer("--profile", *words, "--rate", "400gbit")
        expect(told["equal_step_us"] >= 1.15 * told["step_us"] and told["step_us"] <= 1.03 * told["lower_bound_us"], words, told)


def more_room_makes_no_step_longer():
    words = ("--profile", "gpt2", "--ranks", "4", "--schedule", "auto", "--rate", "400gbit")
    steps = [answer(*words, "--memory", memory)["step_us"] for memory in ("3G", "4G", "16G")]
    expect(steps == sorted(steps, reverse=True), steps)
    kinds = [answer(*words, "--schedule", kind)["step_us"] for kind in ("gpipe", "1f1b", "zb-h1", "v-zb", "interleaved")]
    expect(answer(*words)["step_us"] <= min(kinds) * (1 + 1e-9), kinds)


def ranks_may_be_unequal():
    words = ("--profile", "resnet50", "--ranks", "2", "--batch", "8", "--rate", "10000gbit", "--latency", "0")
    told = answer(*words, "--speeds", "1,3")
    expect(told["stages"][0]["unit_count"] < told["stages"][1]["unit_count"], told)
    told = answer(*words, "--memory", "400M,8G")
    expect([memory["limit_bytes"] for memory in told["memory"]] == [400 << 20, 8 << 30], told)
    expect(told["memory"][0]["total_bytes"] <= 400 << 20, told)


def ties_may_stay_together():
    words = ("--profile", "gpt2", "--ranks", "2", "--schedule", "v-zb")
    apart, together = answer(*words), answer(*words, "--keep-ties-together")
    ranks = {unit: stage["rank"] for stage in together["stages"] for unit in stage["units"]}
    expect(ranks["embeddings"] == ranks["head"] and together["tied_us"] == 0, together)
    expect(together["step_us"] >= apart["step_us"], together, apart)


def files_are_read():
    path = ROOT / "own.json"
    path.write_text(explain("--profile", "resnet50", "--print-profile", "--batch", "4"))
    expect(answer("--profile", path)["step_us"] == answer("--profile", "resnet50", "--batch", "4")["step_us"])
    path.write_text(json.dumps({"units": [{"name": f"u{i}", "forward_us": 100, "backward_us": 300} for i in range(6)]}))
    text = explain("--profile", path, "--ranks", "3", "--rate", "100gbit", "--latency", "0")
    expect("optimal" in text and "u0 .. u1" in text and "were not measured apart" in text and "TFLOP" not in text, text)


def wrong_files_are_refused():
    path = ROOT / "wrong.json"
    path.write_text('{"units": [\n{"name": "a", "forward_us": 1, "backward_us": 1, "outputs": [{"to": "a", "bytes": 1}]}]}')
    refused("--profile", path, about=f"{path}: line 2: a cycle: unit a sends an output to unit a")
    path.write_text('{"units": [\n{"name": "a", "forward_us": "x"}]}')
    refused("--profile", path, about="line 2: \"forward_us\" is not a number")
    path.write_text(json.dumps({"units": [{"name": "a", "forward_us": 1, "backward_us": 1, "stage": 7}]}))
    refused("--profile", path, about="unit a is pinned to stage 7, but there are 4 stages")
    refused("--profile", "gpt3", about="gpt2, bert-large and resnet50 are built in")
    refused("--profile", ROOT, about="is a folder")


def lack_of_memory_is_explained():
    refused("--profile", "gpt2", "--ranks", "4", "--memory", "1G", about="It would fit with gradients and states in 8 shards")
    explain("--profile", "gpt2", "--ranks", "4", "--memory", "1G", "--shards", "8")
    refused("--profile", "gpt2", "--ranks", "4", "--memory", "1M", about="use more stages, parameter shards")
    less = answer("--profile", "gpt2", "--ranks", "4", "--recompute", "all")["memory"][0]
    expect(less["activation_bytes"] < answer("--profile", "gpt2", "--ranks", "4")["memory"][0]["activation_bytes"] / 2, less)


def stages_are_recomputed():
    """If all are, each pays its forward pass once more. auto: only if memory is short, and not the last one, which keeps one
    microbatch."""
    words = ("--profile", "gpt2", "--ranks", "4")
    plain, every = answer(*words), answer(*words, "--recompute", "all")
    expect([s["recomputes"] for s in plain["stages"]] == [False] * 4 and [s["recomputes"] for s in every["stages"]] == [True] * 4, plain, every)
    expect(plain["step_us"] < every["step_us"] < plain["step_us"] * 1.4, plain["step_us"], every["step_us"])
    expect(answer(*words, "--recompute", "auto") == plain == answer(*words, "--recompute", "none"))
    refused(*words, "--memory", "1100M", about="It would fit if activations of stages 0 to 2 are recomputed")
    table = ROOT / "recomputed.csv"
    short = answer(*words, "--memory", "1100M", "--recompute", "auto", "--csv", table)
    expect([s["recomputes"] for s in short["stages"]] == [True, True, True, False], short)
    expect(all(m["total_bytes"] <= m["limit_bytes"] == 1100 << 20 for m in short["memory"]), short["memory"])
    expect(not short["is_optimal"] and short["lower_bound_us"] <= plain["step_us"] < short["step_us"], short)
    expect("0R0,0B0" in table.read_text() and "3R" not in table.read_text(), table.read_text())
    cuts = ",".join(stage["units"][0] for stage in short["stages"][1:])
    again = answer(*words, "--memory", "1100M", "--recompute", "auto", "--cuts", cuts)
    expect([s["recomputes"] for s in again["stages"]] == [False] * 4 and again["memory"][0]["total_bytes"] > 1100 << 20, again)
    out = explain(*words, "--memory", "1100M", "--recompute", "auto")
    expect("# these stages keep only their input, and repeat the forward pass: 0, 1, 2\n" in out, out)
    refused("--recompute", "some", about="all, auto")


def stages_may_be_on_several_ranks():
    """A model with layers of convolutions and a head of many parameters: only the former are replicated. Shares of a microbatch
    are timed."""
    path = ROOT / "alexnet.json"
    layer = {"input_gradient_us": 2000, "weight_gradient_us": 1000, "output_bytes": 1000, "kept_bytes": 1 << 20}
    path.write_text(json.dumps({"units": [{"name": f"c{i}", "forward_us": 2000, "parameter_bytes": 1 << 16, **layer} for i in range(4)] +
                                         [{"name": "fc", "forward_us": 400, "backward_us": 800, "parameter_bytes": 400 << 20}]}))
    words = ("--profile", path, "-n", "5", "--microbatches", "20", "--replicate")
    found = answer(*words)
    expect([(s["units"], s["replicas"]) for s in found["stages"]] == [(["c0", "c1", "c2", "c3"], 4), (["fc"], 1)], found["stages"])
    expect(found["stages"][0]["forward_us"] == 2000 and found["stages"][0]["kept_bytes"] == 1 << 20 and found["ranks"] == 2, found)
    expect(found["replicas_us"] > 0 and found["step_us"] < answer(*words[:-1])["step_us"], found)
    out = explain(*words)
    expect("    0  0-3     4  c0 .. c3" in out and "    1    4     1  fc" in out and "of it to sum those of stages on several ranks)" in out, out)
    expect(answer("--profile", path, "-n", "1", "--replicate")["stages"][0]["replicas"] == 1)
    refused(*words, "--speeds", "1,1,1,1,2", about="leave out --cuts, --speeds and lists of --memory")
    refused(*words, "--cuts", "fc", about="--replicate chooses which ranks have a stage")
    refused(*words, "--memory", "1M", about="are short")


def own_cuts_are_timed():
    words = ("--profile", "gpt2", "--ranks", "4", "--rate", "100gbit")
    best = answer(*words)
    begins = [stage["units"][0] for stage in best["stages"][1:]]
    same = answer(*words, "--cuts", ",".join(begins))
    expect(same["step_us"] == best["step_us"] and same["stages"] == best["stages"] and same["method"] == "cuts", same, best)
    expect(not same["is_optimal"] and same["lower_bound_us"] <= same["step_us"], same)
    worse = answer(*words, "--cuts", "h.1,head,end", "--memory", "1G")
    expect(worse["step_us"] > best["step_us"] and worse["stages"][3]["units"] == [], worse)
    expect(worse["memory"][1]["total_bytes"] > worse["memory"][1]["limit_bytes"] == 1 << 30, worse)
    refused(*words, "--cuts", "h.1,h.2", about="--cuts has 2 names, and 4 stages have 3 begins")
    refused(*words, "--cuts", "h.1,h.2,h.3,h.4", about="--cuts has more than 3 names")
    refused(*words, "--cuts", "h.1,h.2,h.12", about="there is no unit 'h.12'")
    refused(*words, "--cuts", "h.3,h.2,h.5", about="stage 1 begins with unit 4, behind 3")


def schedules_are_drawn():
    """The trace ends with the predicted step, without the sum of tied gradients that follows it."""
    plot, trace, table = (ROOT / name for name in ("gpt2.svg", "gpt2.json", "gpt2.csv"))
    told = answer("--ranks", "3", "--microbatches", "4", "--keep-ties-together", "--plot", plot, "--trace", trace, "--csv", table)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    expect(len(events) == 3 * 4 * 2 and plot.read_text().count("<title>") == len(events), len(events))
    expect(abs(max(event["ts"] + event["dur"] for event in events) - told["step_us"]) < 1, told)
    expect(table.read_text().startswith("0F0,0F1,0F2,0B0"), table.read_text())
    empty = ROOT / "empty.json"
    empty.write_text(json.dumps({"units": [{"name": name, "forward_us": 0, "backward_us": 0} for name in "ab"]}))
    code, out, err = call(SHOAL, "explain", "pipeline", "--profile", empty, "-n", "1", "--plot", plot)
    expect(code == 1 and "nan" not in out and "its step takes no time" in err, code, out, err)
    code, out, err = call(SHOAL, "explain", "pipeline", "--plot", ROOT / "none/x.svg")
    expect(code == 1 and "cannot write" in err and len(err.splitlines()) == 1, code, err)


# An optimizer in the place of PipeDream's, which puts half of the nodes on each of two ranks, and a graph with a skip.
GRAPH = """node2 -- Linear(3, 4) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[8.0; 8.0], parameter_size=48.0
node1 -- Input0 -- forward_compute_time=9.0, backward_compute_time=9.0, activation_size=0.0, parameter_size=0.0
node3 -- ReLU() -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=8.0, parameter_size=0.0
node4 -- Linear(4, 4) -- forward_compute_time=5.0, backward_compute_time=9.0, activation_size=8.0, parameter_size=64.0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode2 -- node4
"""
OPTIMIZER = """import sys
import graphviz
graphviz.Digraph().render("a picture that nobody looks at")
folder = sys.argv[sys.argv.index("-o") + 1]
lines = open(sys.argv[sys.argv.index("-f") + 1]).read().splitlines()
with open(folder + "/gpus=2.txt", "w") as out:
    for line in lines[:4]:
        print(line + ", stage_id=%d" % (line > "node3"), file=out)
"""


def other_partitions_are_compared():
    """bench/bench_partition.py, with a profile and an optimizer of ours."""
    checkout = ROOT / "pipedream"
    (checkout / "profiler/none/profiles/tiny").mkdir(parents=True)
    (checkout / "optimizer").mkdir()
    (checkout / "profiler/none/profiles/tiny/graph.txt").write_text(GRAPH)
    (checkout / "optimizer/optimizer_graph_hierarchical.py").write_text(OPTIMIZER)
    bench = pathlib.Path(__file__).resolve().parents[3] / "bench/bench_partition.py"
    code, out, err = call(sys.executable, bench, "--pipedream", checkout, "-n", "2")
    expect(code == 0 and not err and len(out.splitlines()) == 1, code, out, err)
    # stages of 8 and 14 ms, or of 6 and 16: one microbatch takes 22 ms, seven more 14 or 16 each; transfers take nanoseconds
    expect(out.startswith("tiny ") and "4 units  2 ranks  step     120.0 ms" in out and "PipeDream 1.117" in out, out)
    code, out, err = call(sys.executable, bench, "--pipedream", ROOT)
    expect(code == 1 and "is this a checkout" in err, code, out, err)


def options_are_checked():
    refused("--ranks", "0", about="a number from 1")
    refused("--schedule", "zb-h3", about="did you mean zb-h")
    refused("--memory", "1G,2G", "--ranks", "3", about="--memory has 2 values: give one, or 3")
    refused("--memory", "1G,2G,3G", "--ranks", "2", about="more than 2 values")
    refused("--memory", "1G,x", "--ranks", "2", about="a size such as")
    refused("--memory", "0", about="sizes above 0")
    refused("--speeds", "1,0", "--ranks", "2", about="numbers above 0")
    refused("--flops", "50", about="FLOP per second")
    refused("--kept-share", "1.5", about="a number from 0 to 1")
    refused("--method", "best", about="shortest, tree, equal")
    refused("--schedule", "interleaved", "--ranks", "4", "--microbatches", "6", about="6 is no multiple")
    refused("gpt2", about="'gpt2' is not an option")
    refused("--memroy", "1G", about="did you mean --memory?")


def help_teaches():
    code, out, err = call(SHOAL, "help", "explain", "pipeline")
    expect(code == 0 and not err and out == explain("--help"), code, out, err)
    for word in ("microbatches", "bound", "Examples:", "Exit codes"):
        expect(word in out, word, out)
    expect(max(map(len, out.splitlines())) <= 128 and "shoal explain pipeline --profile gpt2 --ranks 4" in out, out)
    expect("shoal explain pipeline" in call(SHOAL, "explain", "--help")[1])


run_cases([models_have_their_sizes, models_have_their_arithmetic, activations_are_those_of_the_shapes,
           times_follow_the_batch_and_the_rate, formats_agree, a_heavy_head_gets_fewer_layers, automatic_stages_beat_equal_numbers, more_room_makes_no_step_longer,
           ranks_may_be_unequal, ties_may_stay_together, files_are_read, wrong_files_are_refused, lack_of_memory_is_explained,
           stages_are_recomputed, stages_may_be_on_several_ranks, own_cuts_are_timed, other_partitions_are_compared, schedules_are_drawn, options_are_checked, help_teaches])
