/* Descriptions of collective calls, each valid for all ranks: the arguments of the call, the contents and memory of its
 * operands, and the expected result. Formulas derive all of it from the text of shoal.h, with no code of the library. Every
 * test that needs exact results uses these: it draws or lists descriptions, and calls them through the code under test.
 *
 * Guard bytes surround operands, and their parts and tensors: a check notices any other write. For tests; reentrant. */
#ifndef SHOAL_TESTS_OPERATIONS_H
#define SHOAL_TESTS_OPERATIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shoal/shoal.h"

/* ---- The call ------------------------------------------------------------------------------------------------------------ */

enum operation_kind {
    OPERATION_ALLREDUCE,
    OPERATION_REDUCE,
    OPERATION_REDUCE_SCATTER,
    OPERATION_BROADCAST,
    OPERATION_ALLGATHER,
    OPERATION_GATHER,
    OPERATION_SCATTER,
    OPERATION_ALLTOALL,
    OPERATION_BARRIER,
    OPERATION_KIND_END
};

/* The plain call, the one with parts of different lengths, the one of several tensors. */
enum operation_form { FORM_PLAIN, FORM_PARTS, FORM_TENSORS, FORM_END };

enum operation_lengths { LENGTHS_EQUAL, LENGTHS_ZEROS, LENGTHS_ONE, LENGTHS_RANDOM, LENGTHS_END };

/* The positions of parts: in sequence, in another order on each rank, with gaps, by rank. */
enum operation_order { ORDER_ROW, ORDER_PERMUTED, ORDER_GAPS, ORDER_MIXED, ORDER_END };

/* Input and output separate, in place, by rank and tensor. */
enum operation_place { PLACE_APART, PLACE_SAME, PLACE_MIXED, PLACE_END };

enum operation_memory { MEMORY_PLAIN, MEMORY_SHARED, MEMORY_MIXED, MEMORY_END };

/* The same on every rank. */
struct operation {
    enum operation_kind kind;
    enum operation_form form;
    enum shoal_type type;
    enum shoal_op op; /* if the kind reduces */
    double scale;
    int root;
    size_t count; /* elements of a whole or of each part; FORM_PARTS and FORM_TENSORS: of the longest */
    int tensors;  /* FORM_TENSORS: their number */
    enum operation_lengths lengths;
    enum operation_order order;
    enum operation_place place;
    enum operation_memory memory;
    bool is_offset; /* operands begin one element after a cache line */
    uint64_t salt;
};

/* A kind with its properties, in the words of shoal.h. */
struct operation_row {
    const char *name;
    bool root_contributes;      /* only root has an input */
    bool root_receives;         /* only root has an output */
    bool is_input_partitioned;  /* in parts */
    bool is_output_partitioned; /* in parts */
    bool is_reduced;
    bool has_form[FORM_END];
};

const struct operation_row *operation_row(enum operation_kind kind);

/* Returns false for bitwise operators on types that are not integers. */
bool operation_is_legal(enum shoal_type type, enum shoal_op op);

/* Draws a description whose operands need at most `room` bytes (operation_room), which is at least 4096. */
struct operation operation_draw(uint64_t *random, int size, size_t room);

/* Writes one readable line. */
void operation_describe(const struct operation *operation, char *text, size_t bytes);

/* ---- One rank's side ----------------------------------------------------------------------------------------------------- */

/* The ranks of a communicator, by numbers that are unique in the world (their ranks in it). */
struct team {
    int size;
    int rank;           /* this rank */
    const int *numbers; /* NULL: 0, 1, ... */
};

/* A device whose memory the CPU does not access. Operands that a test fills and checks are in host memory. They are copied to
 * the same position of an area on the device and back: all on one stream, before the call and after it, without waiting. */
struct twin_device {
    char *(*allocate)(size_t bytes);
    void (*release)(char *there);
    void (*pin)(char *here, size_t bytes); /* so that copies from and to it wait for no stream */
    void (*unpin)(char *here);
    void *(*take_stream)(void); /* returns an idle stream */
    void (*upload)(char *there, const char *here, size_t bytes, void *stream);
    void (*download)(char *here, const char *there, size_t bytes, void *stream);
    void (*synchronize)(void *stream);
};

