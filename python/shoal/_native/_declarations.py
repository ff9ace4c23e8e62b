"""The headers of include/shoal in ctypes. Written by dev/native.py: change the headers, not this file."""
from ctypes import CFUNCTYPE, POINTER, Structure
from ctypes import (c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_long, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64,
                    c_void_p)

from ._structures import Sized, begins

__all__ = ["OK", "PENDING", "ERR_ARGUMENT", "ERR_MEMORY", "ERR_SYSTEM", "ERR_UNSUPPORTED", "ERR_TIMEOUT", "ERR_PEER_LOST",
           "ERR_MISMATCH", "ERR_ABORTED", "ERR_AUTH", "ERR_STATE", "ERR_INTERNAL", "FLOAT32", "FLOAT64", "BFLOAT16", "INT64",
           "FLOAT16", "INT32", "INT8", "UINT8", "TYPE_END", "SUM", "AVG", "MAX", "MIN", "PROD", "BITAND", "BITOR", "BITXOR",
           "SCALED_SUM", "OP_END", "FINDING_OK", "FINDING_NOTE", "FINDING_WARNING", "FINDING_ERROR", "NOISE_KNOWN",
           "NOISE_UNBOUNDED", "NOISE_FEW_STEPS", "NOISE_ONE_BATCH", "NOISE_NOT_FINITE", "SCALING_NONE", "SCALING_LINEAR",
           "SCALING_SQUARE_ROOT", "SCALING_ADASCALE", "COMPRESS_NONE", "COMPRESS_FLOAT16", "COMPRESS_BFLOAT16", "COMPRESS_INT8",
           "SGD", "ADAM", "ADAMW", "ADAGRAD", "LION", "LAMB", "STEP_REDUCE", "STEP_LOCAL", "STATE_MASTER", "STATE_FIRST",
           "STATE_SECOND", "TAIL_PAD", "TAIL_DROP", "TAIL_KEEP", "FORWARD", "BACKWARD", "INPUT_GRADIENT", "WEIGHT_GRADIENT",
           "RECOMPUTE", "SUM_REPLICAS", "SUM_TIED", "UPDATE", "SCHEDULE_GPIPE", "SCHEDULE_1F1B", "SCHEDULE_INTERLEAVED",
           "SCHEDULE_BREADTH_FIRST", "SCHEDULE_ZB_H1", "SCHEDULE_ZB_H2", "SCHEDULE_V_MIN", "SCHEDULE_V_HALF", "SCHEDULE_V_ZB",
           "SCHEDULE_AUTO", "PARTITION_SHORTEST", "PARTITION_TREE", "PARTITION_EQUAL", "RECOMPUTES_AS_SCHEDULED",
           "RECOMPUTES_ALL", "RECOMPUTES_IF_SHORT", "GROUP_WORLD", "GROUP_PIPELINE", "GROUP_TENSOR", "GROUP_REPLICAS",
           "GROUP_DATA", "GROUP_MODEL", "GROUP_SHARDS", "GROUP_SHARD_REPLICAS", "VERSION_MAJOR", "VERSION_MINOR",
           "VERSION_PATCH", "RANKS_MAX", "EAGER_BYTES", "NOISE_STEPS_MIN", "PARAMETERS_MAX", "OPTIMIZER_GROUPS_MAX",
           "DEGREE_HOST", "CHECKPOINT_EXTRA_MAX", "CHECKPOINT_LATEST", "OUTER_FRAGMENTS_MAX", "ANY_STAGE", "PROFILE_UNITS_MAX",
           "NOTE_BYTES", "LogFn", "ContextOptions", "PartFn", "CommOptions", "StoreSet", "StoreGet", "StoreErase", "Store",
           "Place", "Options", "Tensor", "DoneFn", "Message", "Failure", "Span", "Operation", "MemoryUsage", "Traffic",
           "Training", "FindingFn", "DiagnosisOptions", "Question", "Simulation", "Simulated", "Watched", "WatchFn",
           "NoiseStep", "NoiseAverage", "Noise", "Scaling", "ScalingRate", "Parameter", "GradientLayoutOptions",
           "GradientBuffer", "BufferFn", "OptimizerGroup", "Optimizer", "ReducerOptions", "StepResult", "StepStats",
           "BufferTimes", "OptimizerRange", "ShardsOptions", "ShardsResult", "ShardsBytes", "SaveOptions", "LoadOptions",
           "LoadResult", "CheckpointAbout", "CheckpointParameter", "CheckpointValues", "Sampling", "Batch", "OuterOptions",
           "OuterResult", "OuterTotals", "Action", "StageCosts", "ScheduleOptions", "TiedStage", "ScheduleTimes", "Unit",
           "PartitionOptions", "Stage", "RankMemory", "PartitionTimes", "Edge", "PipelineOptions", "Parcel", "Work",
           "ComputeFn", "ReleasedFn", "PipelineCalls", "ActionTimes", "PipelineTimes", "Placement", "Coordinates", "FUNCTIONS"]

# macros
VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
RANKS_MAX = 4096
EAGER_BYTES = 8192
NOISE_STEPS_MIN = 8
PARAMETERS_MAX = 1048576
OPTIMIZER_GROUPS_MAX = 65536
DEGREE_HOST = -1
CHECKPOINT_EXTRA_MAX = 67108864
CHECKPOINT_LATEST = 9223372036854775807
OUTER_FRAGMENTS_MAX = 64
ANY_STAGE = -1
PROFILE_UNITS_MAX = 65536
NOTE_BYTES = 1024

# enum shoal_status
OK = 0
PENDING = 1
ERR_ARGUMENT = 2
ERR_MEMORY = 3
ERR_SYSTEM = 4
ERR_UNSUPPORTED = 5
ERR_TIMEOUT = 6
ERR_PEER_LOST = 7
ERR_MISMATCH = 8
ERR_ABORTED = 9
ERR_AUTH = 10
ERR_STATE = 11
ERR_INTERNAL = 12

LogFn = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


@begins()
class ContextOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("log", LogFn), ("log_arg", c_void_p), ("settings", POINTER(c_char_p)),
                ("threads", c_uint32), ("network_threads", c_uint32)]


PartFn = CFUNCTYPE(None, c_void_p, c_size_t)


@begins()
class CommOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("timeout_ms", c_uint32), ("create_timeout_ms", c_uint32)]


StoreSet = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)

StoreGet = CFUNCTYPE(c_long, c_void_p, c_char_p, c_void_p, c_size_t, c_uint32)

StoreErase = CFUNCTYPE(c_int, c_void_p, c_char_p)


