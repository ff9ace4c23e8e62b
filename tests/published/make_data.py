#!/usr/bin/env python3
"""make_data.py FOLDER: makes small data sets in the forms that the published scripts read. Sequences count in steps, so that a model can
learn them."""
import json
import pathlib
import sys

import h5py
import numpy as np
import torch
from PIL import Image

WORDS, LENGTH, SAMPLES = 97, 24, 400  # of a GPT-2
BERT = {"vocab_size": 104, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "hidden_act": "gelu",
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "initializer_range": 0.02, "max_position_embeddings": 16,
        "type_vocab_size": 2}
SPECIAL, MASK, MASKED = 5, 4, 3  # numbers below SPECIAL are not words


def sequences(random, count, length, words):
    return (random.integers(words, size=(count, 1)) + random.integers(1, 3, size=(count, 1)) * np.arange(length)) % words


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input_ids": row, "attention_mask": [1] * len(row)}) + "\n" for row in rows.tolist()))


def write_bert(path, random, count=64, length=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = sequences(random, count, length, BERT["vocab_size"] - SPECIAL) + SPECIAL
    places = np.sort(np.stack([random.choice(np.arange(1, length), MASKED, replace=False) for _ in range(count)]), 1)
    masked = ids.copy()
    np.put_along_axis(masked, places, MASK, 1)
    with h5py.File(path, "w") as file:
        file["input_ids"], file["input_mask"], file["segment_ids"] = masked, np.ones_like(ids), np.zeros_like(ids)
        file["masked_lm_positions"], file["masked_lm_ids"] = places, np.take_along_axis(ids, places, 1)
        file["next_sentence_labels"] = random.integers(2, size=count)


def write_coco(folder, name, random, count=32, size=64):
    """Images with a bright and a dark rectangle on noise: two classes, with boxes and polygons."""
    images, annotations = [], []
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        pixels = random.integers(90, 160, (size, size, 3), dtype=np.uint8)
        for kind in range(random.integers(1, 4)):
            x, y = (int(each) for each in random.integers(0, size // 2, 2))
            width, height = (int(each) for each in random.integers(12, size // 2, 2))
            pixels[y:y + height, x:x + width] = 250 if kind % 2 else 5
            corners = [x, y, x + width, y, x + width, y + height, x, y + height]
            annotations.append({"id": len(annotations) + 1, "image_id": number, "category_id": kind % 2 + 1, "iscrowd": 0,
                                "bbox": [x, y, width, height], "area": width * height, "segmentation": [corners]})
        Image.fromarray(pixels).save(folder / name / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": size, "height": size})
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(
        {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "dark"}, {"id": 2, "name": "bright"}]}))


def main(folder):
    folder, random = pathlib.Path(folder), np.random.default_rng(1)
    for name, count in (("train/a", SAMPLES), ("train/b", SAMPLES), ("val/a", 64)):
        write_lines(folder / f"{name}.json", sequences(random, count, LENGTH, WORDS))
    for number in range(4):
        write_bert(folder / f"bert/training_{number}.hdf5", random)
    (folder / "bert_config.json").write_text(json.dumps(BERT))
    for name in ("train2014", "val2014"):
        write_coco(folder / "coco", name, random)
    torch.save({"model": {"rpn.head.conv.bias": torch.zeros(16)}}, folder / "maskrcnn.pth")  # the example cannot begin without weights


main(sys.argv[1])
