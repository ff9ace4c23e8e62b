/* The network between hosts, through libfabric: the interface for the rest of the library. */
#ifndef SHOAL_TRANSPORT_FABRIC_H
#define SHOAL_TRANSPORT_FABRIC_H

#include "topology/nic.h"
#include "transport/fabric/fabric_settings.h"

#define SHOAL_FABRIC_ROWS_MAX 8

/* The offers of libfabric's providers, and the provider that would be chosen. Plain data: it remains valid after the library is
 * closed. */
struct shoal_fabric_survey {
    char library[320];        /* "libfabric 1.17 (/usr/lib/libfabric.so.1)"; empty if none is usable */
    char reason[1200];        /* why that provider is chosen, or why none is */
    enum shoal_status status; /* ERR_UNSUPPORTED if none is chosen */
    int count;
    struct shoal_fabric_row {
        const char *name; /* static storage */
        char text[320];   /* what it offers, or why it was rejected */
        bool is_usable, is_taken, is_on_request;
    } rows[SHOAL_FABRIC_ROWS_MAX];
};

/* Asks the providers about that interface, and about those equal to it (shoal_nic_equals). */
void shoal_fabric_survey(const struct shoal_fabric_settings *settings, const struct shoal_nic *nic,
                         const struct shoal_nics *equal, struct shoal_fabric_survey *survey_out);

#endif
