#!/usr/bin/env python3
"""Runs published scripts of SageMaker's model-parallel library over Shoal, on this machine's CPUs, with small models and made-up data.

  scripts.py [NAME ...]     only those scripts
  scripts.py --list         prints the scripts
  scripts.py --from FOLDER  takes files from clones at FOLDER/OWNER/NAME (with or without a work tree) in place of GitHub

The scripts are fetched from GitHub at fixed commits to build/published, where they stay; the repository has none of them. They are
licensed under Apache 2.0 or MIT-0. A script that cannot be fetched is skipped, and the line says why; tests/python/test_smp_scripts.py
makes the calls of the first one. tests/published starts them: torch.cuda answers as if there were GPUs, and packages that need one have
stand-ins. Exit code 1: a script failed.

Examples:
  make test-scripts
  dev/scripts.py mnist gpt2

Exit codes:
  0  all scripts passed, or were skipped
  1  a script failed
  2  the arguments are wrong, or an environment could not be made"""
import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

TOP = pathlib.Path(__file__).resolve().parent.parent
FOLDER = TOP / "build/published"
LIMIT_S = 900  # of a run
NEAR = 1e-3  # how far losses of one and of two partitions may differ, relatively

EXAMPLES, CONTAINERS = "aws/amazon-sagemaker-examples", "aws/deep-learning-containers"
PYTORCH = "training/distributed_training/pytorch/model_parallel"
RESOURCES = "test/sagemaker_tests/pytorch/training/resources"
GPT_FILES = ("data_pipeline.py", "learning_rates.py", "memory_tracker.py")
FP16_FILES = tuple(f"fp16/{name}.py" for name in ("__init__", "fp16", "fp16util", "loss_scaler", "megatron/clip_grads", "megatron/fp16",
                                                  "megatron/grad_scaler"))

# files: the first one is the script. edits: (file, before, after). same: a regular expression of losses, which the first two runs have in
# common. falls: one of a loss that is smaller at the end of each run.
Script = collections.namedtuple("Script", "name repository commit folder files edits venv starter runs same falls", defaults=(None, None))
# seen: regular expressions that the output has, and how often.
Run = collections.namedtuple("Run", "ranks parameters words seen")


def gpt(**options):
    """Words for a GPT-2 that fits a test."""
    given = {"train_batch_size": 8, "val_batch_size": 8, "max_context_width": 24, "vocab_size": 97, "hidden_width": 32, "num_layers": 4,
             "num_heads": 4, "training-dir": "../data/train", "test-dir": "../data/val", "checkpoint-dir": "checkpoints", "model-dir": "model",
             "zipped_data": 0, "logging_freq": 4, "lr": 1e-2, "warmup": 0.01, "plateau": 0.4, "lr_decay_iters": 100, "seed": 1,
             "validation_batches": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "tensor_parallel_degree": 1, "max_steps": 16,
             "microbatches": 4, "activation_checkpointing": 1, "fp16": 0, **options}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


MNIST = {"microbatches": 4, "partitions": 2, "pipeline": "interleaved"}
BERT = {"ddp": True, "partitions": 2, "microbatches": 4, "pipeline": "interleaved", "optimize": "speed"}
BERT_WORDS = ["--input_dir", "../data/bert", "--config_file", "../data/bert_config.json", "--output_dir", "out", "--max_seq_length", "16",
              "--max_predictions_per_seq", "3", "--train_batch_size", "8", "--learning_rate", "1e-2", "--max_steps", "32",
              "--warmup_proportion", "0.1", "--steps_this_run", "16", "--do_train", "1", "--smp", "1", "--ddp", "1",
              "--num_steps_per_checkpoint", "8", "--seed", "3", "--disable_progress_bar", "1"]
