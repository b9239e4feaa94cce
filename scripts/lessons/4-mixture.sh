#!/usr/bin/env bash
# Lesson 4: a dense model and a mixture of experts
#
# In a dense model every token passes every weight. In a mixture each layer has several MLPs, the
# experts, and a router sends each token to a few of them. The model has more weights, and a token
# costs no more work.
#
# A router that sends most tokens to few experts wastes the others. So each expert has a bias, which
# rises while the expert gets too few tokens (router.balance=bias; Wang et al., arXiv 2408.15664).
#
# This lesson trains a Llama whose MLPs are 384 wide, and mixtures with 8 experts that are 192 wide,
# of which each token goes to two: 2 x 192 = 384. All see the same tokens. One mixture balances its
# experts, the other one does not.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

shards 4096
common=(--set optimizer.name=adamw --set optimizer.learning_rate=0.004)
mixture=(--set model.family=mixtral --set model.n_ff_expert=192 --set model.n_expert=8
    --set model.n_expert_per_token=2 --set model.router_scale=2 "${common[@]}")
train dense scripts/lessons/small.json --set model.family=llama --set model.n_ff=384 "${common[@]}"
train mixture scripts/lessons/small.json "${mixture[@]}" --set router.balance=bias \
    --set router.balance_rate=0.003
train unbalanced scripts/lessons/small.json "${mixture[@]}" --set router.balance=none
weights() { grep -o "\"$2\":[0-9]*" "$work/$1/history.jsonl" | head -n 1 | cut -d : -f 2; }
measured "weights of the dense model" "$(weights dense parameters)"
measured "weights of the mixture" "$(weights mixture parameters)"
measured "weights of the mixture that a token passes" "$(weights mixture active_parameters)"
measured "validation loss of the dense model" "$(last dense val_loss)" nats
measured "validation loss of the mixture" "$(last mixture val_loss)" nats
difference=$(calculate %.3f "$(last mixture val_loss) - $(last dense val_loss)")
measured "difference of the two" "$difference" nats
measured "busiest expert, over the mean, with balance" "$(last mixture router_load)"
measured "busiest expert, over the mean, without" "$(last unbalanced router_load)"
measured "validation loss of the mixture without balance" "$(last unbalanced val_loss)" nats

cat <<'END'

The mixture has twice the weights for the same work, and here it learns as much as the dense model,
not more: each expert has seen a quarter of the tokens, and this text is too short for more weights
to pay off. Large mixtures, which see trillions of tokens, learn more for their work (Muennighoff et
al. 2024, arXiv 2409.02060). docs/experts.md has longer runs on this text.
END
