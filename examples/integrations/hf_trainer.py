"""Hugging Face Trainer: `ds_sparse.install()` is the one line that is added.

    torchrun --nproc-per-node 2 hf_trainer.py --deepspeed ds_config.json --output_dir runs/trainer \
        --max_steps 200 --per_device_train_batch_size 4 --report_to tensorboard

`tensorboard --logdir runs` then shows the Trainer's scalars and, through the `tensorboard` section of ds_config.json,
those of the communication.
"""

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import ds_sparse

VOCABULARY, LENGTH = 128, 32


def counting(samples: int) -> TensorDataset:
    """Sequences that count up from anywhere, modulo the vocabulary."""
    starts = torch.randint(VOCABULARY, (samples, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY)


def collate(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a causal language model of transformers takes."""
    tokens = torch.stack([tokens for (tokens,) in samples])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train a small GPT-2 from scratch."""
    ds_sparse.install()
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    )
    trainer = Trainer(model, args, data_collator=collate, train_dataset=counting(4096))
    outcome = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print(f"loss {outcome.training_loss:.4f}")


if __name__ == "__main__":
    main()
