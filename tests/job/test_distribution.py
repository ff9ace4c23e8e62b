#!/usr/bin/env python3
"""The meaning of `distribution` for a host: the command that starts its workers, their number, options of mpirun,
TF_CONFIG. test_sdk2.py compares hyperparameters and errors with the SDK itself."""
import json
import os

from shoal.job.document import Job
from shoal.job.document.distribution import hyperparameters_of, launch_of, mistakes, tf_config
from tap import expect, run_cases


def launch(distribution, gpus=0, **fields):
    return launch_of(Job("train.py", distribution=distribution, **fields), gpus)


def is_refused(said, distribution, **fields):
    try:
        launch(distribution, **fields)
    except ValueError as error:
        expect(str(error) == said, error, said)
        return
    raise AssertionError(f"not refused: {distribution}")


def every_strategy_has_its_runner():
    for distribution, runner in (
            ({}, "plain"), ({"smdistributed": {"dataparallel": {"enabled": True}}}, "shoal"),
        ({"pytorchddp": {"enabled": True}}, "shoal"),
            ({"torch_distributed": {"enabled": True}}, "torchrun"), ({"mpi": {"enabled": True}}, "mpi"),
            ({"parameter_server": {"enabled": True}}, "tensorflow"), ({"multi_worker_mirrored_strategy": {"enabled": True}},
                                                                      "tensorflow"),
            ({"smdistributed": {"dataparallel": {"enabled": False}}}, "plain"), ({"mpi": {"enabled": False}}, "plain"),
            ({"mpi": {"enabled": False}, "torch_distributed": {"enabled": True}}, "torchrun")):
        expect(launch(distribution).runner == runner, distribution, launch(distribution))
    expect(launch({"parameter_server": {"enabled": True}}).tf_config == "parameter_server")
    expect(launch({"multi_worker_mirrored_strategy": {"enabled": True}}).tf_config == "multi_worker_mirrored_strategy")


def workers_are_counted_as_by_the_vendor():
    dataparallel = {"smdistributed": {"dataparallel": {"enabled": True}}}
    mpi = {"mpi": {"enabled": True, "processes_per_host": 2}}
    for distribution, gpus, fields, count in (
            (dataparallel, 0, {}, 1), (dataparallel, 8, {}, 8), (dataparallel, 8, {"workers_per_host": 3}, 3), (mpi, 8, {}, 2),
            ({"mpi": {"enabled": True}}, 0, {}, 1), ({"mpi": {"enabled": False, "processes_per_host": 2}, **dataparallel}, 8,
                                                     {}, 2),
            ({}, 8, {}, 1), ({"parameter_server": {"enabled": True}}, 8, {}, 1)):
        found = launch(distribution, gpus, **fields).workers_per_host
        expect(found == count, distribution, gpus, fields, found)
    alone = launch({}, workers_per_host=3)
    expect((alone.runner, alone.workers_per_host) == ("shoal", 3), alone)


def options_of_mpirun_are_understood_or_named():
    found = launch({"mpi": {"enabled": True, "custom_mpi_options":
                            "-x A=1 -x HOME -x 'B=two words' --bind-to core -verbose --timeout 60 --tag-output"}})
    expect(found.environment == {"A": "1", "B": "two words", "SHOAL_LOG": "info"}, found)
    expect(found.options == ["--bind", "core", "--timeout", "60"] and found.notes == [], found)
    found = launch({"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options":
                                                       "-mca btl ^openib --NCCL_DEBUG INFO -x C=3 --bind-to socket --map-by "
                                                       "ppr:2:node -x"}}})
    expect(found.environment == {"NCCL_DEBUG": "INFO", "C": "3"} and found.options == [], found)
    expect(found.notes == ["custom_mpi_options: no mpirun starts the workers, so these mean nothing here: -mca btl ^openib; "
                           "--bind-to socket; "
                           "--map-by ppr:2:node; -x"], found)
    expect(launch({"pytorchddp": {"enabled": True}}).notes == [])


def what_cannot_be_run_is_refused():
    def modelparallel(**parameters):
        return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, "mpi": {"enabled": True}}
    where = "distribution.smdistributed.modelparallel.parameters"
    is_refused(f"{where}.horovod: true is not served: leave it out, or write false; \"ddp\": true trains "
               "replicas together", modelparallel(partitions=2, horovod=True))
    is_refused(f'{where}.microbatchs: unknown parameter; did you mean "microbatches"?', modelparallel(partitions=2, microbatchs=4))
    for parameters in ({"partitions": 2}, {"partitions": 2, "horovod": True}):
        expect(launch(modelparallel(**parameters), framework="tensorflow").runner == "mpi")
    is_refused(f"{where}.partitions: is of version 1 of the library, and hybrid_shard_degree of version 2; give the parameters of one",
               modelparallel(partitions=2, hybrid_shard_degree=2))
    is_refused(f"{where}.expert_parallel_degree: 2 is not served: leave it out, or write 1; hybrid_shard_degree divides the parameters of "
               "experts as well", modelparallel(expert_parallel_degree=2))
    is_refused(f"{where}.hybrid_shard_degree: is of version 2 of the library, which is for PyTorch only",
               modelparallel(hybrid_shard_degree=2), framework="tensorflow")
    is_refused(f'{where}.hybrid_shards_degree: unknown parameter; did you mean "hybrid_shard_degree"?',
               modelparallel(hybrid_shards_degree=2))
    is_refused("distribution.pytorchxla: pytorchxla is not served: it needs SageMaker's own training compiler; use "
               "torch_distributed",
               {"pytorchxla": {"enabled": True}})
    is_refused("distribution.instance_groups: Instance groups not specified in the estimator !",
               {"mpi": {"enabled": True}, "instance_groups": ["a"]})
    is_refused("distribution.instance_groups: groups of instances of several types are not served; leave it out: all hosts "
               "run the job",
               {"mpi": {"enabled": True}, "instance_groups": []})
    is_refused("distribution.multi_worker_mirrored_strategy: Multi Worker Mirrored Strategy is currently only supported with "
               "dict_keys(['tensorflow']) frameworks but received pytorch",
               {"multi_worker_mirrored_strategy": {"enabled": True}},
               framework="pytorch")
    is_refused("distribution.torch_distributed: is for pytorch, and this job's framework is tensorflow",
               {"torch_distributed": {"enabled": True}}, framework="tensorflow")
    is_refused("distribution.smdistributed.modelparallel.parameters: default_partition needs partitions to be set as well",
               {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"default_partition": 1}}},
                "mpi": {"enabled": True}})


