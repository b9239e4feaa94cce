#!/usr/bin/env bash
# Lesson 3: AdamW and Muon
#
# The gradient says in which direction each weight should move. An optimizer decides how far. AdamW
# divides each weight's mean gradient by its usual size, so that every weight moves about equally
# far. Muon sees that weights form matrices: it makes all directions of a matrix's step equally long
# (an orthogonal matrix, by five steps of an iteration), so that directions which rarely have
# gradients are learned too. Embeddings and norms, which are no such matrices, stay with AdamW.
#
# This lesson trains the same model on the same tokens with both. AdamW gets three learning rates,
# of which the best counts. Muon has the one rate of small.json.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

shards 4096
train small scripts/lessons/small.json
for rate in 0.002 0.004 0.008; do
    train "adamw-$rate" scripts/lessons/small.json --set optimizer.name=adamw \
        --set optimizer.learning_rate=$rate
    measured "validation loss of AdamW at $rate" "$(last "adamw-$rate" val_loss)" nats
done
best=$(for rate in 0.002 0.004 0.008; do last "adamw-$rate" val_loss; done | sort -g | head -n 1)
measured "validation loss of AdamW, best" "$best" nats
measured "validation loss of Muon" "$(last small val_loss)" nats
measured "what Muon gains" "$(calculate %.3f "$best - $(last small val_loss)")" nats

cat <<'END'

Both have seen 307,200 tokens. Muon's step costs more arithmetic, which hardly counts where a step
has many tokens. docs/optimizers.md says how it is computed on many ranks.
END
