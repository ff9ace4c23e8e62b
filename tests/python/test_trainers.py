#!/usr/bin/env python3
"""Libraries on top of torch, switched to Shoal by one line (docs/python.md): Accelerate, Hugging Face Trainer, Lightning.
Each trains on two ranks; losses and parameters equal those of one process that trains in plain PyTorch on the whole batch."""
import copy
import os
import tempfile
import warnings

import ranks
import torch
import torch.distributed as dist
from ranks import Case, expect

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Before ranks are forked: an import takes seconds.
import accelerate  # noqa: E402
import lightning  # noqa: E402
import transformers  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

SAMPLES, STEPS, FEATURES, RATE = 8, 5, 6, 0.1
NEAR = 1e-5


def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def alone(model, loss_of, whole):
    """Trains the model in one process in plain PyTorch, each step on all samples. Returns the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, whole)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def squares(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def same(losses, model, expected, reference, near=NEAR):
    expect(len(losses) == len(expected), losses, expected)
    expect(all(abs(one - other) <= near for one, other in zip(losses, expected)), losses, expected)
    expect(losses[-1] < losses[0], "nothing was learnt", losses)
    for (name, one), other in zip(model.named_parameters(), reference.parameters()):
        expect(torch.allclose(one, other, rtol=0, atol=NEAR), f"{name} differs from one process's", one, other)
    expect(dist.get_backend() == "shoal", dist.get_backend())


def mean_over_ranks(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


def accelerate_trains_as_one_process(world):
    reference, data, losses = network(), samples(), []
    expected = alone(reference, squares, data.tensors)

    dist.init_process_group("shoal")
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES // world.size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), loader)
    for _ in range(STEPS):
        for batch in loader:
            optimizer.zero_grad()
            loss = squares(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    expect(accelerator.num_processes == world.size and hasattr(model, "module"), "the model is not wrapped")
    same(losses, accelerator.unwrap_model(model), expected, reference)


def gpt():
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0))


class Texts(torch.utils.data.Dataset):
    """Rows of numbers as texts of the same length."""

    def __init__(self):
        self.rows = torch.randint(32, (SAMPLES, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trained_by_trainer(world, model, texts, *callbacks):
    """Returns the Trainer after it has trained the model."""
    dist.init_process_group("shoal")
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, use_cpu=True, num_train_epochs=STEPS, per_device_train_batch_size=SAMPLES // world.size, max_grad_norm=0.0,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_num_workers=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=list(callbacks), optimizers=(
            optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)))
        trainer.train()
    return trainer


def trainer_trains_as_one_process(world):
    """Trainer divides by all tokens of a batch, including the first of each text, which nothing predicts."""
    reference, texts = gpt(), Texts()
    expected = alone(reference, lambda model, rows: model(input_ids=rows, labels=rows, num_items_in_batch=rows.numel()).loss,
                     texts.rows)

    model = gpt()
    trainer = trained_by_trainer(world, model, texts)
    expect(trainer.args.world_size == world.size, trainer.args.world_size)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    same(losses, model, expected, reference, near=2e-4)  # Trainer rounds the losses


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.losses = network(), []

    def training_step(self, batch, _):
        loss = squares(self.network, batch)
        self.losses.append(mean_over_ranks(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def trained_by_lightning(world, module, data):
    """Returns Lightning's Trainer after it has trained the module."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world.size, strategy=DDPStrategy(process_group_backend="shoal"), max_epochs=STEPS,
            default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, log_every_n_steps=1)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=SAMPLES // world.size))
    return trainer


def lightning_trains_as_one_process(world):
    reference, data, module = network(), samples(), Module()
    expected = alone(reference, squares, data.tensors)
    trainer = trained_by_lightning(world, module, data)
    expect(trainer.world_size == world.size and trainer.global_step == STEPS, trainer.world_size, trainer.global_step)
    same(module.losses, module.network, expected, reference)


# ---- A worker that dies ----

LAST_STEP = 2


