"""Calls an operation of amp_C with lists of tensors."""


def multi_tensor_applier(operation, overflow, lists, *words):
    return operation(0, overflow, lists, *words)
