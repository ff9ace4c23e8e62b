/* Names and arguments of the kernels for GPUs, for those who launch them and for the kernels themselves
 * (gpu_kernel_body.h). Addresses are numbers, so that a structure is the same on both sides. No state. */
#ifndef SHOAL_DEVICE_CUDA_GPU_KERNELS_H
#define SHOAL_DEVICE_CUDA_GPU_KERNELS_H

#include "base/compiler.h"

#define SHOAL_GPU_THREADS 512         /* of each block */
#define SHOAL_GPU_BLOCKS_MAX 8        /* of a launch: so many multiprocessors at most */
#define SHOAL_GPU_PACKET_BYTES 16     /* that a thread of a reduction loads at once from each source */
#define SHOAL_GPU_ELEMENTS 8          /* that a thread of any other kernel has in work at once */
#define SHOAL_GPU_QUANTIZED_BLOCK 256 /* elements with a scale of their own, as in include/shoal/gradients.h */
#define SHOAL_GPU_SQUARED_CHUNK 4096  /* elements whose squares are added up apart, as in fusion/gradient_kernels.h */
#define SHOAL_GPU_SQUARED_TEAM 16     /* threads that do so: as many as there are partial sums */

/* reduce_<TYPE>_<OP>: of each type and operator of cpu/kernel_lists.h. dest[i] = op over sources[0..source_count-1][i], in that
 * order. The elements: `head` before the first packet, then `packets`, whose addresses are multiples of their size in all
 * arrays, then `tail`. argument: as of shoal_reduce_fn. */
struct shoal_gpu_reduce_args {
    uint64_t dest;
    uint64_t sources[8];
    uint64_t head, packets, tail;
    double argument;
    int64_t source_count;
};

/* to_<type>, from_<type>: between float32 and a 16-bit type, of source * factor. */
struct shoal_gpu_cast_args {
    uint64_t dest, source;
    uint64_t count;
    float factor;
};

/* quantize: for each block u = source + error (0: none), its scale = the largest |u| / 127, values = u / scale to nearest even,
 * and error = u - values * scale. NaN or infinity in a block makes its scale NaN, its error zero. */
struct shoal_gpu_quantize_args {
    uint64_t values, scales, source, error;
    uint64_t count;
};

/* dequantize: dest = values * scale * factor, or dest + that where `adds`. */
struct shoal_gpu_dequantize_args {
    uint64_t dest, values, scales;
    uint64_t count;
    float factor;
    int32_t adds;
};

/* square_<type>: for each chunk two float64 numbers: the squares of its values, of which each is multiplied by factor before,
 * added up as by the processor's kernel; and 0, or NaN where a value is not finite. */
struct shoal_gpu_square_args {
    uint64_t sums, source;
    uint64_t count;
    double factor;
};

/* kernel, what it takes */
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

/* kernels.ptx, a text with an end. */
extern const char shoal_gpu_kernels_ptx[];

#endif
