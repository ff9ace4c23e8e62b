"""Saving and loading: files of one partition each, or of the whole model.

    smp.save(object, "model.pt")                 model.pt_0, model.pt_1, ...: one for each partition
    smp.save(object, "model.pt", partial=False)  model.pt

    smp.save_checkpoint(path, tag, ...)          path/{tag}_partial/{model,optimizer}_{partition}.pt, user_content.pt, parts.json
                                                 or, if ranks divide states, path/{tag}_partial/shards, user_content.pt, parts.json
    smp.save_checkpoint(path, tag, partial=False, ...)   path/{tag}, path/optimizer_{tag}, path/user_content_{tag}
                                                 path/newest: the newest tags

A file appears under its name when it is complete."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil

import torch

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch import _messages
from smdistributed.modelparallel.torch._state import mp_rank, mp_size, pp_rank, pp_size, rdp_rank, state, tp_rank, tp_size


def _write(path, write):
    """Writes a file that appears when it is complete. write(temporary path)."""
    temporary = f"{path}.writing"
    write(temporary)
    os.replace(temporary, path)


def save(obj, f, partial=True, pickle_module=None, pickle_protocol=2, v3=False):
    """Saves an object. partial: each partition's rank saves its own, and the number of the partition is added to the name;
    otherwise only the rank of partition 0 saves. Call it where smp.rdp_rank() is 0. v3: each rank saves its own, and pp_rank, tp_rank
    and rdp_rank are added to the name."""
    state.require()
    if not isinstance(f, (str, os.PathLike)):
        raise SMPError(f"smp.save: f must be the name of a file, not {type(f).__name__}")
    more = {"pickle_module": pickle_module} if pickle_module is not None else {}
    if partial or mp_rank() == 0:
        name = os.fspath(f) if not partial else _name_of_rank(f) if v3 else f"{f}_{mp_rank()}"
        _write(name, lambda path: torch.save(obj, path, pickle_protocol=pickle_protocol, **more))


def _name_of_rank(f):
    return f"{f}_{pp_rank()}_{tp_rank()}_{rdp_rank()}"


def load(f, map_location=None, pickle_module=None, partial=True, **pickle_load_args):
    """Loads an object that save() has saved, on every rank. Other arguments are those of torch.load: it reads tensors, numbers,
    text, and lists and dicts of these, unless weights_only=False is passed."""
    state.require()
    name = f
    if partial and os.path.exists(_name_of_rank(f)):
        name = _name_of_rank(f)
    elif partial:
        _check_parts(f)
        name = f"{f}_{mp_rank()}"
    more = {"pickle_module": pickle_module} if pickle_module is not None else {}
    return torch.load(name, map_location=map_location, **more, **pickle_load_args)


def _check_parts(f):
    """Refuses files of another number of partitions."""
    found = [number for number in range(mp_size() + 1) if os.path.exists(f"{f}_{number}")]
    if found != list(range(mp_size())):
        there = len(found) if len(found) <= mp_size() else f"more than {mp_size()}"
        raise SMPError(f"smp.load: {f}_0, ... are {there} parts, and this job has {mp_size()} partitions: load them with the number of "
                       "partitions with which they were saved, or save the whole model (partial=False)")


# ---- Checkpoints of model and optimizer ------------------------------------------------------------------------------------


def save_checkpoint(path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True,
                    num_kept_partial_checkpoints=None):
    """Saves a model, an optimizer and the program's own content. All ranks call it, with the same tag. It returns on all of them when the
    checkpoint is complete, so that each may load it at once. A rank waits for the others at most as long as the process group's timeout,
    which is that of torch.distributed.init_process_group(). num_kept_partial_checkpoints: how many stay. translate_if_full has no effect: names are the model's own already."""
    state.require()
    if not tag or os.sep in str(tag):
        raise SMPError(f"smp.save_checkpoint: tag must be a name, not {tag!r}")
    folder, wrapper = pathlib.Path(path), model.wrapper() if model is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    if wrapper is not None and partial:
        _save_shards(folder, tag, wrapper, user_content)
    elif wrapper is not None:
        _save_whole_of_shards(folder, tag, model, optimizer, user_content)
    else:
        _save_own(folder, tag, partial, model, optimizer, user_content)
    if rdp_rank() == 0 and mp_rank() == 0:
        _note_newest(folder, "partial" if partial else "full", tag)
        if partial and num_kept_partial_checkpoints:
            _drop_old(folder, num_kept_partial_checkpoints)
    _messages.barrier()


