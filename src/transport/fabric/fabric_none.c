#include "transport/fabric/fabric.h"

enum shoal_status shoal_fabric_print_providers(const struct shoal_settings *settings, const struct shoal_nic *nic, FILE *out)
{
    (void)settings;
    (void)nic;
    fprintf(out,
            "this libshoal was built without libfabric's headers, so for one host: install libfabric-dev and build again\n");
    return SHOAL_ERR_UNSUPPORTED;
}
