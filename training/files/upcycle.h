// Models made of other models: a mixture of experts of a dense model (Komatsuzaki et al., sparse
// upcycling, arXiv 2212.05055), and a mixture with selection biases of one without.
#pragma once
#include <cstdint>
#include <string>

#include "training/files/stored_model.h"

namespace train_gpt {

struct Upcycling {
    int n_expert = 0;  // 0: the model stays as it is
    int n_expert_per_token = 2;
    /// All logits of a new router are 0, so that every token goes to the first experts; else its
    /// weights are random, of the model's init_std.
    bool zero_router = false;
};

/// A mixture each of whose experts is the MLP of its layer in the dense model. Routers are new. A
/// token's weights add up to 1, so the mixture computes what the dense model does, but for
/// rounding. Errors begin with `where`. Throws Error for a model that has experts, or whose MLP
/// cannot be an expert.
StoredModel upcycled(StoredModel dense, const Upcycling& how, const std::string& where);

/// The mixture with selection biases of 0.
StoredModel with_selection_biases(StoredModel mixture);

}  // namespace train_gpt
