#!/usr/bin/env bash
# Lesson 4: a dense model and a mixture of experts
#
# In a dense model every token passes every weight. In a mixture each layer has several MLPs, the
# experts, and a router sends each token to a few of them. The model has more weights, and a token
# costs no more work.
#
# This lesson trains a Llama whose MLPs are 384 wide, and a mixture with 8 experts that are 192
# wide, of which each token goes to two: 2 x 192 = 384. Both see the same tokens.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

shards 4096
common=(--set optimizer.name=adamw --set optimizer.learning_rate=0.004)
train dense scripts/lessons/small.json --set model.family=llama --set model.n_ff=384 "${common[@]}"
train mixture scripts/lessons/small.json --set model.family=mixtral --set model.n_ff_expert=192 \
    --set model.n_expert=8 --set model.n_expert_per_token=2 --set model.router_scale=2 \
    --set router.balance=bias --set router.balance_rate=0.003 "${common[@]}"
weights() { grep -o "\"$2\":[0-9]*" "$work/$1/history.jsonl" | head -n 1 | cut -d : -f 2; }
measured "weights of the dense model" "$(weights dense parameters)"
measured "weights of the mixture" "$(weights mixture parameters)"
measured "weights of the mixture that a token passes" "$(weights mixture active_parameters)"
measured "validation loss of the dense model" "$(last dense val_loss)" nats
measured "validation loss of the mixture" "$(last mixture val_loss)" nats
gain=$(calculate %.3f "$(last dense val_loss) - $(last mixture val_loss)")
measured "what the mixture gains" "$gain" nats
measured "load of the busiest expert, as a multiple of the mean" "$(last mixture router_load)"

cat <<'END'

The mixture has more than twice the weights. A gain as small as here is normal for 150 steps: each
expert has seen a quarter of the tokens. docs/experts.md has longer runs. The router's balance
decides whether there is any gain: experts that get no tokens learn nothing.
END