DETECTION_FILES = {  # of maskrcnn_benchmark
    "": "", "config": "defaults paths_catalog", "data": "build collate_batch", "data/datasets": "coco concat_dataset voc",
    "data/datasets/evaluation": "", "data/datasets/evaluation/coco": "coco_eval coco_eval_np", "data/datasets/evaluation/voc": "voc_eval",
    "data/samplers": "distributed grouped_batch_sampler iteration_based_batch_sampler", "data/transforms": "build transforms",
    "engine": "inference tester trainer", "fp16": "fp16 fp16util loss_scaler",
    "layers": "batch_norm ce_loss iou_loss misc nms pisa_loss roi_align roi_pool sigmoid_focal_loss smooth_l1_loss",
    "layers/nhwc": "UpSampleNearest2d batch_norm conv init max_pool misc transforms",
    "modeling": "balanced_positive_negative_sampler box_coder make_layers matcher poolers registry utils",
    "modeling/backbone": "backbone fpn resnet", "modeling/detector": "detectors generalized_rcnn", "modeling/roi_heads": "roi_heads",
    "modeling/roi_heads/box_head": "box_head inference loss_pisa_box_head roi_box_feature_extractors roi_box_predictors",
    "modeling/roi_heads/keypoint_head": "inference keypoint_head loss roi_keypoint_feature_extractors roi_keypoint_predictors",
    "modeling/roi_heads/mask_head": "inference loss mask_head roi_mask_feature_extractors roi_mask_predictors",
    "modeling/rpn": "anchor_generator inference loss rpn utils", "modeling/rpn/retinanet": "inference loss retinanet",
    "solver": "build cosine_lr_scheduler fused_sgd lr_scheduler",
    "structures": "bounding_box boxlist_ops image_list keypoint segmentation_mask",
    "utils": "async_evaluator c2_model_loading checkpoint collect_env comm env imports logger loss_utils metric_logger miscellaneous "
             "mlperf_logger model_serialization model_zoo registry"}
DETECTION_CONFIG = "configs/e2e_mask_rcnn_R_50_FPN_1x.yaml"
DETECTION = {"partitions": 2, "microbatches": 2, "memory_weight": 1.0, "ddp": True}  # as in the example's notebook
DETECTION_OPTIONS = {
    "MODEL.WEIGHT": "../data/maskrcnn.pth", "DATASETS.TRAIN": "('coco_2014_train',)", "DATASETS.TEST": "('coco_2014_val',)", "OUTPUT_DIR": "out",
    "SAVE_CHECKPOINTS": True, "PER_EPOCH_EVAL": False, "SOLVER.OPTIMIZER": "NovoGrad", "SOLVER.LR_SCHEDULE": "COSINE", "SOLVER.BASE_LR": 0.002,
    "SOLVER.BETA1": 0.9, "SOLVER.BETA2": 0.4, "SOLVER.WARMUP_ITERS": 2, "SOLVER.MAX_ITER": 60, "SOLVER.CHECKPOINT_PERIOD": 30,
    "SOLVER.IMS_PER_BATCH": 4, "TEST.IMS_PER_BATCH": 4, "INPUT.MIN_SIZE_TRAIN": "(64,)", "INPUT.MAX_SIZE_TRAIN": 64, "DATALOADER.NUM_WORKERS": 0,
    "MODEL.BACKBONE.OUT_CHANNELS": 16, "MODEL.RESNETS.WIDTH_PER_GROUP": 8, "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16, "MODEL.ROI_BOX_HEAD.MLP_HEAD_DIM": 32, "MODEL.ROI_MASK_HEAD.CONV_LAYERS": "(16,16,16,16)",
    "MODEL.RPN.PRE_NMS_TOP_N_TRAIN": 60, "MODEL.RPN.FPN_POST_NMS_TOP_N_TRAIN": 60, "MODEL.RPN.PRE_NMS_TOP_N_TEST": 60,
    "MODEL.RPN.POST_NMS_TOP_N_TEST": 20, "MODEL.RPN.FPN_POST_NMS_TOP_N_TEST": 20, "MODEL.RPN.ANCHOR_SIZES": "(8,16,24,32,48)",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32, "MODEL.ROI_BOX_HEAD.NUM_CLASSES": 3}
DETECTION_WORDS = ["--config-file", DETECTION_CONFIG, *(str(word) for option in DETECTION_OPTIONS.items() for word in option)]
DONE, SAVED = ("SMP training finished successfully", 1), ("Finished checkpointing after 16 steps", 2)
LOSS = r"Batch \d+ (?:Validation )?[Ll]oss: ([\d.]+)"
TWO, ONE = {"pipeline_parallel_degree": 2}, {"pipeline_parallel_degree": 1}
PLAIN = {"use_distributed_transformer": 0}

