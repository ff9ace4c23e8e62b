#include "base/compiler.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const char *shoal_version(void)
{
    return STRING(SHOAL_VERSION_MAJOR) "." STRING(SHOAL_VERSION_MINOR) "." STRING(SHOAL_VERSION_PATCH);
}

const char *shoal_status_text(enum shoal_status status)
{
    switch (status) {
#define STATUS_TEXT(name, number, text) \
    case SHOAL_##name:                  \
        return text;
        SHOAL_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "not a status of this version of Shoal";
}

const char *shoal_status_name(enum shoal_status status)
{
    switch (status) {
#define STATUS_NAME(name, number, text) \
    case SHOAL_##name:                  \
        return "SHOAL_" #name;
        SHOAL_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "SHOAL_?";
}

size_t shoal_type_bytes(enum shoal_type type)
{
    if ((unsigned)type >> 16)
        return 0;
    switch ((enum shoal_type)(type & 0xff)) {
#define TYPE_BYTES(name, number, bytes) \
    case SHOAL_##name:                  \
        return bytes;
        SHOAL_TYPE_LIST(TYPE_BYTES)
#undef TYPE_BYTES
    case SHOAL_TYPE_END:
        break;
    }
    return 0;
}
