"""Engine "kubernetes": a job becomes a TrainJob of Kubeflow Trainer v2 and the runtime that it needs. Each pod runs `shoal job run` with
the engine "hosts"; Kubeflow's PET_* variables tell it where it stands.

    ConfigMap NAME-source    job.json and source.tar.gz, mounted at /shoal/job
    Secret NAME-secret       what proves that a rank belongs to the job
    TrainingRuntime NAME     one container on each node, with these and the volume of jobs
    TrainJob NAME            how many nodes, how many workers on each, which image

where.options: image (with this package and what the script imports), namespace, context, claim (a PersistentVolumeClaim of mode
ReadWriteMany for the folder of jobs, shared by all pods), service_account, resources (of each node: {"limits": {"nvidia.com/gpu": 8}}),
python (in the image; default python3). Without a claim what a pod leaves goes to output_path, which is then needed."""
from __future__ import annotations

import base64
import copy
import dataclasses
import io
import json
import pathlib
import re
import secrets
import shutil
import subprocess
import tarfile
import time
from typing import Any, Dict, List, Optional, Tuple

from shoal.job import checkpoints
from shoal.job.document import Job, as_data
from shoal.job.folder import JobFolder, Status, file_replace
from shoal.job.places import EngineError

API = "trainer.kubeflow.org/v1alpha1"
OPTIONS = ("image", "namespace", "context", "claim", "service_account", "resources", "python")
MOUNT, JOBS_MOUNT = "/shoal/job", "/shoal/jobs"
SOURCE_MAX = 900 << 10  # bytes; a ConfigMap holds 1 MiB
ASK_S = 60.0
PASSED_ON = ("start_timeout", "silence", "interface", "port", "checkpoints_timeout")  # options of the engine "hosts" that a pod's document keeps


# ---- manifests ----

def manifests(job: Job) -> List[Dict[str, Any]]:
    """What has to be applied, in this order. Raises EngineError."""
    _check(job)
    name = resource_name(job)
    metadata = {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}}
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-source"}, "binaryData": _source(job)}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-secret"}, "stringData": {"secret": secrets.token_hex(32)}}
    runtime = {"apiVersion": API, "kind": "TrainingRuntime", "metadata": metadata,
               "spec": {"mlPolicy": {"numNodes": job.instance_count, "torch": {}}, "template": {"spec": {"replicatedJobs": [_node(job, name)]}}}}
    made = [source, secret, runtime, _train_job(job, name)]
    if job.where.options.get("namespace"):
        for one in made:
            one["metadata"]["namespace"] = job.where.options["namespace"]
    return made


def resource_name(job: Job) -> str:
    """As Kubernetes takes names: lower case. Pods add to it, so it is at most 40 characters."""
    name = (job.name or "").lower()
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > 40:
        raise EngineError(f"name is {job.name!r}: Kubernetes takes at most 40 letters, digits and hyphens, a letter first; choose another name")
    return name


def _check(job: Job) -> None:
    options = job.where.options
    unknown = sorted(set(options) - set(OPTIONS) - set(PASSED_ON))
    if unknown:
        raise EngineError(f"where.options.{unknown[0]} is not known with the engine kubernetes: known are {', '.join(OPTIONS)}")
    if not options.get("image"):
        raise EngineError("where.options.image is missing: the container image in which the pods run")
    if not options.get("claim") and "://" not in (job.output_path or ""):
        raise EngineError("what a pod writes ends with it: set output_path to a place that pods reach, such as s3://..., or where.options.claim "
                          "to a volume that they share")
    for name, channel in job.channels.items():
        if "://" not in channel.uri and not options.get("claim"):
            raise EngineError(f"channel {name} is the folder {channel.uri}, which pods do not see: name an URL such as s3://...")


def _end_s(job: Job) -> int:
    """What a pod may take to end: its script, its last checkpoints, and all else."""
    return job.stop_grace + 60 + (int(checkpoints.timeout_of(job)) if job.checkpoints else 0)


