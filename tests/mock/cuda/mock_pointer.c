/* Attributes of pointers. */
#include <string.h>

#include "mock_driver.h"

struct looked_up {
    const struct mock_region *region; /* NULL: the driver does not know the memory */
    int attribute;
    void *value;
};

static void put(const struct looked_up *up, const void *value, size_t bytes)
{
    memcpy(up->value, value, bytes);
}

/* Writes only the first byte, as the driver may. */
static void put_bool(const struct looked_up *up, bool value)
{
    const unsigned char byte = value;
    put(up, &byte, sizeof byte);
}

static void put_context(const struct looked_up *up)
{
    const struct mock_context *context = up->region ? up->region->context : NULL;
    const shoal_cu_context handle = context ? context->handle : NULL;
    put(up, &handle, sizeof handle);
}

static void put_memory_type(const struct looked_up *up)
{
    const bool is_host = up->region && up->region->kind == MOCK_HOST_MEMORY;
    const unsigned type = !up->region ? 0 : is_host ? SHOAL_CU_MEMORY_HOST : SHOAL_CU_MEMORY_DEVICE;
    put(up, &type, sizeof type);
}

static void put_device(const struct looked_up *up)
{
    const int ordinal = up->region ? up->region->device : -2; /* CU_DEVICE_INVALID */
    put(up, &ordinal, sizeof ordinal);
}

static void put_number(const struct looked_up *up, uint64_t number)
{
    const uint64_t value = up->region ? number : 0;
    put(up, &value, sizeof value);
}

static bool put_attribute(const struct looked_up *up)
{
    const struct mock_region *region = up->region, none = {.at = 0};
    if (!region)
        region = &none;
    switch (up->attribute) {
    case SHOAL_CU_POINTER_CONTEXT:
        put_context(up);
        return true;
    case SHOAL_CU_POINTER_MEMORY_TYPE:
        put_memory_type(up);
        return true;
    case SHOAL_CU_POINTER_BUFFER_ID:
        put_number(up, region->buffer);
        return true;
    case SHOAL_CU_POINTER_IS_MANAGED:
        put_bool(up, up->region && region->kind == MOCK_MANAGED_MEMORY);
        return true;
    case SHOAL_CU_POINTER_DEVICE:
        put_device(up);
        return true;
    case SHOAL_CU_POINTER_LEGACY_IPC:
        put_bool(up, up->region && region->kind == MOCK_PLAIN_MEMORY);
        return true;
    case SHOAL_CU_POINTER_RANGE_START:
        put_number(up, region->at);
        return true;
    case SHOAL_CU_POINTER_RANGE_BYTES:
        put_number(up, region->bytes);
        return true;
    case SHOAL_CU_POINTER_HANDLE_TYPES:
        put_number(up, (uint64_t)region->handle_types);
        return true;
    default:
        return false;
    }
}

/* Memory that the driver does not know is not an error. */
shoal_cu_result mock_pointer_attributes(unsigned count, int *attributes, void **values, shoal_cu_address at)
{
    ENTER("cuPointerGetAttributes", 0);
    struct looked_up up = {.region = mock_region_find(at)};
    if (!up.region)
        up.region = mock_host_find(at);
    for (unsigned i = 0; i < count; i++) {
        up.attribute = attributes[i];
        up.value = values[i];
        if (!put_attribute(&up))
            return SHOAL_CU_INVALID_VALUE;
    }
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_address_range(shoal_cu_address *base, size_t *bytes, shoal_cu_address at)
{
    ENTER("cuMemGetAddressRange", MOCK_CURRENT);
    const struct mock_region *region = mock_region_find(at);
    if (!region)
        return SHOAL_CU_NOT_FOUND;
    if (base)
        *base = region->at;
    if (bytes)
        *bytes = region->bytes;
    return SHOAL_CU_SUCCESS;
}
