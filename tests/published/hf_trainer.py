#!/usr/bin/env python3
"""Hugging Face's Trainer, which calls smdistributed.modelparallel if SM_HP_MP_PARAMETERS has `partitions`: trains a small BERT, evaluates
it, and trains on from a checkpoint. The class of a sample is one of its words."""
import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import is_sagemaker_mp_enabled

SAMPLES, WORDS, LENGTH, HALFWAY = 64, 64, 12, 24
FOLDER = f"trained-{os.environ['WORLD_SIZE']}"  # parts of one number of partitions


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        words = torch.randint(2, 32, (LENGTH,), generator=torch.Generator().manual_seed(number))
        words[1] = 40 + number % 2
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor(number % 2)}


def trainer():
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    arguments = TrainingArguments(
        output_dir=FOLDER, per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=6, logging_steps=8,
        save_steps=HALFWAY, report_to=[], learning_rate=3e-3, dataloader_drop_last=True, seed=1, disable_tqdm=True)
    return Trainer(model=model, args=arguments, train_dataset=Data(), eval_dataset=Data(),
                   compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())})


def main():
    assert is_sagemaker_mp_enabled(), "SM_HP_MP_PARAMETERS and SM_FRAMEWORK_PARAMS are not set"
    first = trainer()
    first.train()
    found = first.evaluate()
    print(f"evaluated: loss {found['eval_loss']:.6f} accuracy {found['eval_accuracy']:.3f}", flush=True)
    assert found["eval_accuracy"] > 0.9 and found["eval_loss"] < 1.2, found
    second = trainer()
    second.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-{HALFWAY}")
    again = second.evaluate()
    print(f"evaluated: loss {again['eval_loss']:.6f} after {second.state.global_step} steps, half of them from a checkpoint", flush=True)
    assert abs(again["eval_loss"] - found["eval_loss"]) < 1e-3, (found, again)


if __name__ == "__main__":
    main()
