"""A sparse GPT-2 trained by transformers' Trainer; lines with an arrow are all that smupar adds.

Run: python examples/huggingface_gpt2.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import smupar
from smupar.integrations import huggingface  # <- 1

VOCAB = 64
torch.manual_seed(0)


def examples(number: int) -> list[dict[str, torch.Tensor]]:
    """Arithmetic progressions modulo the vocabulary: the next token follows from the two before."""
    start, stride = torch.randint(VOCAB, (2, number, 1))
    rows = (start + stride * torch.arange(24)) % VOCAB
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def main() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=128, n_layer=2, n_head=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    plan = huggingface.parameterize(model, base=64, density=1 / 4)  # <- 2
    print(plan)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            max_steps=60,
            per_device_train_batch_size=16,
            learning_rate=2**-7,
            weight_decay=0.1,
            warmup_steps=10,
            logging_steps=20,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        optimizer = huggingface.make_optimizer(model, plan, args)  # <- 3
        rigl = smupar.RigL(model, plan, optimizer, every=10, stop=45, steps=60)  # <- 4, for masks that move
        Trainer(
            model=model,
            args=args,
            train_dataset=examples(960),
            optimizers=(optimizer, None),
            callbacks=[huggingface.SmuparCallback(plan, sparsifier=rigl)],  # <- 5, with the line above it
        ).train()

        # Masks, hooks and scales come back; an export needs transformers alone.
        ids = examples(4)[0]["input_ids"][None]
        model.save_pretrained(Path(out) / "sparse")
        again, _ = huggingface.load(Path(out) / "sparse")
        huggingface.export(Path(out) / "sparse", Path(out) / "plain")
        plain = GPT2LMHeadModel.from_pretrained(Path(out) / "plain")
        with torch.no_grad():
            wanted = model.eval()(ids).logits
            assert torch.equal(again(ids).logits, wanted)
            torch.testing.assert_close(plain(ids).logits, wanted, rtol=1e-3, atol=1e-4)
    weight = model.transformer.h[0].mlp.c_fc.weight
    print(f"kept weights after training: {torch.count_nonzero(weight) / weight.numel():.4f}")


if __name__ == "__main__":
    main()