SCRIPTS = [
    Script("mnist", CONTAINERS, "0410cde73424bdd9a40268c1e2579dfb081be2d0", f"{RESOURCES}/mnist", ("smmodelparallel_pt_mnist.py",), (),
           "torch", "on_cpu.py", [
               Run(2, MNIST, ["--assert-losses", "1", "--save-partial-model"], [("SMP training finished successfully", 2)]),
               Run(4, {**MNIST, "ddp": True}, ["--assert-losses", "1", "--ddp", "1"], [("SMP training finished successfully", 4)]),
               Run(2, MNIST, ["--epochs", "1", "--partial-checkpoint", "pt_mnist_checkpoint.pt", "--assert-losses", "1"],
                   [("SMP training finished successfully", 2)])]),
    Script("mnist-launcher", CONTAINERS, "0410cde73424bdd9a40268c1e2579dfb081be2d0", f"{RESOURCES}/mnist",
           ("smmodelparallel_mnist_script_mode.sh", "smmodelparallel_pt_mnist.py"), (), "torch", "on_cpu.py", [
               Run(8, None, [], [("SMP training finished successfully", 8)])]),
    Script("bert", EXAMPLES, "7ed6accf315c3f04a3fdc23dcf392726b9f3387b", f"{PYTORCH}/bert/bert_example",
           ("sagemaker_smp_pretrain.py", "modeling.py", "schedulers.py", "utils.py", "file_utils.py"), (), "scripts", "on_cpu.py", [
               Run(2, BERT, BERT_WORDS, [("^0.*Loss: ", 16), (r"__Bert__Loss__", 1), ("Finished syncing model checkpoints", 1)])]),
    Script("gpt2", CONTAINERS, "0410cde73424bdd9a40268c1e2579dfb081be2d0", f"{RESOURCES}/gpt2",
           ("train_gpt_simple.py", *GPT_FILES, *FP16_FILES), (), "scripts", "on_cpu.py", [
               Run(2, None, gpt(**TWO, smp_version=110, checkpoint_freq=8, validation_freq=8), [DONE, SAVED]),
               Run(1, None, gpt(**ONE, smp_version=110, validation_freq=8), [DONE]),
               Run(2, None, gpt(**TWO, smp_version=110, fp16=1, manual_partition=1, max_steps=24, checkpoint_freq=8, load_partial=1,
                                save_final_full_model=1), [DONE, ("Loaded model from", 2)]),
               Run(4, None, gpt(**TWO, smp_version=110, fp16=1, shard_optimizer_state=1, skip_full_optimizer=1), [DONE])], LOSS),
    Script("gpt2-examples", EXAMPLES, "01dbfb67a51210341e1671516bd807464a787ab2", f"{PYTORCH}/gpt2",
           ("train_gpt_simple.py", "sharded_data_parallel_checkpoint.py", *GPT_FILES), (), "scripts", "on_cpu.py", [
               Run(2, None, gpt(**TWO, **PLAIN, checkpoint_freq=8, validation_freq=8), [DONE]),
               Run(1, None, gpt(**ONE, **PLAIN, validation_freq=8), [DONE])], LOSS),
    Script("gpt2-train", EXAMPLES, "f2f9985b931eba4bcfb9327fc3c8f522b330b5c0", f"{PYTORCH}/gpt2",
           ("train.py", "model_config.py", "sdp_utils.py", *GPT_FILES), (), "scripts", "on_cpu.py", [
               Run(2, None, gpt(**TWO, **PLAIN, model_type="gpt2", sharded_data_parallel_degree=1, checkpoint_freq=8, validation_freq=8,
                                save_final_full_model=1), [DONE]),
               Run(1, None, gpt(**ONE, **PLAIN, model_type="gpt2", sharded_data_parallel_degree=1, validation_freq=8), [DONE]),
               Run(2, None, gpt(**TWO, **PLAIN, model_type="gpt2", sharded_data_parallel_degree=1, max_steps=24, load_partial=1, fp16=1,
                                delayed_param=1), [DONE])], LOSS),
    Script("gpt2-custom", EXAMPLES, "53dedee145be9e89c8711de5a2a53f1bdff145b2", f"{PYTORCH}/gpt2-custom",
           ("train_gpt_custom.py", *GPT_FILES, *FP16_FILES),
           (("train_gpt_custom.py", " = m.module.module.transformer.h", " = m.module.transformer.h"),), "scripts", "on_cpu.py", [
               Run(2, None, gpt(**TWO, checkpoint_freq=8, validation_freq=8), [DONE, SAVED]),
               Run(1, None, gpt(**ONE, validation_freq=8), [DONE])], LOSS),
    Script("maskrcnn", EXAMPLES, "10d3379f02584308d99dac6be944a78f21850bda", f"{PYTORCH}/mask-rcnn/utils/train_scripts/maskrcnn",
           ("tools/train_mlperf.py", DETECTION_CONFIG, *(f"maskrcnn_benchmark/{folder}/{name}.py".replace("//", "/")
                                                         for folder, names in DETECTION_FILES.items() for name in ("__init__", *names.split()))),
           (("maskrcnn_benchmark/config/paths_catalog.py", 'DATA_DIR = "datasets"', 'DATA_DIR = "../data"'),
            # it would pass save_partial twice after a partial checkpoint
            ("maskrcnn_benchmark/engine/trainer.py", "save_partial=False, **arguments)", '**{**arguments, "save_partial": False})'),
            # it takes parameters on the CPU for those of other ranks
            ("maskrcnn_benchmark/fp16/fp16util.py", 'if model.device.type == "cpu":', "if False:")),
           "scripts", "on_maskrcnn.py", [
               Run(2, DETECTION, DETECTION_WORDS, [("iter/next_eval: 60", 2), (r"Saving checkpoint to out/model_00000\d0_partial.pth", 4),
                                                   ("Saving checkpoint to out/model_final.pth", 2), ("^0.*Total training time", 1)])],
           falls=r"^0.* loss_mask: ([\d.]+)"),
    # Of this repository: the published run_glue.py needs a hub of models and data.
    Script("hf-trainer", None, None, "tests/published", ("hf_trainer.py",), (), "scripts", "on_cpu.py", [
        Run(2, {"partitions": 2, "microbatches": 4, "ddp": True}, [], [("evaluated: loss", 4)]),
        Run(1, {"partitions": 1, "microbatches": 4, "ddp": True}, [], [("evaluated: loss", 2)])], r"^0.*evaluated: loss ([\d.]+)"),
    Script("tf2", EXAMPLES, "f2f9985b931eba4bcfb9327fc3c8f522b330b5c0", "training/distributed_training/tensorflow/model_parallel/mnist/utils",
           ("tf2.py",), (("tf2.py", "reset_states()", "reset_state()"), ("tf2.py", '"/opt/ml/checkpoints"', '"checkpoints"')), "tensorflow",
           "on_keras.py", [
               Run(2, {"partitions": 2, "microbatches": 2}, [], [("Epoch 5, ", 2), ("Finished sync", 1)]),
               Run(1, {"partitions": 1, "microbatches": 2}, [], [("Epoch 5, ", 1)])]),
    Script("tf2-hvd", EXAMPLES, "f2f9985b931eba4bcfb9327fc3c8f522b330b5c0", "training/distributed_training/tensorflow/model_parallel/mnist/utils",
           ("tf2_hvd.py",), (("tf2_hvd.py", "import horovod.tensorflow", "import shoal.horovod.tensorflow"),
                             ("tf2_hvd.py", "reset_states()", "reset_state()"), ("tf2_hvd.py", "optimizer.variables()", "optimizer.variables")),
           "tensorflow", "on_keras.py", [
               Run(4, {"partitions": 2, "microbatches": 2, "horovod": True}, [], [("Epoch 5, ", 4)])]),
]


