"""Training of a model that is cut into stages, each on a rank, with several microbatches on their way (include/shoal/pipeline.h,
docs/pipelines.md).

    pipeline = shoal.torch.Pipeline(model, example, cuts=["blocks.6"], microbatches=8, loss=cross_entropy)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()

    making    the forward pass is recorded as calls of units (_graph.py), cut into stages (_split.py); a rank keeps its stages
    step      the library runs the schedule: it calls this rank for each action and carries messages between stages; a stage
              computes with autograd (_stages.py), of a replica for its share of the samples (_shares.py). Meanwhile gradients are
              summed over replicas (_stage_sums.py) and ties (_ties.py)
"""
from __future__ import annotations

import math

import torch
from torch import nn

from .. import _native
from .._native import OK
from . import (_communicator, _divided, _executor, _gradients, _graph, _loss_scale, _own_part, _profile, _replicas, _schedules, _shares,
               _split, _stage_sums, _stages, _ties, ddp, sharded)


WRAPPERS = (nn.parallel.DistributedDataParallel, ddp.DistributedDataParallel, sharded.ShardedDataParallel)
RECOMPUTES = {False: _native.RECOMPUTES_AS_SCHEDULED, True: _native.RECOMPUTES_ALL, "auto": _native.RECOMPUTES_IF_SHORT}


