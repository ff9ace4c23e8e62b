/* `shoal doctor`: what its files share. Findings of one host or of many become one list (doctor_findings.c); other hosts are
 * asked through a command such as ssh (doctor_hosts.c). Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_DOCTOR_H
#define SHOAL_TOOLS_DOCTOR_H

#include "ask.h"
#include "tool.h"

struct doctor_options {
    const char *file;    /* of hosts; NULL: this host alone */
    const char *via;     /* command that runs another one on a host */
    const char *shoal;   /* what `shoal` is called there */
    const char *towards; /* NULL: no host in particular */
    int ranks;           /* 0: not said */
    uint64_t timeout_ms; /* 0: the preset */
    bool json;
};

struct doctor_finding {
    enum shoal_finding_level level;
    const char *subject, *found, *advice; /* of a list: the list's own copies */
    uint8_t hosts[ASK_HOSTS_MAX / 8];     /* a bit for each on which it was found */
};

struct doctor_findings {
    struct doctor_finding *at;
    size_t count, capacity;
    bool has_failed; /* no memory: some are missing */
};

/* Adds a finding of the host with that number; one that is there already is said to be there, too. Those about one subject stay
 * together. */
void doctor_findings_add(struct doctor_findings *findings, const struct doctor_finding *finding, int host);
void doctor_findings_fini(struct doctor_findings *findings);
size_t doctor_findings_count(const struct doctor_findings *findings, enum shoal_finding_level level);

/* A table, or one object per line. hosts NULL: all are of this host. */
void doctor_findings_print(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out);
void doctor_findings_print_json(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out);

/* Reads a line of the latter, of one host; the texts lie in it. False: it is none. */
bool doctor_finding_parse(char *line, struct doctor_finding *finding_out);

/* Asks all hosts at once; each has timeout_ms. A host that does not answer is a finding. */
void doctor_hosts_ask(const struct ask_hosts *hosts, const struct doctor_options *options, struct doctor_findings *findings);

#endif
