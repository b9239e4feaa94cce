#include "kernels/residual.h"

#include "device/profile.h"
#include "kernels/neighbours.h"

namespace train_gpt {

namespace {

template <class T>
void add(const ResidualAdd& args) {
    const int64_t M = args.x.rows(), C = args.x.cols();
    const T* bias = args.bias ? args.bias.as<T>() : nullptr;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < M; ++row) {
        const T *x = args.x.as<T>() + row * C, *residual = args.residual.as<T>() + row * C;
        T* out = args.out.as<T>() + row * C;
        if (bias)
            for_positions<T>(C, [=](auto at) { at.store(out, at(x) + at(residual) + at(bias)); });
        else
            for_positions<T>(C, [=](auto at) { at.store(out, at(x) + at(residual)); });
    }
}

}  // namespace

void residual_add(Stream& stream, const ResidualAdd& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(args.out.dtype == args.x.dtype && args.residual.dtype == args.x.dtype &&
           args.residual.numel() == args.x.numel() && args.out.numel() == args.x.numel());
    assert(!args.bias || (args.bias.dtype == args.x.dtype && args.bias.numel() == args.x.cols()));
    TRAIN_GPT_ON_CUDA(stream.device, residual_add(stream, args));
    with_float_type(args.x.dtype, [&](auto type) { add<decltype(type)>(args); });
}

Cost cost_of(const ResidualAdd& a) {
    return {"residual_add",
            bytes_of(a.out) + bytes_of(a.x) + bytes_of(a.residual) + bytes_of(a.bias), 0};
}

}  // namespace train_gpt
