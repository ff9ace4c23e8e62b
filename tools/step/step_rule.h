/* The optimizers of `shoal bench step` and `shoal sim step`: their words, the values that they keep, and the bytes that a step
 * of them moves. Static data; reentrant. */
#ifndef SHOAL_TOOLS_STEP_RULE_H
#define SHOAL_TOOLS_STEP_RULE_H

#include <shoal/gradients.h>
#include <stdbool.h>

#include "tool.h"

enum step_rule {
    STEP_RULE_NONE,
    STEP_RULE_SGD,
    STEP_RULE_MOMENTUM,
    STEP_RULE_ADAM,
    STEP_RULE_ADAMW,
    STEP_RULE_ADAGRAD,
    STEP_RULE_LION,
    STEP_RULE_LAMB
};
/* When a rank that steps all parameters does so. */
enum step_when { STEP_WHEN_AFTER, STEP_WHEN_BUFFERS };
/* How a reducer that steps its shard clips the norm of all gradients: see steps_early of struct shoal_optimizer. */
enum step_clip { STEP_CLIP_NONE, STEP_CLIP_LATE, STEP_CLIP_EARLY };

/* The words of the options, ending with NULL; also for printing. */
#define STEP_RULE_WORDS "none|sgd|momentum|adam|adamw|adagrad|lion|lamb"
#define STEP_WHEN_WORDS "after|buffers"
#define STEP_SHARD_WORDS "all|host|K"
#define STEP_CLIP_WORDS "none|late|early"
extern const char *const step_rules[];
extern const char *const step_whens[];
extern const char *const step_clips[];

/* The optimizer that a command is asked for. */
struct step_optimizing {
    int rule; /* enum step_rule */
    int when; /* enum step_when */
    bool has_when;
    bool is_sharded; /* the reducer steps its shard */
    int degree;      /* as in struct shoal_optimizer */
    int clip;        /* enum step_clip */
};

/* Reads the value of --shard. Returns false after printing one line. */
bool step_shard_read(const struct tool_args *args, struct step_optimizing *optimizing);

/* Returns false after printing one line if the options contradict each other. */
bool step_optimizing_check(const struct step_optimizing *optimizing, const char *command);

/* Returns "all", "host", "2" or "none": the ranks that share the states. Static storage. */
const char *step_shard_name(const struct step_optimizing *optimizing);

/* Returns the rule of the library; SHOAL_SGD for none. */
enum shoal_optimizer_rule step_rule_of(int rule);

/* Returns how many values the optimizer keeps for each element, without masters. */
size_t step_rule_states(int rule);

/* Returns how many bytes the optimizer keeps for each element of a type: states and, with 16 bits, the master. To clip early it
 * keeps both twice, with a master for each type, and the gradient. */
size_t step_bytes_kept(const struct step_optimizing *optimizing, enum shoal_type type);

/* Return how many bytes a step reads and writes for each element: in the pass that steps the parameter; in the pass before it,
 * which only LAMB has; and when the gradient is summed, to clip. */
size_t step_bytes_stepped(const struct step_optimizing *optimizing, enum shoal_type type);
size_t step_bytes_measured(const struct step_optimizing *optimizing, enum shoal_type type);
size_t step_bytes_summed(const struct step_optimizing *optimizing, enum shoal_type type);

#endif
