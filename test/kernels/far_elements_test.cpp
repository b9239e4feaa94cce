// Tensors with more than 2³¹ elements. Only a few of these are ever touched, so that the others
// need no memory.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <sys/mman.h>

#ifdef TRAIN_GPT_CUDA
#include <cuda_runtime_api.h>
#endif

#include "base/error.h"
#include "kernels/experts/grouped_linear.h"
#include "kernels/experts/route.h"
#include "test/kernels/attention_problem.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/test_device.h"

namespace train_gpt {

namespace {

using namespace attention_problem;

constexpr int64_t far = int64_t{1} << 31;  // elements

/// Memory that the device under test and the host can use, and that has pages only where it is
/// touched. On a simulated GPU it is host memory, since the simulator fills its own.
class SparseMemory {
  public:
    explicit SparseMemory(size_t bytes) : bytes_(bytes) {
#ifdef TRAIN_GPT_CUDA
        if (is_managed_) {
            REQUIRE(cudaMallocManaged(&data_, bytes_) == cudaSuccess);
            return;
        }
#endif
        data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(data_ != MAP_FAILED);
#ifdef TRAIN_GPT_CUDA
        if (test_device().is_cuda())
            REQUIRE(cudaHostRegister(data_, bytes_, cudaHostRegisterDefault) == cudaSuccess);
#endif
    }
    ~SparseMemory() {
#ifdef TRAIN_GPT_CUDA
        if (is_managed_) {
            cudaFree(data_);
            return;
        }
        if (is_cuda_) cudaHostUnregister(data_);
#endif
        munmap(data_, bytes_);
    }
    SparseMemory(const SparseMemory&) = delete;
    SparseMemory& operator=(const SparseMemory&) = delete;

    template <class T>
    T* at(int64_t element) const {
#ifdef TRAIN_GPT_CUDA
        if (is_cuda_) REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
#endif
        REQUIRE(static_cast<size_t>(element) < bytes_ / sizeof(T));
        return static_cast<T*>(data_) + element;
    }
    void* data() const { return data_; }

  private:
    size_t bytes_;
    bool is_cuda_ = test_device().is_cuda(), is_managed_ = is_cuda_ && !device_is_simulated();
    void* data_ = nullptr;
};

/// The dimension whose stride takes a tensor of heads beyond 2³¹ elements.
enum class Spread { batch, token, head };

/// A tensor [B, T, heads, D] of bf16 or fp32.
class FarHeads {
  public:
    FarHeads(const Case& c, Spread spread, int T, int heads, DType dtype = DType::bf16)
        : dtype_(dtype), B_(c.shape.B), T_(T), heads_(heads), D_(c.shape.D) {
        // The largest stride; the other two are those of a small tensor.
        const int64_t unit = c.aligned ? 8 : 1, row = D_ + unit * random_int(0, 3);
        const auto beyond = [&](int64_t count) {
            return (far / (count - 1) / 8 + random_int(1, 100)) * 8 + (c.aligned ? 0 : 1);
        };
        if (spread == Spread::batch)
            view_ = {nullptr, beyond(B_), heads_ * row, row};
        else if (spread == Spread::token)
            view_ = {nullptr, heads_ * row, beyond(T_), row};
        else
            view_ = {nullptr, T_ * row, row, beyond(heads_)};
        const int64_t last = place(B_ - 1, T_ - 1, heads_ - 1) + D_;
        REQUIRE(last > far);
        memory_ = std::make_unique<SparseMemory>(static_cast<size_t>(last) * size_of(dtype_));
        view_.data = memory_->data();
    }
    const HeadsView& view() const { return view_; }
    void fill(const Values& values) {
        REQUIRE(dtype_ == DType::bf16);
        each([&](int64_t at, size_t i) {
            *memory_->at<bf16>(at) = bf16(static_cast<float>(values[i]));
        });
    }
    Values read() const {
        Values values;
        each([&](int64_t at, size_t) {
            values.push_back(dtype_ == DType::bf16 ? to_float(*memory_->at<bf16>(at))
                                                   : *memory_->at<float>(at));
        });
        return values;
    }

