/* The first function that the operations look up, and no other one. */
void *TF_NewStatus(void);

__attribute__((visibility("default"))) void *TF_NewStatus(void)
{
    return 0;
}