# ---- Fetching --------------------------------------------------------------------------------------------------------------


def fetch(script, clones):
    """Returns the folder of a script's files. Raises OSError if they cannot be fetched."""
    folder = FOLDER / script.name
    for name in script.files:
        target = folder / name
        if not target.exists() or script.repository is None:
            text = content(script, name, clones)
            for before, after in (each[1:] for each in script.edits if each[0] == name):
                if before not in text:
                    raise OSError(f"{name} has no line with {before!r}")
                text = text.replace(before, after)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


def content(script, name, clones):
    path = f"{script.folder}/{name}"
    if script.repository is None:
        return (TOP / path).read_text()
    if clones:
        done = subprocess.run(["git", "-C", pathlib.Path(clones, script.repository), "show", f"{script.commit}:{path}"], capture_output=True,
                              text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        return done.stdout
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{script.repository}/{script.commit}/{path}", timeout=60) as answer:
        return answer.read().decode()


# ---- Running ---------------------------------------------------------------------------------------------------------------


def environment_of(run, folder):
    variables = {**os.environ, "PYTHONPATH": f"{TOP / 'python'}:{TOP / 'python/smdistributed'}:{folder}", "SHOAL_LIBRARY": str(TOP / "build/libshoal.so"),
                 "OMP_NUM_THREADS": "1", "PUBLISHED_SAMPLES": "2048", "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
                 "SM_NUM_GPUS": "1", "SM_OUTPUT_DATA_DIR": "output", "SM_MODEL_DIR": "model", "SM_CHANNEL_TRAIN": "../data/train",
                 "SM_CHANNEL_TEST": "../data/val", "SM_MODULE_DIR": "s3://bucket/job/source/sourcedir.tar.gz", "SM_CURRENT_HOST": "algo-1",
                 "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True})}
    variables.pop("SM_HP_MP_PARAMETERS", None)
    return {**variables, **({"SM_HP_MP_PARAMETERS": json.dumps(run.parameters)} if run.parameters else {})}


def output_of(script, run, python):
    """Returns the output of a run. Raises AssertionError if it fails."""
    folder = FOLDER / script.name
    published, environment = TOP / "tests/published", environment_of(run, folder)
    words = [TOP / "build/shoal", "run", "-n", run.ranks, "--timeout", LIMIT_S, python, published / script.starter, folder / script.files[0],
             *run.words]
    if script.files[0].endswith(".sh"):  # it calls mpirun, which is a stand-in
        words = ["sh", folder / script.files[0]]
        environment.update(PATH=f"{published / 'stand_ins/bin'}:{environment['PATH']}", PUBLISHED_SHOAL=str(TOP / "build/shoal"),
                           PUBLISHED_PYTHON=str(python), PUBLISHED_STARTER=str(published / script.starter))
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    (folder / "output.txt").write_text(done.stdout)
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout[-3000:]}"
    for expression, count in run.seen:
        found = len(re.findall(expression, done.stdout, re.MULTILINE))
        assert found == count, f"\"{expression}\" is there {found} times, not {count}; see {folder / 'output.txt'}"
    if script.falls is not None:
        losses = [float(each) for each in re.findall(script.falls, done.stdout, re.MULTILINE)]
        assert len(losses) > 1 and losses[-1] < losses[0], f"the losses {losses} do not fall; see {folder / 'output.txt'}"
    return done.stdout


def test(script, python):
    """Runs a script in each of its ways. Returns what was compared."""
    shutil.rmtree(FOLDER / script.name / "out", ignore_errors=True)  # checkpoints of a former test
    outputs = [output_of(script, run, python) for run in script.runs]
    if script.same is None:
        return f"{len(outputs)} runs"
    one, other = ([float(each) for each in re.findall(script.same, output, re.MULTILINE)] for output in outputs[:2])
    assert one and len(one) == len(other), f"{len(one)} losses, and {len(other)} with another number of partitions"
    far = max(abs(a - b) / abs(b) for a, b in zip(one, other))
    assert far < NEAR, f"losses {one} with {script.runs[0].ranks} ranks, and {other} with {script.runs[1].ranks}"
    return f"{len(outputs)} runs, {len(one)} losses equal those of one partition within {far:.1e}"


def environment_make(name):
    """Returns the interpreter of a virtual environment, or None if it cannot be made."""
    if not (TOP / f"build/{name}/made").exists():
        done = subprocess.run(["make", "--no-print-directory", "-C", TOP, f"build/{name}/made"])
        if done.returncode:
            return None
    return TOP / f"build/{name}/bin/python3"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--from", dest="clones", metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {each.name for each in SCRIPTS}
    if unknown:
        parser.error(f"there is no script {', '.join(sorted(unknown))}: choose among {', '.join(each.name for each in SCRIPTS)}")
    failed = 0
    for script in SCRIPTS:
        if arguments.list:
            origin = f"{script.repository}@{script.commit[:8]}" if script.repository else "this repository"
            print(f"{script.name:14} {origin} {script.folder}/{script.files[0]}")
        elif not arguments.names or script.name in arguments.names:
            failed += run_one(script, arguments.clones)
    return int(failed > 0)


def run_one(script, clones):
    """Fetches and runs a script. Returns 1 if it fails."""
    try:
        fetch(script, clones)
    except (OSError, urllib.error.URLError) as error:
        print(f"skipped {script.name}: it cannot be fetched: {error}; tests/python/test_smp_scripts.py stands in", flush=True)
        return 0
    python, maker = environment_make(script.venv), environment_make("scripts")
    if not (python and maker):
        print(f"build/{script.venv} could not be made", file=sys.stderr)
        sys.exit(2)
    if not (FOLDER / "data/maskrcnn.pth").exists():  # the newest of them
        subprocess.run([maker, TOP / "tests/published/make_data.py", FOLDER / "data"], check=True)
    try:
        print(f"ok {script.name}: {test(script, python)}", flush=True)
    except AssertionError as error:
        print(f"FAILED {script.name}: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
