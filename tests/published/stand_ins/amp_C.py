"""Operations of apex on lists of tensors."""
import torch


def multi_tensor_scale(_, overflow, lists, scale):
    """Writes the tensors of the first list, scaled, to those of the second one, and notes if a value is not finite."""
    for source, target in zip(*lists):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            overflow.fill_(1)


def multi_tensor_l2norm(_, overflow, lists, is_each=False):
    norms = torch.stack([each.float().norm() for each in lists[0]])
    return norms.norm(), norms if is_each else None
