/* The functions of TensorFlow's C API that the operations need (tensorflow/c/ops.h, kernels.h, tf_tensor.h, tf_status.h). They
 * are declared here and looked up in the running process. So the library is built without TensorFlow, and one build works with
 * every version that has these functions. */
#ifndef SHOAL_TENSORFLOW_TF_API_H
#define SHOAL_TENSORFLOW_TF_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_AsyncOpKernelDoneCallback TF_AsyncOpKernelDoneCallback;

typedef struct {
    const char *data;
    size_t length;
} TF_StringView;

/* enum TF_DataType */
enum tf_type {
    TF_FLOAT = 1,
    TF_DOUBLE = 2,
    TF_INT32 = 3,
    TF_UINT8 = 4,
    TF_INT8 = 6,
    TF_INT64 = 9,
    TF_BFLOAT16 = 14,
    TF_HALF = 19,
};

/* enum TF_Code */
enum tf_code {
    TF_OK = 0,
    TF_INVALID_ARGUMENT = 3,
    TF_DEADLINE_EXCEEDED = 4,
    TF_PERMISSION_DENIED = 7,
    TF_RESOURCE_EXHAUSTED = 8,
    TF_FAILED_PRECONDITION = 9,
    TF_ABORTED = 10,
    TF_UNIMPLEMENTED = 12,
    TF_INTERNAL = 13,
};

typedef void (*tf_deallocator)(void *data, size_t bytes, void *arg);
typedef void (*tf_shape_fn)(TF_ShapeInferenceContext *context, TF_Status *status);
typedef void *(*tf_create_fn)(TF_OpKernelConstruction *construction);
typedef void (*tf_compute_fn)(void *kernel, TF_OpKernelContext *context);
typedef void (*tf_compute_async_fn)(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done);
typedef void (*tf_delete_fn)(void *kernel);

/* Result, name without TF_, arguments. */
#define TF_API_LIST(X)                                                                                                         \
    X(TF_Status *, NewStatus, (void))                                                                                          \
    X(void, DeleteStatus, (TF_Status *))                                                                                       \
    X(void, SetStatus, (TF_Status *, int code, const char *text))                                                              \
    X(int, GetCode, (const TF_Status *))                                                                                       \
    X(const char *, Message, (const TF_Status *))                                                                              \
    X(TF_Tensor *, NewTensor,                                                                                                  \
      (int type, const int64_t *dims, int rank, void *data, size_t bytes, tf_deallocator deallocator, void *arg))              \
    X(void, DeleteTensor, (TF_Tensor *))                                                                                       \
    X(int, TensorType, (const TF_Tensor *))                                                                                    \
    X(int, NumDims, (const TF_Tensor *))                                                                                       \
    X(int64_t, Dim, (const TF_Tensor *, int index))                                                                            \
    X(size_t, TensorByteSize, (const TF_Tensor *))                                                                             \
    X(void *, TensorData, (const TF_Tensor *))                                                                                 \
    X(size_t, DataTypeSize, (int type))                                                                                        \
    X(TF_OpDefinitionBuilder *, NewOpDefinitionBuilder, (const char *name))                                                    \
    X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *text))                                         \
    X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *text))                                        \
    X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *text))                                          \
    X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                                                \
    X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder *, tf_shape_fn))                             \
    X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                                     \
    X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *))                                                   \
    X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext *, int index, TF_ShapeHandle *, TF_Status *))             \
    X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext *, int index, TF_ShapeHandle *, TF_Status *))            \
    X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))                                   \
    X(TF_ShapeHandle *, ShapeInferenceContextScalar, (TF_ShapeInferenceContext *))                                             \
    X(TF_ShapeHandle *, NewShapeHandle, (void))                                                                                \
    X(void, DeleteShapeHandle, (TF_ShapeHandle *))                                                                             \
    X(TF_KernelBuilder *, NewKernelBuilder, (const char *name, const char *device, tf_create_fn, tf_compute_fn, tf_delete_fn)) \
    X(TF_KernelBuilder *, NewAsyncKernelBuilder,                                                                               \
      (const char *name, const char *device, tf_create_fn, tf_compute_async_fn, tf_delete_fn))                                 \
    X(void, RegisterKernelBuilder, (const char *name, TF_KernelBuilder *, TF_Status *))                                        \
    X(TF_StringView, OpKernelConstruction_GetName, (TF_OpKernelConstruction *))                                                \
    X(bool, OpKernelConstruction_HasAttr, (TF_OpKernelConstruction *, const char *name, TF_Status *))                          \
    X(void, OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction *, const char *name, int64_t *value, TF_Status *))     \
    X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                            \
    X(int64_t, StepId, (TF_OpKernelContext *))                                                                                 \
    X(int, NumInputs, (TF_OpKernelContext *))                                                                                  \
    X(void, GetInput, (TF_OpKernelContext *, int index, TF_Tensor **, TF_Status *))                                            \
    X(void, SetOutput, (TF_OpKernelContext *, int index, const TF_Tensor *, TF_Status *))                                      \
    X(TF_Tensor *, AllocateOutput,                                                                                             \
      (TF_OpKernelContext *, int index, int type, const int64_t *dims, int rank, size_t bytes, TF_Status *))                   \
    X(TF_Tensor *, ForwardInputOrAllocateOutput,                                                                               \
      (TF_OpKernelContext *, const int *inputs, int input_count, int index, const int64_t *dims, int rank, int *forwarded,     \
       TF_Status *))                                                                                                           \
    X(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                                      \
    X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback *))

struct tf_api {
#define TF_API_MEMBER(result, name, arguments) result(*name) arguments;
    TF_API_LIST(TF_API_MEMBER)
#undef TF_API_MEMBER
};

/* The functions, once tf_api_load has returned true. */
extern struct tf_api tf;

/* Finds all functions in the TensorFlow of this process. Returns false with one line in `error` if something is missing. */
bool tf_api_load(char *error, size_t error_bytes);

#endif
