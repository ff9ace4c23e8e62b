"""Engine "kubernetes": makes a job a TrainJob of Kubeflow Trainer v2, with the runtime that it needs. Each pod runs `shoal job
run` with the engine "hosts" and finds its index in Kubeflow's PET_* variables.

    ConfigMap NAME-source    source.tar.gz
    Secret NAME-secret       job.json, which may hold passwords, and the secret that proves that a rank belongs to the job
    TrainingRuntime NAME     one container on each node, with these two mounted at /shoal/job, and the volume of jobs
    TrainJob NAME            how many nodes, how many workers on each, which image; owns the others, if `shoal job run` has made it

where.options: image (with this package and what the script imports), namespace, context, claim (a PersistentVolumeClaim of mode
ReadWriteMany for the folder of jobs, shared by all pods), service_account, resources (of each node: {"limits":
{"nvidia.com/gpu": 8}}), python (in the image; default python3), pod (merged into the pods' template: {"spec": {"nodeSelector":
...}}). Without a claim, a pod's results go to output_path, which is then required."""
from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import fcntl
import io
import json
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import time
from typing import Any, Dict, List, Optional, Tuple

from shoal.job.document import Job, as_data
from shoal.job.document.folder import ENDED, JobFolder, Status, file_replace
from shoal.job.engines import contract
from shoal.job.engines.shared import EngineError, end_seconds, source_files

LABEL = "shoal/start"  # its value is random for each start, and marks the objects that this start made
MADE = "kubernetes.yaml"  # in the job's folder: the objects, as text_of() writes them
API = "trainer.kubeflow.org/v1alpha1"
OPTIONS = ("image", "namespace", "context", "claim", "service_account", "resources", "python", "pod")
MOUNT, JOBS_MOUNT = "/shoal/job", "/shoal/jobs"
SOURCE_MAX = 900 << 10  # bytes; a ConfigMap holds 1 MiB
ASK_S = 60.0
LOGS_S = 10.0  # between two looks at the pods' logs
# Options of the engine "hosts" that a pod's document keeps.
PASSED_ON = ("start_timeout", "silence", "interface", "port", "checkpoints_timeout")


# ---- manifests ----

def manifests(job: Job) -> List[Dict[str, Any]]:
    """Returns the objects to create, in this order. Raises EngineError."""
    _check(job)
    drawn = secrets.token_hex(8)
    name = resource_name(job)
    metadata = {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}}
    document, source = _source(job)
    made = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-source"}, "binaryData": source},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-secret"},
             "stringData": {"secret": secrets.token_hex(32), "job.json": document}},
            {"apiVersion": API, "kind": "TrainingRuntime", "metadata": metadata,
             "spec": {"mlPolicy": {"numNodes": job.instance_count, "torch": {}}, "template": {"spec": {"replicatedJobs": [_node(job, name)]}}}},
            _train_job(job, name)]
    for one in made:
        one["metadata"].setdefault("labels", {})[LABEL] = drawn
        if job.where.options.get("namespace"):
            one["metadata"]["namespace"] = job.where.options["namespace"]
    return made


def _merged(ours: Any, theirs: Any) -> Any:
    """Merges `theirs` into `ours`: objects key by key, lists of named things by name. Other lists are appended; any other value
    is replaced."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {**ours, **{key: _merged(ours[key], one) if key in ours else one for key, one in theirs.items()}}
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return theirs
    names = [one.get("name") if isinstance(one, dict) else None for one in theirs]
    kept = [_merged(one, theirs[names.index(one["name"])]) if isinstance(one, dict) and one.get("name") in names else one for one in ours]
    taken = [one.get("name") for one in ours if isinstance(one, dict)]
    return kept + [one for name, one in zip(names, theirs) if name is None or name not in taken]


def resource_name(job: Job) -> str:
    """Returns the job's name as Kubernetes accepts it: lower case, and at most 40 characters because pods append to it."""
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
    pod = options.get("pod", {})
    if not isinstance(pod, dict) or set(pod) - {"metadata", "spec"}:
        raise EngineError('where.options.pod is a part of the pods\' template, such as {"spec": {"nodeSelector": {"disk": "fast"}}}: it has '
                          "metadata and spec, and nothing else")
    if not options.get("claim") and "://" not in (job.output_path or ""):
        raise EngineError("what a pod writes is lost when the pod ends: set output_path to a place that pods reach, such as s3://..., or "
                          "where.options.claim to a volume that they share")
    for name, channel in job.channels.items():
        if "://" not in channel.uri and not options.get("claim"):
            raise EngineError(f"channel {name} is the folder {channel.uri}, which pods do not see: name an URL such as s3://...")


