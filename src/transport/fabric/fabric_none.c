#include "transport/fabric/fabric.h"

#include <stdio.h>
#include <string.h>

void shoal_fabric_survey(const struct shoal_settings *settings, const struct shoal_nic *nic,
                         struct shoal_fabric_survey *survey_out)
{
    (void)settings;
    (void)nic;
    memset(survey_out, 0, sizeof *survey_out);
    survey_out->status = SHOAL_ERR_UNSUPPORTED;
    snprintf(survey_out->reason, sizeof survey_out->reason,
             "this libshoal was built without libfabric's headers, so for one host: install libfabric-dev and build again");
}