def _node(job: Job, name: str) -> Dict[str, Any]:
    """The replicated job that Kubeflow calls node, with the only container that it gives its variables to."""
    options, volumes = job.where.options, [{"name": "source", "configMap": {"name": f"{name}-source"}}, {"name": "jobs", "emptyDir": {}}]
    if options.get("claim"):
        volumes[1] = {"name": "jobs", "persistentVolumeClaim": {"claimName": options["claim"]}}
    mounts = [{"name": "source", "mountPath": MOUNT, "readOnly": True}, {"name": "jobs", "mountPath": JOBS_MOUNT}]
    pod: Dict[str, Any] = {"containers": [{"name": "node", "image": options["image"], "volumeMounts": mounts}], "volumes": volumes,
                           "terminationGracePeriodSeconds": _end_s(job)}
    if options.get("service_account"):
        pod["serviceAccountName"] = options["service_account"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # A pod that failed is not tried again: its workers belong to a job whose other ranks have ended.
    return {"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"backoffLimit": 0, "template": {"spec": pod}}}}


def _train_job(job: Job, name: str) -> Dict[str, Any]:
    options = job.where.options
    secret = {"name": "SHOAL_SECRET", "valueFrom": {"secretKeyRef": {"name": f"{name}-secret", "key": "secret"}}}
    trainer: Dict[str, Any] = {"numNodes": job.instance_count, "image": options["image"],
                               "command": [options.get("python", "python3"), "-m", "shoal.job", "run", f"{MOUNT}/job.json"],
                               "env": [{"name": "SHOAL_JOBS", "value": JOBS_MOUNT}, secret]}
    if job.workers_per_host:
        trainer["numProcPerNode"] = job.workers_per_host
    if options.get("resources"):
        trainer["resourcesPerNode"] = options["resources"]
    return {"apiVersion": API, "kind": "TrainJob", "metadata": {"name": name},
            "spec": {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}, "trainer": trainer}}


def _source(job: Job) -> Dict[str, str]:
    """The document as a pod needs it, and the source if it is a folder or a file of this machine."""
    inside = copy.deepcopy(job)
    options = {name: job.where.options[name] for name in PASSED_ON if name in job.where.options}
    inside.where = dataclasses.replace(job.where, engine="hosts", options={**options, "shared": bool(job.where.options.get("claim"))})
    files: Dict[str, bytes] = {}
    if "://" not in (job.source_dir or job.entry_point):
        files["source.tar.gz"] = _archive(job)
        inside.source_dir, inside.dependencies = f"file://{MOUNT}/source.tar.gz", []
        inside.entry_point = job.entry_point if job.source_dir else pathlib.Path(job.entry_point).name
    elif job.dependencies:
        raise EngineError("dependencies lie on this machine, and the source does not: put them where source_dir is")
    files["job.json"] = json.dumps(as_data(inside), indent=1).encode()
    return {name: base64.b64encode(data).decode() for name, data in sorted(files.items())}


def _archive(job: Job) -> bytes:
    packed = io.BytesIO()
    place = pathlib.Path(job.source_dir or job.entry_point)
    with tarfile.open(fileobj=packed, mode="w:gz", dereference=True) as tar:
        _archive_add(tar, place, place if place.is_dir() else place.parent)
        for dependency in map(pathlib.Path, job.dependencies):
            _archive_add(tar, dependency, dependency.parent)
    data = packed.getvalue()
    if len(data) > SOURCE_MAX:
        raise EngineError(f"{place} has {len(data) >> 10} KiB when packed, and at most {SOURCE_MAX >> 10} can go with a job: put it into the "
                          "image or at an URL such as s3://..., and name that in source_dir")
    return data


def _archive_add(tar: tarfile.TarFile, place: pathlib.Path, top: pathlib.Path) -> None:
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        name = path.relative_to(top)
        if path.is_file() and not {".git", "__pycache__"} & set(name.parts):
            if str(name) in tar.getnames():
                raise EngineError(f"{path} would replace {name}, which the source or another dependency has: rename one")
            tar.add(path, arcname=str(name))


# ---- YAML ----

def yaml_text(documents: List[Dict[str, Any]]) -> str:
    """The documents as YAML. Texts are quoted as JSON has them, which YAML reads the same."""
    return "---\n".join("\n".join(_yaml_lines(document)) + "\n" for document in documents)


def _yaml_lines(value: Any) -> List[str]:
    lines: List[str] = []
    if isinstance(value, dict):
        for key, one in value.items():
            lines += _yaml_item(f"{key}:", one, "  ")
    else:
        for one in value:
            inner = _yaml_lines(one) if isinstance(one, (dict, list)) and one else [_scalar(one)]
            lines += [("- " if number == 0 else "  ") + line for number, line in enumerate(inner)]
    return lines


def _yaml_item(head: str, value: Any, indent: str) -> List[str]:
    if isinstance(value, (dict, list)) and value:
        return [head, *(indent + line for line in _yaml_lines(value))]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9./-]*", value) and value.lower() not in ("true", "false", "null", "yes",
                                                                                                            "no", "on", "off", "y", "n"):
        return value
    return json.dumps(value)


