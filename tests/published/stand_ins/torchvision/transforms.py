"""The transforms that the scripts use, of images that are tensors of bytes; and functions of images of PIL."""
import types

import numpy as np
import torch


class Compose:
    def __init__(self, transforms):
        self._transforms = transforms

    def __call__(self, image):
        for each in self._transforms:
            image = each(image)
        return image


class ToTensor:
    def __call__(self, image):
        return image.float().div(255).unsqueeze(0)


class Normalize:
    def __init__(self, mean, std):
        self._mean, self._std = mean[0], std[0]

    def __call__(self, image):
        return (image - self._mean) / self._std


def _to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)


def _normalize(image, mean, std):
    return (image - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


functional = types.SimpleNamespace(
    resize=lambda image, size: image.resize(size[::-1]), hflip=lambda image: image.transpose(0), to_tensor=_to_tensor, normalize=_normalize)