  private:
    int64_t place(int b, int t, int h) const {
        return b * view_.batch + t * view_.token + h * view_.head;
    }
    template <class F>
    void each(F&& f) const {
        size_t i = 0;
        for (int b = 0; b < B_; ++b)
            for (int t = 0; t < T_; ++t)
                for (int h = 0; h < heads_; ++h)
                    for (int d = 0; d < D_; ++d) f(place(b, t, h) + d, i++);
    }

    DType dtype_;
    int B_, T_, heads_, D_;
    HeadsView view_;
    std::unique_ptr<SparseMemory> memory_;
};

/// run() on tensors that are spread.
Run run_spread(const Case& c, Spread spread, KeyGradients key_gradients) {
    AttentionShape shape = c.shape;
    const TestMemory documents(c.doc_start.size() * sizeof(int32_t));
    if (!c.doc_start.empty()) {
        std::memcpy(documents.data(), c.doc_start.data(), c.doc_start.size() * sizeof(int32_t));
        shape.doc_start = static_cast<const int32_t*>(documents.data());
    }
    const auto of_queries = [&] { return FarHeads(c, spread, shape.T, shape.H); };
    const auto of_keys = [&](DType dtype) {
        return FarHeads(c, spread, shape.S, shape.H_kv, dtype);
    };
    FarHeads q = of_queries(), k = of_keys(DType::bf16), v = of_keys(DType::bf16),
             dout = of_queries();
    q.fill(c.q);
    k.fill(c.k);
    v.fill(c.v);
    dout.fill(c.dout);
    const FarHeads out = of_queries(), dq = of_queries();
    const DType sums = key_gradients == KeyGradients::write ? DType::bf16 : DType::fp32;
    const FarHeads dk = of_keys(sums), dv = of_keys(sums);
    const size_t rows = static_cast<size_t>(shape.B) * shape.H * shape.T;
    const SharedArray<float> lse(rows);
    attention_problem::AttentionStream stream(shape);
    attention_forward(stream.stream, {shape, q.view(), k.view(), v.view(), out.view(), lse.data()});
    attention_backward(stream.stream, {shape, q.view(), k.view(), v.view(), out.view(), dout.view(),
                                       lse.data(), dq.view(), dk.view(), dv.view(), key_gradients});
    Run result{out.read(), dq.read(), dk.read(), dv.read(), {}};
    result.lse.assign(lse.values().begin(), lse.values().end());
    return result;
}

/// A matrix [rows, cols] of which some rows are touched.
template <class T>
class FarMatrix {
  public:
    FarMatrix(int64_t rows, int64_t cols)
        : rows_(rows), cols_(cols), memory_(static_cast<size_t>(rows * cols) * sizeof(T)) {
        REQUIRE(rows * cols > far);
    }
    Tensor tensor() const { return {memory_.data(), dtype_of<T>, {rows_, cols_}}; }
    /// `count` rows from `first` on.
    void fill(int64_t first, const Buffer& from) {
        std::memcpy(memory_.template at<T>(first * cols_), from.tensor().data,
                    from.tensor().bytes());
    }
    std::string bytes(int64_t first, int64_t count) const {
        const T* const begin = memory_.template at<T>(first * cols_);
        return {reinterpret_cast<const char*>(begin),
                static_cast<size_t>(count * cols_) * sizeof(T)};
    }

  private:
    int64_t rows_, cols_;
    SparseMemory memory_;
};

Buffer random_buffer(DType dtype, std::initializer_list<int64_t> shape) {
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies{});
    return {dtype, shape, random_normal(static_cast<size_t>(count))};
}

/// Our own grouped products on a GPU.
std::vector<KernelSettings> grouped_settings() {
    std::vector<KernelSettings> all{{.grouped = KernelSettings::Grouped::own}};
    if (has_wgmma(test_device())) all.push_back({.grouped = KernelSettings::Grouped::wgmma});
    return all;
}

SharedArray<int32_t> shared(const std::vector<int32_t>& values) {
    SharedArray<int32_t> array(values.size());
    std::ranges::copy(values, array.data());
    return array;
}
Tensor tensor_of(const SharedArray<int32_t>& array) {
    return {array.data(), DType::int32, {static_cast<int64_t>(array.values().size())}};
}

}  // namespace