class Store(Structure):
    _fields_ = [("set", StoreSet), ("get", StoreGet), ("erase", StoreErase), ("arg", c_void_p)]


@begins()
class Place(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("hosts", c_int), ("host", c_int), ("local_rank", c_int), ("local_size", c_int),
                ("pid", c_int), ("host_name", c_char * 64)]


# enum shoal_type
FLOAT32 = 0
FLOAT64 = 1
BFLOAT16 = 2
INT64 = 3
FLOAT16 = 4
INT32 = 5
INT8 = 6
UINT8 = 7
TYPE_END = 8

# enum shoal_op
SUM = 0
AVG = 1
MAX = 2
MIN = 3
PROD = 4
BITAND = 5
BITOR = 6
BITXOR = 7
SCALED_SUM = 8
OP_END = 9


@begins(scale=1)
class Options(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("timeout_ms", c_uint32), ("trace_tag", c_uint32), ("scale", c_double),
                ("wait_ms", c_uint32), ("stream", c_void_p)]


class Tensor(Structure):
    _fields_ = [("input", c_void_p), ("output", c_void_p), ("count", c_size_t)]


DoneFn = CFUNCTYPE(None, c_void_p, c_int)


class Message(Structure):
    _fields_ = [("is_send", c_int), ("buffer", c_void_p), ("count", c_size_t), ("type", c_int), ("peer", c_int), ("tag", c_int)]


@begins(rank=-1, reporter=-1, step=-1)
class Failure(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("status", c_int), ("rank", c_int), ("reporter", c_int), ("pid", c_int),
                ("sequence", c_uint64), ("step", c_int), ("waited_ms", c_uint64), ("host", c_char * 64),
                ("operation", c_char * 96), ("text", c_char * 512), ("is_given", c_int)]


class Span(Structure):
    _fields_ = [("kind", c_char_p), ("sequence", c_uint64), ("stage", c_uint64), ("microbatch", c_uint32)]


@begins(last_rank=-1)
class Operation(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("sequence", c_uint64), ("algorithm", c_char_p), ("arrived_us", c_double),
                ("done_us", c_double), ("last_rank", c_int), ("late_us", c_double)]


@begins()
class MemoryUsage(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("control_bytes", c_size_t), ("staging_bytes", c_size_t), ("local_bytes", c_size_t)]


@begins()
class Traffic(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("sent_bytes", c_uint64), ("sent_messages", c_uint64),
                ("sent_to", POINTER(c_uint64))]


@begins()
class Training(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("batch", c_double), ("noise_scale", c_double), ("noise_error", c_double)]


# enum shoal_finding_level
FINDING_OK = 0
FINDING_NOTE = 1
FINDING_WARNING = 2
FINDING_ERROR = 3

FindingFn = CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_char_p, c_char_p)


@begins()
class DiagnosisOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("towards", c_char_p), ("ranks", c_int), ("timeout_ms", c_uint32)]


@begins(ranks=2, bytes=1048576, rank=-1, hosts=1)
class Question(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("collective", c_char_p), ("ranks", c_int), ("bytes", c_size_t), ("type", c_int),
                ("shared_input", c_int), ("shared_output", c_int), ("rank", c_int), ("in_place", c_int), ("hosts", c_size_t),
                ("on_gpus", c_int)]


@begins(hosts=2, ranks_per_host=1, bytes=1048576, rate_gbit_s=25, latency_us=30, message_us=2, memory_gb_s=5, signal_us=0.2,
        header_bytes=64, frame_bytes=65536, unit_bytes=1048576, copy_us=7)
class Simulation(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("collective", c_char_p), ("hosts", c_size_t), ("ranks_per_host", c_size_t),
                ("bytes", c_size_t), ("type", c_int), ("shared", c_int), ("every_chunk", c_int),
                ("settings", POINTER(c_char_p)), ("rate_gbit_s", c_double), ("latency_us", c_double), ("message_us", c_double),
                ("stack_gb_s", c_double), ("memory_gb_s", c_double), ("signal_us", c_double), ("header_bytes", c_size_t),
                ("frame_bytes", c_size_t), ("cores", c_size_t), ("burst_bytes", c_size_t), ("burst_gbit_s", c_double),
                ("pause_us", c_double), ("one_machine", c_int), ("pcie_gb_s", c_double), ("switch_gb_s", c_double),
                ("switch_gpus", c_size_t), ("switch_adapters", c_int), ("nvlink_gb_s", c_double), ("unit_bytes", c_size_t),
                ("ring_bytes", c_size_t), ("copy_us", c_double), ("host_memory_gb_s", c_double), ("threads", c_size_t),
                ("network_threads", c_size_t)]


@begins()
class Simulated(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("algorithm", c_char_p), ("bytes", c_size_t), ("time_us", c_double),
                ("algbw_gb_s", c_double), ("busbw_gb_s", c_double), ("bound_us", c_double), ("sent_bytes", c_double),
                ("received_bytes", c_double), ("sending", c_double), ("receiving", c_double), ("working", c_double),
                ("messaging", c_double), ("waiting", c_double), ("chunks", c_size_t), ("chunks_simulated", c_size_t),
                ("chunk_us", c_double), ("copying", c_double)]


class Watched(Structure):
    _fields_ = [("pid", c_int), ("job", c_uint64), ("comm", c_uint64), ("name", c_char_p), ("host", c_char_p),
                ("version", c_char_p), ("rank", c_int), ("size", c_int), ("world_rank", c_int), ("status", c_int),
                ("operations", c_uint64), ("bytes", c_uint64), ("came_last", c_uint64), ("late_us", c_double),
                ("called", c_uint64), ("under_way", c_int), ("idle_us", c_double), ("collective", c_char_p),
                ("algorithm", c_char_p), ("sequence", c_uint64), ("count", c_uint64), ("type", c_int), ("op", c_int),
                ("root", c_int), ("is_message", c_int), ("posted_us", c_double), ("arrived_us", c_double), ("waits_for", c_int),
                ("waits_us", c_double), ("rejected", c_uint64), ("waited_us", c_double), ("sent_bytes", c_uint64),
                ("is_span", c_int), ("trace_tag", c_uint64), ("waits_for_stage", c_int), ("batch", c_double),
                ("noise_scale", c_double), ("noise_error", c_double), ("threads", c_int), ("network_threads", c_int)]


WatchFn = CFUNCTYPE(None, c_void_p, POINTER(Watched))


@begins()
class NoiseStep(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("small_batch", c_double), ("small_squared", c_double), ("big_batch", c_double),
                ("big_squared", c_double)]


