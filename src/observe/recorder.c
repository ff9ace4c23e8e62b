#include "observe/recorder.h"

#include <stdlib.h>
#include <string.h>

enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder)
{
    recorder->next = 0;
    recorder->records = calloc(SHOAL_RECORDS, sizeof *recorder->records);
    return recorder->records ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void shoal_recorder_fini(struct shoal_recorder *recorder)
{
    free(recorder->records);
    recorder->records = NULL;
}

void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy)
{
    copy->next = recorder->next;
    memcpy(copy->records, recorder->records, SHOAL_RECORDS * sizeof *copy->records);
}

static void print_time(FILE *out, const char *name, uint64_t ticks, uint64_t origin, double ns_per_tick)
{
    if (ticks)
        fprintf(out, ",\"%s\":%.3f", name, (double)(int64_t)(ticks - origin) * ns_per_tick / 1e3);
    else
        fprintf(out, ",\"%s\":null", name);
}

static const char *type_name(uint8_t type)
{
    switch (type) {
#define TYPE_NAME(name, number, bytes) \
    case SHOAL_##name:                 \
        return #name;
        SHOAL_TYPE_LIST(TYPE_NAME)
#undef TYPE_NAME
    default:
        return "?";
    }
}

static const char *op_name(uint8_t op)
{
    switch (op) {
#define OP_NAME(name, number) \
    case SHOAL_##name:        \
        return #name;
        SHOAL_OP_LIST(OP_NAME)
#undef OP_NAME
    default:
        return "?";
    }
}

void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out)
{
    const uint64_t first = recorder->next > SHOAL_RECORDS ? recorder->next - SHOAL_RECORDS : 0;
    uint64_t origin = 0;
    for (uint64_t i = first; i < recorder->next; i++) {
        const struct shoal_record *r = &recorder->records[i % SHOAL_RECORDS];
        origin = origin ? origin : r->posted;
        fprintf(out,
                "{\"comm\":\"%s\",\"rank\":%d,\"sequence\":%llu,\"kind\":\"%s\",\"algorithm\":\"%s\",\"count\":%llu,"
                "\"type\":\"%s\",\"op\":\"%s\",\"root\":%d,\"tag\":%u,\"status\":\"%s\"",
                comm, rank, (unsigned long long)r->sequence, r->kind, r->algorithm, (unsigned long long)r->count,
                type_name(r->type), op_name(r->op), r->root, r->trace_tag, shoal_status_name((enum shoal_status)r->status));
        print_time(out, "posted_us", r->posted, origin, ns_per_tick);
        print_time(out, "arrived_us", r->arrived, origin, ns_per_tick);
        print_time(out, "done_us", r->done, origin, ns_per_tick);
        fprintf(out, ",\"last_rank\":%d,\"late_us\":%.3f,\"step\":%d,\"peer\":%d}\n", r->last_rank,
                (double)r->late * ns_per_tick / 1e3, r->step, r->peer);
    }
}