def small_models():
    """Names, models of transformers without dropout, and their arguments for ten samples."""
    torch.manual_seed(3)
    words, sizes = torch.randint(50, (10, 9)), {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    quiet = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    yield "GPT-2", transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **quiet)), {
            "input_ids": words, "use_cache": False, "return_dict": False}
    yield "Llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50, **quiet)), {
        "input_ids": words, "use_cache": False}
    yield "BERT", transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=50, **none)), {
        "input_ids": words, "attention_mask": torch.ones(10, 9, dtype=torch.long)}
    yield "T5", transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=32, num_layers=3, num_heads=2, d_ff=64, d_kv=16, vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0)), {
            "input_ids": words, "decoder_input_ids": words.flip(1), "use_cache": False}
    yield "ViT", transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **none)), {
        "pixel_values": torch.randn(10, 3, 32, 32)}


def pipelines_train_models_of_transformers(world):
    """Their own code is divided, in microbatches of two sizes."""
    dist.init_process_group("shoal")
    import shoal.torch
    for name, model, inputs in small_models():
        alone, targets = copy.deepcopy(model), torch.arange(10)
        def loss(result, target):
            return (result[0].flatten(1).square().mean(1) * (target + 1)).mean()

        pipeline = shoal.torch.Pipeline(model, inputs, microbatches=4, schedule="zb-h1", loss=loss)
        expect(len(pipeline.units) >= 5, name, pipeline.units)
        result = pipeline.forward(inputs)
        if result is not None:
            torch.testing.assert_close(result[0], alone(**inputs)[0].detach(), rtol=1e-4, atol=1e-5)
        mine, wanted = pipeline.step(inputs, targets), loss(alone(**inputs), targets)
        wanted.backward()
        torch.testing.assert_close(mine, wanted.detach())
        gradients = dict(alone.named_parameters(remove_duplicate=False))
        own = [each for each, parameter in pipeline.named_parameters() if parameter.grad is not None]
        for each in own:
            torch.testing.assert_close(pipeline.module.get_parameter(each).grad, gradients[each].grad, rtol=1e-4, atol=1e-5)
        of_ranks = [None] * world.size
        dist.all_gather_object(of_ranks, own)  # how many each has depends on measured times
        expect(all(of_ranks) and {id(gradients[each]) for one in of_ranks for each in one} ==
               {id(each) for each in alone.parameters() if each.grad is not None}, name, of_ranks)


def raises_of_rank_1(train):
    try:
        train()
    except RuntimeError as error:  # includes torch's DistBackendError
        expect("rank 1" in str(error), error)
        return
    raise AssertionError("training came to its end without rank 1")


class Dies(transformers.TrainerCallback):
    def on_step_begin(self, arguments, state, control, **_):
        if dist.get_rank() == 1 and state.global_step == LAST_STEP:
            os._exit(3)


def dies_in_trainer(world):
    raises_of_rank_1(lambda: trained_by_trainer(world, gpt(), Texts(), Dies()))


class MortalModule(Module):
    def on_train_batch_start(self, batch, batch_index):
        if self.global_rank == 1 and self.global_step == LAST_STEP:
            os._exit(3)


def dies_in_lightning(world):
    raises_of_rank_1(lambda: trained_by_lightning(world, MortalModule(), samples()))


# ---- Names unknown to Accelerate ----


def accelerate_refuses_the_name(world):
    """docs/python.md warns of this: the name of a back-end that Accelerate does not know."""
    from accelerate.utils import InitProcessGroupKwargs
    try:
        accelerate.Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="shoal")])
    except ValueError as error:
        expect("shoal" in str(error), error)
        return
    raise AssertionError("Accelerate takes the name now: say so in docs/python.md")


warnings.filterwarnings("ignore")
CASES = [Case(body.__name__, body, sizes=(2,), init=False, fresh=True) for body in (
    accelerate_trains_as_one_process, pipelines_train_models_of_transformers, trainer_trains_as_one_process,
    lightning_trains_as_one_process, accelerate_refuses_the_name)]
CASES += [Case(body.__name__, body, sizes=(2,), init=False, fresh=True, ends=(1,)) for body in (dies_in_trainer, dies_in_lightning)]

if __name__ == "__main__":
    ranks.run(CASES)