@begins(window=100)
class NoiseAverage(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("window", c_double), ("weight", c_double), ("weight_squared", c_double),
                ("squared", c_double), ("variance", c_double), ("squared_spread", c_double), ("variance_spread", c_double),
                ("common_spread", c_double), ("batch", c_double), ("steps", c_uint64), ("single", c_uint64),
                ("not_finite", c_uint64)]


# enum shoal_noise_state
NOISE_KNOWN = 0
NOISE_UNBOUNDED = 1
NOISE_FEW_STEPS = 2
NOISE_ONE_BATCH = 3
NOISE_NOT_FINITE = 4


@begins(state=2)
class Noise(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("state", c_int), ("steps", c_uint64), ("left_out", c_uint64), ("scale", c_double),
                ("error", c_double), ("low", c_double), ("high", c_double), ("squared", c_double), ("squared_error", c_double),
                ("variance", c_double), ("variance_error", c_double), ("batch", c_double)]


# enum shoal_scaling_rule
SCALING_NONE = 0
SCALING_LINEAR = 1
SCALING_SQUARE_ROOT = 2
SCALING_ADASCALE = 3


@begins(rule=1)
class Scaling(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("rule", c_int), ("old_batch", c_double), ("is_adaptive", c_int),
                ("warmup", c_double), ("iterations", c_double), ("steps", c_uint64)]


@begins(factor=1, gain=1)
class ScalingRate(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("factor", c_double), ("gain", c_double)]


class Parameter(Structure):
    _fields_ = [("count", c_size_t), ("type", c_int), ("name", c_char_p)]


@begins(ranks=1)
class GradientLayoutOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("ranks", c_int), ("buffer_bytes", c_size_t), ("first_buffer_bytes", c_size_t),
                ("rank_bytes", c_size_t), ("order", POINTER(c_uint32))]


@begins()
class GradientBuffer(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("type", c_int), ("bytes", c_size_t), ("used_bytes", c_size_t),
                ("parameters", POINTER(c_uint32)), ("parameter_count", c_size_t)]


# enum shoal_compression
COMPRESS_NONE = 0
COMPRESS_FLOAT16 = 1
COMPRESS_BFLOAT16 = 2
COMPRESS_INT8 = 3

BufferFn = CFUNCTYPE(c_int, c_void_p, c_size_t, POINTER(c_uint32), c_size_t)

# enum shoal_optimizer_rule
SGD = 1
ADAM = 2
ADAMW = 3
ADAGRAD = 4
LION = 5
LAMB = 6


@begins(rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08)
class OptimizerGroup(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("rate", c_double), ("decay", c_double), ("beta1", c_double), ("beta2", c_double),
                ("epsilon", c_double), ("dampening", c_double), ("rate_decay", c_double), ("initial", c_double),
                ("is_nesterov", c_int), ("maximizes", c_int)]


@begins(rule=3, scale_growth=2, scale_backoff=0.5, scale_interval=2000)
class Optimizer(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("rule", c_int), ("groups", POINTER(OptimizerGroup)), ("group_count", c_size_t),
                ("group_of", POINTER(c_uint32)), ("steps_early", c_int), ("is_atomic", c_int), ("degree", c_int),
                ("weights", POINTER(c_double)), ("granules", POINTER(c_size_t)), ("loss_scale", c_double),
                ("scale_growth", c_double), ("scale_backoff", c_double), ("scale_interval", c_uint32)]


@begins(op=1)
class ReducerOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("op", c_int), ("buffer_bytes", c_size_t),
                ("first_buffer_bytes", c_size_t), ("rank_bytes", c_size_t), ("flight_bytes", c_size_t),
                ("timeout_ms", c_uint32), ("layout", c_void_p), ("order", POINTER(c_uint32)), ("keeps_layout", c_int),
                ("results_in_views", c_int), ("allows_unused", c_int), ("is_uneven", c_int), ("divides_by_active", c_int),
                ("checks_finite", c_int), ("has_norms", c_int), ("max_norm", c_double), ("compression", c_int),
                ("forgets_error", c_int), ("has_thread", c_int), ("on_buffer", BufferFn), ("on_buffer_arg", c_void_p),
                ("is_on_device", c_int), ("stream", c_void_p), ("optimizer", POINTER(Optimizer)), ("noise_window", c_double)]


# enum shoal_step
STEP_REDUCE = 0
STEP_LOCAL = 1


@begins(nonfinite_parameter=-1, nonfinite_rank=-1, clip=1)
class StepResult(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("active", c_int), ("nonfinite_parameter", c_int64),
                ("nonfinite_rank", c_int), ("local_squared", c_double), ("squared", c_double), ("clip", c_double),
                ("is_skipped", c_int), ("loss_scale", c_double)]


@begins()
class StepStats(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("step_us", c_double), ("backward_us", c_double),
                ("exposed_us", c_double), ("pack_us", c_double), ("unpack_us", c_double), ("callback_us", c_double),
                ("copied_bytes", c_uint64), ("sent_bytes", c_uint64), ("received_bytes", c_uint64), ("network_bytes", c_uint64),
                ("balance", c_double), ("flight_buffers", c_size_t), ("wire_bytes", c_uint64)]


@begins()
class BufferTimes(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("first_us", c_double), ("full_us", c_double), ("posted_us", c_double),
                ("done_us", c_double), ("out_us", c_double)]


# enum shoal_optimizer_state
STATE_MASTER = 0
STATE_FIRST = 1
STATE_SECOND = 2


@begins()
class OptimizerRange(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("type", c_int), ("count", c_size_t), ("gradient", c_void_p),
                ("parameter", c_void_p), ("master", c_void_p), ("first", c_void_p), ("second", c_void_p)]


@begins(op=1)
class ShardsOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("unit_of", POINTER(c_uint32)),
                ("optimizer", POINTER(Optimizer)), ("op", c_int), ("live_units", c_uint32), ("whole_bytes", c_size_t),
                ("max_norm", c_double), ("checks_finite", c_int), ("timeout_ms", c_uint32)]


@begins(clip=1)
class ShardsResult(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("squared", c_double), ("clip", c_double),
                ("is_skipped", c_int), ("loss_scale", c_double)]


@begins()
class ShardsBytes(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("shard_bytes", c_size_t), ("live_bytes", c_size_t), ("gradient_bytes", c_size_t),
                ("whole_bytes", c_size_t)]


@begins()
class SaveOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("extra", c_void_p), ("extra_bytes", c_size_t),
                ("keep", c_uint32), ("timeout_ms", c_uint32)]


@begins(step=9223372036854775807)
class LoadOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("extra", c_void_p), ("extra_room", c_size_t),
                ("timeout_ms", c_uint32)]


