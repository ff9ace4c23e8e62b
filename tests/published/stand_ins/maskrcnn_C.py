"""The operators of the Mask R-CNN example in torch. The example compiles them, with CUDA kernels, for a torch of 2019. Boxes are
(x1, y1, x2, y2) and include both ends. Only what the example calls with FPN and masks is here."""
import math

import torch
import torch.nn.functional as F
from pycocotools import mask as masks


def _sizes(boxes):
    return boxes[..., 2] - boxes[..., 0] + 1, boxes[..., 3] - boxes[..., 1] + 1


def box_iou(one, other):
    """Returns [images, n, m], the overlap of each box of [images, n, 4] with each of [images, m, 4]."""
    begin = torch.maximum(one[:, :, None, :2], other[:, None, :, :2])
    end = torch.minimum(one[:, :, None, 2:], other[:, None, :, 2:])
    both = (end - begin + 1).clamp(min=0).prod(-1)
    areas = [width * height for width, height in (_sizes(one), _sizes(other))]
    return both / (areas[0][:, :, None] + areas[1][:, None] - both)


def box_encode(wanted, boxes, *weights):
    (width, height), (wanted_width, wanted_height) = _sizes(boxes), _sizes(wanted)
    across = wanted[:, 0] - boxes[:, 0] + 0.5 * (wanted_width - width)
    down = wanted[:, 1] - boxes[:, 1] + 0.5 * (wanted_height - height)
    codes = across / width, down / height, torch.log(wanted_width / width), torch.log(wanted_height / height)
    return [weight * code for weight, code in zip(weights, codes)]


def match_proposals(quality, forgives, low, high):
    """Returns for each proposal the number of its target, -1 for background and -2 for neither. quality: [images, targets,
    proposals]. forgives: the best proposals of a target belong to it, however low their quality is."""
    best, found = quality.max(1)
    matches = torch.where(best >= high, found, torch.where(best < low, -1, -2))
    if not forgives:
        return matches
    of_target = quality.max(2, keepdim=True).values
    return torch.where(((quality == of_target) & (of_target > 0)).any(1), found, matches)


def anchor_generator(image_size, grid, cells, stride, straddle):
    """Returns anchors in the order of rows, columns and cells, and which of them are inside of the image."""
    down, across = (torch.arange(size, dtype=torch.float32) * stride for size in grid)
    shifts = torch.stack(torch.meshgrid(down, across, indexing="ij"), -1).flip(-1).repeat(1, 1, 2)
    anchors = (shifts[:, :, None] + cells).reshape(-1, 4)
    if straddle < 0:
        return anchors, torch.ones(len(anchors), dtype=torch.bool)
    height, width = image_size
    return anchors, (anchors[:, :2] >= -straddle).all(1) & (anchors[:, 2] < width + straddle) & (anchors[:, 3] < height + straddle)


def GeneratePreNMSUprightBoxesBatched(images, cells, _, most, grids, counts, order, scores, deltas, anchors, sizes, kept, min_size, clip, corrects):
    """Returns boxes, scores and which of them to keep: [levels, images, kept], for the best `kept` anchors of each level. order:
    their numbers, by cells, rows and columns."""
    levels, begin = len(grids), 0
    boxes, keep = torch.zeros(levels, images, kept, 4), torch.zeros(levels, images, kept, dtype=torch.uint8)
    order = order.view(levels, images, kept)
    for level, (rows, columns) in enumerate(grids.tolist()):
        count, places = cells * rows * columns, rows * columns
        used = min(kept, count)
        chosen, is_real = order[level, :, :used].clamp(max=count - 1), order[level, :, :used] < count  # levels are padded to the largest
        cell, place = chosen // places, chosen % places
        own = anchors[:, begin:begin + count].gather(1, (place * cells + cell)[..., None].expand(-1, -1, 4))
        of_level = deltas[level, :, :4 * count].view(images, cells, 4, places)
        codes = of_level[torch.arange(images)[:, None], cell, :, place]
        made = _decoded(own, codes, clip, corrects)
        limits = sizes[:, None, [0, 1, 0, 1]] - 1
        made = torch.minimum(made, limits).clamp(min=0)
        width, height = _sizes(made)
        boxes[level, :, :used], keep[level, :, :used] = made, (torch.minimum(width, height) >= min_size) & is_real
        begin += count
    return boxes, scores, keep