class Pipeline:
    """Trains a model on the CPU, each of whose stages is on a rank of a process group.

    `example`: arguments of the model for one microbatch: a tensor, a tuple of arguments, or a dict of them. `microbatches`: into
    how many each batch is divided. `schedule`: "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "v-min",
    "v-half", "v-zb" or "auto", or the text of a schedule in torch's form. `loss(result, target)` returns the mean over the samples
    of a microbatch.

    `cuts`: names of the units at which stages 1, 2, ... begin, or of modules whose first unit begins one. Without them rank 0
    measures each unit on the example, or counts operations if the model is on the device meta, and the library finds the stages
    with the shortest step; see explain().
    `memory`: bytes that each rank has for parameters, gradients, optimizer states and activations; no limit by default.
    `partition`: a dict of other fields of struct shoal_partition_options. `stages`: how many, for "interleaved" and
    "breadth-first"; by default two for each rank.

    `recompute`: True, or the numbers of stages: these keep only their inputs between both passes of a microbatch, and repeat the
    forward pass just before the backward pass, while their rank would wait for the gradient. "auto": only stages for which
    `memory` is too short, chosen with the stages.

    `units`: which modules run as a whole: a set of classes, or a function that returns true for such a module. By default the
    members of every ModuleList and Sequential that contain no longer list, and other modules without lists. `init`: for a model on the device meta, a
    function that sets the parameters and buffers that a module owns itself; by default its reset_parameters().

    `replicate`: a stage may be on several ranks, each of which computes a share of the samples of each microbatch. "auto": the library
    chooses the number of stages and the ranks of each, with the shortest predicted step. A list: how many ranks each rank of the
    schedule becomes, in all as many as the group has: [3, 1] runs a schedule of two ranks on four, stage 0 on ranks 0 to 2.

    `replicas`: a process group of the ranks that have the same stages of several pipelines, each with a batch of its own: their
    gradients are averaged. The ranks of one pipeline are `process_group`.

    `grad_scaler`: the torch.amp.GradScaler whose scale step() multiplies the loss by; it returns the loss without. A step with an
    infinite gradient is skipped on all ranks. Each rank needs parameters.

    Making it is a collective call. Each rank keeps the units of its own stages; the rest of `model` moves to the device meta. The
    recorded forward pass must not depend on values of tensors, except inside units."""
    _takes_objects = False  # whether arguments that are objects may change from step to step: then all ranks have them

    def __init__(self, model, example, stages=None, microbatches=1, schedule="1f1b", loss=None, cuts=None, memory=None, units=None,
                 init=None, partition=None, process_group=None, replicas=None, recompute=False, replicate=None, grad_scaler=None):
        _check(model, microbatches)
        self._scaler = _loss_scale.scaler_of(grad_scaler)
        recompute = _recompute_of(recompute, cuts)
        self.process_group = ddp._group_of(process_group, None, "cpu")
        self._replicate = _replicas.replicate_of(replicate, self.process_group.size(), cuts, schedule, replicas)
        self.microbatches, self._loss, example = microbatches, loss, _stages.arguments_of(example)
        self._tensor, self._replicas = _divided.parts_of(model)[1], replicas  # the team of tensor parallelism, or None
        chooser = _graph.unit_chooser(model, units)
        recorded = _record_modes(model, example, chooser, self._takes_objects)
        self._parts = None  # how values depend on samples, by the mode
        if self._replicate is not None:
            if self._tensor is not None:
                raise NotImplementedError("shoal: replicate= does not divide the samples of a model whose layers are divided: use replicas=")
            twice, rows = _record_modes(model, _shares.doubled(example), chooser, self._takes_objects), _shares.rows_of(example)
            self._parts = {mode: _shares.Parts(each, twice[mode], rows) for mode, each in recorded.items()}
        self.units, self._whole, self._partition = recorded[True].units, recorded[True].whole, None
        if cuts is not None:
            self.schedule = self._schedule_of(schedule, stages or len(cuts) + 1)
            self.schedule = self.schedule.recomputed(recompute) if recompute else self.schedule
            self._communicator = self._join()
            borders = self._borders(list(cuts))
        else:
            plain = self._plain_schedule(schedule, stages)
            self._communicator = self._join()
            borders = self._divide(model, recorded[True], example, plain, schedule, stages, memory, partition or {}, recompute)
        self._check_stages(stages)
        self._compare(borders)
        self._splits = {mode: _split.Split(each, _split.borders_in(each.units, self.units, borders)) for mode, each in recorded.items()}
        self._make(model, init)
        if self._scaler is not None:
            self._require_parameters()

    # ---- Making ----

    def _schedule_of(self, wanted, stages):
        ranks = self.process_group.size() if self._replicate is None else len(self._replicate)
        schedule = _schedules.schedule_of(wanted, ranks, self.microbatches, stages, self._replicate)
        return schedule if self._replicate is None else schedule.replicated(self._replicate)

    def _join(self):
        group = self.process_group
        self._timeout = _communicator.timeouts.get(f"torch.{group.group_name}")
        self._store = torch.distributed.distributed_c10d._get_process_group_store(group)
        return _gradients.Communicator(self._store, group.rank(), group.size(), self._timeout, "pipeline")

    def _borders(self, cuts):
        borders = _split.borders_of(self.units, cuts)
        if len(borders) + 1 != self.schedule.stages:
            raise ValueError(f"shoal: cuts has {len(borders)} names, which make {len(borders) + 1} stages, but this schedule of "
                             f"{self.schedule.ranks} ranks needs {self.schedule.stages}: the model's units are {', '.join(self.units)}")
        return borders

    def _check_stages(self, stages):
        if stages is not None and stages != self.schedule.stages:
            raise ValueError(f"shoal: stages is {stages}, but this schedule of {self.schedule.ranks} ranks has {self.schedule.stages}: "
                             "leave stages out, or choose \"interleaved\" or \"breadth-first\"")

    def _compare(self, borders):
        """Raises an error on all ranks if one has other stages than rank 0."""
        text = "\n".join([", ".join(self.units), str(borders), self.schedule.text()])
        other = self.process_group.rank() if self._text_of_first(text) != text else -1
        last = int(self._reduced(torch.tensor([other], dtype=torch.float64), _native.MAX)[0].item())
        if last >= 0:
            raise ValueError(f"shoal: rank {last} has another model, other cuts or another schedule than rank 0; on rank "
                             f"{self.process_group.rank()} the units are {', '.join(self.units)}, and stages begin at {borders} of them")

    def _plain_schedule(self, wanted, stages):
        """Returns the schedule if it does not depend on the model's profile, else None."""
        if _schedules.is_word(wanted) and "auto" in (wanted, self._replicate):
            return None
        schedule = self._schedule_of(wanted, stages)
        if len(self.units) < schedule.stages:
            reasons = "".join(f"; {name} is one unit, because it cannot be recorded: {reason}" for name, reason in self._whole.items())
            raise ValueError(f"shoal: the model has {len(self.units)} units ({', '.join(self.units)}), and this schedule of "
                             f"{schedule.ranks} ranks needs {schedule.stages} stages: use fewer ranks, or smaller units (units=){reasons}")
        return schedule

    def _divide(self, model, recorded, example, plain, wanted, stages, memory, options, recompute):
        """Returns the numbers of the units at which stages 1, 2, ... begin."""
        is_list = recompute not in (False, True, "auto")
        if is_list and plain is None:
            raise ValueError("shoal: recompute has numbers of stages, which \"auto\" does not know yet, as schedule= or replicate=: choose a "
                             "schedule and replicas, or pass True or \"auto\"")
        if plain is not None and recompute and recompute != "auto":
            plain = plain.recomputed(recompute)
        if plain is not None and plain.stages == 1:
            self.schedule = plain
            return []
        profile = self._profile(model, recorded, example)
        schedule = wanted if _schedules.is_word(wanted) and not is_list else plain
        options = {"recomputes": RECOMPUTES[recompute], **options} if not is_list else options
        self._partition = _profile.Partition(profile, schedule, self.process_group.size(), self.microbatches, stages, memory, options,
                                             self._replicate)
        self.schedule = self._partition.schedule
        return self._partition.first_units[1:]

    def _profile(self, model, recorded, example):
        """Returns rank 0's profile on all ranks."""
        text = ""
        if self.process_group.rank() == 0:
            try:
                text = _profile.profile_of(model, recorded, example)
            except Exception as error:
                text = f"!{_communicator.text_of(error)}"
        text = self._text_of_first(text)
        if text.startswith("!"):
            raise RuntimeError(f"shoal: the model cannot be measured on rank 0: {text[1:]}; pass cuts=, names among {', '.join(self.units)}")
        return text

    def _text_of_first(self, text):
        """Copies rank 0's text to all ranks. With replicas, or with ranks that divide layers, the text of the first pipeline
        counts."""
        if self.process_group.rank() == 0:
            text = self._tensor.share_text(text) if self._tensor is not None else text
            text = _first_replicas(text, self._replicas) if self._replicas is not None else text
        library, address = _native.load(), self._communicator.address
        size = torch.tensor([len(text.encode())])
        self._check(library.broadcast(address, size.data_ptr(), size.data_ptr(), 8, _native.UINT8, 0, None))
        given = torch.zeros(size.item(), dtype=torch.uint8)
        if self.process_group.rank() == 0:
            given = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._check(library.broadcast(address, given.data_ptr(), given.data_ptr(), given.numel(), _native.UINT8, 0, None))
        return bytes(given.tolist()).decode()

    def _make(self, model, init):
        group, self._model = self.process_group, model
        rank, self._replica = self.schedule.place(group.rank())
        self._own = [stage for stage in range(self.schedule.stages) if self.schedule.rank_of(stage) == rank]
        splits = list(self._splits.values())
        ties = _ties.ties_of(model, splits, self.schedule)
        # If there are other pipelines, gradients are averaged over all of them before those of ties are summed.
        self.schedule = self.schedule.with_sums([stages for _, stages in ties] if self._replicas is None else [], self._replicas is not None)
        _own_part.keep(model, _split.parts(splits, self._own, model), init)
        self.module = _split.parts(splits, self._own, model)
        known = set(model.modules())
        for each in self.module.modules():
            each.training = each.training if each in known else model.training
        edges = self._edges()
        self._executor = _executor.Executor(self._communicator, self.schedule, edges, _communicator.milliseconds(self._timeout))
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._ties = _ties.Ties(ties, self.schedule, named, self._store, group.rank(), self._timeout)
        self._stages = [self._stage(stage, model, edges) for stage in self._own]
        self._sums = self._make_sums()
        self._ties.share_first()

    def _edges(self):
        """Returns the pairs of stages between which messages go."""
        edges = {edge for each in self._splits.values() for edge in each.edges}
        if self._parts is not None:  # a stage that needs no value, such as one of parameters only, still needs the number of samples
            edges |= {(0, stage) for stage in range(1, self.schedule.stages)} - {(0, end) for _, end in edges}
        return sorted(edges)

    def _require_parameters(self):
        """Raises an error on all ranks if the scaler of one would find no gradient, and so would not follow the others."""
        rank = -1 if any(each.requires_grad for each in self.module.parameters()) else self.process_group.rank()
        last = int(self._reduced(torch.tensor([rank], dtype=torch.float64), _native.MAX)[0].item())
        if last >= 0:
            raise ValueError(f"shoal: grad_scaler= needs parameters to train on each rank, and rank {last} has none: choose other cuts, or "
                             "leave it out")

    def _make_sums(self):
        """Returns the sums over the replicas of this rank's stages, or over those of the pipeline."""
        self._team, rank = None, self.schedule.place(self.process_group.rank())[0]
        count = self.schedule.replicas()[rank]
        if self._replicas is not None:
            replicas = ddp._group_of(self._replicas, None, "cpu")
            store = torch.distributed.distributed_c10d._get_process_group_store(replicas)
            timeout = _communicator.timeouts.get(f"torch.{replicas.group_name}")
            self._team = _gradients.Communicator(store, replicas.rank(), replicas.size(), timeout, "replicas")
            return _stage_sums.StageSums(self._team, self.module, self._stages, _native.AVG)
        if count == 1:
            return _stage_sums.NoSums()
        members = self.schedule.members_of(self._own)
        store = torch.distributed.PrefixStore("shoal replicas " + " ".join(map(str, members)), self._store)
        self._team = _gradients.Communicator(store, self._replica, count, self._timeout, "replicas")
        return _stage_sums.StageSums(self._team, self.module, self._stages, _native.SUM, self._ties.ids())

    def _shares_of(self, number, edges):
        """Returns what a replica cuts and joins, or None for a pipeline without replicas."""
        if self._parts is None:
            return None
        parts = {(mode, *edge): [self._parts[mode].of(node) for node in nodes]
                 for mode, split in self._splits.items() for edge, nodes in split.edges.items()}
        others = {stage: self.schedule.replicas_of(stage) for stage in range(self.schedule.stages)}
        return _shares.StageShares(number, (others[number], self._replica), others, parts)

    def _stage(self, number, model, edges):
        modules = {mode: (split.module(number, model), split.sources(number), split.targets(number))
                   for mode, split in self._splits.items()}
        sources, targets = [begin for begin, end in edges if end == number], [end for begin, end in edges if begin == number]
        return _stages.Stage(number, modules, sources, targets, number == self.schedule.stages - 1, self._tensor,
                             self._shares_of(number, edges))

    def explain(self):
        """Returns a line for the schedule, one for each stage (its units, its time, and why it begins where it does), one for the
        memory of each rank, and one for the predicted step, in microseconds."""
        if self._partition is not None:
            return self._partition.text(self.units)
        again = self.schedule.recomputed_stages()
        return "\n".join(f"stage {stage} on {_replicas.members_named(self.schedule, stage)}: {', '.join(self._splits[True].units_of(stage)) or 'no unit'}"
                         f"{'; recomputed' if stage in again else ''}" for stage in range(self.schedule.stages))

    # ---- Passes ----

    def step(self, inputs=None, targets=None, outputs=False):
        """Runs the forward and backward passes of all microbatches, and adds up gradients like one backward pass of the whole
        batch. Returns the loss, the mean over all samples, on every rank. All ranks call it. With outputs=True it returns (loss,
        result): the model's result for the batch, without a graph, on the ranks on which forward() returns one, None on others. All
        ranks pass the same `outputs`.

        The rank of the first stage needs the inputs, in the form of the example, and the rank of the last stage the targets; other
        ranks may pass None. Both are divided along the first dimension, as equally as possible, or are lists of microbatches."""
        if self._loss is None:
            raise RuntimeError("shoal: this pipeline has no loss: pass loss=, a function of the model's result and the target")
        done = self._run(inputs, targets, self._loss, outputs)
        rows, last = done.rows, self.schedule.stages - 1
        is_first = self._replica == 0  # its batch counts for all replicas
        is_infinite = self._scaler is not None and _loss_scale.has_infinite(self.module.parameters(), self._tensor)
        told = [done.loss, rows[0] if 0 in self._own and is_first else 0, rows[1] if last in self._own and is_first else 0, is_infinite]
        loss, inputs, targets, infinite = self._reduced(torch.tensor(told, dtype=torch.float64), _native.SUM).tolist()
        if infinite and not is_infinite:
            _loss_scale.make_infinite(self.module.parameters())
        if inputs and targets and inputs != targets:
            raise ValueError(f"shoal: the batch has {inputs:.0f} samples in its inputs and {targets:.0f} in its targets: the gradients of "
                             "this step are those of other samples")
        loss = torch.tensor(loss, dtype=torch.float32)
        return (loss, done.result()) if outputs else loss

    @torch.no_grad()
    def forward(self, inputs=None):
        """Runs the forward passes only. Returns the model's result for the batch on the ranks of the last stage, None on others."""
        return self._run(inputs, None, None, True).result()

    __call__ = forward

    def _run(self, inputs, targets, loss, keeps_results):
        parts = None  # how the result depends on samples; if it cannot be joined, all ranks raise an error
        if keeps_results and self._parts is not None:
            parts = self._parts[self.module.training].of_result()
        shares = self._stages[0].shares if self._stages else None
        batch = _stages.Batch(inputs, targets, self.microbatches, self._splits[True].recorded, shares.own if shares else None)
        done = _stages.Pass(self._stages, batch, loss, self.module.training, self._executor, self._sums.complete, self._ties.begin_sum,
                            self._takes_objects, keeps_results)
        done.rows = batch.rows()
        done.scale = _loss_scale.scale_of(self._scaler) if loss is not None else 1.0
        self._perform(done, loss is not None, parts)
        return done

    def _perform(self, done, has_gradients, parts=None):
        """Runs the schedule of a Pass. Gradients are then sums over ties and replicas of stages, and averages of replicas. parts: of
        the results, which replicas join; or None."""
        try:
            if has_gradients:
                self._ties.begin()
                self._sums.begin()
            done.begin()
            self._executor.run(done.compute, forward_only=not has_gradients)
            if has_gradients:
                self._sums.finish()
                if self._replicas is not None:
                    self._ties.begin_sums()
                self._ties.finish()
            if parts is not None and self._stages and self._stages[-1].is_last:
                done.results = _replicas.gathered(self._team, done.results, done.samples, parts)
        except BaseException as error:  # other ranks may have ended their pass, and wait
            self._executor.fail([self._communicator, *self._ties.communicators], str(error))
            self._ties.restore()
            self._sums.fail(str(error))
            raise

    def times(self):
        """Returns the times of the last step on this rank: a dict of step_us, computed_us, waited_us, sending_us and bubble, of
        sent_bytes and received_bytes, and of begin_ns, when the step began on the clock CLOCK_MONOTONIC, and actions: a list of
        (name, waited_us, begin_us, end_us), such as ("1F3", 12.5, 830.0, 1420.0), in microseconds since then."""
        times = self._executor.times()
        found = {name: getattr(times, name) for name in ("step_us", "computed_us", "waited_us", "sending_us", "bubble", "sent_bytes",
                                                         "received_bytes", "begin_ns")}
        found["actions"] = [(_schedules.name_of(each.action), each.waited_us, each.begin_us, each.end_us)
                            for each in (times.actions[number] for number in range(times.action_count))]
        return found

    # ---- This rank's part of the model ----

    def parameters(self):
        """Yields the parameters of this rank's stages, for an optimizer."""
        return self.module.parameters()

    def parameter_groups(self):
        """Returns them as one group, for an optimizer: torch's optimizers refuse an empty list of parameters, but not an empty group,
        which a rank may have whose stages are only activations, say."""
        return [{"params": [*self.module.parameters()]}]

    def named_parameters(self):
        """Yields the parameters of this rank's stages with the model's own names."""
        return self.module.named_parameters()

    def state_dict(self):
        """Returns the state of this rank's stages under the model's own names. torch.distributed.checkpoint saves the parts of all
        ranks as one checkpoint, and loads it with any number of stages."""
        return self.module.state_dict()

    def load_state_dict(self, state, strict=True):
        """Loads the state of this rank's stages; state may be that of the whole model."""
        own = self.module.state_dict()
        return self.module.load_state_dict({name: value for name, value in state.items() if name in own}, strict)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Like torch.nn.utils.clip_grad_norm_ of the whole model: returns the norm of the gradients of all stages, in which tied
        parameters count once. All ranks call it."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        own = [] if self._replica else self._ties.counted_once(self.module.parameters())  # the first replica's count
        counted = [each for each in own if each.grad is not None]
        power = _divided.power(counted, norm_type, _divided.parts_of(self.module)[0], self._tensor).reshape(1)
        if norm_type == math.inf:
            total = self._reduced(power, _native.MAX)[0].float()
        else:
            total = (self._reduced(power, _native.SUM) ** (1 / norm_type))[0].float()
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return total

    def _reduced(self, number, op):
        status = _native.load().allreduce(self._communicator.address, number.data_ptr(), number.data_ptr(), number.numel(), _native.FLOAT64, op,
                                            None)
        self._check(status)
        return number

    def _check(self, status):
        if status != OK:
            raise _communicator.BackendError(f"shoal: {_communicator.timed_out(status)}"
                                             f"{_native.error_of(status, comm=self._communicator.address)}")

    def to_torch(self):
        """Returns (modules, text) for torch.distributed.pipelining: this rank's stages as modules by their numbers, each for a
        PipelineStage, and the schedule for _PipelineScheduleRuntime._load_csv(file, format="compute_only"). The modules have this
        pipeline's parameters. torch hands tensors from a stage to the next one only, so skips go through the stages between. It knows
        no recomputed stages, and these become plain ones: wrap them in torch.utils.checkpoint."""
        split = self._splits[True]
        if self.schedule.size != self.schedule.ranks:
            raise NotImplementedError("shoal: torch.distributed.pipelining runs no stage on several ranks: leave out replicate=")
        return {stage: split.link(stage, self._model) for stage in self._own}, self.schedule.plain().text()

    def train(self, mode=True):
        """Sets the mode of training or evaluation, as for a module."""
        self.module.train(mode)
        return self

    def eval(self):
        """Sets the mode of evaluation."""
        return self.train(False)