@begins()
class LoadResult(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("extra_bytes", c_size_t), ("read_bytes", c_size_t)]


@begins(rule=-1)
class CheckpointAbout(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("saved_at", c_uint64), ("rule", c_int), ("shards", c_uint32),
                ("parameters", c_size_t), ("file_bytes", c_uint64), ("extra_bytes", c_size_t)]


@begins()
class CheckpointParameter(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("type", c_int), ("count", c_size_t), ("steps", c_uint64),
                ("states", c_uint32)]


@begins()
class CheckpointValues(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("parameter", Parameter), ("steps", c_uint64), ("states", c_void_p * 3)]


# enum shoal_tail
TAIL_PAD = 0
TAIL_DROP = 1
TAIL_KEEP = 2


@begins(ranks=1, shuffles=1)
class Sampling(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("samples", c_uint64), ("used", c_uint64), ("seed", c_uint64), ("epoch", c_uint64),
                ("rank", c_int), ("ranks", c_int), ("shuffles", c_int), ("tail", c_int)]


@begins()
class Batch(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("per_rank", c_uint64), ("all_ranks", c_uint64), ("left", c_uint64)]


@begins(fragments=1, lr=1, nesterov=1)
class OuterOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("every", c_uint32), ("fragments", c_uint32),
                ("delay", c_uint32), ("fragment_of", POINTER(c_uint32)), ("lr", c_double), ("momentum", c_double),
                ("nesterov", c_int), ("mixing", c_double), ("compression", c_int), ("forgets_error", c_int),
                ("shares_start", c_int), ("timeout_ms", c_uint32)]


@begins(begun=-1, applied=-1)
class OuterResult(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("begun", c_int64), ("applied", c_int64)]


@begins()
class OuterTotals(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("steps", c_uint64), ("exchanges", c_uint64), ("sent_bytes", c_uint64),
                ("network_bytes", c_uint64), ("waited_us", c_double), ("computed_us", c_double)]


# enum shoal_action_kind
FORWARD = 0
BACKWARD = 1
INPUT_GRADIENT = 2
WEIGHT_GRADIENT = 3
RECOMPUTE = 4
SUM_REPLICAS = 5
SUM_TIED = 6
UPDATE = 7


class Action(Structure):
    _fields_ = [("kind", c_int), ("stage", c_uint32), ("microbatch", c_uint32)]


# enum shoal_schedule_kind
SCHEDULE_GPIPE = 0
SCHEDULE_1F1B = 1
SCHEDULE_INTERLEAVED = 2
SCHEDULE_BREADTH_FIRST = 3
SCHEDULE_ZB_H1 = 4
SCHEDULE_ZB_H2 = 5
SCHEDULE_V_MIN = 6
SCHEDULE_V_HALF = 7
SCHEDULE_V_ZB = 8
SCHEDULE_AUTO = 9


class StageCosts(Structure):
    _fields_ = [("forward", c_double), ("input_gradient", c_double), ("weight_gradient", c_double), ("transfer", c_double),
                ("sum_replicas", c_double), ("sum_tied", c_double), ("update", c_double)]


@begins(kind=1, kept_share=1)
class ScheduleOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("kind", c_int), ("ranks", c_uint32), ("microbatches", c_uint32),
                ("stages_per_rank", c_uint32), ("costs", StageCosts), ("activations", c_double), ("kept_share", c_double),
                ("shortens_span", c_int)]


class TiedStage(Structure):
    _fields_ = [("tie", c_uint32), ("stage", c_uint32)]


@begins()
class ScheduleTimes(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_double), ("span", c_double), ("bubble", c_double),
                ("span_bubble", c_double), ("activations", c_double)]


@begins(stage=-1)
class Unit(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("forward", c_double), ("input_gradient", c_double),
                ("weight_gradient", c_double), ("backward_is_halved", c_int), ("stage", c_int32), ("parameter_bytes", c_uint64),
                ("kept_bytes", c_uint64), ("output_bytes", c_uint64)]


# enum shoal_partition_method
PARTITION_SHORTEST = 0
PARTITION_TREE = 1
PARTITION_EQUAL = 2

# enum shoal_recomputes
RECOMPUTES_AS_SCHEDULED = 0
RECOMPUTES_ALL = 1
RECOMPUTES_IF_SHORT = 2


@begins(memory_weight=0.8, gradient_ratio=1, state_ratio=2, parameter_shards=1, gradient_shards=1, state_shards=1, kept_share=1)
class PartitionOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("method", c_int), ("memory_weight", c_double), ("memory_bytes", c_uint64),
                ("rank_memory_bytes", POINTER(c_uint64)), ("rank_speeds", POINTER(c_double)), ("bytes_per_us", c_double),
                ("latency_us", c_double), ("gradient_ratio", c_double), ("state_ratio", c_double),
                ("parameter_shards", c_uint32), ("gradient_shards", c_uint32), ("state_shards", c_uint32),
                ("kept_share", c_double), ("slots", c_uint32), ("recomputes", c_int), ("keeps_ties_together", c_int),
                ("effort", c_uint64), ("rank_replicas", POINTER(c_uint32))]


@begins()
class Stage(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("rank", c_uint32), ("first_unit", c_uint32), ("unit_count", c_uint32),
                ("forward", c_double), ("input_gradient", c_double), ("weight_gradient", c_double), ("transfer", c_double),
                ("parameter_bytes", c_uint64), ("kept_bytes", c_uint64), ("received_bytes", c_uint64), ("recomputes", c_int),
                ("replicas", c_uint32), ("sum_replicas", c_double), ("sum_tied", c_double)]


@begins()
class RankMemory(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("parameter_bytes", c_uint64), ("gradient_bytes", c_uint64),
                ("state_bytes", c_uint64), ("activation_bytes", c_uint64), ("buffer_bytes", c_uint64),
                ("total_bytes", c_uint64), ("limit_bytes", c_uint64)]


@begins()
class PartitionTimes(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_double), ("tied", c_double), ("bubble", c_double),
                ("bottleneck", c_double), ("lower_bound", c_double), ("is_optimal", c_int), ("replicas", c_double),
                ("overlapped", c_double)]


class Edge(Structure):
    _fields_ = [("from", c_uint32), ("to", c_uint32)]


@begins()
class PipelineOptions(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("edges", POINTER(Edge)), ("edge_count", c_size_t),
                ("ahead", c_uint32), ("timeout_ms", c_uint32)]


