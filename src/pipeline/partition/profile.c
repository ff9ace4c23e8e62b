/* Profiles: units, skips, ties. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/partition/partition.h"

enum shoal_status partition_refuse(struct partition_text text, enum shoal_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (text.at && text.bytes)
        vsnprintf(text.at, text.bytes, format, args);
    va_end(args);
    return status;
}

static enum shoal_status profile_full(struct partition_text text)
{
    return partition_refuse(text, SHOAL_ERR_MEMORY, "no memory for a larger profile");
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_profile_create(const char *name, struct shoal_profile **profile_out)
{
    if (!profile_out || (name && !profile_is_name(name)))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_profile *profile = calloc(1, sizeof *profile);
    char *copy = strdup(name ? name : "model");
    if (!profile || !copy) {
        free(profile);
        free(copy);
        return SHOAL_ERR_MEMORY;
    }
    profile->name = copy;
    *profile_out = profile;
    return SHOAL_OK;
}

void shoal_profile_free(struct shoal_profile *profile)
{
    if (!profile)
        return;
    for (uint32_t i = 0; i < profile->count; i++)
        free((char *)profile->units[i].name);
    for (size_t i = 0; i < profile->tie_count; i++)
        free(profile->ties[i].units);
    free(profile->units);
    free(profile->tied);
    free(profile->slots);
    free(profile->outputs);
    free(profile->ties);
    free(profile->name);
    free(profile);
}

/* ---- Names --------------------------------------------------------------------------------------------------------------- */

bool profile_is_name(const char *name)
{
    const size_t length = name ? strnlen(name, PROFILE_NAME_MAX + 1) : 0;
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return false;
    return length > 0 && length <= PROFILE_NAME_MAX;
}

/* FNV-1a */
static uint32_t profile_hash(const char *name)
{
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash;
}

/* Returns the slot of a name, or the free one where it belongs. The table has a free slot. */
static uint32_t slot_of(const struct shoal_profile *profile, const uint32_t *slots, uint32_t slot_count, const char *name)
{
    uint32_t slot = profile_hash(name) & (slot_count - 1);
    while (slots[slot] && strcmp(profile->units[slots[slot] - 1].name, name) != 0)
        slot = (slot + 1) & (slot_count - 1);
    return slot;
}

uint32_t shoal_profile_find(const struct shoal_profile *profile, const char *name)
{
    if (!profile || !name || !profile->slot_count)
        return SHOAL_PROFILE_UNITS_MAX;
    const uint32_t number = profile->slots[slot_of(profile, profile->slots, profile->slot_count, name)];
    return number ? number - 1 : SHOAL_PROFILE_UNITS_MAX;
}

/* Makes room for another unit, in the list and in the table. */
static bool profile_grow(struct shoal_profile *profile)
{
    if (profile->count < profile->room)
        return true;
    const uint32_t room = profile->room ? 2 * profile->room : 32, slot_count = 2 * room;
    struct shoal_unit *units = reallocarray(profile->units, room, sizeof *units);
    if (!units)
        return false;
    profile->units = units;
    uint64_t *tied = reallocarray(profile->tied, room, sizeof *tied);
    if (!tied)
        return false;
    profile->tied = tied;
    uint32_t *slots = calloc(slot_count, sizeof *slots);
    if (!slots)
        return false;
    for (uint32_t i = 0; i < profile->count; i++)
        slots[slot_of(profile, slots, slot_count, units[i].name)] = i + 1;
    free(profile->slots);
    profile->slots = slots;
    profile->slot_count = slot_count;
    profile->room = room;
    return true;
}

/* ---- Units --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_unit(const struct shoal_profile *profile, const struct shoal_unit *unit,
                                    struct partition_text text)
{
    const double times[] = {unit->forward, unit->input_gradient, unit->weight_gradient};
    const uint64_t sizes[] = {unit->parameter_bytes, unit->kept_bytes, unit->output_bytes};
    if (!profile_is_name(unit->name))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT,
                                "the name of unit %u is empty, longer than %d bytes, or has a control character",
                                profile->count, PROFILE_NAME_MAX);
    if (shoal_profile_find(profile, unit->name) != SHOAL_PROFILE_UNITS_MAX)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "there are two units %s", unit->name);
    if (profile->count == SHOAL_PROFILE_UNITS_MAX)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "more than %d units", SHOAL_PROFILE_UNITS_MAX);
    for (size_t i = 0; i < 3; i++)
        if (!(times[i] >= 0 && times[i] <= 1e15))
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "unit %s: a time of %g us is not in the range 0 to 1e15",
                                    unit->name, times[i]);
    if (unit->backward_is_halved && unit->input_gradient != unit->weight_gradient)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "unit %s: its backward pass is halved, but into %g and %g us",
                                unit->name, unit->input_gradient, unit->weight_gradient);
    for (size_t i = 0; i < 3; i++)
        if (sizes[i] > PROFILE_BYTES_MAX)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "unit %s: a size of %llu bytes is above 2^50", unit->name,
                                    (unsigned long long)sizes[i]);
    if (unit->stage < SHOAL_ANY_STAGE || unit->stage > 65535)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "unit %s is pinned to stage %d, which does not exist", unit->name,
                                unit->stage);
    return SHOAL_OK;
}

enum shoal_status shoal_profile_add_unit(struct shoal_profile *profile, const struct shoal_unit *unit, char *text,
                                         size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    struct shoal_unit own = SHOAL_UNIT_INIT;
    if (!profile || !shoal_struct_bytes(unit))
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "profile is NULL, or unit is not set: use SHOAL_UNIT_INIT");
    shoal_struct_copy_in(&own, unit, sizeof own);
    PARTITION_TRY(check_unit(profile, &own, why));
    char *name = strdup(own.name);
    if (!name || !profile_grow(profile)) {
        free(name);
        return profile_full(why);
    }
    own.name = name;
    profile->slots[slot_of(profile, profile->slots, profile->slot_count, name)] = profile->count + 1;
    profile->tied[profile->count] = 0;
    profile->units[profile->count++] = own;
    return SHOAL_OK;
}

/* ---- Skips and ties ------------------------------------------------------------------------------------------------------ */

