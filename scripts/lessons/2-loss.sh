#!/usr/bin/env bash
# Lesson 2: the loss
#
# A model gives each token of its vocabulary a probability to be the next one. Its loss is the mean
# of -ln p of the tokens that really follow, in nats. A model that knows nothing gives 4,096 tokens
# the same probability each, so its loss is ln 4096 = 8.32. Perplexity is e to the loss: among how
# many equally likely tokens it hesitates. Divided by ln 2 and by the bytes of a token, the loss
# becomes bits per byte: the size to which the model could compress a text that it has not seen.
#
# This lesson trains a small model for 150 steps of 2,048 tokens, and compares it with gzip, which
# learns from the text it has just read and knows no words.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

shards 4096
train small scripts/lessons/small.json
measured "loss of the first step, before the weights move" "$(first small loss)" nats
measured "ln 4096" "$(calculate %.3f "log(4096)")" nats
loss=$(last small val_loss) bits=$(last small val_bits_per_byte)
measured "validation loss after 150 steps" "$loss" nats
measured "perplexity" "$(calculate %.1f "exp($loss)")" tokens
measured "bits per byte" "$bits"
measured "bytes of a token, from loss and bits" "$(calculate %.3f "$loss / log(2) / $bits")"
zipped=$(gzip -9 < "$text" | wc -c)
measured "bits per byte of gzip -9" "$(calculate %.3f "8 * $zipped / $(wc -c < "$text")")"

cat <<'END'

Half a minute of training took the model from 4,096 equally likely tokens to less than a hundred.
It needs fewer bits than gzip, which reads the whole text. `train_gpt look` shows which tokens it
expects and which not: docs/learning.md.
END
