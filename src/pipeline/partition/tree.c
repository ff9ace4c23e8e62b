/* The tree method: units are the leaves of a tree of modules, by the dots in their names. A node with several stages
 * distributes them among its children. Karakus et al., "Amazon SageMaker model parallelism" (2021), algorithms 1 to 3:
 *
 *   - the cost of a node weighs its memory against its time, both as shares of the whole model's;
 *   - the children, in order, are divided into at most as many segments as there are stages, with the least maximum of cost;
 *   - stages go to the segments one by one, each to the one with the highest cost / (stages that it has + 1) (D'Hondt);
 *   - a segment that has several stages divides them among its children again.
 *
 * Unlike there, a segment without a stage joins the one before it, and not the first stage of its parent: so each stage has
 * units that follow each other. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

#define LEVELS_MAX 200 /* deeper nodes are not divided */
#define HALVINGS 60    /* halvings of the interval that has the least maximum */

struct tree {
    const struct problem *problem;
    double *cost;    /* [units + 1]: sums of the units before */
    uint32_t *stage; /* [units] */
};

/* Units from `from` to before `to`, that have the first `parts` parts of their names in common, and the stages for them. */
struct node {
    uint32_t from, to, parts;
    uint32_t first_stage, stages;
};

static void sum_costs(struct tree *tree)
{
    const struct problem *problem = tree->problem;
    const uint32_t n = problem->units;
    const double weight = problem->options.memory_weight, time = problem_work(problem, 0, n);
    const double memory = problem->parameters[n] * problem->memory_ratio + problem->kept[n];
    for (uint32_t i = 1; i <= n; i++) {
        const double part = problem->parameters[i] * problem->memory_ratio + problem->kept[i];
        tree->cost[i] =
            weight * (memory > 0 ? part / memory : 0) + (1 - weight) * (time > 0 ? problem_work(problem, 0, i) / time : 0);
    }
}

/* Returns the length of the first `parts` parts of a name, or of all of it. */
static size_t prefix_length(const char *name, uint32_t parts)
{
    const char *at = name;
    for (uint32_t i = 0; i < parts; i++) {
        const char *dot = strchr(i ? at + 1 : at, '.');
        if (!dot)
            return strlen(name);
        at = dot;
    }
    return (size_t)(at - name);
}

/* Returns the unit behind the child that begins with unit `from`. */
static uint32_t child_end(const struct tree *tree, const struct node *node, uint32_t from)
{
    const struct shoal_unit *units = tree->problem->profile->units;
    const size_t length = prefix_length(units[from].name, node->parts + 1);
    uint32_t to = from + 1;
    if (length == strlen(units[from].name))
        return to;
    while (to < node->to && prefix_length(units[to].name, node->parts + 1) == length &&
           memcmp(units[from].name, units[to].name, length) == 0)
        to++;
    return to;
}

static double tree_cost(const struct tree *tree, uint32_t from, uint32_t to)
{
    return tree->cost[to] - tree->cost[from];
}

/* Fills segments up to a cost. Returns how many there are, at most `most` + 1; ends_out may be NULL. */
static uint32_t fill_segments(const struct tree *tree, const struct node *node, double limit, uint32_t most, uint32_t *ends_out)
{
    uint32_t segments = 0, begin = node->from;
    for (uint32_t from = node->from; from < node->to && segments <= most;) {
        const uint32_t to = child_end(tree, node, from);
        if (to == node->to || tree_cost(tree, begin, child_end(tree, node, to)) > limit) {
            if (ends_out && segments < most)
                ends_out[segments] = to;
            segments++;
            begin = to;
        }
        from = to;
    }
    return segments;
}

/* Divides the children into segments with the least maximum cost. Returns how many. */
static uint32_t find_segments(const struct tree *tree, const struct node *node, uint32_t *ends)
{
    double low = 0, high = tree_cost(tree, node->from, node->to);
    for (uint32_t from = node->from; from < node->to;) {
        const uint32_t to = child_end(tree, node, from);
        const double own = tree_cost(tree, from, to);
        low = own > low ? own : low;
        from = to;
    }
    for (int i = 0; i < HALVINGS && low < high; i++) {
        const double middle = low + (high - low) / 2;
        if (fill_segments(tree, node, middle, node->stages, NULL) <= node->stages)
            high = middle;
        else
            low = middle;
    }
    return fill_segments(tree, node, high, node->stages, ends);
}

/* D'Hondt: returns the segment that gets the next stage. */
static uint32_t next_segment(const struct tree *tree, const struct node *node, const uint32_t *ends, const uint32_t *given,
                             uint32_t segments)
{
    uint32_t best = 0;
    double most = -1;
    for (uint32_t i = 0; i < segments; i++) {
        const double quotient = tree_cost(tree, i ? ends[i - 1] : node->from, ends[i]) / (given[i] + 1);
        if (quotient > most) {
            most = quotient;
            best = i;
        }
    }
    return best;
}

static enum shoal_status divide_node(struct tree *tree, struct node node, int level);

static enum shoal_status divide_segments(struct tree *tree, const struct node *node, const uint32_t *ends,
                                         const uint32_t *given, uint32_t segments, int level)
{
    uint32_t stage = node->first_stage;
    for (uint32_t i = 0; i < segments; i++) {
        const uint32_t from = i ? ends[i - 1] : node->from;
        const bool has_stage = given[i] > 0 || stage == node->first_stage;
        const struct node segment = {from, ends[i], node->parts, has_stage ? stage : stage - 1, given[i] ? given[i] : 1};
        PARTITION_TRY(divide_node(tree, segment, level + 1));
        stage += given[i];
    }
    return SHOAL_OK;
}

/* Divides the stages of a node among its children. */
static enum shoal_status divide_node(struct tree *tree, struct node node, int level)
{
    while (node.stages > 1 && node.to > node.from + 1 && child_end(tree, &node, node.from) == node.to)
        node.parts++; /* one child */
    if (node.stages == 1 || node.to == node.from + 1 || level == LEVELS_MAX) {
        for (uint32_t i = node.from; i < node.to; i++)
            tree->stage[i] = node.first_stage;
        return SHOAL_OK;
    }
    uint32_t *ends = calloc(node.stages, sizeof *ends), *given = calloc(node.stages, sizeof *given);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (ends && given) {
        const uint32_t segments = find_segments(tree, &node, ends);
        for (uint32_t i = 0; i < node.stages; i++)
            given[next_segment(tree, &node, ends, given, segments)]++;
        status = divide_segments(tree, &node, ends, given, segments, level);
    }
    free(ends);
    free(given);
    return status;
}

enum shoal_status tree_divide(const struct problem *problem, uint32_t *division_out)
{
    const uint32_t n = problem->units;
    struct tree tree = {problem, calloc((size_t)n + 1, sizeof *tree.cost), calloc(n, sizeof *tree.stage)};
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (tree.cost && tree.stage) {
        sum_costs(&tree);
        status = divide_node(&tree, (struct node){0, n, 0, 0, problem->stages}, 0);
    }
    for (uint32_t s = 0, unit = 0; status == SHOAL_OK && s <= problem->stages; s++) {
        while (unit < n && tree.stage[unit] < s)
            unit++;
        division_out[s] = unit;
    }
    free(tree.cost);
    free(tree.stage);
    return status;
}

void equal_divide(const struct problem *problem, uint32_t *division_out)
{
    for (uint32_t s = 0; s <= problem->stages; s++)
        division_out[s] = (uint32_t)((uint64_t)problem->units * s / problem->stages);
}
