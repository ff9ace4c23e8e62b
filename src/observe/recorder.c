#include "observe/recorder.h"

#include <stdlib.h>
#include <string.h>

enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder)
{
    memset(recorder, 0, sizeof *recorder);
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
    copy->identity = recorder->identity;
    memcpy(copy->records, recorder->records, SHOAL_RECORDS * sizeof *copy->records);
}
