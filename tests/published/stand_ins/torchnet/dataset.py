"""SplitDataset: one part of a data set, by its name."""


class SplitDataset:
    def __init__(self, dataset, partitions):
        self._dataset, self._parts, begin = dataset, {}, 0.0
        for name, share in partitions.items():
            self._parts[name] = range(round(begin * len(dataset)), round((begin + share) * len(dataset)))
            begin += share
        self._part = None

    def select(self, name):
        self._part = self._parts[name]

    def __len__(self):
        return len(self._part)

    def __getitem__(self, index):
        return self._dataset[self._part[index]]
