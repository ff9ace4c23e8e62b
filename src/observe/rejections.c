#include "observe/rejections.h"

static const struct {
    const char *name, *text;
} rows[SHOAL_REJECTIONS] = {
    [SHOAL_REJECTED_SHORT] = {"rejected_short", "a message too short for a header"},
    [SHOAL_REJECTED_UNKNOWN] = {"rejected_unknown", "a message of an unknown sender"},
    [SHOAL_REJECTED_FORGED] = {"rejected_forged", "a message with a wrong authentication code"},
    [SHOAL_REJECTED_REPLAYED] = {"rejected_replayed", "a message that was received before"},
    [SHOAL_REJECTED_FOREIGN] = {"rejected_foreign", "a message in the name of another rank"},
    [SHOAL_REJECTED_IMMEDIATE] = {"rejected_immediate", "a write's immediate that names no expected increment"},
    [SHOAL_REJECTED_UNEXPECTED] = {"rejected_unexpected", "more messages than allowed for a communicator that is not made yet"},
    [SHOAL_REJECTED_BROKEN] = {"rejected_broken", "a receive that failed"},
};

const char *shoal_rejection_name(enum shoal_rejection why)
{
    return rows[why].name;
}

const char *shoal_rejection_text(enum shoal_rejection why)
{
    return rows[why].text;
}

uint64_t shoal_rejections_total(const struct shoal_rejections *rejections)
{
    uint64_t total = 0;
    for (int i = 0; i < SHOAL_REJECTIONS; i++)
        total += rejections->counts[i];
    return total;
}
