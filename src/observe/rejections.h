/* Messages that an endpoint received and rejected, by reason. The network counts them (transport/fabric/network.h), and the
 * flight recorder prints them. A rejected message has no other effect. */
#ifndef SHOAL_OBSERVE_REJECTIONS_H
#define SHOAL_OBSERVE_REJECTIONS_H

#include "base/compiler.h"

enum shoal_rejection {
    SHOAL_REJECTED_SHORT,      /* too short for a header */
    SHOAL_REJECTED_UNKNOWN,    /* no known session: from a stranger, or another job */
    SHOAL_REJECTED_FORGED,     /* wrong authentication code */
    SHOAL_REJECTED_REPLAYED,   /* received before, or older than the window that detects replays */
    SHOAL_REJECTED_FOREIGN,    /* from a known process, in the name of a rank that it is not */
    SHOAL_REJECTED_IMMEDIATE,  /* write immediates that name no counter, or an increment already counted */
    SHOAL_REJECTED_UNEXPECTED, /* for a communicator not created yet, beyond the limit per rank */
    SHOAL_REJECTED_BROKEN,     /* receives that the provider reports as failed, such as messages that are too long */
    SHOAL_REJECTIONS
};

struct shoal_rejections {
    uint64_t counts[SHOAL_REJECTIONS];
};

/* Returns "rejected_forged": the name in the flight recorder and in tables. Static text. */
const char *shoal_rejection_name(enum shoal_rejection why);
/* Returns "a message with a wrong authentication code", for a sentence. Static text. */
const char *shoal_rejection_text(enum shoal_rejection why);

uint64_t shoal_rejections_total(const struct shoal_rejections *rejections);

#endif
