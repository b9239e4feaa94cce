// Random attention problems, and what the kernels must give for them.
#pragma once
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "kernels/attention/attention.h"
#include "test/catch.h"
#include "test/kernels/reference.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt::attention_problem {

// --------------------------------------------------------------------------------------- kernels

/// A device, and which of its kernels run there.
struct Kernels {
    Device device;
    KernelSettings::Attention attention = KernelSettings::Attention::automatic;
};

/// Those for sm_90a too, on a GPU that has them.
const std::vector<Kernels>& test_kernels();

/// What streams of tests are set to.
KernelSettings::Attention& attention_under_test();
inline bool tests_wgmma() { return attention_under_test() == KernelSettings::Attention::wgmma; }

class KernelsUnderTest {
  public:
    explicit KernelsUnderTest(const Kernels& kernels);
    ~KernelsUnderTest() { attention_under_test() = KernelSettings::Attention::automatic; }
    KernelsUnderTest(const KernelsUnderTest&) = delete;
    KernelsUnderTest& operator=(const KernelsUnderTest&) = delete;

  private:
    DeviceUnderTest device_;
};

/// ON_EACH_DEVICE(), and on sm_90 once more with the kernels for sm_90a.
#define ON_EACH_KERNELS()                                                                  \
    const ::train_gpt::attention_problem::KernelsUnderTest kernels_under_test(GENERATE(    \
        ::Catch::Generators::from_range(::train_gpt::attention_problem::test_kernels()))); \
    INFO("on " << (!::train_gpt::test_device().is_cuda()           ? "the CPU"             \
                   : ::train_gpt::attention_problem::tests_wgmma() ? "CUDA with wgmma"     \
                                                                   : "CUDA"))

// --------------------------------------------------------------------------------------- reference

struct Case : AttentionProblem {
    bool aligned = false;  // all views, to 8 elements: what the tensor cores' kernels need
    DType sinks_dtype = DType::fp32;
};

inline float rounded(double x, DType dtype) {
    const float single = static_cast<float>(x);
    return dtype == DType::bf16 ? to_float(bf16(single)) : single;
}

inline AttentionReference exact_attention(const Case& c) { return attention_reference<double>(c); }

// ----------------------------------------------------------------------------------------- layouts

enum class Layout { packed, separate, cache };

/// Memory of several heads tensors. Every element that belongs to no view holds a pattern that must
/// survive.
class Memory {
  public:
    Memory(DType dtype, size_t elements);

    void* at(size_t element) const { return data() + element * size_of(dtype_); }
    double get(size_t element) const {
        if (dtype_ == DType::bf16) {
            bf16 x;
            std::memcpy(&x, at(element), 2);
            return to_float(x);
        }
        float x;
        std::memcpy(&x, at(element), 4);
        return x;
    }
    void set(size_t element, double value) {
        const bf16 half(static_cast<float>(value));
        const float single = static_cast<float>(value);
        std::memcpy(at(element), dtype_ == DType::bf16 ? static_cast<const void*>(&half) : &single,
                    size_of(dtype_));
    }
    void own(size_t element) { owned_[element] = true; }
    void settle() const { memory_.settle(); }
    std::vector<unsigned char> bytes() const;
    /// True when nothing but owned elements differs from `before`.
    bool others_unchanged(const std::vector<unsigned char>& before) const;

  private:
    unsigned char* data() const { return static_cast<unsigned char*>(memory_.data()); }

    DType dtype_;
    TestMemory memory_;
    std::vector<bool> owned_;
};

/// One tensor [B, T, heads, D] somewhere in a Memory.
struct Placed {
    std::shared_ptr<Memory> memory;
    size_t origin = 0;
    HeadsView view;
    int B = 0, T = 0, heads = 0, D = 0;

    template <class F>
    void each(F&& f) const {
        size_t i = 0;
        for (int b = 0; b < B; ++b)
            for (int t = 0; t < T; ++t)
                for (int h = 0; h < heads; ++h)
                    for (int d = 0; d < D; ++d)
                        f(origin + static_cast<size_t>(b * view.batch + t * view.token +
                                                       h * view.head + d),
                          i++);
    }
    void fill(const Values& values) const;
    Values read() const;
    void poison() const;
};

/// Several tensors in one, [B, T, the sum of their heads, D].
std::vector<Placed> place_packed(const Case& c, int T, const std::vector<int>& heads);

/// A stream whose scratch is exactly what the contract asks for, full of NaNs. On CUDA a write
/// behind it is an error, on the CPU it is found by within_bounds().
struct AttentionStream {
    size_t bytes;
    TestMemory memory;
    Stream stream;

    explicit AttentionStream(const AttentionShape& shape);
    bool within_bounds() const;

  private:
    static size_t guard() { return test_device().is_cuda() ? 0 : 64; }
};

/// What is asked of the kernels beside the case.
struct Request {
    bool lse = true;
    KeyGradients key_gradients = KeyGradients::write;
    Values dk = {}, dv = {};  // before add_fp32
    Values dsinks = {};       // before it is added to; empty: it is written
};

/// One run of the kernels on a case; outputs poisoned before, surroundings checked after.
struct Run {
    Values out, dq, dk, dv;
    std::vector<float> lse;
    std::vector<float> dsinks = {};
};

/// The sinks of a case and their gradients, between elements that must stay as they are.
class Sinks {
  public:
    Sinks(const Case& c, const Request& request);
    Tensor tensor() const;
    GradientSink sink() const;
    std::vector<float> read() const;

  private:
    static constexpr float mark = 1234.5f;
    float* gradients() const { return static_cast<float*>(gradients_.data()); }

    size_t H_;
    DType dtype_;
    TestMemory sinks_, gradients_;
    bool accumulate_;
};

Run run(const Case& c, Layout layout, const Request& request = {});

// ------------------------------------------------------------------------------------------ inputs

Values random_values(size_t n, DType dtype, float stddev = 1.0f);

struct Wish {
    DType dtype = DType::fp32;
    int T = 0, extra_keys = 0, D = 0;  // 0: any T, any D
    int B = 0, H = 0, H_kv = 0;        // 0: a few
    bool documents = false, backward = true, aligned = false;
    bool windows = false;  // a window, sinks, both or none
    float size = 1;
};

/// Sinks of the size of scores, or as models may learn them.
void add_sinks(Case& c);

Case random_case(const Wish& wish);

std::string describe(const Case& c);

// ------------------------------------------------------------------------------------------ errors

struct ErrorSize {
    double rms = 0, max = 0;  // max: relative to the terms of the element
};
ErrorSize error_of(const Values& a, const Values& exact, const Values& terms);

void check_run(const Case& c, const Run& ours);

void check_case(const Case& c, Layout layout);

inline Layout any_layout() { return static_cast<Layout>(random_int(0, 2)); }

/// Sets the OpenMP team size and puts the old one back.
struct Threads {
    int before = omp_get_max_threads();
    explicit Threads(int n) { omp_set_num_threads(n); }
    ~Threads() { omp_set_num_threads(before); }
};

template <class T>
inline bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
bool same_bits(const Run& a, const Run& b);

const std::vector<DType> dtypes = {DType::fp32, DType::bf16};

}  // namespace train_gpt::attention_problem
