/* Runs the doctor on the hosts of a file, through a program such as ssh, and judges the results. */
#include <stdlib.h>
#include <string.h>

#include "doctor.h"

/* A question to all hosts. */
struct request {
    const struct ask_hosts *hosts;
    const struct doctor_options *options;
};

static void command_print(const void *arg, int host, FILE *out)
{
    const struct request *request = arg;
    ask_word_quote(out, request->options->shoal);
    fputs(" doctor --json --towards ", out);
    ask_word_quote(out, request->hosts->at[0].name);
    if (request->hosts->at[host].slots)
        fprintf(out, " --ranks %d", request->hosts->at[host].slots);
}

/* ---- Judging ------------------------------------------------------------------------------------------------------------- */

/* Reads a host's answer. Ignores lines that are not findings, such as a login shell's greeting. Returns the number of
 * findings. */
static int answer_take(char *text, struct doctor_findings *findings, int host)
{
    struct doctor_finding finding;
    char *rest = NULL;
    int count = 0;
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
        if (line[0] != '{' || !doctor_finding_parse(line, &finding))
            continue;
        doctor_findings_add(findings, &finding, host);
        count++;
    }
    return count;
}

static void silence_tell(struct doctor_findings *findings, int host, const char *why, const char *said)
{
    char found[2 * ASK_SAID_MAX + 64];
    snprintf(found, sizeof found, "no diagnosis came: %s%s%s", why, *said ? ": " : "", said);
    const struct doctor_finding finding = {.level = SHOAL_FINDING_ERROR,
                                           .subject = "host",
                                           .found = found,
                                           .advice = "try that command by hand; --via, --shoal and --timeout change it"};
    doctor_findings_add(findings, &finding, host);
}

/* A doctor ends with 0 or 1, and has printed something on stdout. */
static void probe_judge(struct ask_probe *probe, const struct doctor_options *options, int host,
                        struct doctor_findings *findings)
{
    char why[ASK_SAID_MAX], said[ASK_SAID_MAX], printed[ASK_SAID_MAX];
    ask_last_line(probe->text[ASK_ERR], said);
    ask_last_line(probe->text[ASK_OUT], printed);
    const int code = ask_exit_code(probe, options->timeout_ms, why);
    if ((code == 0 || code == 1) && answer_take(probe->text[ASK_OUT], findings, host))
        return;
    silence_tell(findings, host, why, *said ? said : printed);
}

/* If a value must be the same on all hosts, reports each variant as bad. */
static void variants_tell(struct doctor_findings *findings, const char *subject, enum shoal_finding_level level,
                          const char *advice)
{
    size_t variants = 0;
    for (size_t i = 0; i < findings->count; i++)
        variants += !strcmp(findings->at[i].subject, subject);
    for (size_t i = 0; i < findings->count && variants > 1; i++) {
        struct doctor_finding *finding = &findings->at[i];
        char *copy = !strcmp(finding->subject, subject) && finding->level < level ? strdup(advice) : NULL;
        if (!copy)
            continue;
        free((char *)(uintptr_t)finding->advice);
        finding->advice = copy;
        finding->level = level;
    }
}

/* ---- All of them --------------------------------------------------------------------------------------------------------- */

void doctor_hosts_ask(const struct ask_hosts *hosts, const struct doctor_options *options, struct doctor_findings *findings)
{
    const struct request request = {hosts, options};
    struct ask_probe *probes = ask_run(hosts, options->via, options->timeout_ms, command_print, &request);
    findings->has_failed = !probes;
    for (int i = 0; i < hosts->count && probes; i++)
        probe_judge(&probes[i], options, i, findings);
    ask_free(probes, hosts);
    variants_tell(findings, "version", SHOAL_FINDING_ERROR, "install one version of Shoal on all hosts");
    variants_tell(findings, "mtu", SHOAL_FINDING_WARNING, "set one MTU on all hosts and switches");
}
