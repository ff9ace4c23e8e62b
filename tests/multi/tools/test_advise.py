#!/usr/bin/env python3
"""`shoal advise` as a user sees it: whole pages, the JSON object, the HTML page, bad input. (test_advise.c tests the arithmetic.)

The pages of eight questions are in advice_pages/. To write them anew:
PYTHONPATH=tests/multi SHOAL_COMMAND=build/shoal python3 tests/multi/tools/test_advise.py --write"""
import atexit
import html
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree

from tap import Skip, call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # pages are those of a machine without GPUs
PAGES = pathlib.Path(__file__).with_name("advice_pages")
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-advise-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30
sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "python"))

RESNET = ("--profile", "resnet50", "--samples", "1281167", "--batch", "256", "--machine", "p3.2xlarge")
GPT = ("--profile", "gpt2", "--samples", "9000000", "--batch", "512")
# name: words, exit code
QUESTIONS = {
    "sizes_of_a_machine": ((*RESNET, "--epochs", "90", "--count", "1-8", "--price", "3.06USD,p3.8xlarge=12.24USD",
                            "--finish-by", "4d"), 0),
    "one_bigger_machine_first": ((*RESNET, "--epochs", "90", "--count", "1,2,4,8,16", "--price", "3.06USD,p3.16xlarge=24.48USD"), 0),
    "few_samples_for_batch_norm": (("--profile", "resnet50", "--samples", "50000", "--batch", "64", "--machine",
                                    "p3dn.24xlarge", "--count", "4"), 0),
    "a_model_that_hardly_fits": ((*GPT, "--machine", "p3.16xlarge", "--count", "1,2"), 0),
    "a_batch_of_64_times": (("--profile", "bert-large", "--samples", "8000000", "--batch", "512", "--machine", "dgx-a100",
                             "--count", "1,64", "--keep", "worker", "--optimizer", "lamb", "--learning-rate", "6.25e-4",
                             "--type", "bfloat16", "--critical-batch", "8000"), 0),
    "a_model_that_is_divided": (("--profile", "bert-large", "--samples", "100000", "--batch", "12", "--machine", "this", "--per-machine", "2",
                                 "--count", "2", "--worker-memory", "2200M", "--backward", "900", "--measured-batch", "1"), 0),
    "nothing_fits": (("--profile", "bert-large", "--samples", "1000", "--batch", "2", "--machine", "p3.2xlarge", "--count", "2",
                      "--worker-memory", "2G"), 3),
    "workers_that_do_not_divide": (("--profile", "gpt2", "--samples", "5000", "--batch", "512", "--machine", "this",
                                    "--per-machine", "7", "--worker-memory", "16G", "--backward", "900", "--measured-batch", "4",
                                    "--finish-by", "1s", "--rate", "10gbit"), 4),
}


def advise(*words, code=0):
    got, out, err = call(SHOAL, "advise", *words, timeout=120)
    expect(got == code and not err, words, got, out, err)
    return out


def asked(*words, code=0):
    return json.loads(advise(*words, "--format", "json", code=code))


def refused(*words, about):
    code, out, err = call(SHOAL, "advise", *words)
    expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err and err.startswith("shoal advise: "), words, code, out, err)


def rung(point, way):
    (found,) = [rung for rung in point["ladder"] if rung["way"] == way]
    return found


# ---- Pages ----------------------------------------------------------------------------------------------------------------------


def questions_have_their_pages():
    for name, (words, code) in QUESTIONS.items():
        wanted = (PAGES / f"{name}.txt").read_text()
        page = advise(*words, code=code)
        expect(page == wanted, name, *(f"- {a}\n+ {b}" for a, b in zip(wanted.splitlines(), page.splitlines()) if a != b))
        expect(all(len(line) <= 100 for line in page.splitlines() if "  " not in line and not line.startswith("#")), page)
    expect({path.stem for path in PAGES.glob("*.txt")} == set(QUESTIONS), list(PAGES.iterdir()))


