/* The machines that `shoal advise` knows by name, and this machine. Static data; advise_shape_here() reads kernel files, and
 * asks CUDA's driver. */
#ifndef SHOAL_TOOLS_ADVISE_SHAPE_H
#define SHOAL_TOOLS_ADVISE_SHAPE_H

#include <stdbool.h>
#include <stddef.h>

struct advise_shape {
    const char *name, *family; /* shapes of a family differ only in size */
    const char *accelerator;   /* NULL: workers compute on cores */
    size_t accelerators;
    double memory_gib;             /* of an accelerator, as its driver reports it */
    double network_gbit;           /* of the machine */
    double pcie_gb_s;              /* between an accelerator and host memory, each way; 0: no accelerator */
    double nvlink_gb_s;            /* between the accelerators, of each, each way; 0: they have only PCIe */
    double tflop_s_16, tflop_s_32; /* peak of an accelerator, dense, with 16 bits and with float32; 0: not known */
    size_t cores;                  /* virtual ones, as sold; cores of a DGX */
    double host_gib;
    bool is_baseline; /* the network's rate is a guaranteed one, as for small sizes; else a peak */
};

/* Finds a shape by its name, with or without "ml." before it. Returns NULL if it is not known. */
const struct advise_shape *advise_shape_find(const char *name);

/* Returns the shape whose name is most similar, or NULL. */
const char *advise_shape_nearest(const char *name);

/* Returns the next larger shape of the same family, or NULL. */
const struct advise_shape *advise_shape_larger(const struct advise_shape *shape);

/* Returns shape i, or NULL after the last one. */
const struct advise_shape *advise_shape_at(size_t i);

/* Describes this machine: the cores, memory and GPUs that this process may use. Its network is not known: 0. Peaks and the rate
 * of PCIe are those of a known shape with such GPUs. Main thread: the name of an unknown GPU is in static storage. */
struct advise_shape advise_shape_here(void);

#endif
