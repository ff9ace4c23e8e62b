"""The operators of reductions, under Horovod's numbers."""

Average, Sum, Adasum, Min, Max, Product = range(6)


def operator_of(op, average):
    """Returns the operator that a call asks for, by `op` or by `average`, an older argument."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    op = Average if op is None else op
    if op == Adasum:
        raise NotImplementedError("shoal: there is no Adasum: use op=hvd.Average, and scale the learning rate by hvd.size()")
    if op not in (Average, Sum, Min, Max, Product):
        raise ValueError(f"shoal: op={op!r} is none of hvd.Average, Sum, Min, Max and Product")
    return op
