#include "fusion/reducer/compute.h"

#include <string.h>

#include "device/gpu_packer.h"
#include "fusion/reducer/reducer_device.h"

static bool is_float16(const struct shoal_reducer *reducer)
{
    return reducer->options.compression == SHOAL_COMPRESS_FLOAT16;
}

static enum shoal_type half_of(const struct shoal_reducer *reducer)
{
    return is_float16(reducer) ? SHOAL_FLOAT16 : SHOAL_BFLOAT16;
}

enum shoal_status fusion_narrow(const struct shoal_reducer *reducer, size_t buffer, uint16_t *dest, const float *source,
                                size_t count, float factor)
{
    if (reducer->device)
        return shoal_gpu_packer_narrow(fusion_device_packer(reducer), fusion_device_lane(buffer), half_of(reducer), dest,
                                       source, count, factor);
    fusion_wide_narrow(fusion_wide(reducer), is_float16(reducer), dest, source, count, factor);
    return SHOAL_OK;
}

enum shoal_status fusion_widen(const struct shoal_reducer *reducer, size_t buffer, float *dest, const uint16_t *source,
                               size_t count)
{
    if (reducer->device)
        return shoal_gpu_packer_widen(fusion_device_packer(reducer), fusion_device_lane(buffer), half_of(reducer), dest, source,
                                      count, 1);
    fusion_wide_widen(fusion_wide(reducer), is_float16(reducer), dest, source, count, 1);
    return SHOAL_OK;
}

enum shoal_status fusion_quantize(const struct shoal_reducer *reducer, size_t buffer, int8_t *values, float *scales,
                                  const float *source, float *error, size_t count)
{
    if (reducer->device)
        return shoal_gpu_packer_quantize(fusion_device_packer(reducer), fusion_device_lane(buffer), values, scales, source,
                                         error, count);
    fusion_wide_quantize(fusion_wide(reducer), values, scales, source, error, count);
    return SHOAL_OK;
}

enum shoal_status fusion_dequantize(const struct shoal_reducer *reducer, size_t buffer, float *dest, const int8_t *values,
                                    const float *scales, size_t count, float factor, bool adds)
{
    if (reducer->device)
        return shoal_gpu_packer_dequantize(fusion_device_packer(reducer), fusion_device_lane(buffer), dest, values, scales,
                                           count, factor, adds);
    fusion_wide_dequantize(fusion_wide(reducer), dest, values, scales, count, factor, adds);
    return SHOAL_OK;
}

enum shoal_status fusion_save(const struct shoal_reducer *reducer, size_t buffer, char *to, const float *from, size_t count)
{
    if (reducer->device)
        return shoal_gpu_packer_fetch(fusion_device_packer(reducer), fusion_device_lane(buffer), to, from,
                                      count * sizeof *from);
    memcpy(to, from, count * sizeof *from);
    return SHOAL_OK;
}

enum shoal_status fusion_restore(const struct shoal_reducer *reducer, size_t buffer, float *to, const char *from, size_t count)
{
    if (reducer->device)
        return shoal_gpu_packer_store(fusion_device_packer(reducer), fusion_device_lane(buffer), to, from, count * sizeof *to);
    memcpy(to, from, count * sizeof *to);
    return SHOAL_OK;
}

enum shoal_status fusion_settle(const struct shoal_reducer *reducer)
{
    return reducer->device ? shoal_gpu_packer_settle(fusion_device_packer(reducer)) : SHOAL_OK;
}