def _first_replicas(text, group):
    """Returns the text of the first replica."""
    found = [text]
    torch.distributed.broadcast_object_list(found, torch.distributed.get_global_rank(group, 0), group=group)
    return found[0]


# ---- The model -------------------------------------------------------------------------------------------------------------


def _check(model, microbatches):
    if not isinstance(model, nn.Module):
        raise TypeError(f"shoal: model must be an nn.Module, not {type(model).__name__}")
    if not (isinstance(microbatches, int) and microbatches >= 1):
        raise ValueError(f"shoal: microbatches is {microbatches!r}, but must be a number from 1 on")
    if model._forward_hooks or model._forward_pre_hooks:
        raise NotImplementedError("shoal: the model itself has forward hooks, and only its units run: put it into a module around it")
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise NotImplementedError(f"shoal: {name or 'the model'} is wrapped in {type(module).__name__}, whose passes a pipeline does not run: "
                                      "pass the module itself, and average gradients with replicas=")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise NotImplementedError(f"shoal: {name} is on {tensor.device}, and Pipeline trains on the CPU: use "
                                      "torch.distributed.pipelining for other devices")


def _recompute_of(wanted, cuts):
    """Returns True, False, "auto" or a list of stages."""
    if wanted is None or isinstance(wanted, bool):
        return bool(wanted)
    if wanted == "auto":
        if cuts is not None:
            raise ValueError("shoal: recompute=\"auto\" chooses stages together with their borders: leave out cuts, or pass True or a list "
                             "of stages")
        return wanted
    if not isinstance(wanted, (list, tuple, set, range)):
        raise TypeError(f"shoal: recompute must be True, \"auto\" or a list of stages, not {wanted!r}")
    return sorted(wanted)


def _record_modes(model, example, is_unit, takes_objects):
    """Returns the recorded forward pass of each mode, True for training."""
    former = {module: module.training for module in model.modules()}
    recorded = {}
    try:
        for mode in (True, False):
            for module in former:
                module.training = mode
            recorded[mode] = _graph.record(model, example, is_unit, takes_objects)
    finally:
        for module, mode in former.items():
            module.training = mode
    other = [name for name in recorded[False].units if name not in recorded[True].units]
    if other:
        raise ValueError(f"shoal: unit {other[0]} is called in evaluation but not in training: call all units in training")
    places = [recorded[True].units.index(name) for name in recorded[False].units]
    if places != sorted(places):
        raise ValueError("shoal: the units are called in another order in evaluation than in training: "
                         f"{', '.join(recorded[False].units)}, and {', '.join(recorded[True].units)}")
    return recorded
