/* Names and arguments of the kernels for GPUs, for the code that launches them and for the kernels themselves
 * (gpu_kernel_body.h). Addresses are numbers, so that a structure is the same on both sides. No state. */
#ifndef SHOAL_DEVICE_CUDA_GPU_KERNELS_H
#define SHOAL_DEVICE_CUDA_GPU_KERNELS_H

#include "base/compiler.h"

#define SHOAL_GPU_THREADS 512         /* in each block */
#define SHOAL_GPU_BLOCKS_MAX 8        /* in a launch: it uses at most this many multiprocessors */
#define SHOAL_GPU_PACKET_BYTES 16     /* loaded at once from each source by a thread of a reduction */
#define SHOAL_GPU_ELEMENTS 8          /* processed at once by a thread of any other kernel */
#define SHOAL_GPU_QUANTIZED_BLOCK 256 /* elements that share a scale, as in include/shoal/gradients.h */
#define SHOAL_GPU_SQUARED_CHUNK 4096  /* elements whose squares are added separately, as in fusion/codec/gradient_kernels.h */
#define SHOAL_GPU_SQUARED_TEAM 16     /* threads that add a chunk: one for each partial sum */

/* reduce_<TYPE>_<OP>, for each type and operator of cpu/kernel_lists.h. dest[i] = op over sources[0..source_count-1][i], in
 * that order. The elements are `head` before the first packet, then `packets`, whose addresses are multiples of their size in
 * all arrays, then `tail`. argument: see shoal_reduce_fn. */
struct shoal_gpu_reduce_args {
    uint64_t dest;
    uint64_t sources[8];
    uint64_t head, packets, tail;
    double argument;
    int64_t source_count;
};

/* to_<type>, from_<type>: casts source * factor between float32 and a 16-bit type. */
struct shoal_gpu_cast_args {
    uint64_t dest, source;
    uint64_t count;
    float factor;
};

/* quantize: for each block, u = source + error (error 0: none), scale = the largest |u| / 127, values = u / scale to nearest
 * even, and error = u - values * scale. NaN or infinity in a block makes its scale NaN and its error zero. */
struct shoal_gpu_quantize_args {
    uint64_t values, scales, source, error;
    uint64_t count;
};

/* dequantize: dest = values * scale * factor. With `adds` this is added to dest. */
struct shoal_gpu_dequantize_args {
    uint64_t dest, values, scales;
    uint64_t count;
    float factor;
    int32_t adds;
};

/* square_<type>: two float64 numbers for each chunk. The first is the sum of the squares of value * factor, added in the order
 * of the processor's kernel. The second is 0, or NaN if a value is not finite. */
struct shoal_gpu_square_args {
    uint64_t sums, source;
    uint64_t count;
    double factor;
};

/* kernel, its arguments */
#define SHOAL_GPU_KERNEL_LIST(X)              \
    X(to_bfloat16, shoal_gpu_cast_args)       \
    X(to_float16, shoal_gpu_cast_args)        \
    X(from_bfloat16, shoal_gpu_cast_args)     \
    X(from_float16, shoal_gpu_cast_args)      \
    X(quantize, shoal_gpu_quantize_args)      \
    X(dequantize, shoal_gpu_dequantize_args)  \
    X(square_float32, shoal_gpu_square_args)  \
    X(square_float64, shoal_gpu_square_args)  \
    X(square_bfloat16, shoal_gpu_square_args) \
    X(square_float16, shoal_gpu_square_args)

/* The code in kernels.ptx.xz, decompressed, as a NUL-terminated text. */
extern const char shoal_gpu_kernels_ptx[];

#endif