class Parcel(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_size_t), ("owner", c_void_p), ("stage", c_uint32), ("replica", c_uint32),
                ("note_bytes", c_uint32), ("note", c_char * 1024)]


class Work(Structure):
    _fields_ = [("action", Action), ("input_count", c_uint32), ("output_count", c_uint32), ("inputs", POINTER(Parcel)),
                ("outputs", POINTER(Parcel)), ("is_last_gradient", c_int), ("is_recomputed", c_int), ("replica", c_uint32),
                ("replicas", c_uint32)]


ComputeFn = CFUNCTYPE(c_int, c_void_p, POINTER(Work), c_void_p, c_size_t)

ReleasedFn = CFUNCTYPE(None, c_void_p, c_void_p)


@begins()
class PipelineCalls(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("compute", ComputeFn), ("released", ReleasedFn), ("user", c_void_p)]


class ActionTimes(Structure):
    _fields_ = [("action", Action), ("waited_us", c_double), ("begin_us", c_double), ("end_us", c_double)]


@begins()
class PipelineTimes(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("step", c_uint64), ("begin_ns", c_uint64), ("step_us", c_double),
                ("computed_us", c_double), ("waited_us", c_double), ("sending_us", c_double), ("bubble", c_double),
                ("sent_bytes", c_uint64), ("received_bytes", c_uint64), ("actions", POINTER(ActionTimes)),
                ("action_count", c_uint32)]


@begins(ranks=1, pipeline=1, tensor=1, shards=1)
class Placement(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("ranks", c_int), ("pipeline", c_int), ("tensor", c_int), ("shards", c_int),
                ("strategy", c_char_p)]


# enum shoal_group
GROUP_WORLD = 0
GROUP_PIPELINE = 1
GROUP_TENSOR = 2
GROUP_REPLICAS = 3
GROUP_DATA = 4
GROUP_MODEL = 5
GROUP_SHARDS = 6
GROUP_SHARD_REPLICAS = 7


@begins()
class Coordinates(Sized):
    _fields_ = [("struct_bytes", c_size_t), ("pp", c_int), ("tp", c_int), ("rdp", c_int), ("dp", c_int), ("mp", c_int),
                ("shard", c_int), ("shard_replica", c_int)]


