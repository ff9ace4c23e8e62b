"""The transforms that the scripts use, of images that are tensors of bytes."""


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
