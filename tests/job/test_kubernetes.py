#!/usr/bin/env python3
"""The engine "kubernetes": how Kubeflow's own software reads the manifests, what a pod does with them, and what is reported
about a cluster that a program named kubectl imitates. With `manifests FILE` this is the part that runs in Kubeflow's
environment."""
import base64
import json
import os
import pathlib
import re
import stat
import subprocess
import sys

from jobs import DATA_PARALLEL, TOP, Jobs, names_in
from tap import Skip, call, expect, run_cases

KUBEFLOW = TOP / "build/kubeflow/bin/python3"
RANKS = """
    import os
    print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "SM_CURRENT_HOST")))
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
"""
# Keeps what it is told, and answers with the file of the verb. Its logs begin at the second that it is asked for.
KUBECTL = """#!/bin/sh
echo "$*" >> "$KUBECTL_FOLDER/calls"
case "$*" in
*create*) cat > "$KUBECTL_FOLDER/created"; cat "$KUBECTL_FOLDER/refusal" >&2 2>/dev/null && exit 1; exit 0 ;;
*jsonpath*) echo uid-7 ;;
*patch\ secret*) cat "$KUBECTL_FOLDER/forbidden" >&2 2>/dev/null && exit 1; exit 0 ;;
*get\ pods*) cat "$KUBECTL_FOLDER/pods" ;;
*logs*since-time*) since=${*##*since-time=}; awk -v since="${since%%.*}" 'substr($1, 1, 19) >= since' "$KUBECTL_FOLDER/logs" ;;
*logs*) cat "$KUBECTL_FOLDER/logs" 2>/dev/null ;;
*get*) cat "$KUBECTL_FOLDER/state" 2>/dev/null || { echo "Error from server (NotFound)" >&2; exit 1; } ;;
esac
exit 0
"""


def where(**options):
    return {"engine": "kubernetes", "options": {"image": "shoal:1", **options}}


def read_manifests(path):
    """Reads manifests in Kubeflow's environment, because there is no YAML parser here."""
    if not KUBEFLOW.exists():
        raise Skip(f"there is no {KUBEFLOW}: `make build/kubeflow/made`")
    code, out, err = call(KUBEFLOW, __file__, "manifests", path, timeout=120)
    expect(code == 0, code, out, err)
    return json.loads(out.splitlines()[-1])


