/* The settings of an optimizer's parameter groups, and the numbers that a kernel needs for one step of one parameter. Pure
 * functions: no state, no rank. */
#ifndef SHOAL_FUSION_OPTIMIZER_GROUP_H
#define SHOAL_FUSION_OPTIMIZER_GROUP_H

#include "fusion/codec/update_kernels.h"

/* Returns true if struct_bytes of an optimizer is set. */
bool fusion_settings_are_set(const struct shoal_optimizer *optimizer);

/* Copies an optimizer of the caller, whose struct_bytes may be that of an older version. The copy's struct_bytes is the
 * caller's; if that is not set, nothing else is copied. */
struct shoal_optimizer fusion_settings_copy(const struct shoal_optimizer *optimizer);

/* Returns true if struct_bytes of the settings is set. group may be NULL. */
bool fusion_group_is_set(const struct shoal_optimizer_group *group);

/* Copies settings of a public struct, whose struct_bytes may be that of an older version. */
struct shoal_optimizer_group fusion_group_copy(const struct shoal_optimizer_group *group);

/* Returns NULL if the settings are possible for the rule, otherwise what is wrong: static storage. */
const char *fusion_group_fault(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group);

/* Returns the kernel's rule for a group, and the number of states that a parameter in it has. */
enum shoal_rule fusion_group_rule(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group);
size_t fusion_rule_states(enum shoal_rule rule);

/* Returns the numbers of the steps-th step of a parameter, counted from 1. The gradient is multiplied by factor. */
struct shoal_update fusion_update_of(enum shoal_rule rule, const struct shoal_optimizer_group *group, uint64_t steps,
                                     double factor);

/* Sets the rate of LAMB's second pass. squared: of the whole parameter, as shoal_moments_fn adds them up. */
void fusion_trust(const struct shoal_optimizer_group *group, const double squared[2], struct shoal_update *update);

/* One setting, for a message about groups that differ. */
struct fusion_setting {
    const char *name;
    double value;
};

#define FUSION_GROUP_SETTINGS 10

/* Writes all settings of a group. */
void fusion_group_list(const struct shoal_optimizer_group *group, struct fusion_setting settings[FUSION_GROUP_SETTINGS]);

#endif