def _decoded(boxes, codes, clip, corrects):
    width, height = _sizes(boxes)
    middle = torch.stack([boxes[..., 0] + 0.5 * width + codes[..., 0] * width, boxes[..., 1] + 0.5 * height + codes[..., 1] * height], -1)
    half = 0.5 * torch.stack([width, height], -1) * codes[..., 2:].clamp(max=clip).exp()
    return torch.cat([middle - half, middle + half - (1 if corrects else 0)], -1)


def nms_batched(boxes, counts, _, keep, threshold):
    """Returns which boxes of each group overlap with no earlier one by more than the threshold. keep: 0 for boxes that do not
    count."""
    found = []
    for group, alive in zip(boxes.split(list(counts)), keep.reshape(-1).bool().split(list(counts))):
        alive = alive.clone()
        overlaps = box_iou(group[None], group[None])[0] > threshold
        for number in range(len(group)):
            if alive[number]:
                alive[number + 1:] &= ~overlaps[number, number + 1:]
        found.append(alive)
    return torch.cat(found).to(torch.uint8)


def nms(boxes, scores, threshold):
    order = scores.argsort(descending=True)
    keep = nms_batched(boxes[order], [len(boxes)], None, torch.ones(len(boxes)), threshold)
    return order[keep.bool()]


def _sampled(image, regions, size, samples):
    """Returns means of bilinear samples, [regions, channels, *size]. image: [1, channels, rows, columns]. regions: [n, 4] in
    pixels of the image."""
    lengths = (regions[:, 2:] - regions[:, :2]).clamp(min=1)
    places = []
    for axis, count in ((1, size[0]), (0, size[1])):  # rows, then columns
        steps = (torch.arange(count * samples) + 0.5) / (count * samples)
        place = regions[:, axis, None] + lengths[:, axis, None] * steps
        places.append(2 * place / max(1, image.shape[2 if axis == 1 else 3] - 1) - 1)
    grid = torch.stack([places[1][:, None].expand(-1, places[0].shape[1], -1), places[0][:, :, None].expand(-1, -1, places[1].shape[1])], -1)
    found = F.grid_sample(image.expand(len(regions), -1, -1, -1), grid, padding_mode="border", align_corners=True)
    return F.avg_pool2d(found, samples)


def _align(images, regions, scale, size, samples):
    made = images.new_zeros(len(regions), images.shape[1], *size)
    for number in range(len(images)):
        own = (regions[:, 0] == number).nonzero().squeeze(1)
        if len(own):
            made = made.index_copy(0, own, _sampled(images[number:number + 1], regions[own, 1:] * scale, size, samples or 2))
    return made


def roi_align_forward(images, regions, scale, rows, columns, samples, is_nhwc):
    assert not is_nhwc
    return _align(images.float(), regions, scale, (rows, columns), samples).to(images.dtype)


def roi_align_backward(gradient, regions, scale, rows, columns, count, channels, height, width, samples, is_nhwc):
    """The samples are linear in the images, so the gradient does not depend on their values."""
    assert not is_nhwc
    with torch.enable_grad():
        images = torch.zeros(count, channels, height, width, requires_grad=True)
        made = _align(images, regions, scale, (rows, columns), samples)
        return torch.autograd.grad(made, images, gradient)[0] if len(regions) else torch.zeros_like(images)


def generate_mask_targets(_, polygons, boxes, size):
    """Returns the masks of polygons inside of their boxes, [boxes, size, size]."""
    found = []
    for parts, box in zip(polygons, boxes):
        factors = size / (box[2:] - box[:2]).clamp(min=1)
        scaled = [((part.view(-1, 2) - box[:2]) * factors).reshape(-1).double().tolist() for part in parts]
        found.append(torch.from_numpy(masks.decode(masks.merge(masks.frPyObjects(scaled, size, size)))).float())
    return torch.stack(found)


assert math.isclose(box_iou(torch.tensor([[[0.0, 0, 9, 9]]]), torch.tensor([[[5.0, 0, 14, 9]]])).item(), 1 / 3, rel_tol=1e-6)