TEST_CASE("attention has the same bits where heads lie more than 2^31 elements apart", "[cuda]") {
    ON_EACH_KERNELS();
    for (const Spread spread : {Spread::batch, Spread::token, Spread::head})
        for (const bool aligned : {true, false}) {
            if (tests_wgmma() && !aligned) continue;  // computed by other kernels
            Wish wish;
            wish.dtype = DType::bf16;
            wish.aligned = aligned;
            wish.B = wish.H_kv = 2;
            wish.H = random_int(0, 1) ? 2 : 4;
            wish.T = static_cast<int>(random_int(17, 40));
            wish.extra_keys = static_cast<int>(random_int(0, 1) * random_int(1, 40));
            // Rows whose size and place are multiples of 4 elements are added up in another order.
            // Odd strides are no such place, so the heads that lie near get no such size.
            wish.D = aligned ? 8 * static_cast<int>(random_int(1, 16))
                             : static_cast<int>(4 * random_int(0, 9) + random_int(1, 3));
            wish.documents = random_int(0, 1) == 1;
            const Case c = random_case(wish);
            const auto key_gradients =
                random_int(0, 1) ? KeyGradients::write : KeyGradients::write_fp32;
            CAPTURE(describe(c), static_cast<int>(spread), static_cast<int>(key_gradients));
            CHECK(same_bits(run(c, Layout::separate, {.key_gradients = key_gradients}),
                            run_spread(c, spread, key_gradients)));
        }
}

TEST_CASE("grouped products have the same bits for rows that lie beyond 2^31 elements", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    // As many rows as there may be. The kernels take the first expert's first row as it comes; so
    // the experts have the last rows, and no others are computed.
    const int64_t R = (int64_t{1} << 23) - (int64_t{1} << 16), E = 3, N = 264, K = 272;
    const std::vector<int32_t> counts{static_cast<int32_t>(random_int(1, 70)), 0,
                                      static_cast<int32_t>(random_int(1, 140))};
    const auto rows = static_cast<int32_t>(counts[0] + counts[2]);
    const int64_t first = R - rows - random_int(0, 50);
    std::vector<int32_t> near{0}, offsets{static_cast<int32_t>(first)};
    for (const int32_t count : counts) {
        near.push_back(near.back() + count);
        offsets.push_back(offsets.back() + count);
    }
    const auto near_offsets = shared(near), far_offsets = shared(offsets);
    const Buffer x = random_buffer(DType::bf16, {rows, K}),
                 dy = random_buffer(DType::bf16, {rows, N}),
                 w = random_buffer(DType::bf16, {E, N, K});
    FarMatrix<bf16> far_x(R, K), far_dy(R, N);
    far_x.fill(first, x);
    far_dy.fill(first, dy);
    for (const KernelSettings& settings : grouped_settings())
        for (const bool gathers : {false, true}) {
            CAPTURE(static_cast<int>(settings.grouped), gathers, rows, first);
            // Gathered rows are those of the tokens of the same numbers.
            std::vector<int32_t> near_tokens(static_cast<size_t>(rows)), far_tokens(R, 1 << 30);
            std::iota(near_tokens.begin(), near_tokens.end(), 0);
            std::iota(far_tokens.begin() + first, far_tokens.begin() + first + rows,
                      static_cast<int32_t>(first));
            const auto near_token = shared(near_tokens), far_token = shared(far_tokens);
            const auto tokens = [&](const SharedArray<int32_t>& of) {
                return gathers ? tensor_of(of) : Tensor{};
            };
            const Buffer out(DType::bf16, {rows, N}), dx(DType::bf16, {rows, K}),
                dw(DType::fp32, {E, N, K}), dw_of_far(DType::fp32, {E, N, K});
            const FarMatrix<bf16> far_out(R, N), far_dx(R, K);
            train_gpt::TestStream stream(0, settings);
            grouped_linear_forward(stream, {.out = out,
                                            .x = x,
                                            .w = w,
                                            .offsets = tensor_of(near_offsets),
                                            .row_token = tokens(near_token)});
            grouped_linear_forward(stream, {.out = far_out.tensor(),
                                            .x = far_x.tensor(),
                                            .w = w,
                                            .offsets = tensor_of(far_offsets),
                                            .row_token = tokens(far_token)});
            CHECK((out.bytes() == far_out.bytes(first, rows)));
            grouped_linear_backward_weight(stream, {.dw = dw.sink(false),
                                                    .x = x,
                                                    .dy = dy,
                                                    .offsets = tensor_of(near_offsets),
                                                    .row_token = tokens(near_token)});
            grouped_linear_backward_weight(stream, {.dw = dw_of_far.sink(false),
                                                    .x = far_x.tensor(),
                                                    .dy = far_dy.tensor(),
                                                    .offsets = tensor_of(far_offsets),
                                                    .row_token = tokens(far_token)});
            CHECK((dw.bytes() == dw_of_far.bytes()));
            if (gathers) continue;
            grouped_linear_backward_input(
                stream, {.dx = dx, .dy = dy, .w = w, .offsets = tensor_of(near_offsets)});
            grouped_linear_backward_input(stream, {.dx = far_dx.tensor(),
                                                   .dy = far_dy.tensor(),
                                                   .w = w,
                                                   .offsets = tensor_of(far_offsets)});
            CHECK((dx.bytes() == far_dx.bytes(first, rows)));
        }
}