# ---- kubectl ----

def write(job: Job, path: pathlib.Path) -> None:
    """The manifests as a file, for kubectl apply elsewhere. Whole or not at all."""
    text = yaml_text(manifests(job))
    try:
        file_replace(path.absolute(), text)
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror}") from error


def _kubectl(options: Dict[str, Any], *words: str, told: Optional[str] = None) -> Tuple[int, str, str]:
    path = shutil.which("kubectl")
    if path is None:
        raise EngineError("there is no kubectl on PATH: install it, or write the manifests with --write FILE and apply them elsewhere")
    place = [f"--{name}={options[name]}" for name in ("context", "namespace") if options.get(name)]
    try:
        done = subprocess.run([path, *place, *words], input=told or "", capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return 1, "", f"kubectl has not answered within {ASK_S:.0f} s"
    return done.returncode, done.stdout, done.stderr


def start(job: Job, folder: JobFolder) -> None:
    text = yaml_text(manifests(job))
    (folder.path / "kubernetes.yaml").write_text(text)
    code, _, err = _kubectl(job.where.options, "create", "--filename=-", told=text)
    if code:
        _kubectl(job.where.options, "delete", "--ignore-not-found", "--filename=-", told=text)
        said = err.strip().splitlines() or ["it said nothing"]
        raise EngineError(f"kubectl create exited with code {code}: {said[-1]}")
    folder.status_write(dataclasses.replace(folder.status(), engine_id=resource_name(job)))


def _options(folder: JobFolder) -> Dict[str, Any]:
    return json.loads(folder.document.read_text())["where"]["options"]


def stop(folder: JobFolder) -> None:
    """Deletes the TrainJob; its pods get SIGTERM, and their scripts the grace time."""
    status = folder.status()
    code, _, err = _kubectl(_options(folder), "delete", "trainjob", status.engine_id or "", "--ignore-not-found", "--wait=false")
    if code:
        raise EngineError(f"kubectl delete exited with code {code}: {err.strip()}")
    folder.status_write(dataclasses.replace(status, status="Stopped", ended=time.time(), exit_code=143))


def refresh(folder: JobFolder, status: Status) -> Status:
    """What Kubernetes says of the job; its pods share no folder with us. Their logs come, too."""
    options = _options(folder)
    code, out, err = _kubectl(options, "get", "trainjob", status.engine_id or "", "--output=json")
    if code:
        if "NotFound" not in err:
            return status  # the cluster does not answer: nothing is known anew
        return _ended(status, "Failed", f"the TrainJob {status.engine_id} is gone: somebody has deleted it")
    _logs_bring(folder, options, status)
    told = json.loads(out).get("status") or {}
    conditions = {one["type"]: one for one in told.get("conditions") or [] if one.get("status") == "True"}
    if "Complete" in conditions:
        job = json.loads(folder.document.read_text())
        kept = f"{job['output_path'].rstrip('/')}/{job['name']}/output/model.tar.gz" if job["output_path"] else None
        return dataclasses.replace(_ended(status, "Completed", None), model=kept)
    if "Failed" in conditions:
        one = conditions["Failed"]
        return _ended(status, "Failed", _last_word(folder, status) or f"{one.get('reason')}: {one.get('message')}")
    is_active = any(one.get("active") for one in told.get("jobsStatus") or [])
    if is_active and status.status == "Starting":
        return dataclasses.replace(status, status="Training", started=time.time())
    return status


def _ended(status: Status, how: str, reason: Optional[str]) -> Status:
    return dataclasses.replace(status, status=how, ended=time.time(), exit_code=0 if how == "Completed" else 1, failure_reason=reason)


def _last_word(folder: JobFolder, status: Status) -> Optional[str]:
    """What the first host has said of the failure."""
    path = folder.log(status.hosts[0])
    found = re.findall(r"^shoal job: \S+ failed: (.*) \(exit code \d+; all output: .*\)$", path.read_text() if path.exists() else "", re.M)
    return found[-1] if found else None


def _logs_bring(folder: JobFolder, options: Dict[str, Any], status: Status) -> None:
    for index, host in enumerate(status.hosts):
        chosen = f"jobset.sigs.k8s.io/jobset-name={status.engine_id},batch.kubernetes.io/job-completion-index={index}"
        code, out, _ = _kubectl(options, "logs", f"--selector={chosen}", "--container=node", "--tail=-1")
        if code == 0 and out:
            file_replace(folder.log(host), out)


def lost_reason(folder: JobFolder, status: Status) -> Optional[str]:
    return None  # refresh() has told