def _save_own(folder, tag, partial, model, optimizer, user_content):
    """Saves a checkpoint of the first replica, which collects the parts that it lacks from the others."""
    of_optimizer = None
    if optimizer is not None and (rdp_rank() == 0 or state.divides_step()):
        of_optimizer = optimizer.local_state_dict() if partial else optimizer.state_dict()
    if rdp_rank() > 0:
        return
    if partial:
        _save_parts(folder, tag, model.local_state_dict() if model else None, of_optimizer, user_content)
    else:
        _save_whole(folder, tag, model.state_dict() if model else None, of_optimizer, user_content)


@contextlib.contextmanager
def _folder_of_parts(folder, tag, group, is_first, user_content, **about):
    """Makes the folder of a partial checkpoint, in which all ranks of a group write; it appears when they have."""
    made, writing = folder / f"{tag}_partial", folder / f"{tag}_partial.writing"
    if is_first:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
    _messages.barrier(group)
    yield writing
    _messages.barrier(group)
    if is_first:
        torch.save(user_content, writing / "user_content.pt")
        (writing / "parts.json").write_text(json.dumps(about))
        shutil.rmtree(made, ignore_errors=True)
        os.rename(writing, made)


def _save_parts(folder, tag, of_model, of_optimizer, user_content):
    with _folder_of_parts(folder, tag, _messages.CommGroup.MP_GROUP, mp_rank() == 0, user_content,
                          pipeline_parallel_degree=pp_size(), tensor_parallel_degree=tp_size()) as writing:
        for name, values in (("model", of_model), ("optimizer", of_optimizer)):
            if values is not None:
                torch.save(values, writing / f"{name}_{mp_rank()}.pt")


def _save_shards(folder, tag, wrapper, user_content):
    with _folder_of_parts(folder, tag, _messages.CommGroup.DP_GROUP, state.group("DP_GROUP").rank() == 0, user_content, shards=True,
                          tensor_parallel_degree=tp_size()) as writing:
        wrapper.save_checkpoint(str(writing / _shards_name()), 0)
    _messages.barrier(_messages.CommGroup.DP_GROUP)


def _shards_name():
    """Returns the name of the folder of shards. Each rank of tensor parallelism has its own."""
    return "shards" if tp_size() == 1 else f"shards_{tp_rank()}"


def _save_whole_of_shards(folder, tag, model, optimizer, user_content):
    whole = model.state_dict()
    if optimizer is not None:
        optimizer.consolidate_state_dict(0)
    if rdp_rank() == 0:
        _save_whole(folder, tag, whole, optimizer.state_dict() if optimizer else None, user_content)


def _save_whole(folder, tag, of_model, of_optimizer, user_content):
    for name, values in ((f"{tag}", of_model), (f"optimizer_{tag}", of_optimizer)):
        if mp_rank() == 0 and values is not None:
            _write(folder / name, lambda to, values=values: torch.save(values, to))
    if mp_rank() == 0:
        _write(folder / f"user_content_{tag}", lambda to: torch.save(user_content, to))


def _newest(folder):
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / "newest").read_text())
    return {}


def _note_newest(folder, kind, tag):
    tags = {**_newest(folder), kind: tag}
    _write(folder / "newest", lambda to: pathlib.Path(to).write_text(json.dumps(tags)))


def _drop_old(folder, count):
    found = sorted(folder.glob("*_partial"), key=lambda each: each.stat().st_mtime_ns)
    for old in found[:-count]:
        shutil.rmtree(old)


