"""A script as SageMaker users write it: trains a small network on Fashion-MNIST with SMDDP's back-end, saves the model, and
defines how the endpoint uses it. Only the data format is this example's own; everything else follows the documentation."""
import argparse
import gzip
import json
import os
import pathlib

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PIXEL_MEAN, PIXEL_DEVIATION = 72.94, 90.02  # mean and deviation of the training images, measured once


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
                                    nn.Conv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
                                    nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels):
        return self.layers((pixels - PIXEL_MEAN) / PIXEL_DEVIATION)


def read_numbers(path, header_bytes):
    with gzip.open(path) as file:
        return torch.from_numpy(numpy.frombuffer(file.read(), dtype=numpy.uint8, offset=header_bytes).copy())


def read_images(folder, kind):
    images = read_numbers(pathlib.Path(folder) / f"{kind}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float()
    return images, read_numbers(pathlib.Path(folder) / f"{kind}-labels-idx1-ubyte.gz", 8).long()


@torch.no_grad()
def accuracy(network, images, labels):
    """Returns the accuracy over all test images; each worker tests its share."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (network(images[mine]).argmax(1) == labels[mine]).sum().double()
    dist.all_reduce(right)
    return right.item() / len(labels)


def train(options):
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the back-end "smddp"
    dist.init_process_group(backend="smddp")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    network = DistributedDataParallel(Network())
    images, labels = read_images(options.train, "train")
    data = TensorDataset(images[:options.limit], labels[:options.limit])
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, batch_size=options.batch_size // workers, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.epochs * len(loader))
    test_images, test_labels = read_images(options.test, "t10k")
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for step, (pixels, names) in enumerate(loader, 1):
            loss = cross_entropy(network(pixels), names)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if rank == 0 and step % 50 == 0:
                print(f"epoch {epoch + 1} step {step}/{len(loader)} loss={loss.item():.4f};", flush=True)
        share = accuracy(network.module, test_images, test_labels)
        if rank == 0:
            print(f"epoch {epoch + 1} test_accuracy={share:.4f};", flush=True)
    if rank == 0:
        torch.save(network.module.state_dict(), os.path.join(options.model_dir, "model.pth"))
    dist.destroy_process_group()


# ---- the endpoint calls these ----

def model_fn(model_dir):
    network = Network()
    network.load_state_dict(torch.load(os.path.join(model_dir, "model.pth"), weights_only=True))
    return network.eval()


def predict_fn(data, model):
    """Returns the class of each image."""
    with torch.no_grad():
        return model(torch.as_tensor(numpy.asarray(data), dtype=torch.float32).view(-1, 1, 28, 28)).argmax(1).numpy()


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=120, help="images per step, over all workers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=60000, help="use only so many training images")
    parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAIN"))
    parser.add_argument("--test", default=os.environ.get("SM_CHANNEL_TEST"))
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--hosts", type=json.loads, default=os.environ.get("SM_HOSTS", "[]"))
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_options())