def _node(job: Job, name: str) -> Dict[str, Any]:
    """Returns the replicated job that Kubeflow calls node, with the only container to which it passes its variables."""
    options = job.where.options
    parts = [{"configMap": {"name": f"{name}-source"}},
             {"secret": {"name": f"{name}-secret", "items": [{"key": "job.json", "path": "job.json"}]}}]
    volumes: List[Dict[str, Any]] = [{"name": "source", "projected": {"sources": parts}}, {"name": "jobs", "emptyDir": {}}]
    if options.get("claim"):
        volumes[1] = {"name": "jobs", "persistentVolumeClaim": {"claimName": options["claim"]}}
    mounts = [{"name": "source", "mountPath": MOUNT, "readOnly": True}, {"name": "jobs", "mountPath": JOBS_MOUNT}]
    pod: Dict[str, Any] = {"containers": [{"name": "node", "image": options["image"], "volumeMounts": mounts}], "volumes": volumes,
                           "terminationGracePeriodSeconds": end_seconds(job)}
    if options.get("service_account"):
        pod["serviceAccountName"] = options["service_account"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # A failed pod is not retried: its workers belong to a job whose other ranks have ended.
    return {"name": "node", "template": {"metadata": {"labels": labels},
                                         "spec": {"backoffLimit": 0, "template": _merged({"spec": pod}, options.get("pod", {}))}}}


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


def _source(job: Job) -> Tuple[str, Dict[str, str]]:
    """Returns the document as a pod needs it, and the source if it is a folder or a file of this machine."""
    inside = copy.deepcopy(job)
    options = {name: job.where.options[name] for name in PASSED_ON if name in job.where.options}
    inside.where = dataclasses.replace(job.where, engine="hosts", options={**options, "shared": bool(job.where.options.get("claim"))})
    files: Dict[str, str] = {}
    if "://" not in (job.source_dir or job.entry_point):
        files["source.tar.gz"] = base64.b64encode(_archive(job)).decode()
        inside.source_dir, inside.dependencies = f"file://{MOUNT}/source.tar.gz", []
        inside.entry_point = job.entry_point if job.source_dir else pathlib.Path(job.entry_point).name
    elif job.dependencies:
        raise EngineError("dependencies are on this machine, and the source is not: put them where source_dir is")
    return json.dumps(as_data(inside), indent=1), files


class Packed(io.BytesIO):
    """A file in memory that refuses to become larger than SOURCE_MAX."""

    def __init__(self, place: pathlib.Path):
        super().__init__()
        self.place = place

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > SOURCE_MAX:
            raise EngineError(f"{self.place} has more than {SOURCE_MAX >> 10} KiB when packed, which cannot go with a job: put it into the "
                              "image or at an URL such as s3://..., and name that in source_dir")
        return super().write(data)


def _archive(job: Job) -> bytes:
    place, names = pathlib.Path(job.source_dir or job.entry_point), set()
    packed = Packed(place)
    with tarfile.open(fileobj=packed, mode="w|gz", dereference=True) as tar:
        for one, top in [(place, place if place.is_dir() else place.parent), *((path, path.parent) for path in map(pathlib.Path, job.dependencies))]:
            for path in sorted(source_files(one)):
                name = str(path.relative_to(top))
                if name in names:
                    raise EngineError(f"{path} would replace {name}, which the source or another dependency has: rename one")
                names.add(name)
                tar.add(path, arcname=name, recursive=False)
    return packed.getvalue()


# ---- kubectl ----

def text_of(made: List[Dict[str, Any]]) -> str:
    """Returns the manifests as JSON, which is also YAML."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": made}, indent=1) + "\n"


def write(job: Job, path: pathlib.Path) -> None:
    """Writes the manifests to a file, for `kubectl create` elsewhere. `kubectl apply` would keep a second copy, for which a
    large source leaves no room."""
    try:
        file_replace(path.absolute(), text_of(manifests(job)))
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
    """Makes all objects or none: after a refusal it deletes only what this start has made."""
    made = manifests(job)
    text, options, name = text_of(made), job.where.options, resource_name(job)
    file_replace(folder.path / MADE, text)
    code, _, err = _kubectl(options, "create", "--filename=-", told=text)
    if code:
        for kinds in ("trainjob,trainingruntime", "configmap,secret"):
            _kubectl(options, "delete", kinds, f"--selector={LABEL}={made[0]['metadata']['labels'][LABEL]}", "--ignore-not-found")
        said = err.strip().splitlines() or ["it said nothing"]
        if "AlreadyExists" in err or "already exists" in err:
            raise EngineError(f"there is a job {name} already in namespace {options.get('namespace', 'of the context')}: choose another name, or "
                              f"delete that one (kubectl: {said[-1]})")
        raise EngineError(f"kubectl create exited with code {code}: {said[-1]}")
    file_replace(folder.engine_id, name)
    _own(folder, options, name, made)


def _own(folder: JobFolder, options: Dict[str, Any], name: str, made: List[Dict[str, Any]]) -> None:
    """Makes the TrainJob the owner of the other objects, so that they are deleted with it by anyone who deletes it."""
    code, uid, err = _kubectl(options, "get", "trainjob", name, "--output=jsonpath={.metadata.uid}")
    refused = [] if code == 0 and uid else [err]
    owner = {"apiVersion": API, "kind": "TrainJob", "name": name, "uid": uid.strip()}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for one in [] if refused else made[:-1]:
        code, _, err = _kubectl(options, "patch", one["kind"].lower(), one["metadata"]["name"], "--type=merge", f"--patch={patch}")
        refused += [err] if code else []
    if refused:
        _say(f"the TrainJob {name} does not own all of its other objects ({_last_line(refused[0])}): `shoal job stop {folder.name}` deletes them, and "
             "`kubectl delete` of the TrainJob alone does not")


def _say(text: str) -> None:
    print(f"shoal job: {text}", file=sys.stderr, flush=True)


def _last_line(err: str) -> str:
    return "kubectl: " + (err.strip().splitlines() or ["it said nothing"])[-1]


def _options(folder: JobFolder) -> Dict[str, Any]:
    return json.loads(folder.document.read_text())["where"]["options"]


def stop(folder: JobFolder) -> None:
    """Deletes the TrainJob, whose pods get SIGTERM, and their scripts the grace time. Deletes the other objects also, in case the
    TrainJob does not own them."""
    status, options = folder.status(), _options(folder)
    code, _, err = _kubectl(options, "delete", "trainjob", status.engine_id or "", "--ignore-not-found", "--wait=false")
    if code:
        raise EngineError(f"kubectl delete exited with code {code}: {err.strip()}")
    folder.status_write(dataclasses.replace(status, status="Stopped", ended=time.time(), exit_code=143))
    with contextlib.suppress(FileNotFoundError, KeyError):  # an earlier version has made the objects, without a label
        drawn = json.loads((folder.path / MADE).read_text())["items"][0]["metadata"]["labels"][LABEL]
        _others_delete(options, drawn)


def _others_delete(options: Dict[str, Any], drawn: str) -> None:
    code, _, err = _kubectl(options, "delete", "configmap,secret,trainingruntime", f"--selector={LABEL}={drawn}", "--ignore-not-found", "--wait=false")
    if code:
        _say(f"objects with the label {LABEL}={drawn} may be left ({_last_line(err)}): delete them by hand")


def refresh(folder: JobFolder, status: Status) -> Status:
    """Writes the job's status as Kubernetes reports it, because its pods share no folder with us. Also fetches their logs."""
    if status.status in ENDED or status.engine_id is None:
        return status
    new = _asked(folder, status)
    folder.status_follow(status, new)
    return new


def _asked(folder: JobFolder, status: Status) -> Status:
    options = _options(folder)
    code, out, err = _kubectl(options, "get", "trainjob", status.engine_id or "", "--output=json")
    if code and "NotFound" not in err:
        return status  # the cluster does not answer: keep the last status
    if code:
        return _ended(status, "Failed", f"the TrainJob {status.engine_id} is gone: somebody has deleted it")
    told = json.loads(out).get("status") or {}
    conditions = {one["type"]: one for one in told.get("conditions") or [] if one.get("status") == "True"}
    _logs_bring(folder, options, status, "Complete" in conditions or "Failed" in conditions)
    if "Complete" in conditions:
        return dataclasses.replace(_ended(status, "Completed", None), model=_model(folder, status))
    if "Failed" in conditions:
        one = conditions["Failed"]
        return _ended(status, "Failed", _last_word(folder, status) or f"{one.get('reason')}: {one.get('message')}")
    if status.started is None and any(one.get("ready", one.get("active")) for one in told.get("jobsStatus") or []):
        return dataclasses.replace(status, status="Training", started=time.time(), waits_for=None)
    if status.started is None:
        return dataclasses.replace(status, status="Pending", waits_for=_why_pending(options, status))
    return status


def _why_pending(options: Dict[str, Any], status: Status) -> Optional[str]:
    """Returns why the first waiting pod does not run, such as Unschedulable or ImagePullBackOff."""
    code, out, _ = _kubectl(options, "get", "pods", f"--selector=jobset.sigs.k8s.io/jobset-name={status.engine_id}", "--output=json")
    told = [pod.get("status", {}) for pod in json.loads(out).get("items", [])] if code == 0 and out else []
    waiting = [one["state"]["waiting"] for pod in told for one in pod.get("containerStatuses", []) if "waiting" in one.get("state", {})]
    waiting += [one for pod in told for one in pod.get("conditions", []) if one.get("type") == "PodScheduled" and one.get("status") == "False"]
    texts = [": ".join(filter(None, (one.get("reason"), one.get("message")))) for one in waiting]
    return contract.failure_text(texts[0]) if texts else None


def _ended(status: Status, how: str, reason: Optional[str]) -> Status:
    return dataclasses.replace(status, status=how, ended=time.time(), exit_code=int(how != "Completed"), failure_reason=reason, waits_for=None)


def _words(folder: JobFolder, status: Status, pattern: str) -> List[str]:
    """Returns messages that the command printed on the first host."""
    path = folder.log(status.hosts[0])
    return re.findall(rf"^shoal job: {pattern}$", path.read_text(errors="replace") if path.exists() else "", re.M)


def _last_word(folder: JobFolder, status: Status) -> Optional[str]:
    found = _words(folder, status, r"\S+ failed: (.*) \(exit code \d+; all output: .*\)")
    return found[-1] if found else None


def _model(folder: JobFolder, status: Status) -> Optional[str]:
    job = json.loads(folder.document.read_text())
    if not job["output_path"] or _words(folder, status, r"\S+ wrote no model: .*"):
        return None
    return f"{job['output_path'].rstrip('/')}/{job['name']}/output/model.tar.gz"


def _logs_bring(folder: JobFolder, options: Dict[str, Any], status: Status, is_last: bool) -> None:
    """Appends the news in the pods' logs to ours: every LOGS_S, and at the end."""
    for index, host in enumerate(status.hosts):
        path = folder.logs / f".{host}.since"
        is_due = is_last or not path.exists() or time.time() - path.stat().st_mtime >= LOGS_S
        with open(path, "a+") as known, contextlib.suppress(BlockingIOError):  # another command is already fetching them
            fcntl.flock(known, fcntl.LOCK_EX | (0 if is_last else fcntl.LOCK_NB))
            known.seek(0)
            since = known.read()
            chosen = f"jobset.sigs.k8s.io/jobset-name={status.engine_id},batch.kubernetes.io/job-completion-index={index}"
            words = ["--tail=-1", "--timestamps", *([f"--since-time={since}"] if since else [])]
            code, out, _ = _kubectl(options, "logs", f"--selector={chosen}", "--container=node", *words) if is_due else (0, "", "")
            if is_due:
                known.truncate(0)
                known.write(_log_append(folder.log(host), out if code == 0 else "", since))


def _log_append(path: pathlib.Path, text: str, since: str) -> str:
    """Appends the lines after `since`, because kubectl filters only by whole seconds. Returns the time of the last line."""
    def key(stamp: str) -> Tuple[str, str]:  # the fraction has no trailing zeros
        seconds, _, rest = stamp.rstrip("Z").partition(".")
        return seconds, rest.ljust(9, "0")

    with open(path, "a", encoding="utf-8") as log:
        last = since
        for line in text.splitlines():
            stamp, _, words = line.partition(" ")
            if not since or key(stamp) > key(since):
                log.write(words + "\n")
                last = stamp
    return last
