#include "parallel/state/parameters.h"

#include <cassert>
#include <string>

#include "device/trace.h"

namespace train_gpt {

namespace {

constexpr int sums_slot = 0;

}  // namespace

ParameterStore::ParameterStore(Arena& arena, std::vector<Parameter> parameters,
                               ParameterStoreOptions options)
    : ParameterBuffers(arena, std::move(parameters), options.dtype, options.use, options.sharding,
                       std::move(options.slots)),
      grids_(training() && options.sharding.is_exact()
                 ? std::optional<Grids>(std::in_place, arena, *this,
                                        options.model ? *options.model : this->parameters())
                 : std::nullopt),
      weights(*this),
      gradients(*this, grids()),
      state(*this) {
    if (training() && options.sharding.matrices) matrices.emplace(arena, *this);
}

void ParameterStore::connect(const Mesh& mesh, StepClock* clock, TensorGroup* tensor) {
    assert(mesh.layout().world() == sharding().world);
    if (sharding().world == 1) return;
    everyone_ = &mesh.everyone();
    exchange_ =
        std::make_unique<Exchange>(everyone_->exchange_stream(device()),
                                   std::vector<std::string>{mesh.name_of(*everyone_)}, clock);
    gradients.connect(mesh, *exchange_, tensor);
    weights.connect(mesh, *exchange_);
    if (matrices) matrices->connect(mesh, *exchange_);
}

void ParameterStore::gather_from_ranks(Stream& stream, double* out, const double* in, int64_t n) {
    assert(everyone_);
    exchange_->submit(stream, sums_slot, [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "gather sums");
        everyone_->all_gather(exchange, out, in, n, DType::fp64);
    });
    exchange_->hold(stream, sums_slot);
}

void ParameterStore::reduce_over_ranks(Stream& stream, void* data, int64_t n, DType dtype,
                                       Reduction reduction) {
    if (!everyone_) return;
    exchange_->submit(stream, sums_slot, [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, "add sums");
        everyone_->all_reduce(exchange, data, n, dtype, reduction);
    });
    exchange_->hold(stream, sums_slot);
}

}  // namespace train_gpt
