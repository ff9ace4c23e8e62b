/* Messages that an endpoint received and rejected, by reason. The network counts (transport/fabric/network.h), the flight
 * recorder prints. Nothing that is counted here has changed anything else. */
#ifndef SHOAL_OBSERVE_REJECTIONS_H
#define SHOAL_OBSERVE_REJECTIONS_H

#include "base/compiler.h"

enum shoal_rejection {
    SHOAL_REJECTED_SHORT,      /* messages that are too short for a header */
    SHOAL_REJECTED_UNKNOWN,    /* messages of no session: of a stranger, or of another job */
    SHOAL_REJECTED_FORGED,     /* messages whose authentication code is wrong */
    SHOAL_REJECTED_REPLAYED,   /* messages that were received before, or are older than the window that tells */
    SHOAL_REJECTED_FOREIGN,    /* messages of a known process in the name of a rank that it is not */
    SHOAL_REJECTED_IMMEDIATE,  /* immediates of writes that name no counter, or an increment that was counted */
    SHOAL_REJECTED_UNEXPECTED, /* messages for a communicator not made yet, beyond what its ranks may send before that */
    SHOAL_REJECTED_BROKEN,     /* receives that the provider reports as failed, such as of messages that are too long */
    SHOAL_REJECTIONS
};

struct shoal_rejections {
    uint64_t counts[SHOAL_REJECTIONS];
};

/* "rejected_forged": the name in the flight recorder and in tables. Static text. */
const char *shoal_rejection_name(enum shoal_rejection why);
/* "a message with a wrong authentication code", for a sentence. Static text. */
const char *shoal_rejection_text(enum shoal_rejection why);

uint64_t shoal_rejections_total(const struct shoal_rejections *rejections);

#endif
