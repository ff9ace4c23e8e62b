/* Sizes: the instance-type reference of karpenter-provider-aws, v1.12; NVIDIA's data sheets for DGX. Peaks: data sheets, dense.
 * Rates of PCIe and NVLink: what GPUs reach, as in `shoal sim --pcie` and `--nvlink`; the fifth generation of NVLink in
 * proportion to its nominal rate. */
#include "advise_shape.h"

#include <stdint.h>
#include <string.h>

#include "advise_gpus.h"
#include "tool.h"
#include "topology/limits.h"

enum { SHAPES_MAX = 64 };

#define GEN3 12
#define GEN4 24
#define GEN5 55
#define V100(count, gib) "V100", count, gib
#define V100_PEAKS 125, 15.7
#define A100_PEAKS 312, 19.5
#define H100_PEAKS 989, 67
#define B200_PEAKS 2250, 75
#define T4_PEAKS 65, 8.1
#define A10G_PEAKS 70, 31.2
#define L4_PEAKS 121, 30.3
#define L40S_PEAKS 362, 91.6

static const struct advise_shape shapes[] = {
    {"p3.2xlarge", "p3", V100(1, 16), 2.5, GEN3, 0, V100_PEAKS, 8, 61, true},
    {"p3.8xlarge", "p3", V100(4, 16), 10, GEN3, 120, V100_PEAKS, 32, 244, false},
    {"p3.16xlarge", "p3", V100(8, 16), 25, GEN3, 120, V100_PEAKS, 64, 488, false},
    {"p3dn.24xlarge", "p3dn", V100(8, 32), 100, GEN3, 120, V100_PEAKS, 96, 768, false},
    {"p4d.24xlarge", "p4d", "A100", 8, 40, 400, GEN4, 160, A100_PEAKS, 96, 1152, false},
    {"p4de.24xlarge", "p4de", "A100", 8, 80, 400, GEN4, 160, A100_PEAKS, 96, 1152, false},
    {"p5.4xlarge", "p5", "H100", 1, 80, 100, GEN5, 0, H100_PEAKS, 16, 256, false},
    {"p5.48xlarge", "p5", "H100", 8, 80, 3200, GEN5, 320, H100_PEAKS, 192, 2048, false},
    {"p5e.48xlarge", "p5e", "H200", 8, 141, 3200, GEN5, 320, H100_PEAKS, 192, 2048, false},
    {"p5en.48xlarge", "p5en", "H200", 8, 141, 3200, GEN5, 320, H100_PEAKS, 192, 2048, false},
    {"p6-b200.48xlarge", "p6-b200", "B200", 8, 179, 3200, GEN5, 640, B200_PEAKS, 192, 2048, false},
    {"p6-b300.48xlarge", "p6-b300", "B300", 8, 269, 6400, GEN5, 640, B200_PEAKS, 192, 4096, false},
    {"g4dn.xlarge", "g4dn", "T4", 1, 16, 5, GEN3, 0, T4_PEAKS, 4, 16, true},
    {"g4dn.12xlarge", "g4dn", "T4", 4, 16, 50, GEN3, 0, T4_PEAKS, 48, 192, false},
    {"g4dn.metal", "g4dn", "T4", 8, 16, 100, GEN3, 0, T4_PEAKS, 96, 384, false},
    {"g5.xlarge", "g5", "A10G", 1, 22.4, 2.5, GEN4, 0, A10G_PEAKS, 4, 16, true},
    {"g5.12xlarge", "g5", "A10G", 4, 22.4, 40, GEN4, 0, A10G_PEAKS, 48, 192, false},
    {"g5.48xlarge", "g5", "A10G", 8, 22.4, 100, GEN4, 0, A10G_PEAKS, 192, 768, false},
    {"g6.xlarge", "g6", "L4", 1, 22.4, 2.5, GEN4, 0, L4_PEAKS, 4, 16, true},
    {"g6.12xlarge", "g6", "L4", 4, 22.4, 40, GEN4, 0, L4_PEAKS, 48, 192, false},
    {"g6.48xlarge", "g6", "L4", 8, 22.4, 100, GEN4, 0, L4_PEAKS, 192, 768, false},
    {"g6e.xlarge", "g6e", "L40S", 1, 44.7, 2.5, GEN4, 0, L40S_PEAKS, 4, 32, true},
    {"g6e.48xlarge", "g6e", "L40S", 8, 44.7, 400, GEN4, 0, L40S_PEAKS, 192, 1536, false},
    {"dgx-1", "dgx-1", V100(8, 32), 400, GEN3, 120, V100_PEAKS, 40, 512, false},
    {"dgx-a100", "dgx-a100", "A100", 8, 80, 1600, GEN4, 160, A100_PEAKS, 128, 2048, false},
    {"dgx-h100", "dgx-h100", "H100", 8, 80, 3200, GEN5, 320, H100_PEAKS, 112, 2048, false},
    {"dgx-b200", "dgx-b200", "B200", 8, 179, 3200, GEN5, 640, B200_PEAKS, 112, 2048, false},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };
