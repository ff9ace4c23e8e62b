/* Registers the operations with TensorFlow when the library is loaded. Python calls shoal_tensorflow_problem to check the
 * result. */
#include <stdio.h>

#include "averager.h"
#include "collectives.h"
#include "kernel.h"
#include "tf_api.h"

#define WORDS_MAX 8

/* Why nothing was registered; "" if all was. */
static char problem[256];

__attribute__((visibility("default"))) const char *shoal_tensorflow_problem(void);

const char *shoal_tensorflow_problem(void)
{
    return problem;
}

/* ---- Shapes -------------------------------------------------------------------------------------------------------------- */

static void set_scalar(TF_ShapeInferenceContext *context, int index, TF_Status *status)
{
    TF_ShapeHandle *const scalar = tf.ShapeInferenceContextScalar(context);
    tf.ShapeInferenceContextSetOutput(context, index, scalar, status);
    tf.DeleteShapeHandle(scalar);
}

static void copy_shapes(TF_ShapeInferenceContext *context, int count, TF_Status *status)
{
    for (int i = 0; i < count && tf.GetCode(status) == TF_OK; i++) {
        TF_ShapeHandle *const shape = tf.NewShapeHandle();
        tf.ShapeInferenceContextGetInput(context, i, shape, status);
        if (tf.GetCode(status) == TF_OK)
            tf.ShapeInferenceContextSetOutput(context, i, shape, status);
        tf.DeleteShapeHandle(shape);
    }
}

/* Inputs: N tensors. Outputs: N tensors of the same shapes, and a handle. */
static void shape_of_start(TF_ShapeInferenceContext *context, TF_Status *status)
{
    const int count = (int)tf.ShapeInferenceContextNumInputs(context);
    copy_shapes(context, count, status);
    set_scalar(context, count, status);
}

/* Inputs: N tensors and a handle. Outputs: N tensors of the same shapes. */
static void shape_of_finish(TF_ShapeInferenceContext *context, TF_Status *status)
{
    copy_shapes(context, (int)tf.ShapeInferenceContextNumInputs(context) - 1, status);
}

/* Leaves the shapes unknown; Python sets what is known of them. */
static void shape_unknown(TF_ShapeInferenceContext *context, TF_Status *status)
{
    tf.ShapeInferenceContextSetUnknownShape(context, status);
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

#define ANY \
    "{float, double, half, bfloat16, int8, uint8, int16, uint16, int32, uint32, int64, uint64, bool, complex64, complex128}"
#define REDUCED "{float, double, half, bfloat16, int8, uint8, int32, int64}"
#define REAL "{float, double, half, bfloat16}"

struct operation {
    const char *name;
    const char *inputs[WORDS_MAX];
    const char *outputs[WORDS_MAX];
    const char *attributes[WORDS_MAX];
    bool is_stateful;
    tf_shape_fn shape;
    tf_compute_fn compute; /* compute or compute_async is set */
    tf_compute_async_fn compute_async;
};

static const struct operation operations[] = {
    {"ShoalAllreduceStart",
     {"inputs: N * T"},
     {"pending: N * T", "handle: int64"},
     {"N: int >= 1", "T: " REDUCED, "operator: int", "world: int = 0"},
     true,
     shape_of_start,
     allreduce_start,
     NULL},
    {"ShoalBroadcastStart",
     {"inputs: N * T"},
     {"pending: N * T", "handle: int64"},
     {"N: int >= 1", "T: " ANY, "root: int", "world: int = 0"},
     true,
     shape_of_start,
     broadcast_start,
     NULL},
    /* The input "rows" describes each rank, either by its number of rows or by its tensor's rank and first dimensions, which
     * must agree except for the first one. If it is empty, all ranks have tensors of one shape, and the result stacks them. */
    {"ShoalAllgatherStart",
     {"input: T", "rows: int64"},
     {"pending: T", "handle: int64"},
     {"T: " ANY, "world: int = 0"},
     true,
     shape_unknown,
     allgather_start,
     NULL},
    {"ShoalReduceScatterStart",
     {"input: T", "rows: int64"},
     {"pending: T", "handle: int64"},
     {"T: " REDUCED, "operator: int", "world: int = 0"},
     true,
     shape_unknown,
     reduce_scatter_start,
     NULL},
    {"ShoalAlltoallStart",
     {"input: T", "splits: int64", "received_splits: int64"},
     {"pending: T", "handle: int64"},
     {"T: " ANY, "world: int = 0"},
     true,
     shape_unknown,
     alltoall_start,
     NULL},
    {"ShoalGradientStart",
     {"input: T"},
     {"pending: T", "handle: int64"},
     {"T: " REAL, "reducer: int", "index: int", "marks: int", "world: int = 0"},
     true,
     shape_of_start,
     gradient_start,
     NULL},
    {"ShoalGradientsNone", {0}, {0}, {"reducer: int", "world: int = 0"}, true, shape_unknown, NULL, gradients_none},
    {"ShoalFinish",
     {"pending: N * T", "handle: int64"},
     {"outputs: N * T"},
     {"N: int >= 1", "T: " ANY},
     false,
     shape_of_finish,
     NULL,
     finish},
    {"ShoalBarrier", {0}, {0}, {"world: int = 0"}, true, shape_unknown, NULL, barrier},
};

static void define(const struct operation *operation, TF_Status *status)
{
    TF_OpDefinitionBuilder *const builder = tf.NewOpDefinitionBuilder(operation->name);
    for (int i = 0; i < WORDS_MAX && operation->attributes[i]; i++)
        tf.OpDefinitionBuilderAddAttr(builder, operation->attributes[i]);
    for (int i = 0; i < WORDS_MAX && operation->inputs[i]; i++)
        tf.OpDefinitionBuilderAddInput(builder, operation->inputs[i]);
    for (int i = 0; i < WORDS_MAX && operation->outputs[i]; i++)
        tf.OpDefinitionBuilderAddOutput(builder, operation->outputs[i]);
    if (operation->is_stateful) /* TensorFlow 2.16 to 2.21 treat false as true */
        tf.OpDefinitionBuilderSetIsStateful(builder, true);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, operation->shape);
    tf.RegisterOpDefinition(builder, status);
}

static void provide(const struct operation *operation, TF_Status *status)
{
    TF_KernelBuilder *const builder =
        operation->compute
            ? tf.NewKernelBuilder(operation->name, "CPU", kernel_create, operation->compute, kernel_delete)
            : tf.NewAsyncKernelBuilder(operation->name, "CPU", kernel_create, operation->compute_async, kernel_delete);
    tf.RegisterKernelBuilder(operation->name, builder, status);
}

__attribute__((constructor)) static void register_operations(void)
{
    if (!tf_api_load(problem, sizeof problem))
        return;
    TF_Status *const status = tf.NewStatus();
    for (size_t i = 0; i < sizeof operations / sizeof *operations && !problem[0]; i++) {
        define(&operations[i], status);
        if (tf.GetCode(status) == TF_OK)
            provide(&operations[i], status);
        if (tf.GetCode(status) != TF_OK)
            snprintf(problem, sizeof problem, "TensorFlow does not take the operation %s: %s", operations[i].name,
                     tf.Message(status));
    }
    tf.DeleteStatus(status);
}
