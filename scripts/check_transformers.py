#!/usr/bin/env python3
"""Loads a checkpoint folder with Hugging Face's transformers and prints what it makes of a text.

    scripts/check_transformers.py CHECKPOINT [TEXT_FILE]        needs: pip install torch transformers

Prints one JSON line: tokens, loss (nats per predicted token) and bits per byte of the text (its first n_ctx tokens,
default: a sentence), in float32. `train_gpt eval` on the same tokens must give the same loss.
"""
import json
import math
import sys

import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

SENTENCE = "In the beginning God created the heaven and the earth."


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    checkpoint = sys.argv[1]
    model, loading = GPT2LMHeadModel.from_pretrained(checkpoint, output_loading_info=True)
    faults = {key: list(loading[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if loading[key]}
    if faults:
        sys.exit(f"{checkpoint}: the tensors are not those of a GPT2LMHeadModel: {faults}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    text = SENTENCE
    if len(sys.argv) == 3:
        with open(sys.argv[2], encoding="utf-8") as file:
            text = file.read(16 * model.config.n_ctx)
    tokens = tokenizer(text)["input_ids"][:model.config.n_ctx]
    if len(tokens) < 2:
        sys.exit("the text has fewer than two tokens: there is nothing to predict")
    text_bytes = len(tokenizer.decode(tokens[1:]).encode())
    with torch.no_grad():
        loss = model.float().eval()(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()
    print(json.dumps({"tokens": tokens, "loss": loss,
                      "bits_per_byte": loss * (len(tokens) - 1) / text_bytes / math.log(2)}))


if __name__ == "__main__":
    main()