_Static_assert((int)SHAPES + 2 <= (int)SHAPES_MAX, "advise_shape_nearest() has room for all names");

static const char *bare(const char *name)
{
    return strncmp(name, "ml.", 3) ? name : name + 3;
}

const struct advise_shape *advise_shape_at(size_t i)
{
    return i < SHAPES ? &shapes[i] : NULL;
}

const struct advise_shape *advise_shape_find(const char *name)
{
    for (size_t i = 0; i < SHAPES; i++)
        if (!strcmp(shapes[i].name, bare(name)))
            return &shapes[i];
    return NULL;
}

const char *advise_shape_nearest(const char *name)
{
    const char *names[SHAPES_MAX] = {"this"};
    for (size_t i = 0; i < SHAPES; i++)
        names[i + 1] = shapes[i].name;
    return tool_word_nearest(bare(name), names);
}

const struct advise_shape *advise_shape_larger(const struct advise_shape *shape)
{
    for (size_t i = 0; i < SHAPES; i++)
        if (!strcmp(shapes[i].family, shape->family) && shapes[i].accelerators > shape->accelerators)
            return &shapes[i];
    return NULL;
}

/* Returns the first shape with such GPUs, or NULL. The driver names forms of a GPU that are joined by NVLink "SXM". */
static const struct advise_shape *shape_with(const char *gpu)
{
    for (size_t i = 0; i < SHAPES; i++)
        if (advise_gpu_is(gpu, shapes[i].accelerator))
            return &shapes[i];
    return NULL;
}

static void gpus_add(struct advise_shape *shape)
{
    static struct advise_gpus gpus; /* the shape points to the name */
    gpus = advise_gpus_find();
    if (!gpus.count)
        return;
    const struct advise_shape *known = shape_with(gpus.name);
    shape->accelerator = known ? known->accelerator : gpus.name;
    shape->accelerators = gpus.count;
    shape->memory_gib = gpus.memory_bytes / 0x1p30;
    shape->pcie_gb_s = known ? known->pcie_gb_s : GEN4;
    shape->tflop_s_16 = known ? known->tflop_s_16 : 0;
    shape->tflop_s_32 = known ? known->tflop_s_32 : 0;
    for (size_t i = 0; strstr(gpus.name, "SXM") && gpus.count > 1 && known && i < SHAPES; i++)
        if (!strcmp(shapes[i].accelerator, known->accelerator) && shapes[i].nvlink_gb_s > 0)
            shape->nvlink_gb_s = shapes[i].nvlink_gb_s;
}

struct advise_shape advise_shape_here(void)
{
    const uint64_t bytes = shoal_topology_memory_left();
    const int cores = shoal_topology_cores();
    struct advise_shape shape = {
        .name = "this", .family = "this", .cores = (size_t)cores, .host_gib = bytes == UINT64_MAX ? 0 : (double)bytes / 0x1p30};
    gpus_add(&shape);
    return shape;
}