TEST_CASE("grouped products have the same bits for weights that lie beyond 2^31 elements",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const int64_t E = most_experts, N = 2056, K = 2056, rows = random_int(1, 90);
    // The last expert has all rows.
    std::vector<int32_t> offsets(static_cast<size_t>(E) + 1, 0);
    offsets.back() = static_cast<int32_t>(rows);
    const auto far_offsets = shared(offsets), near_offsets = shared({0, offsets.back()});
    const Buffer x = random_buffer(DType::bf16, {rows, K}),
                 dy = random_buffer(DType::bf16, {rows, N}), w = random_buffer(DType::bf16, {N, K});
    FarMatrix<bf16> far_w(E * N, K);
    far_w.fill((E - 1) * N, w);
    for (const KernelSettings& settings : grouped_settings()) {
        CAPTURE(static_cast<int>(settings.grouped), rows);
        const Buffer out(DType::bf16, {rows, N}), dx(DType::bf16, {rows, K}),
            out_of_far(DType::bf16, {rows, N}), dx_of_far(DType::bf16, {rows, K});
        train_gpt::TestStream stream(0, settings);
        const Tensor one = w.tensor().reshaped({1, N, K}), all = far_w.tensor().reshaped({E, N, K});
        grouped_linear_forward(stream,
                               {.out = out, .x = x, .w = one, .offsets = tensor_of(near_offsets)});
        grouped_linear_forward(
            stream, {.out = out_of_far, .x = x, .w = all, .offsets = tensor_of(far_offsets)});
        CHECK((out.bytes() == out_of_far.bytes()));
        grouped_linear_backward_input(
            stream, {.dx = dx, .dy = dy, .w = one, .offsets = tensor_of(near_offsets)});
        grouped_linear_backward_input(
            stream, {.dx = dx_of_far, .dy = dy, .w = all, .offsets = tensor_of(far_offsets)});
        CHECK((dx.bytes() == dx_of_far.bytes()));

        // What is added to is that of the last expert alone: no other has rows.
        const Buffer dw(DType::fp32, {N, K}, std::vector<float>(static_cast<size_t>(N * K)));
        FarMatrix<float> far_dw(E * N, K);
        far_dw.fill((E - 1) * N, dw);
        grouped_linear_backward_weight(
            stream, {.dw = dw.sink(true), .x = x, .dy = dy, .offsets = tensor_of(near_offsets)});
        grouped_linear_backward_weight(stream, {.dw = {far_dw.tensor().data, DType::fp32, true},
                                                .x = x,
                                                .dy = dy,
                                                .offsets = tensor_of(far_offsets)});
        CHECK((dw.bytes() == far_dw.bytes((E - 1) * N, N)));
    }
}

}  // namespace train_gpt
