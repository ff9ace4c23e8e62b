#include "base/node_list.h"

#include <string.h>

bool shoal_node_list_first(const char *list, char *node_out, size_t bytes)
{
    size_t used = 0;
    while (*list && *list != ',') {
        const bool is_range = *list == '[';
        list += is_range;
        const size_t part = strcspn(list, is_range ? "-,]" : "[,");
        if (part >= bytes - used)
            return false;
        memcpy(node_out + used, list, part);
        used += part;
        list += is_range ? strcspn(list, "]") : part;
        list += is_range && *list == ']';
    }
    node_out[used] = 0;
    return used > 0;
}