def manifests_are_what_kubeflow_understands():
    with Jobs() as jobs:
        document = jobs.document(RANKS, "cell", instance_count=2, workers_per_host=4, distribution=DATA_PARALLEL, output_path="s3://bucket/out",
                                 where=where(namespace="research", resources={"limits": {"nvidia.com/gpu": 8}}, pod={
                                     "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {
                                         "nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
                                         "containers": [{"name": "node", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}],
                                         "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}}), environment={"WANDB_API_KEY": "hidden"})
        path = jobs.root / "cell.yaml"
        code, out, err = jobs.call("run", document, "--write", path)
        expect(code == 0 and "kubectl create -f" in err and not jobs.jobs.exists(), code, out, err)
        expect(stat.S_IMODE(path.stat().st_mode) == 0o600, path.stat())
        config, secret, runtime, train_job = read_manifests(path)
    expect("hidden" in secret["stringData"]["job.json"] and all("hidden" not in json.dumps(one) for one in (config, runtime, train_job)))
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    expect(pod["metadata"]["labels"] and pod["spec"]["nodeSelector"] and pod["spec"]["tolerations"], pod)
    expect([one["name"] for one in pod["spec"]["volumes"]] == ["source", "jobs", "shm"], pod)
    container, = pod["spec"]["containers"]
    expect([one["name"] for one in container["volumeMounts"]] == ["source", "jobs", "shm"] and container["image"] == "shoal:1", container)
    expect([one["metadata"]["namespace"] for one in (config, secret, runtime, train_job)] == ["research"] * 4)
    expect(len({one["metadata"]["labels"]["shoal/start"] for one in (config, secret, runtime, train_job)}) == 1)
    trainer = train_job["spec"]["trainer"]
    expect((trainer["numNodes"], trainer["numProcPerNode"], trainer["resourcesPerNode"]) == (2, 4, {"limits": {"nvidia.com/gpu": 8}}), trainer)
    expect(len(secret["stringData"]["secret"]) == 64 and trainer["env"][1]["valueFrom"]["secretKeyRef"]["name"] == "cell-secret", trainer)


def pods_run_the_job():
    """The two containers run as processes of this machine, with the variables that Kubeflow's controller sets."""
    with Jobs() as jobs:
        document = jobs.document(RANKS, "cell", instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, where=where(claim="jobs"))
        path = jobs.root / "cell.yaml"
        expect(jobs.call("run", document, "--write", path)[0] == 0)
        config, secret, _, train_job = read_manifests(path)
        mounted = jobs.root / "mounted"
        mounted.mkdir()
        for name, data in config["binaryData"].items():
            (mounted / name).write_bytes(base64.b64decode(data))
        inside = secret["stringData"]["job.json"]
        (mounted / "job.json").write_text(inside.replace("/shoal/job/", f"{mounted}/"))
        words = [word.replace("/shoal/job/", f"{mounted}/") for word in train_job["spec"]["trainer"]["command"]]
        pods = [subprocess.Popen([sys.executable, *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
            **jobs.environment, "SHOAL_COMMAND": os.environ["SHOAL_COMMAND"], "SHOAL_SECRET": secret["stringData"]["secret"],
            "PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}) for index in range(2)]
        done = [(*pod.communicate(timeout=100), pod.returncode) for pod in pods]
        expect([code for _, _, code in done] == [0, 0], done)
        expect(all(f"I am {rank} 4 algo-{rank // 2 + 1}" in done[rank // 2][0] for rank in range(4)), done)
        expect(names_in(jobs.folder("cell") / "model.tar.gz") == ["of-0", "of-1", "of-2", "of-3"])


class Cluster:
    """A program named kubectl, first on PATH."""

    def __init__(self, jobs):
        self.folder = jobs.root / "cluster"
        (self.folder / "bin").mkdir(parents=True)
        program = self.folder / "bin/kubectl"
        program.write_text(KUBECTL)
        program.chmod(0o755)
        jobs.environment.update(PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}", KUBECTL_FOLDER=str(self.folder))

    def says(self, what, **told):
        condition = [{"type": what, "status": "True", **told}] if what else []
        state = {"status": {"conditions": condition, "jobsStatus": [{"name": "node", "active": 0 if what else 2}]}}
        (self.folder / "state").write_text(json.dumps(state))


def status_and_logs_come_from_the_cluster():
    with Jobs() as jobs:
        cluster = Cluster(jobs)
        cluster.says(None)
        jobs.start("pass", instance_count=2, name="cell", where=where(), output_path="s3://bucket/out")
        expect('"kind": "TrainJob"' in (cluster.folder / "created").read_text())
        manifests_kept = jobs.folder("cell") / "kubernetes.yaml"
        expect(stat.S_IMODE(manifests_kept.stat().st_mode) == 0o600, "it holds the secret")
        expect((cluster.folder / "calls").read_text().count('"ownerReferences"') == 3, (cluster.folder / "calls").read_text())
        (cluster.folder / "logs").write_text("2026-11-26T10:00:00.5Z 0| epoch 1\n")
        expect(jobs.status("cell")["status"] == "Training" and jobs.log("cell") == "0| epoch 1\n", jobs.told("cell"))
        (cluster.folder / "calls").unlink()
        jobs.status("cell")
        expect("logs" not in (cluster.folder / "calls").read_text(), "logs are brought once in ten seconds")
        with open(cluster.folder / "logs", "w") as file:  # the cluster has turned its logs meanwhile
            file.write("2026-11-26T10:00:00.5Z 0| epoch 1\n2026-11-26T10:00:00.51Z 0| epoch 2\n2026-11-26T10:00:02Z 0| epoch 3\n")
        cluster.says("Complete")
        status = jobs.status("cell")
        expect(jobs.log("cell") == "0| epoch 1\n0| epoch 2\n0| epoch 3\n", jobs.log("cell"))
        expect(status["status"] == "Completed" and status["model"] == "s3://bucket/out/cell/output/model.tar.gz", status)

        (cluster.folder / "logs").write_text("2026-11-26T10:00:00Z shoal job: cell wrote no model: its script left nothing\n")
        jobs.start("pass", name="none", where=where(), output_path="s3://bucket/out")
        status = jobs.status("none")
        expect(status["status"] == "Completed" and status["model"] is None, status)

        state = {"status": {"conditions": [], "jobsStatus": [{"name": "node", "active": 2, "ready": 0}]}}
        (cluster.folder / "state").write_text(json.dumps(state))
        full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
        (cluster.folder / "pods").write_text(json.dumps({"items": [{"status": {"phase": "Pending", "conditions": [full]}}]}))
        jobs.start("pass", name="waits", where=where(), output_path="s3://bucket/out")
        expect("status        Pending (Unschedulable: 0/3 nodes are available)" in jobs.call("status", "waits")[1], jobs.call("status", "waits"))
        cluster.says(None)
        status = jobs.status("waits")
        expect((status["status"], status["waits_for"]) == ("Training", None), status)

        cluster.says(None)
        jobs.start("pass", name="fails", where=where(), output_path="s3://bucket/out")
        cluster.says("Failed", reason="JobsFailed", message="a pod failed")
        expect(jobs.status("fails")["failure_reason"] == "JobsFailed: a pod failed", jobs.told("fails"))

        jobs.start("pass", name="gone", where=where(), output_path="s3://bucket/out")
        (cluster.folder / "state").unlink()
        expect("has deleted it" in jobs.status("gone")["failure_reason"], jobs.told("gone"))

        cluster.says(None)
        jobs.start("pass", name="stopped", where=where(), output_path="s3://bucket/out")
        expect(jobs.call("stop", "stopped")[0] == 0 and jobs.status("stopped")["status"] == "Stopped", jobs.told("stopped"))
        drawn = json.loads((jobs.folder("stopped") / "kubernetes.yaml").read_text())["items"][0]["metadata"]["labels"]["shoal/start"]
        calls = (cluster.folder / "calls").read_text()
        expect("delete trainjob stopped" in calls and f"delete configmap,secret,trainingruntime --selector=shoal/start={drawn} " in calls, calls)


def objects_that_the_trainjob_does_not_own_are_told():
    """Its maker may be forbidden to change secrets. The job runs, and a stop deletes all."""
    with Jobs() as jobs:
        cluster = Cluster(jobs)
        cluster.says(None)
        (cluster.folder / "forbidden").write_text("Error from server (Forbidden): you cannot patch secrets\n")
        code, out, err = jobs.call("run", jobs.document("pass", where=where(), output_path="s3://bucket/out"), "--detach")
        said = "the TrainJob job does not own all of its other objects (kubectl: Error from server (Forbidden): you cannot patch secrets): `shoal job stop job`"
        expect((code, out) == (0, "job\n") and said in err and len(err.splitlines()) == 1, code, out, err)
        expect((cluster.folder / "calls").read_text().count("patch ") == 3, "the others are owned")


def refusals_are_told_and_leave_nothing():
    with Jobs() as jobs:
        cluster = Cluster(jobs)
        (cluster.folder / "refusal").write_text("error: no matches for kind TrainJob\n")
        good = {"where": where(), "output_path": "s3://bucket/out"}
        for fields, said in ((good, "kubectl create exited with code 1: error: no matches for kind TrainJob"),
                             ({"where": {"engine": "kubernetes"}, "output_path": "s3://bucket/out"}, "where.options.image is missing"),
                             ({**good, "where": where(pod={"nodeSelector": {}})}, "where.options.pod is a part of the pods' template"),
                             ({"where": where()}, "what a pod writes is lost when the pod ends"),
                             ({"where": where(nmaespace="x"), "output_path": "s3://bucket/out"}, "where.options.nmaespace is not known"),
                             ({**good, "channels": {"training": str(jobs.root)}}, "which pods do not see")):
            code, out, err = jobs.call("run", jobs.document("pass", **fields))
            expect(code == 1 and said in err and len(err.splitlines()) == 1, code, out, err)
            expect(not jobs.folder().exists())
        calls = (cluster.folder / "calls").read_text()
        expect(re.search(r"delete configmap,secret --selector=shoal/start=[0-9a-f]{16} --ignore-not-found", calls)
               and re.search(r"delete trainjob,trainingruntime --selector=", calls) and "delete --ignore" not in calls, calls)
        (cluster.folder / "refusal").write_text('Error from server (AlreadyExists): trainjobs.trainer.kubeflow.org "job" already exists\n')
        code, out, err = jobs.call("run", jobs.document("pass", **good))
        expect(code == 1 and "there is a job job already in namespace of the context: choose another name" in err, code, out, err)
        (jobs.root / "secret").write_text("a key")
        (jobs.root / "source/key").symlink_to(jobs.root / "secret")
        code, out, err = jobs.call("run", jobs.document("pass", **good))
        expect(code == 1 and "key is a link to" in err and "which the source must not take along" in err, code, out, err)
        (jobs.root / "source/key").unlink()
        jobs.write("large", base64.b64encode(os.urandom(1_500_000)).decode())
        code, out, err = jobs.call("run", jobs.document("pass", **good))
        expect(code == 1 and "has more than 900 KiB when packed, which cannot go with a job" in err, code, out, err)
        code, out, err = jobs.call("run", jobs.document("pass", **good), PATH="/nowhere")
        expect(code == 1, code, out, err)


def manifests(path):
    """Round trips through the models of Kubeflow's API, and what its client makes of the runtime. Prints the documents as JSON."""
    import yaml
    from kubeflow.trainer.backends.container.runtime_loader import _parse_runtime_yaml
    from kubeflow_trainer_api import models
    documents = yaml.safe_load(pathlib.Path(path).read_text())["items"]
    kinds = {"ConfigMap": models.IoK8sApiCoreV1ConfigMap if hasattr(models, "IoK8sApiCoreV1ConfigMap") else None,
             "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}
    for document in documents:
        model = kinds.get(document["kind"])
        if model:  # unknown keys vanish, so what comes back is compared
            back = model.from_dict(document).to_dict()
            expect(back == document, document["kind"], back, document)
    runtime = _parse_runtime_yaml(documents[2])
    expect(runtime.name == documents[2]["metadata"]["name"] and runtime.trainer.image == "shoal:1", runtime)
    print(json.dumps(documents))


if __name__ == "__main__":
    if sys.argv[1:2] == ["manifests"]:
        manifests(sys.argv[2])
    else:
        run_cases([manifests_are_what_kubeflow_understands, pods_run_the_job, status_and_logs_come_from_the_cluster,
                   objects_that_the_trainjob_does_not_own_are_told, refusals_are_told_and_leave_nothing])