def the_web_page_has_the_same_words_and_a_curve():
    words, code = QUESTIONS["sizes_of_a_machine"]
    page = advise(*words, "--format", "html", code=code)
    expect("<script" not in page and "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page, page)
    svg = page[page.index("<svg"):page.index("</svg>") + 6]
    root = xml.etree.ElementTree.fromstring(svg)
    labels = [each.text for each in root.iter(f"{SVG}text")]
    expect(len(list(root.iter(f"{SVG}circle"))) == 4 and all(label in labels for label in ("1", "2", "4", "8", "100 %")), svg)
    told = html.unescape(re.sub(r"<[^>]*>", " ", page))
    for word in advise(*words).split():
        expect(word == "==" or word in told, word)


def names_are_escaped_in_the_web_page():
    file = ROOT / "a<b>&.json"
    file.write_text('[{"name": "w", "elements": 1000, "ready": 1}]')
    page = advise("--profile", file, "--samples", "10", "--batch", "4", "--machine", "this", "--format", "html")
    expect("<title>a&lt;b&gt;&amp;.json on this" in page and "a<b>" not in page, page)


# ---- Numbers --------------------------------------------------------------------------------------------------------------------


def counts_are_those_of_the_arithmetic():
    answer = asked(*RESNET, "--count", "1,4", "--epochs", "90")
    one, four = [point for point in answer["points"] if point["machine"] == "p3.2xlarge"]
    expect((one["workers"], four["workers"], four["most_per_worker"]) == (1, 4, 64), answer)
    expect((one["iterations_kept"], one["iterations_dropped"], one["last_batch"]) == (5005, 5004, 143), one)
    expect(one["steps"] == 90 * 5005 == four["steps"], one, four)


def steps_are_those_of_the_simulator():
    """On 2.5 Gbit/s, sums of float32 between four machines; the advice adds the forward pass."""
    words = ("--backward", "200", "--forward", "100", "--measured-batch", "64")
    (point,) = [point for point in asked(*RESNET, "--count", "4", *words)["points"] if point["machines"] == 4]
    out = call(SHOAL, "sim", "step", "--profile", "resnet50", "--backward", "200", "--forward", "100", "--hosts", "4",
               "--ranks-per-host", "1", "--rate", "2.5gbit", "--pcie", "gen3", "--format", "json")[1]
    row = json.loads(out)
    expect(abs(point["step_us"] - row["step_us"] - 100e3) < 1e-3 and point["step_us_is"] == "simulated", point, row)
    expect(abs(point["efficiency"] - row["efficiency"]) < 1e-9 and point["limit"] == row["limit"] == "wire", point, row)


def microbatches_add_up():
    """Memory for eight samples: 32 are computed in four microbatches, and only the last one sums."""
    words = ("--profile", "resnet50", "--samples", "1000", "--batch", "32", "--machine", "p3.2xlarge", "--backward", "20",
             "--measured-batch", "10")
    whole = rung(asked(*words)["points"][0], "data parallel")
    fixed = whole["total_bytes"] - whole["activations_bytes"]
    memory = int((fixed + whole["activations_bytes"] / 4) / 0.92) + 2
    (point,) = [point for point in asked(*words, "--worker-memory", memory)["points"] if point["machine"] == "p3.2xlarge"]
    expect(point["way"] == "smaller batch" and rung(point, "smaller batch")["microbatches"] == 4, point)
    expect(point["step_us"] == 32 * 3000 and point["efficiency"] == 1, point)  # 2 ms backward and 1 ms forward for each
    summed = asked(*words, "--worker-memory", memory, "--count", "2", "--batch", "64")["points"][0]
    single = asked(*words, "--count", "2", "--batch", "16")["points"][0]
    expect(abs(summed["step_us"] - single["step_us"] - 24 * 3000) < 1e-3, summed, single)


def memory_follows_type_and_optimizer():
    def parts(*words):
        return rung(asked(*GPT, "--machine", "p4d.24xlarge", *words)["points"][0], "data parallel")
    elements = 124439808
    for words, wanted in ((("--optimizer", "sgd"), (4, 4, 0, 0)), (("--optimizer", "momentum"), (4, 4, 4, 0)),
                          ((), (4, 4, 8, 0)), (("--type", "bfloat16"), (2, 2, 8, 4)), (("--type", "float16", "--optimizer", "lion"), (2, 2, 4, 4))):
        found = parts(*words)
        expect(tuple(found[name + "_bytes"] / elements for name in ("weights", "gradients", "states", "master")) == wanted, words, found)
        total = sum(value for name, value in found.items() if name.endswith("_bytes") and name != "total_bytes")
        expect(abs(total - found["total_bytes"]) < 1, found)


def units_of_a_file_are_found_by_their_names():
    """Members of a list are gathered together; sharded parameters need five of the largest: three live ones, and two of gradients."""
    file = ROOT / "units.json"
    for names, largest in ((("blocks.1.b", "blocks.1.a.weight", "blocks.0.a", "head.weight"), 200), (("net/dense_1/kernel", "net/dense_1/bias", "x", "y"), 150),
                           (("0.weight", "0.bias", "1.weight", "10.weight"), 150), (("w", "v", "x", "y"), 120)):
        sizes = (50, 100, 50, 120) if names[0] != "blocks.1.b" else (90, 110, 50, 120)
        file.write_text(json.dumps([{"name": name, "elements": size, "ready": 1} for name, size in zip(names, sizes)]))
        (point,) = asked("--profile", file, "--samples", "10", "--batch", "4", "--machine", "this", "--per-machine", "2", "--worker-memory", "1G")["points"]
        expect(rung(point, "sharded parameters")["buffers_bytes"] == 5 * 4 * largest, names, rung(point, "sharded parameters"))


def fused_attention_keeps_no_scores():
    """In 16 bits, GPT-2 keeps 12 x 5 a s^2 bytes of scores for each sample (arXiv 2205.05198)."""
    words = (*GPT, "--machine", "p4d.24xlarge", "--type", "bfloat16")
    kept, fused = (rung(asked(*words, *more)["points"][0], "data parallel")["activations_bytes"] for more in ((), ("--fused-attention",)))
    expect(kept - fused == 64 * 12 * 5 * 12 * 1024 * 1024, kept, fused)


def a_bigger_machine_is_compared():
    words, _ = QUESTIONS["sizes_of_a_machine"]
    points = asked(*words)["points"]
    expect([(point["machine"], point["machines"]) for point in points] ==
           [("p3.2xlarge", 1), ("p3.2xlarge", 2), ("p3.2xlarge", 4), ("p3.8xlarge", 1), ("p3.2xlarge", 8), ("p3.8xlarge", 2)], points)
    four, one = points[2], points[3]
    expect(four["workers"] == one["workers"] == 4 and one["step_us"] < four["step_us"], four, one)
    expect(abs(one["cost"] - 12.24 * one["job_s"] / 3600) < 1e-6 and abs(four["cost"] - 4 * 3.06 * four["job_s"] / 3600) < 1e-6, one, four)
    without = asked(*RESNET, "--count", "4", "--per-machine", "1")["points"]
    expect(len(without) == 1 and without[0]["cost"] is None, without)


def a_size_with_a_price_is_compared():
    """From p3.2xlarge to p3.16xlarge, and to many of them."""
    points = asked(*RESNET, "--count", "1-16", "--price", "3.06USD,p3.16xlarge=24.48USD")["points"]
    expect([(point["machine"], point["machines"]) for point in points] ==
           [*(("p3.2xlarge", count) for count in (1, 2, 4, 8)), ("p3.16xlarge", 1), ("p3.2xlarge", 16), ("p3.16xlarge", 2)], points)
    eight, one, many = points[3], points[4], points[6]
    expect(eight["workers"] == one["workers"] == 8 and many["step_us"] < one["step_us"] < eight["step_us"], eight, one, many)
    expect(abs(one["cost"] - 24.48 * one["job_s"] / 3600) < 1e-6, one)


def the_fewest_machines_meet_a_time_limit():
    words = (*GPT, "--machine", "p4d.24xlarge", "--type", "bfloat16", "--count", "1")
    answer = asked(*words, "--finish-by", "40min")
    found = answer["finish"]
    expect(answer["finishes"] and found["job_s"] <= 2400 and found["machines"] > 1, answer)
    (fewer,) = asked(*words[:-1], found["machines"] - 1)["points"]
    expect(fewer["job_s"] > 2400, fewer, found)
    late = asked(*words, "--finish-by", "1min", code=4)
    expect(not late["finishes"] and late["finish"]["job_s"] > 60, late["finish"])


def a_batch_that_grows_has_rates():
    answer = asked(*GPT, "--machine", "p4d.24xlarge", "--from-batch", "128", "--learning-rate", "3e-4")
    first = answer["learning_rates"][0]
    expect(abs(first["rate"] - 6e-4) < 1e-12 and abs(first["beta1"] - 0.6) < 1e-12 and first["is_in_range"] and "arXiv" in first["source"], first)
    grown = asked(*GPT, "--machine", "p4d.24xlarge", "--count", "1,4", "--keep", "worker")["points"]
    expect([point["batch"] for point in grown] == [512, 2048], grown)
    kept, more = (asked(*GPT, "--machine", "p4d.24xlarge", "--from-batch", "128", *words)["points"][0]["steps"]
                  for words in ((), ("--critical-batch", "1000")))
    expect(more == -(-kept * 1512 // 1128), kept, more)


def the_fastest_number_is_described():
    words, code = QUESTIONS["sizes_of_a_machine"]
    answer, page = asked(*words, code=code), " ".join(advise(*words, code=code).split())
    own = {point["machines"]: point["job_s"] for point in answer["points"] if point["machine"] == "p3.2xlarge"}
    expect(answer["shown"] == 2 == min(own, key=own.get) and "instance_count = 2" in answer["job"], answer)
    expect("In short: 2 machines" in page and "Fewest machine hours: 1 machine, " in page and "Faster than all of these: 2 x p3.8xlarge" in page, page)
    grown = asked(*RESNET, "--count", "1,2", "--worker-memory", "1M", code=3)
    expect(grown["shown"] == 2 and grown["job"] == "", grown)


def every_number_says_how_sure_it_is():
    sure = asked(*RESNET)["sure"]
    expect(sure["counts"] == sure["states"] == "computed" and sure["activations"] == "modeled" and sure["sample_us"] == "assumed", sure)
    sure = asked(*RESNET, "--backward", "100", "--measured-batch", "32", "--rate", "1gbit", "--activations", "90M")["sure"]
    expect(sure["sample_us"] == sure["network"] == sure["activations"] == "given", sure)


def large_models_are_cut():
    file = ROOT / "large.json"
    file.write_text(json.dumps([{"name": f"layer.{i}", "elements": 200_000_000, "ready": (i + 1) / 40} for i in range(40)]))
    words = ("--profile", file, "--samples", "1000000", "--batch", "64", "--machine", "p3.16xlarge", "--type", "bfloat16",
             "--activations", "100M", "--backward", "900", "--measured-batch", "1")
    (point,) = asked(*words, "--count", "8")["points"]
    expect(point["way"] == "sharded parameters" and point["step_us_is"] == "arithmetic", point)
    expect([each["answer"] for each in point["ladder"][:3]] == ["too large"] * 3 and rung(point, "recomputation")["answer"] == "not known", point)
    shared = rung(point, "sharded parameters")
    expect(abs(shared["weights_bytes"] + shared["gradients_bytes"] + shared["states_bytes"] + shared["master_bytes"] - 16 * 8e9 / 64) < 1, shared)
    expect("fully_shard" in asked(*words, "--count", "8")["job"], point)
    (none,) = asked(*words, "--count", "1", "--worker-memory", "4G", code=3)["points"]
    expect(none["way"] == "" and none["step_us"] is None, none)


def the_job_is_a_document():
    if sys.version_info < (3, 11):
        raise Skip("shoal job needs tomli to read TOML before Python 3.11")
    (ROOT / "train.py").write_text("")
    for machine, line in (("ml.p4d.24xlarge", 'instance_type = "ml.p4d.24xlarge"'), ("dgx-a100", "workers_per_host = 8"),
                          ("this", "instance_count = 4")):
        job = asked(*RESNET[:-1], machine, "--worker-memory", "16G", "--count", "4")["job"]
        expect(line in job.splitlines() and "instance_count = 4" in job and "DistributedDataParallel" in job, job)
        (ROOT / "job.toml").write_text('entry_point = "train.py"\n' + job.partition("# train.py")[0])
        code, out, err = call(SHOAL, "job", "check", ROOT / "job.toml")
        expect(code == 0 and "no mistakes" in out and "on 4 hosts" in out, job, out, err)


def divided(way, *words, profile="bert-large", spare=1.0):
    """Returns the answer with the memory that `way`, which divides the model, needs at least: too little for the ways before it. And the
    rung. spare: more memory than that, as a factor."""
    words = ("--profile", profile, "--samples", "1000", "--backward", "900", "--measured-batch", "1", *words)
    (ladder,) = [point["ladder"] for point in asked(*words, "--worker-memory", "1M", code=3)["points"] if point["machine"] in words]
    at = [each["way"] for each in ladder].index(way)
    sizes = [each.get("total_bytes", float("inf")) for each in ladder]
    expect(sizes[at] * spare < min(sizes[:at]), way, words, sizes)
    answer = asked(*words, "--worker-memory", int(sizes[at] * spare / 0.92) + 2)
    (point,) = [point for point in answer["points"] if point["machine"] in words]
    expect(point["way"] == way and answer["shown"] == point["machines"], answer)
    return answer, rung(point, way)


# way: workers of a machine, machines, batch, tensor degree, stages, microbatches
DIVIDED = {"tensor parallel": (4, 1, 12, 4, 1, 12), "pipeline": (2, 2, 12, 1, 4, 12), "tensor and pipeline": (4, 2, 26, 4, 2, 26)}


def documents_of_divided_models_are_read():
    """By shoal.job, and then by smdistributed.modelparallel, which refuses what contradicts."""
    if sys.version_info < (3, 11):
        raise Skip("shoal job needs tomli to read TOML before Python 3.11")
    from shoal.job.document.distribution import launch_of
    from shoal.job.document.reading import job_read
    from smdistributed.modelparallel import _parameters
    (ROOT / "train.py").write_text("")
    for way, (per_machine, count, batch, tensor, stages, microbatches) in DIVIDED.items():
        answer, found = divided(way, "--machine", "this", "--per-machine", per_machine, "--count", count, "--batch", batch)
        (ROOT / "job.toml").write_text('entry_point = "train.py"\n' + answer["job"].partition("\n# train.py")[0])
        job = job_read(ROOT / "job.toml")
        expect((job.instance_count, launch_of(job, 0).workers_per_host) == (count, per_machine), answer["job"])
        given = job.distribution["smdistributed"]["modelparallel"]["parameters"]
        parameters, notes = _parameters.read(given)
        expect(not notes and parameters.ddp and (parameters.tensor_parallel_degree, parameters.pipeline_parallel_degree,
                                                 parameters.microbatches) == (tensor, stages, microbatches), notes, given)
        expect(parameters.active_microbatches == (stages if stages > 1 else None) and parameters.prescaled_batch == (tensor > 1), given)
        expect(parameters.bf16 == found["is_16_bit"] and ("set_activation_checkpointing" in answer["job"]) == found["recomputes"], found, given)
        expect(("smp.tensor_parallelism()" in answer["job"]) == (tensor > 1) and "shoal.torch." not in answer["job"], answer["job"])
        code, out, err = call(SHOAL, "job", "check", ROOT / "job.toml")
        expect(code == 0 and "no mistakes" in out, out, err)


def microbatches_divide_the_samples_of_a_replica():
    """smp.step refuses others: 50 samples in microbatches of 6 are 9 for the way, and 10 for smp."""
    file = ROOT / "even.json"
    file.write_text(json.dumps([{"name": f"layer.{i}", "elements": 1_000_000, "ready": (i + 1) / 40} for i in range(40)]))
    for batch, of_way, wanted in ((32, 8, 8), (50, 9, 10), (38, 10, 19), (37, 10, 37), (2, 2, 2)):
        answer, found = divided("pipeline", "--machine", "this", "--per-machine", "2", "--batch", batch, "--activations", "1K", profile=file, spare=1.005)
        expect(found["microbatches"] == of_way and f"parameters.microbatches = {wanted}\n" in answer["job"], batch, found, answer["job"])
        expect(f"# batches of {batch}, " in answer["job"] and f"--stages 2 --microbatches {wanted}" in answer["job"], batch, answer["job"])


def models_on_gpus_are_divided_by_other_calls():
    answer, found = divided("tensor and pipeline", "--machine", "p3.8xlarge", "--per-machine", "4", "--count", "2", "--batch", "26")
    lines = answer["job"].splitlines()
    expect("distribution.smdistributed.dataparallel.enabled = true" in lines and "modelparallel" not in answer["job"], lines)
    expect("model = shoal.torch.tensor_parallel(model, 4)" in lines and any("torch.distributed.pipelining" in line for line in lines), lines)


def gpus_of_this_machine_are_its_workers():
    """A stand-in for CUDA's driver: the smallest memory counts, and known GPUs have their peaks."""
    folder = pathlib.Path(os.environ["SHOAL_TESTS"]).parent / "mock/devices"
    if not (folder / "libcuda.so.1").exists():
        raise Skip("the stand-in for CUDA's driver was not built")

    def on(devices, *words, code=0):
        command = ("env", f"LD_LIBRARY_PATH={folder}", f"MOCK_DEVICES={devices}", SHOAL, "advise", *RESNET[:-1], "this", "--format", "json", *words)
        got, out, err = call(*command, timeout=120)
        expect(got == code, devices, words, got, out, err)
        return json.loads(out)["question"] if not code else err

    known = on("40960,40000 NVIDIA A100-SXM4-40GB")
    expect((known["accelerator"], known["workers_per_machine"], known["worker_memory_bytes"]) == ("A100", 2, 40000 << 20), known)
    expect(known["sample_us"] > 0 and known["nvlink_gb_s"] == 160 and known["pcie_gb_s"] == 24, known)
    unknown = on("8192 Some <GPU> 3000")
    expect((unknown["accelerator"], unknown["workers_per_machine"], unknown["sample_us"]) == ("Some <GPU> 3000", 1, None), unknown)
    expect(unknown["pcie_gb_s"] > 0 and unknown["nvlink_gb_s"] == 0, unknown)
    expect(on("22528 NVIDIA L40S")["accelerator"] == "L40S" and on("22528 NVIDIA L4")["accelerator"] == "L4")
    expect(on("4096,4096 X", "--per-machine", "1", "--count", "2")["workers_per_machine"] == 1)
    expect("--per-machine 3: this has 2 X" in on("4096,4096 X", "--per-machine", "3", code=2))
    expect(on("", "--worker-memory", "4G")["accelerator"] == "")


def hosts_of_a_file_are_like_this_machine():
    hosts = ROOT / "hosts.txt"
    hosts.write_text("# a cluster\n" + "".join(f"n{i} slots=2\n" for i in range(3)))
    words = (*RESNET[:-1], hosts, "--worker-memory", "16G")
    answer = asked(*words)
    expect([point["machines"] for point in answer["points"]] == [1, 2, 3] and [point["workers"] for point in answer["points"]] == [2, 4, 6], answer["points"])
    expect(answer["question"]["hosts_of_file"] == 3 and [point["machines"] for point in asked(*words, "--count", "2")["points"]] == [2])
    expect("the 3 hosts of the file are like this machine; none was asked" in " ".join(advise(*words).split()))
    finish = asked(*words, "--backward", "900", "--measured-batch", "4", "--finish-by", "1s", "--rate", "100gbit", code=4)["finish"]
    expect(finish["machines"] <= 3, finish)
    refused(*words, "--count", "4", about="--count 4: the file has 3 hosts")
    hosts.write_text("n0\n")
    expect([point["machines"] for point in asked(*words)["points"]] == [1])
    hosts.write_text("n0 slots=2\nn1 slots=4\n")
    refused(*words, about="hosts with equal slots=N")
    hosts.write_text("n0 slots=many\n")
    refused(*words, about="hosts.txt")


# ---- Bad input ------------------------------------------------------------------------------------------------------------------


def wrong_questions_are_refused():
    refused(about="which model?")
    refused("--profile", "resnet50", about="how many samples")
    refused("--profile", "resnet50", "--samples", "10", about="how many samples has a step")
    refused("--profile", "resnet50", "--samples", "10", "--batch", "4", about="which machine?")
    refused("--profile", "resnet50", "--samples", "10", "--batch", "11", "--machine", "this", about="larger than the data set")
    refused(*RESNET, "4", about="'4' is not an option")
    refused(*RESNET[:-1], "p3.17xlarge", about="did you mean p3.16xlarge?")
    refused(*RESNET[:-1], "mainframe", about="there is no machine 'mainframe'")
    refused(*RESNET, "--samples", "0", about="a whole number from 1")
    refused(*RESNET, "--samples", "99999999999999999999999", about="a whole number from 1")
    refused(*RESNET, "--batch", "1.5", about="a whole number from 1")
    refused(*RESNET, "--epochs", "0", about="a number above 0")
    refused(*RESNET, "--epochs", "nan", about="a number above 0")
    refused(*RESNET, "--count", "0", about="from 1 to")
    refused(*RESNET, "--count", "1,x", about="from 1 to")
    refused("--profile", "resnet50", "--samples", "9999", "--batch", "9999", "--machine", "p3.16xlarge", "--count", "513", about="at most 4096")
    refused(*RESNET, "--per-machine", "2", about="has 1 V100")
    refused(*RESNET, "--worker-memory", "0", about="a size above 0")
    refused(*RESNET, "--type", "int8", about="float32, bfloat16 or float16")
    refused(*RESNET, "--optimizer", "none", about="sgd, momentum")
    refused(*RESNET, "--optimizer", "lars", about="one of")
    refused(*RESNET, "--backward", "10", about="belong together")
    refused(*RESNET, "--measured-batch", "10", about="belong together")
    refused(*RESNET, "--forward", "10", "--measured-batch", "4", about="belong together")
    refused(*RESNET, "--keep", "all", about="batch, worker")
    refused(*RESNET, "--keep", "worker", "--count", "3", about="they divide 258")
    refused(*RESNET, "--format", "pdf", about="text, json, html")
    refused(*RESNET, "--rate", "fast", about="bits per second")


def wrong_prices_and_limits_are_refused():
    for price in ("3.06", "USD", "3.06 USD", "-1USD", "3.06US-D", "3.06DOLLARSX", "3.06USD,4USD"):
        refused(*RESNET, "--price", price, about="a price with its currency")
    for other in ("p4d.24xlarge", "p3.2xlarge", "p3.17xlarge"):
        refused(*RESNET, "--price", f"3USD,{other}=9USD", about=f"the next size of p3.2xlarge is p3.8xlarge, and '{other}' is not a larger one")
    refused(*RESNET, "--price", "3USD,p3.8xlarge=9EUR", about="two currencies")
    for limit in ("12", "0h", "soon", "-1h"):
        refused(*RESNET, "--finish-by", limit, about="a time with its unit")
    refused(*GPT, "--machine", "this", "--finish-by", "1h", about="--backward MS --measured-batch N")


def wrong_profiles_are_refused():
    refused("--profile", ROOT / "none.json", *RESNET[2:], about="no such file")
    file = ROOT / "other.json"
    for text in ("", "{}", "[]", '[{"name": "w"}]', '[{"name": "w", "elements": 0, "ready": 1}]',
                 '{"name": "gpt", "units": [{"name": "wte", "forward_us": 25, "backward_us": 9}]}'):  # a profile for a pipeline
        file.write_text(text)
        refused("--profile", file, *RESNET[2:], about="other.json:1:")


def a_batch_below_the_workers_is_an_answer():
    page = advise("--profile", "resnet50", "--samples", "100", "--batch", "4", "--machine", "p3.16xlarge", code=3)
    expect("fewer samples than workers" in page, page)
    answer = asked("--profile", "resnet50", "--samples", "100", "--batch", "9", "--machine", "p4d.24xlarge", "--count", "1,2")
    expect([point["fault"] for point in answer["points"]] == ["", "fewer samples than workers"], answer)


def what_is_not_known_is_said():
    file = ROOT / "plain.json"
    file.write_text('[{"name": "w", "elements": 1000, "ready": 1}]')
    page = advise("--profile", file, "--samples", "100", "--batch", "4", "--machine", "this")
    expect("Activations are not known" in " ".join(page.split()) and "is not known. Measure one worker" in page and "--batch-norms" in page, page)


def help_has_all_options_and_shapes():
    code, out, err = call(SHOAL, "advise", "--help")
    source = pathlib.Path(__file__).resolve().parents[3] / "tools/advise"
    options = re.findall(r'\{"(--[\w-]+)",', (source / "advise_options.c").read_text())
    shapes = re.findall(r'^\s*\{"([\w.-]+)", "', (source / "advise_shape.c").read_text(), re.M)
    expect(code == 0 and not err and len(shapes) > 20, code, err)
    expect(not [word for word in (*options, *shapes) if word not in out and word not in ("--dtype", "--help")], out)


if __name__ == "__main__" and "--write" in sys.argv:
    for name, (words, code) in QUESTIONS.items():
        (PAGES / f"{name}.txt").write_text(advise(*words, code=code))
elif __name__ == "__main__":
    run_cases([questions_have_their_pages, the_web_page_has_the_same_words_and_a_curve, names_are_escaped_in_the_web_page,
               counts_are_those_of_the_arithmetic, steps_are_those_of_the_simulator, microbatches_add_up,
               memory_follows_type_and_optimizer, units_of_a_file_are_found_by_their_names, fused_attention_keeps_no_scores, a_bigger_machine_is_compared, a_size_with_a_price_is_compared, the_fewest_machines_meet_a_time_limit,
               a_batch_that_grows_has_rates, the_fastest_number_is_described, every_number_says_how_sure_it_is, large_models_are_cut, the_job_is_a_document,
               documents_of_divided_models_are_read, microbatches_divide_the_samples_of_a_replica, models_on_gpus_are_divided_by_other_calls,
               gpus_of_this_machine_are_its_workers, hosts_of_a_file_are_like_this_machine,
               wrong_questions_are_refused, wrong_prices_and_limits_are_refused, wrong_profiles_are_refused,
               a_batch_below_the_workers_is_an_answer, what_is_not_known_is_said, help_has_all_options_and_shapes])