# The return type and the arguments of each function.
FUNCTIONS = {
    "shoal_version": (c_char_p, []),
    "shoal_status_text": (c_char_p, [c_int]),
    "shoal_status_name": (c_char_p, [c_int]),
    "shoal_context_create": (c_int, [POINTER(ContextOptions), POINTER(c_void_p)]),
    "shoal_context_destroy": (None, [c_void_p]),
    "shoal_context_threads": (c_int, [c_void_p]),
    "shoal_context_run": (c_int, [c_void_p, PartFn, c_void_p, c_size_t]),
    "shoal_comm_create": (c_int, [c_void_p, POINTER(CommOptions), POINTER(c_void_p)]),
    "shoal_comm_create_at": (c_int, [c_void_p, c_char_p, c_int, c_int, POINTER(CommOptions), POINTER(c_void_p)]),
    "shoal_comm_create_with": (c_int, [c_void_p, POINTER(Store), c_int, c_int, POINTER(CommOptions), POINTER(c_void_p)]),
    "shoal_comm_split": (c_int, [c_void_p, c_int, c_int, POINTER(CommOptions), POINTER(c_void_p)]),
    "shoal_comm_shrink": (c_int, [c_void_p, POINTER(c_int), c_size_t, POINTER(CommOptions), POINTER(c_void_p)]),
    "shoal_comm_rank": (c_int, [c_void_p]),
    "shoal_comm_size": (c_int, [c_void_p]),
    "shoal_comm_place": (c_int, [c_void_p, c_int, POINTER(Place)]),
    "shoal_comm_finalize": (c_int, [c_void_p]),
    "shoal_comm_free": (None, [c_void_p]),
    "shoal_comm_abort": (None, [c_void_p]),
    "shoal_type_bytes": (c_size_t, [c_int]),
    "shoal_allreduce": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_reduce": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options)]),
    "shoal_reduce_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_broadcast": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_allgather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, POINTER(Options)]),
    "shoal_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_alltoall": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, POINTER(Options)]),
    "shoal_barrier": (c_int, [c_void_p, POINTER(Options)]),
    "shoal_allgatherv": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_int, POINTER(Options)]),
    "shoal_reduce_scatterv": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), c_int, c_int, POINTER(Options)]),
    "shoal_alltoallv": (c_int, [c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_void_p, POINTER(c_size_t),
                                POINTER(c_size_t), c_int, POINTER(Options)]),
    "shoal_allreduce_coalesced": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_reduce_scatter_coalesced": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_broadcast_coalesced": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options)]),
    "shoal_allgather_coalesced": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, POINTER(Options)]),
    "shoal_allreduce_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options),
                                     POINTER(c_void_p)]),
    "shoal_reduce_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options),
                                  POINTER(c_void_p)]),
    "shoal_reduce_scatter_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options),
                                          POINTER(c_void_p)]),
    "shoal_broadcast_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options),
                                     POINTER(c_void_p)]),
    "shoal_allgather_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_gather_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_scatter_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_alltoall_post": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_barrier_post": (c_int, [c_void_p, POINTER(Options), POINTER(c_void_p)]),
    "shoal_allgatherv_post": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_int,
                                      POINTER(Options), POINTER(c_void_p)]),
    "shoal_reduce_scatterv_post": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t), c_int, c_int, POINTER(Options),
                                           POINTER(c_void_p)]),
    "shoal_alltoallv_post": (c_int, [c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_void_p, POINTER(c_size_t),
                                     POINTER(c_size_t), c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_allreduce_coalesced_post": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options),
                                               POINTER(c_void_p)]),
    "shoal_reduce_scatter_coalesced_post": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options),
                                                    POINTER(c_void_p)]),
    "shoal_broadcast_coalesced_post": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, c_int, POINTER(Options),
                                               POINTER(c_void_p)]),
    "shoal_allgather_coalesced_post": (c_int, [c_void_p, POINTER(Tensor), c_size_t, c_int, POINTER(Options),
                                               POINTER(c_void_p)]),
    "shoal_request_wait": (c_int, [c_void_p, c_uint32]),
    "shoal_request_test": (c_int, [c_void_p]),
    "shoal_request_on_done": (None, [c_void_p, DoneFn, c_void_p]),
    "shoal_request_free": (None, [c_void_p]),
    "shoal_send": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options)]),
    "shoal_recv": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options)]),
    "shoal_send_post": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_recv_post": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, POINTER(Options), POINTER(c_void_p)]),
    "shoal_exchange": (c_int, [c_void_p, POINTER(Message), c_size_t, POINTER(Options)]),
    "shoal_exchange_post": (c_int, [c_void_p, POINTER(Message), c_size_t, POINTER(Options), POINTER(c_void_p)]),
    "shoal_mem_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "shoal_mem_free": (c_int, [c_void_p, c_void_p]),
    "shoal_mem_register": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_uint64]),
    "shoal_mem_deregister": (c_int, [c_void_p, c_void_p]),
    "shoal_last_failure": (c_int, [c_void_p, c_void_p, POINTER(Failure)]),
    "shoal_comm_fail": (None, [c_void_p, POINTER(Failure)]),
    "shoal_report": (c_int, [c_void_p, c_int, c_char_p, c_char_p]),
    "shoal_track_create": (c_int, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "shoal_track_begin": (None, [c_void_p, POINTER(Span)]),
    "shoal_track_wait": (None, [c_void_p, c_int, c_int]),
    "shoal_track_start": (None, [c_void_p]),
    "shoal_track_end": (None, [c_void_p, c_int]),
    "shoal_flight_print": (None, [c_void_p, c_void_p]),
    "shoal_last_operation": (c_int, [c_void_p, POINTER(Operation)]),
    "shoal_comm_memory": (c_int, [c_void_p, POINTER(MemoryUsage)]),
    "shoal_comm_traffic": (c_int, [c_void_p, POINTER(Traffic)]),
    "shoal_comm_publish": (c_int, [c_void_p, POINTER(Training)]),
    "shoal_print_settings": (c_int, [c_void_p, c_void_p]),
    "shoal_print_topology": (None, [c_void_p]),
    "shoal_print_algorithms": (c_int, [c_void_p]),
    "shoal_print_providers": (c_int, [c_void_p]),
    "shoal_diagnose": (c_int, [POINTER(DiagnosisOptions), FindingFn, c_void_p]),
    "shoal_explain": (c_int, [POINTER(Question), c_void_p]),
    "shoal_explain_json": (c_int, [POINTER(Question), c_void_p]),
    "shoal_simulate": (c_int, [POINTER(Simulation), c_void_p, POINTER(Simulated)]),
    "shoal_watch": (c_int, [c_int, WatchFn, c_void_p, c_char_p, c_size_t]),
    "shoal_watch_print": (c_int, [c_int, c_void_p, c_char_p, c_size_t]),
    "shoal_noise_add": (c_int, [POINTER(NoiseAverage), POINTER(NoiseStep)]),
    "shoal_noise_check": (c_int, [POINTER(NoiseAverage), c_char_p, c_size_t]),
    "shoal_noise_read": (c_int, [POINTER(NoiseAverage), POINTER(Noise)]),
    "shoal_noise_text": (c_int, [POINTER(Noise), c_char_p, c_size_t]),
    "shoal_scaling_gain": (c_double, [c_double, c_double, c_double]),
    "shoal_scaling_beta": (c_double, [c_double, c_double]),
    "shoal_scaling_look": (c_int, [POINTER(Scaling), c_double, POINTER(Noise), POINTER(ScalingRate), c_char_p, c_size_t]),
    "shoal_scaling_step": (c_int, [POINTER(Scaling), c_double, POINTER(Noise), POINTER(ScalingRate), c_char_p, c_size_t]),
    "shoal_gradient_layout_create": (c_int, [POINTER(Parameter), c_size_t, POINTER(GradientLayoutOptions), POINTER(c_void_p),
                                             c_char_p, c_size_t]),
    "shoal_gradient_layout_free": (None, [c_void_p]),
    "shoal_gradient_layout_print": (c_int, [c_void_p, c_void_p]),
    "shoal_gradient_layout_parse": (c_int, [c_char_p, c_size_t, POINTER(Parameter), c_size_t, POINTER(c_void_p), c_char_p,
                                            c_size_t]),
    "shoal_gradient_layout_hash": (c_uint64, [c_void_p]),
    "shoal_gradient_layout_parameters": (c_size_t, [c_void_p]),
    "shoal_gradient_layout_buffers": (c_size_t, [c_void_p]),
    "shoal_gradient_layout_ranks": (c_int, [c_void_p]),
    "shoal_gradient_layout_buffer": (c_int, [c_void_p, c_size_t, POINTER(GradientBuffer)]),
    "shoal_gradient_layout_place": (c_int, [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]),
    "shoal_reducer_create": (c_int, [c_void_p, c_void_p, POINTER(Parameter), c_size_t, POINTER(ReducerOptions),
                                     POINTER(c_void_p)]),
    "shoal_reducer_free": (None, [c_void_p]),
    "shoal_reducer_begin": (c_int, [c_void_p, c_int]),
    "shoal_reducer_ready": (c_int, [c_void_p, c_size_t, c_void_p, c_size_t]),
    "shoal_reducer_ready_part": (c_int, [c_void_p, c_size_t, c_void_p, c_size_t, c_size_t]),
    "shoal_reducer_unused": (c_int, [c_void_p, c_size_t]),
    "shoal_reducer_finish": (c_int, [c_void_p, POINTER(StepResult)]),
    "shoal_reducer_join": (c_int, [c_void_p, POINTER(c_int), POINTER(StepResult)]),
    "shoal_reducer_view": (c_void_p, [c_void_p, c_size_t]),
    "shoal_reducer_layout_number": (c_uint, [c_void_p]),
    "shoal_reducer_is_used": (c_int, [c_void_p, c_size_t]),
    "shoal_reducer_layout": (c_void_p, [c_void_p]),
    "shoal_reducer_order": (c_int, [c_void_p, POINTER(c_uint32)]),
    "shoal_reducer_fail": (None, [c_void_p, c_int, c_char_p]),
    "shoal_reducer_failure": (c_int, [c_void_p, POINTER(Failure)]),
    "shoal_reducer_stats": (c_int, [c_void_p, POINTER(StepStats)]),
    "shoal_reducer_sent_to": (c_int, [c_void_p, POINTER(c_uint64)]),
    "shoal_reducer_buffer_times": (c_int, [c_void_p, c_size_t, POINTER(BufferTimes)]),
    "shoal_reducer_ready_us": (c_double, [c_void_p, c_size_t]),
    "shoal_bytes_hash": (c_uint64, [c_void_p, c_size_t]),
    "shoal_reducer_compare": (c_int, [c_void_p, POINTER(c_uint64)]),
    "shoal_reducer_residual_bytes": (c_size_t, [c_void_p]),
    "shoal_reducer_export_residuals": (c_int, [c_void_p, c_void_p, c_size_t]),
    "shoal_reducer_import_residuals": (c_int, [c_void_p, c_void_p, c_size_t]),
    "shoal_reducer_wait": (c_int, [c_void_p, c_uint32]),
    "shoal_reducer_parameter": (c_void_p, [c_void_p, c_size_t]),
    "shoal_reducer_use_parameter": (c_int, [c_void_p, c_size_t, c_void_p]),
    "shoal_reducer_load_parameters": (c_int, [c_void_p]),
    "shoal_reducer_set_group": (c_int, [c_void_p, c_size_t, POINTER(OptimizerGroup)]),
    "shoal_reducer_set_gradient_scale": (c_int, [c_void_p, c_double]),
    "shoal_reducer_loss_scale": (c_double, [c_void_p, POINTER(c_uint32)]),
    "shoal_reducer_set_loss_scale": (c_int, [c_void_p, c_double, c_uint32]),
    "shoal_reducer_optimizer_bytes": (c_size_t, [c_void_p]),
    "shoal_reducer_read_state": (c_int, [c_void_p, c_size_t, c_int, c_void_p]),
    "shoal_reducer_write_state": (c_int, [c_void_p, c_size_t, c_int, c_void_p]),
    "shoal_reducer_parameter_steps": (c_uint64, [c_void_p, c_size_t]),
    "shoal_reducer_set_parameter_steps": (c_int, [c_void_p, c_size_t, c_uint64]),
    "shoal_optimizer_update": (c_int, [c_int, POINTER(OptimizerGroup), c_uint64, c_double, POINTER(OptimizerRange)]),
    "shoal_reducer_set_batch": (c_int, [c_void_p, c_double, c_double]),
    "shoal_reducer_noise": (c_int, [c_void_p, POINTER(Noise)]),
    "shoal_reducer_noise_average": (c_int, [c_void_p, POINTER(NoiseAverage)]),
    "shoal_reducer_set_noise_average": (c_int, [c_void_p, POINTER(NoiseAverage)]),
    "shoal_shards_create": (c_int, [c_void_p, c_void_p, POINTER(Parameter), c_size_t, POINTER(ShardsOptions),
                                    POINTER(c_void_p)]),
    "shoal_shards_free": (None, [c_void_p]),
    "shoal_shards_gather": (c_int, [c_void_p, c_uint32, c_uint32]),
    "shoal_shards_parameter": (c_void_p, [c_void_p, c_size_t]),
    "shoal_shards_release": (c_int, [c_void_p, c_uint32]),
    "shoal_shards_gradient": (c_void_p, [c_void_p, c_size_t]),
    "shoal_shards_ready": (c_int, [c_void_p, c_size_t, c_void_p, c_size_t]),
    "shoal_shards_step": (c_int, [c_void_p, POINTER(ShardsResult)]),
    "shoal_shards_drop": (c_int, [c_void_p]),
    "shoal_shards_set_group": (c_int, [c_void_p, c_size_t, POINTER(OptimizerGroup)]),
    "shoal_shards_set_gradient_scale": (c_int, [c_void_p, c_double]),
    "shoal_shards_loss_scale": (c_double, [c_void_p, POINTER(c_uint32)]),
    "shoal_shards_set_loss_scale": (c_int, [c_void_p, c_double, c_uint32]),
    "shoal_shards_write": (c_int, [c_void_p, c_size_t, c_int, c_void_p]),
    "shoal_shards_read": (c_int, [c_void_p, c_size_t, c_int, c_void_p]),
    "shoal_shards_parameter_steps": (c_uint64, [c_void_p, c_size_t]),
    "shoal_shards_set_parameter_steps": (c_int, [c_void_p, c_size_t, c_uint64]),
    "shoal_shards_memory": (c_int, [c_void_p, POINTER(ShardsBytes)]),
    "shoal_reducer_save": (c_int, [c_void_p, c_char_p, POINTER(SaveOptions)]),
    "shoal_shards_save": (c_int, [c_void_p, c_char_p, POINTER(SaveOptions)]),
    "shoal_reducer_load": (c_int, [c_void_p, c_char_p, POINTER(LoadOptions), POINTER(LoadResult)]),
    "shoal_shards_load": (c_int, [c_void_p, c_char_p, POINTER(LoadOptions), POINTER(LoadResult)]),
    "shoal_checkpoint_open": (c_int, [c_char_p, c_uint64, POINTER(c_void_p), c_char_p, c_size_t]),
    "shoal_checkpoint_close": (None, [c_void_p]),
    "shoal_checkpoint_steps": (c_int, [c_char_p, POINTER(c_uint64), c_size_t, POINTER(c_size_t), c_char_p, c_size_t]),
    "shoal_checkpoint_describe": (c_int, [c_void_p, POINTER(CheckpointAbout)]),
    "shoal_checkpoint_entry": (c_int, [c_void_p, c_size_t, POINTER(CheckpointParameter)]),
    "shoal_checkpoint_read": (c_int, [c_void_p, c_size_t, c_int, c_size_t, c_size_t, c_void_p, c_char_p, c_size_t]),
    "shoal_checkpoint_extra": (c_int, [c_void_p, c_void_p, c_char_p, c_size_t]),
    "shoal_checkpoint_write": (c_int, [c_char_p, POINTER(SaveOptions), c_int, POINTER(CheckpointValues), c_size_t, c_char_p,
                                       c_size_t]),
    "shoal_sampling_count": (c_int, [POINTER(Sampling), POINTER(c_uint64), c_char_p, c_size_t]),
    "shoal_sampling_indices": (c_int, [POINTER(Sampling), c_uint64, c_size_t, POINTER(c_uint64), c_char_p, c_size_t]),
    "shoal_batch_divide": (c_int, [c_uint64, c_int, c_int, POINTER(Batch), c_char_p, c_size_t]),
    "shoal_outer_create": (c_int, [c_void_p, c_void_p, POINTER(Parameter), c_size_t, POINTER(c_void_p), POINTER(OuterOptions),
                                   POINTER(c_void_p)]),
    "shoal_outer_free": (None, [c_void_p]),
    "shoal_outer_step": (c_int, [c_void_p, POINTER(c_void_p), POINTER(OuterResult)]),
    "shoal_outer_is_due": (c_int, [c_void_p]),
    "shoal_outer_finish": (c_int, [c_void_p, POINTER(c_void_p)]),
    "shoal_outer_failure": (c_int, [c_void_p, POINTER(Failure)]),
    "shoal_outer_stats": (c_int, [c_void_p, POINTER(OuterTotals)]),
    "shoal_outer_state_bytes": (c_size_t, [c_void_p]),
    "shoal_outer_export": (c_int, [c_void_p, c_void_p, c_size_t]),
    "shoal_outer_import": (c_int, [c_void_p, c_void_p, c_size_t]),
    "shoal_schedule_create": (c_int, [POINTER(ScheduleOptions), POINTER(c_void_p), c_char_p, c_size_t]),
    "shoal_schedule_free": (None, [c_void_p]),
    "shoal_schedule_ranks": (c_uint32, [c_void_p]),
    "shoal_schedule_stages": (c_uint32, [c_void_p]),
    "shoal_schedule_microbatches": (c_uint32, [c_void_p]),
    "shoal_schedule_rank_of": (c_uint32, [c_void_p, c_uint32]),
    "shoal_schedule_actions": (POINTER(Action), [c_void_p, c_uint32, POINTER(c_uint32)]),
    "shoal_schedule_recompute": (c_int, [c_void_p, POINTER(c_ubyte), POINTER(c_void_p)]),
    "shoal_schedule_recomputes": (c_int, [c_void_p, c_uint32]),
    "shoal_schedule_replicate": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_void_p)]),
    "shoal_schedule_replicas": (c_uint32, [c_void_p, c_uint32]),
    "shoal_schedule_size": (c_uint32, [c_void_p]),
    "shoal_schedule_place": (c_int, [c_void_p, c_uint32, POINTER(c_uint32), POINTER(c_uint32)]),
    "shoal_replica_share": (None, [c_uint64, c_uint32, c_uint32, POINTER(c_uint64), POINTER(c_uint64)]),
    "shoal_schedule_add_sums": (c_int, [c_void_p, POINTER(TiedStage), c_size_t, c_int, c_int, POINTER(c_void_p)]),
    "shoal_schedule_plain": (c_int, [c_void_p, POINTER(c_void_p)]),
    "shoal_schedule_name": (c_char_p, [c_int]),
    "shoal_schedule_print": (c_int, [c_void_p, c_void_p]),
    "shoal_schedule_read": (c_int, [c_char_p, c_size_t, POINTER(c_void_p), c_char_p, c_size_t]),
    "shoal_schedule_check": (c_int, [c_void_p, c_uint32, c_char_p, c_size_t]),
    "shoal_schedule_slots": (c_int, [c_void_p, POINTER(c_uint32)]),
    "shoal_schedule_time": (c_int, [c_void_p, POINTER(StageCosts), c_double, POINTER(ScheduleTimes),
                                    POINTER(POINTER(c_double))]),
    "shoal_schedule_time_stages": (c_int, [c_void_p, POINTER(StageCosts), c_double, POINTER(ScheduleTimes),
                                           POINTER(POINTER(c_double))]),
    "shoal_schedule_stage_costs": (c_int, [c_void_p, POINTER(StageCosts), POINTER(StageCosts)]),
    "shoal_schedule_action_cost": (c_double, [POINTER(Action), POINTER(StageCosts)]),
    "shoal_profile_create": (c_int, [c_char_p, POINTER(c_void_p)]),
    "shoal_profile_free": (None, [c_void_p]),
    "shoal_profile_add_unit": (c_int, [c_void_p, POINTER(Unit), c_char_p, c_size_t]),
    "shoal_profile_add_output": (c_int, [c_void_p, c_uint32, c_uint32, c_uint64, c_char_p, c_size_t]),
    "shoal_profile_add_tie": (c_int, [c_void_p, POINTER(c_uint32), c_uint32, c_uint64, c_char_p, c_size_t]),
    "shoal_profile_name": (c_char_p, [c_void_p]),
    "shoal_profile_units": (c_uint32, [c_void_p]),
    "shoal_profile_unit": (c_int, [c_void_p, c_uint32, POINTER(Unit)]),
    "shoal_profile_find": (c_uint32, [c_void_p, c_char_p]),
    "shoal_profile_print": (c_int, [c_void_p, c_void_p]),
    "shoal_profile_read": (c_int, [c_char_p, c_size_t, POINTER(c_void_p), c_char_p, c_size_t]),
    "shoal_partition_create": (c_int, [c_void_p, c_void_p, POINTER(PartitionOptions), POINTER(c_void_p), c_char_p, c_size_t]),
    "shoal_partition_create_at": (c_int, [c_void_p, c_void_p, POINTER(PartitionOptions), POINTER(c_uint32), POINTER(c_void_p),
                                          c_char_p, c_size_t]),
    "shoal_partition_choose": (c_int, [c_void_p, POINTER(ScheduleOptions), POINTER(PartitionOptions), POINTER(c_void_p),
                                       POINTER(c_void_p), POINTER(c_int), c_char_p, c_size_t]),
    "shoal_partition_replicate": (c_int, [c_void_p, POINTER(ScheduleOptions), POINTER(PartitionOptions), POINTER(c_void_p),
                                          POINTER(c_void_p), POINTER(c_int), c_char_p, c_size_t]),
    "shoal_partition_free": (None, [c_void_p]),
    "shoal_partition_stages": (c_uint32, [c_void_p]),
    "shoal_partition_stage": (c_int, [c_void_p, c_uint32, POINTER(Stage)]),
    "shoal_partition_memory": (c_int, [c_void_p, c_uint32, POINTER(RankMemory)]),
    "shoal_partition_step_times": (c_int, [c_void_p, POINTER(PartitionTimes)]),
    "shoal_partition_add_sums": (c_int, [c_void_p, c_void_p, c_int, POINTER(c_void_p)]),
    "shoal_partition_reason": (c_char_p, [c_void_p, c_uint32]),
    "shoal_partition_method_name": (c_char_p, [c_int]),
    "shoal_pipeline_create": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(PipelineOptions), POINTER(c_void_p)]),
    "shoal_pipeline_free": (None, [c_void_p]),
    "shoal_pipeline_step": (c_int, [c_void_p, POINTER(PipelineCalls)]),
    "shoal_pipeline_forward": (c_int, [c_void_p, POINTER(PipelineCalls)]),
    "shoal_pipeline_failure": (c_int, [c_void_p, POINTER(Failure)]),
    "shoal_pipeline_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "shoal_pipeline_step_times": (c_int, [c_void_p, POINTER(PipelineTimes)]),
    "shoal_placement_locate": (c_int, [POINTER(Placement), c_int, POINTER(Coordinates), c_char_p, c_size_t]),
    "shoal_placement_group": (c_int, [POINTER(Placement), c_int, c_int, POINTER(c_int), c_size_t, POINTER(c_size_t), c_char_p,
                                      c_size_t]),
}