def parameters_of_version_2_are_served():
    """Those that the vendor's notebooks have, started by torchrun; in another document by mpirun."""
    parameters = {"activation_loading_horizon": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 4, "sm_activation_offloading": True,
                  "tensor_parallel_degree": 2, "expert_parallel_degree": 1, "random_seed": 7, "allow_empty_shards": False,
                  "fsdp_cache_flush_warnings": True}
    for given in (parameters, {"tensor_parallel_degree": 2}, {}):
        found = launch({"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True, "parameters": given}}},
                       gpus=8, framework="pytorch")
        expect((found.runner, found.workers_per_host, found.notes) == ("torchrun", 8, []), given, found)
    found = launch({"mpi": {"enabled": True, "processes_per_host": 4},
                    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"hybrid_shard_degree": 2}}}})
    expect((found.runner, found.workers_per_host) == ("mpi", 4), found)


def several_mistakes_are_found_at_once():
    found = mistakes(Job("train.py", distribution={
        "mpi": {"enabled": "yes", "processes": 2}, "smdistributed": {"dataparalel": {}}, "torch_distributed": True,
        "gloo": {}}))
    expect([".".join(place) for place, _ in found] == ["smdistributed.dataparalel", "mpi.enabled", "mpi.processes",
                                                       "torch_distributed", "gloo"],
           *found)


def hyperparameters_know_their_base():
    job = Job("train.py", name="j", source_dir="/code", framework="tensorflow", hyperparameters={"a": "b c"})
    os.environ.pop("AWS_REGION", None), os.environ.pop("AWS_DEFAULT_REGION", None)
    found = hyperparameters_of(job, "/base")
    expect(found == {"a": '"b c"', "model_dir": '"/base/model"', "sagemaker_submit_directory": '"/base/code"',
                     "sagemaker_program": '"train.py"', "sagemaker_container_log_level": "20", "sagemaker_job_name": '"j"',
                     "sagemaker_region": '"us-east-1"'}, found)
    os.environ["AWS_REGION"] = "eu-west-1"
    job = Job("/x/train.py", name="j", output_path="s3://bucket/out/", framework="tensorflow")
    found = {name: json.loads(value) for name, value in hyperparameters_of(job).items()}
    expect(found["model_dir"] == "s3://bucket/out/j/model" and found["sagemaker_program"] == "train.py"
           and found["sagemaker_region"] == "eu-west-1" and found["sagemaker_submit_directory"] == "/opt/ml/code", found)


def tf_config_is_that_of_the_containers():
    hosts = ["algo-1", "algo-2", "algo-3"]
    cluster = {"master": ["algo-1:2222"], "ps": ["algo-1:2223", "algo-2:2223", "algo-3:2223"],
               "worker": ["algo-2:2222", "algo-3:2222"]}
    for host, is_server, task in (("algo-1", False, {"index": 0, "type": "master"}),
                                  ("algo-3", False, {"index": 1, "type": "worker"}),
                                  ("algo-1", True, {"index": 0, "type": "ps"}), ("algo-3", True, {"index": 2, "type": "ps"})):
        found = tf_config("parameter_server", hosts, host, is_server)
        expect(found == {"cluster": cluster, "environment": "cloud", "task": task}, found)
    expect(tf_config("parameter_server", ["algo-1"], "algo-1") is None)
    found = tf_config("multi_worker_mirrored_strategy", hosts, "algo-2")
    expect(found == {"cluster": {"worker": ["algo-1:8890", "algo-2:8890", "algo-3:8890"]}, "environment": "cloud",
                     "task": {"index": 1, "type": "worker"}}, found)
    found = tf_config("multi_worker_mirrored_strategy", ["a"], "a", address=lambda host, port: f"127.0.0.1:{port + 1}")
    expect(found["cluster"] == {"worker": ["127.0.0.1:8891"]}, found)


run_cases([every_strategy_has_its_runner, workers_are_counted_as_by_the_vendor, options_of_mpirun_are_understood_or_named,
           what_cannot_be_run_is_refused, parameters_of_version_2_are_served, several_mistakes_are_found_at_once, hyperparameters_know_their_base,
           tf_config_is_that_of_the_containers])
