/* The first of the functions that the operations look for, and no other. */
void *TF_NewStatus(void);

__attribute__((visibility("default"))) void *TF_NewStatus(void)
{
    return 0;
}
