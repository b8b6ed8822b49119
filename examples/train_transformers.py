"""Train a small byte-level Llama without RoPE on Python's help topics, by the library's Trainer.

Usage: python examples/train_transformers.py [--method exact|window|lsh] [--steps 48]

Prints the loss, in bits a byte, as training goes on, and at the end on text held back. All three
methods start from the same weights and see the same batches. Under lsh each step draws its own
blocks. Needs: pip install "plsh[transformers]" accelerate
"""

import argparse
import math
import tempfile
from pydoc_data.topics import topics
from typing import Any

import plsh_torch.transformers as on_plsh
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Bytes(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of a text, a token a byte."""

    def __init__(self, text: bytes, length: int) -> None:
        self.pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def train(method: str, steps: int, length: int, batch: int) -> tuple[list[float], float]:
    """Return the losses on the way and on the held-back text, in bits a byte."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = len(text) * 9 // 10
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = on_plsh.switch(LlamaForCausalLM(config), method, rope=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                per_device_eval_batch_size=batch,
                learning_rate=3e-3,
                lr_scheduler_type="cosine",
                logging_steps=max(1, steps // 6),
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Bytes(text[:cut], length),
            eval_dataset=Bytes(text[cut:][: 16 * (length + 1)], length),
            callbacks=[on_plsh.StepCallback()] if method == "lsh" else [],
        )
        trainer.train()
        held_back = trainer.evaluate()["eval_loss"]
    curve = [entry["loss"] / math.log(2) for entry in trainer.state.log_history if "loss" in entry]
    return curve, held_back / math.log(2)


def main() -> None:
    """Train, and print the curves."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=("exact", "window", "lsh"), action="append")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    for method in options.method or ("exact", "window", "lsh"):
        curve, held_back = train(method, options.steps, options.length, options.batch)
        print(f"{method:7}", *(f"{loss:6.3f}" for loss in curve), f"  held back {held_back:6.3f}")


if __name__ == "__main__":
    main()