/* Memory for operands, of `bytes` each, all aligned to a cache line: one area for inputs, one for outputs, of each kind. */
struct areas {
    size_t bytes;
    char *plain[2];
    char *shared[2];
    const struct twin_device *device; /* NULL: none; else shared areas have a twin there */
    char *twins[2];
};

/* The areas of a side on a device. */
struct twins {
    const struct twin_device *device; /* NULL: no area is on a device */
    char *input;                      /* NULL: in host memory */
    char *output;
    void *stream;
};

struct operation_side {
    struct operation operation;
    struct team team;
    char *input; /* the beginning of the input area, after its guard */
    char *output;
    struct twins twins;
};

/* Returns the bytes that the operation uses of each area. */
size_t operation_room(const struct operation *operation, int size);

/* Places the operands at byte `begin` of the areas, and fills them. */
struct operation_side operation_prepare(const struct operation *operation, const struct team *team, const struct areas *areas,
                                        size_t begin);

/* The arguments of the call. */
struct operation_arguments {
    const void *input;
    void *output;
    size_t *given, *given_at; /* parts of the input; NULL: in sequence, or a whole */
    size_t *taken, *taken_at; /* parts of the output */
    struct shoal_tensor *tensors;
    void *memory; /* of all arrays */
    size_t bytes;
};

struct operation_arguments operation_open_arguments(const struct operation_side *side);
/* Overwrites the arrays before it frees them: they must not be read after the call. */
void operation_close_arguments(struct operation_arguments *arguments);

/* Makes the call; request_out NULL: blocking. */
SHOAL_MUST_USE enum shoal_status operation_call(const struct operation_side *side, struct shoal_comm *comm,
                                                struct shoal_request **request_out);

/* Returns true if the result of the completed operation is correct; otherwise text receives one line that describes the error.
 */
bool operation_check(const struct operation_side *side, char *text, size_t bytes);

/* When an operation is done here, no rank reads or writes its operands any longer: this overwrites them, and a later check
 * compares them again. */
void operation_spoil(const struct operation_side *side);
bool operation_is_spoiled(const struct operation_side *side, char *text, size_t bytes);

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

enum exchange_pattern { EXCHANGE_NONE, EXCHANGE_RING, EXCHANGE_ONE_TO_ALL, EXCHANGE_ALL, EXCHANGE_PATTERN_END };

/* Messages between ranks; the same on every rank. */
struct exchange {
    enum exchange_pattern pattern;
    enum shoal_type type;
    size_t count; /* elements of the longest; others are shorter, some empty */
    int per_pair; /* messages from one rank to another */
    int tags;     /* the number of different tags */
    enum operation_memory memory;
    bool is_offset;
    uint64_t salt;
};

#define EXCHANGE_MESSAGES_MAX 512 /* of a rank, both directions */

struct exchange_side {
    struct exchange exchange;
    struct team team;
    char *input;
    char *output;
    struct twins twins;
};

struct exchange exchange_draw(uint64_t *random, int size, size_t room);
void exchange_describe(const struct exchange *exchange, char *text, size_t bytes);
size_t exchange_room(const struct exchange *exchange, int size);
struct exchange_side exchange_prepare(const struct exchange *exchange, const struct team *team, const struct areas *areas,
                                      size_t begin);
/* Returns the options of the call that sends them if there is a device, else NULL. */
const struct shoal_options *exchange_options(const struct exchange_side *side, struct shoal_options *options);
/* Writes the messages of this rank and returns their number. Each rank orders the pairs differently; a pair's messages are
 * received tag by tag. */
size_t exchange_list(const struct exchange_side *side, struct shoal_message *messages);
bool exchange_check(const struct exchange_side *side, char *text, size_t bytes);
void exchange_spoil(const struct exchange_side *side);
bool exchange_is_spoiled(const struct exchange_side *side, char *text, size_t bytes);

#endif