def resume_from_checkpoint(path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True,
                           translate_function=None):
    """Loads a checkpoint into the model and the optimizer of the script, and returns the program's own content. All ranks call it,
    after smp.DistributedModel() and smp.DistributedOptimizer(). tag: None for the newest. translate_function changes the state of the
    whole model before it is loaded. load_sharded_optimizer_state has no effect."""
    state.require()
    model, optimizer = state.model and state.model(), next(iter(state.optimizers), None)
    if model is None or (load_optimizer and optimizer is None):
        raise SMPError("smp.resume_from_checkpoint: call it after smp.DistributedModel() and, for the optimizer's state, "
                       "smp.DistributedOptimizer(); or pass load_optimizer=False")
    folder = pathlib.Path(path)
    tag = tag or _newest(folder).get("partial" if partial else "full")
    if tag is None:
        raise SMPError(f"smp.resume_from_checkpoint: there is no {'partial' if partial else 'full'} checkpoint at {path}")
    wrapper = model.wrapper()
    if wrapper is not None and partial:
        return _load_shards(folder / f"{tag}_partial", tag, wrapper)
    names = _parts_of(folder / f"{tag}_partial", tag) if partial else [folder / name.format(tag) for name in
                                                                       ("{}", "optimizer_{}", "user_content_{}")]
    state_of_model = _read(names[0], tag)
    if translate_function is not None and not partial:
        state_of_model = translate_function(state_of_model)
    model.load_state_dict(state_of_model, strict)
    if load_optimizer and (partial or names[1].exists()):
        optimizer.load_state_dict(_read(names[1], tag))
    return torch.load(names[2]) if names[2].exists() else None


def _load_shards(folder, tag, wrapper):
    about = _about(folder, tag)
    if "shards" not in about:
        raise SMPError(f"smp.resume_from_checkpoint: the partial checkpoint {tag} has whole states, and this job divides them: leave "
                       "shard_optimizer_state and sharded_data_parallel_degree out, or use a full checkpoint (partial=False)")
    _check_tensor_degree(about, tag)
    wrapper.load_checkpoint(str(folder / _shards_name()))
    return torch.load(folder / "user_content.pt")


def _about(folder, tag):
    """Returns the record of a partial checkpoint (parts.json)."""
    if not (folder / "parts.json").exists():
        raise SMPError(f"smp.resume_from_checkpoint: there is no partial checkpoint {tag} at {folder.parent}")
    return json.loads((folder / "parts.json").read_text())


def _check_tensor_degree(about, tag):
    degree = about.get("tensor_parallel_degree", 1)
    if degree != tp_size():
        raise SMPError(f"smp.resume_from_checkpoint: the partial checkpoint {tag} is of tensor_parallel_degree {degree}, and this job of "
                       f"{tp_size()}: use that degree, or a full checkpoint (partial=False)")


def _read(path, tag):
    if not path.exists():
        raise SMPError(f"smp.resume_from_checkpoint: the checkpoint {tag} has no {path.name} at {path.parent}: it was saved without it, or "
                       "there is no such checkpoint")
    return torch.load(path)


def _parts_of(folder, tag):
    """Returns the files of this rank's partition, and of the program's content."""
    about = _about(folder, tag)
    saved = about.get("pipeline_parallel_degree")
    if saved is None:
        raise SMPError(f"smp.resume_from_checkpoint: ranks have divided the states of the partial checkpoint {tag}: set "
                       "shard_optimizer_state or sharded_data_parallel_degree, or use a full checkpoint (partial=False)")
    if saved != pp_size():
        raise SMPError(f"smp.resume_from_checkpoint: the partial checkpoint {tag} has {saved} partitions, and this job {pp_size()}: use "
                       f"pipeline_parallel_degree {saved}, or a full checkpoint (partial=False)")
    _check_tensor_degree(about, tag)
    return [folder / f"model_{mp_rank()}.pt", folder / f"optimizer_{mp_rank()}.pt", folder / "user_content.pt"]
