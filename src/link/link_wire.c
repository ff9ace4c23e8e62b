#include "link/link_wire.h"

#include <stdio.h>
#include <string.h>

void shoal_link_text_clean(char *text, size_t bytes)
{
    text[bytes - 1] = 0;
    for (char *p = text; *p; p++) {
        if (*p < ' ' || *p > '~')
            *p = '?';
    }
}

enum shoal_link_verdict shoal_link_hello_judge(const struct shoal_link_hello *other, const struct shoal_link_hello *own)
{
    if (other->job != own->job || other->protocol >> 16 != own->protocol >> 16)
        return SHOAL_LINK_NOT_OURS;
    if (other->protocol != own->protocol || memcmp(other->version, own->version, sizeof own->version) != 0)
        return SHOAL_LINK_VERSION;
    if (other->size != own->size)
        return SHOAL_LINK_SIZE;
    if (other->rank >= own->size)
        return SHOAL_LINK_RANK;
    if (other->settings != own->settings)
        return SHOAL_LINK_SETTINGS;
    if (!other->has_secret != !own->has_secret)
        return SHOAL_LINK_SECRET_ONE_SIDED;
    return SHOAL_LINK_OK;
}

/* The lengths of the greetings come first, so that no bytes can move from one part to another. */
bool shoal_link_proof_build(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server,
                            const struct shoal_link_meeting *meeting, unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    static const char sides[2][24] = {"shoal link client", "shoal link server"};
    const uint32_t counts[2] = {(uint32_t)meeting->client_greeting->count, (uint32_t)meeting->server_greeting->count};
    const struct shoal_auth_span spans[] = {
        {sides[of_server], sizeof sides[0]},
        {counts, sizeof counts},
        {meeting->client, sizeof *meeting->client},
        {meeting->server, sizeof *meeting->server},
        {meeting->client_greeting->bytes, meeting->client_greeting->count},
        {meeting->server_greeting->bytes, meeting->server_greeting->count},
    };
    memset(proof, 0, SHOAL_AUTH_MAC_BYTES);
    return !meeting->client->has_secret || !meeting->server->has_secret ||
           shoal_auth_mac(secret, spans, SHOAL_COUNT_OF(spans), proof);
}

bool shoal_link_proof_check(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server,
                            const struct shoal_link_meeting *meeting, const unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES];
    if (!meeting->client->has_secret && !meeting->server->has_secret)
        return true; /* the job's number has been compared */
    return shoal_link_proof_build(secret, of_server, meeting, wanted) && shoal_auth_equal(wanted, proof, sizeof wanted);
}

enum shoal_status shoal_link_verdict_status(enum shoal_link_verdict verdict)
{
    switch (verdict) {
    case SHOAL_LINK_OK:
        return SHOAL_OK;
    case SHOAL_LINK_SIZE:
    case SHOAL_LINK_RANK:
    case SHOAL_LINK_TAKEN:
    case SHOAL_LINK_MIXED:
        return SHOAL_ERR_ARGUMENT;
    case SHOAL_LINK_VERSION:
    case SHOAL_LINK_SETTINGS:
    case SHOAL_LINK_SECRET_ONE_SIDED:
    case SHOAL_LINK_SECRET_WRONG:
        return SHOAL_ERR_AUTH;
    case SHOAL_LINK_NOT_OURS:
    case SHOAL_LINK_PAST:
        return SHOAL_ERR_TIMEOUT;
    case SHOAL_LINK_VERDICT_END:
        break;
    }
    return SHOAL_ERR_INTERNAL;
}

static void print_versions(const struct shoal_link_hello *it, const struct shoal_link_hello *other, const char *other_name,
                           char *text, size_t text_bytes)
{
    struct shoal_link_hello a = *it, b = *other;
    shoal_link_text_clean(a.version, sizeof a.version);
    shoal_link_text_clean(b.version, sizeof b.version);
    snprintf(text, text_bytes, "it runs Shoal %s (protocol %u) and %s runs %s (protocol %u); install one version everywhere",
             a.version, a.protocol & 0xffff, other_name, b.version, b.protocol & 0xffff);
}

void shoal_link_refusal_print(enum shoal_link_verdict verdict, const struct shoal_link_hello *it,
                              const struct shoal_link_hello *other, const char *other_name, const char *members, char *text,
                              size_t text_bytes)
{
    switch (verdict) {
    case SHOAL_LINK_VERSION:
        print_versions(it, other, other_name, text, text_bytes);
        return;
    case SHOAL_LINK_SIZE:
        snprintf(text, text_bytes, "it counts %u %s, and %s counts %u", it->size, members, other_name, other->size);
        return;
    case SHOAL_LINK_RANK:
        snprintf(text, text_bytes, "there are only %s 0 to %u", members, other->size - 1);
        return;
    case SHOAL_LINK_TAKEN:
        snprintf(text, text_bytes, "two processes claim to be this rank, or an earlier process of this rank has ended");
        return;
    case SHOAL_LINK_SECRET_ONE_SIDED:
        snprintf(text, text_bytes, "%s has a secret and %s has none; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all %s",
                 it->has_secret ? "it" : other_name, it->has_secret ? other_name : "it", members);
        return;
    case SHOAL_LINK_SECRET_WRONG:
        snprintf(text, text_bytes, "its secret is not %s's; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all %s", other_name,
                 members);
        return;
    default:
        snprintf(text, text_bytes, "it is not of this job");
        return;
    }
}
