/* Sets the layout of a reducer: when it is made, and once more after the first step, to the order in which rank 0's gradients
 * became ready. The layout never changes during a step. */
#ifndef SHOAL_FUSION_RELAYOUT_H
#define SHOAL_FUSION_RELAYOUT_H

#include "fusion/reducer/reducer.h"

/* Takes over the layout and allocates memory for it. On an error nothing has changed and the caller still owns the layout. */
SHOAL_MUST_USE enum shoal_status fusion_install(struct shoal_reducer *reducer, struct shoal_gradient_layout *layout);

/* Renews the layout after the first step, whose buffers are then no longer used. Does nothing later, or if the options keep the
 * layout. A collective call; on an error the reducer has failed. */
SHOAL_MUST_USE enum shoal_status fusion_renew_layout(struct shoal_reducer *reducer);

#endif