enum shoal_status shoal_profile_add_output(struct shoal_profile *profile, uint32_t from, uint32_t to, uint64_t bytes,
                                           char *text, size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    if (!profile || from >= profile->count || to >= profile->count)
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "an output from unit %u to unit %u, but there are %u units", from, to,
                                profile ? profile->count : 0);
    if (to <= from)
        return partition_refuse(
            why, SHOAL_ERR_ARGUMENT,
            "a cycle: unit %s sends an output to unit %s, which runs %s. Make one unit of units that need each "
            "other",
            profile->units[from].name, profile->units[to].name, to < from ? "before it" : "at that time");
    if (bytes > PROFILE_BYTES_MAX)
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "unit %s: an output of %llu bytes is above 2^50",
                                profile->units[from].name, (unsigned long long)bytes);
    if (profile->output_count == profile->output_room) {
        const size_t room = profile->output_room ? 2 * profile->output_room : 16;
        struct profile_output *more = reallocarray(profile->outputs, room, sizeof *more);
        if (!more)
            return profile_full(why);
        profile->outputs = more;
        profile->output_room = room;
    }
    profile->outputs[profile->output_count++] = (struct profile_output){from, to, bytes};
    return SHOAL_OK;
}

static enum shoal_status check_tie(const struct shoal_profile *profile, const uint32_t *units, uint32_t count, uint64_t bytes,
                                   struct partition_text text)
{
    if (!profile || !units || count < 2)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "a tie has %u units, and needs two or more", units ? count : 0);
    for (uint32_t i = 0; i < count; i++) {
        if (units[i] >= profile->count)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "a tie has unit %u, but there are %u units", units[i],
                                    profile->count);
        if (i > 0 && units[i] <= units[i - 1])
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "units %s and %s of a tie are not in rising order",
                                    profile->units[units[i - 1]].name, profile->units[units[i]].name);
        const uint64_t free_bytes = profile->units[units[i]].parameter_bytes - profile->tied[units[i]];
        if (bytes > free_bytes)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT,
                                    "a tie shares %llu bytes, but unit %s has only %llu bytes of parameters for it",
                                    (unsigned long long)bytes, profile->units[units[i]].name, (unsigned long long)free_bytes);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_profile_add_tie(struct shoal_profile *profile, const uint32_t *units, uint32_t count, uint64_t bytes,
                                        char *text, size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    PARTITION_TRY(check_tie(profile, units, count, bytes, why));
    if (profile->tie_count == profile->tie_room) {
        const size_t room = profile->tie_room ? 2 * profile->tie_room : 4;
        struct profile_tie *more = reallocarray(profile->ties, room, sizeof *more);
        if (!more)
            return profile_full(why);
        profile->ties = more;
        profile->tie_room = room;
    }
    uint32_t *copy = calloc(count, sizeof *copy);
    if (!copy)
        return profile_full(why);
    memcpy(copy, units, count * sizeof *copy);
    for (uint32_t i = 0; i < count; i++)
        profile->tied[units[i]] += bytes;
    profile->ties[profile->tie_count++] = (struct profile_tie){copy, count, bytes};
    return SHOAL_OK;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

const char *shoal_profile_name(const struct shoal_profile *profile)
{
    return profile->name;
}

uint32_t shoal_profile_units(const struct shoal_profile *profile)
{
    return profile->count;
}

enum shoal_status shoal_profile_unit(const struct shoal_profile *profile, uint32_t number, struct shoal_unit *unit_out)
{
    if (!profile || number >= profile->count || !shoal_struct_bytes(unit_out))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_out(unit_out, &profile->units[number], sizeof *profile->units);
    return SHOAL_OK;
}
