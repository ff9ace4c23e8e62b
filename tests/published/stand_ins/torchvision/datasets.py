"""MNIST whose digits are made: each class is a pattern of its own, shifted, with noise. Images of COCO are in files."""
import os
import types

import torch

SAMPLES = {True: int(os.environ.get("PUBLISHED_SAMPLES", "4096")), False: 512}


class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        made = torch.Generator().manual_seed(1)
        patterns = torch.rand(10, 28, 28, generator=made) > 0.7
        made.manual_seed(2 if train else 3)
        self.targets = torch.randint(10, (SAMPLES[train],), generator=made)
        shifts = torch.randint(-1, 2, (SAMPLES[train], 2), generator=made).tolist()
        drawn = torch.stack([patterns[target].roll(shift, (0, 1)) for target, shift in zip(self.targets, shifts)])
        self.data = (drawn * 90 + torch.randint(166, (SAMPLES[train], 28, 28), generator=made)).to(torch.uint8)
        self._transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        return (self._transform(image) if self._transform else image), int(self.targets[index])


class CocoDetection(torch.utils.data.Dataset):
    """Images and their annotations, by pycocotools."""

    def __init__(self, root, annFile):
        from pycocotools.coco import COCO
        self.root, self.coco = root, COCO(annFile)
        self.ids = sorted(self.coco.imgs)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        from PIL import Image
        number = self.ids[index]
        image = Image.open(os.path.join(self.root, self.coco.loadImgs(number)[0]["file_name"])).convert("RGB")
        return image, self.coco.loadAnns(self.coco.getAnnIds(imgIds=number))


coco = types.SimpleNamespace(CocoDetection=CocoDetection)
