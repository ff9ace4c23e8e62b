/* Calls as text, for failures and warnings. All texts are truncated at the end of their buffer. Any thread. */
#ifndef SHOAL_ENGINE_CALL_TEXT_H
#define SHOAL_ENGINE_CALL_TEXT_H

#include "transport/transport.h"

struct shoal_request;

/* Appends to a text. */
SHOAL_PRINTF(3, 4) void shoal_engine_append(char *text, size_t bytes, const char *format, ...);
/* Writes "all-reduce of 1024 float32, sum". */
void shoal_engine_print_call(const struct shoal_descriptor *descriptor, char *text, size_t bytes);
/* Like shoal_engine_print_call(), with the tag of a message. The tag is not compared between ranks, so that a descriptor does
 * not have it. */
void shoal_engine_print_request(const struct shoal_request *request, char *text, size_t bytes);

#endif
