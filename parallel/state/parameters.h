// Parameters of a model as the layers below the model see them: named tensors in units, with their
// gradients and optimizer state.
#pragma once
#include <utility>
#include <vector>

#include "parallel/state/parameter_buffers.h"
#include "parallel/state/parameter_collectives.h"
#include "parallel/state/parameter_state.h"

namespace train_gpt {

/// The buffers, the collectives over them in a training step, and the state in them from and to the
/// host. What needs only one of the three can take that one.
class ParameterStore : public ParameterBuffers, public ParameterCollectives, public ParameterState {
  public:
    ParameterStore(Arena& arena, std::vector<Parameter> parameters, DType dtype, Use use,
                   const Sharding& sharding = {})
        : ParameterBuffers(arena, std::move(parameters), dtype, use, sharding),
          ParameterCollectives(static_cast<const ParameterBuffers&>(*this)),
          ParameterState(static_cast<const ParameterBuffers&>(*this)) {}
    // The second and the third hold references to the first.
    ParameterStore(const ParameterStore&) = delete;
    ParameterStore& operator=(const ParameterStore&) = delete;
};

}  // namespace train_gpt
