// Every contract of kernels/*.h in each form that training uses, one struct each, beside its tests:
// test/kernels/X_operations.cpp. From these structs come a test of each against float64, a check of
// each gradient (test/kernels/operations_test.cpp) and the lines of build/compare.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "device/device.h"
#include "device/memory.h"
#include "device/stream.h"

namespace train_gpt::compare {

using Values = std::vector<double>;
using Dims = std::vector<int64_t>;

/// The extent of each letter: B T C H D V M N K F E k as in the contracts; P positions before the
/// T; G heads of keys (H_kv); W keys of a window. In attention H counts the heads of keys, and Q
/// heads of queries share each.
using Shape = std::map<char, int64_t>;

/// How exact a result can be: how often it is rounded to the compute dtype on its way, and how many
/// fp32 terms it sums.
struct Accuracy {
    int roundings = 0;
    int64_t terms = 1;

    /// The bound of the relative L2 error. A rounding has a relative error of at most u. A sum of n
    /// random terms in fp32 has a relative error of about √n·2⁻²⁴. Squares of independent errors
    /// add up. 16 more terms allow for roots, exponentials and quotients, and the factor 2 for
    /// errors that are not random. The bound is for many elements together: a single sum whose
    /// terms cancel may be less exact.
    double bound(DType dtype) const;
};
constexpr const char* bound_formula =
    "2·√(r·u² + (n + 16)·2⁻⁴⁸) after r roundings (u = 2⁻⁹ in bf16, 2⁻²⁴ in fp32) and sums of n "
    "terms in fp32";

/// One operand in the host's memory, its elements as tensors keep them.
struct Operand {
    std::string name;
    Dims dims;
    DType dtype = DType::fp32;
    bool is_double = false;          // in spite of its dtype
    std::vector<std::byte> content;  // before the call; empty: NaN
    bool is_result = false;
    Accuracy accuracy = {};

    size_t bytes() const;
    /// The numbers in `memory`, which holds such an operand.
    Values values(const std::byte* memory) const;
};

/// The operands of an operation with a shape and a dtype.
class Operands {
  public:
    Operands(Shape shape, DType dtype, uint64_t seed)
        : shape_(std::move(shape)), dtype_(dtype), seed_(seed) {}

    int64_t operator[](char letter) const { return shape_.at(letter); }
    DType dtype() const { return dtype_; }

    // Functions that declare operands. They throw Error if there is not enough memory.
    /// Independent normal values, of the compute dtype or of another. They repeat after four
    /// million.
    void normal(const std::string& name, const Dims& dims, float stddev = 1, float mean = 0);
    void normal(const std::string& name, const Dims& dims, DType dtype, float stddev = 1,
                float mean = 0);
    /// int32 in [0, below); one in ten is −1 where some may be ignored.
    void integers(const std::string& name, const Dims& dims, int64_t below, bool ignored = false);
    /// Something else that the call reads, n words long.
    void words(const std::string& name, const void* content, int64_t n);
    /// Memory that is written but not compared: scratch, or what prepare() computes.
    void room(const std::string& name, const Dims& dims, DType dtype);
    /// What the call computes.
    void result(const std::string& name, const Dims& dims, DType dtype, const Accuracy& accuracy);
    void double_result(const std::string& name, const Dims& dims, const Accuracy& accuracy);
    /// What the call changes, an operand declared before.
    void changes(const std::string& name, const Accuracy& accuracy);

    const std::vector<Operand>& all() const { return operands_; }
    size_t total_bytes() const;
    bool has(const std::string& name) const { return find(name) != nullptr; }
    /// What an operand holds before the call; empty for a result that is only written.
    Values values(const std::string& name) const;
    std::vector<int32_t> integer_values(const std::string& name) const;

  private:
    Operand& declare(const std::string& name, const Dims& dims, DType dtype,
                     bool is_double = false);
    const Operand* find(const std::string& name) const;
    Shape shape_;
    DType dtype_;
    uint64_t seed_;
    std::vector<Operand> operands_;
};

/// The operands in a device's memory.
class Call {
  public:
    Call(const Operands& operands, Arena& arena);
    /// Restores the operands to their content before the call.
    void reset() const;

    int64_t operator[](char letter) const { return operands_[letter]; }
    DType dtype() const { return operands_.dtype(); }
    /// Absent if the operation has no such operand.
    Tensor operator[](const char* name) const;
    GradientSink sink(const char* name, bool accumulate = false) const;
    template <class T>
    T* data(const char* name) const {
        return static_cast<T*>((*this)[name].data);
    }
    /// Waits for the device.
    Values values(const Operand& operand) const;

  private:
    const Operands& operands_;
    Device device_;
    std::map<std::string, Tensor> tensors_;
};

/// A letter of an operation's shape.
struct Letter {
    char name = 0;
    int64_t small = 1;  // by default: the float64 reference takes a second at most
    int64_t cpu = 1,
            gpu = 1;  // GPT-2 124M's, with B = 4, T = 256 on the CPU and B = 64, T = 1024 on a GPU
    int64_t least = 1;  // smaller values have no error bound
};

/// One of the ways of computing an operation on a device.
struct Implementation {
    std::string name;
    KernelSettings settings = {};
    std::string choices = {};  // if any, the stream's: kernels/choices.h
};
std::vector<Implementation> only_one(const Operands& o, const Device& device);

using Results = std::map<std::string, Values>;
/// Under this name a reference gives, for a result whose elements are sums, the roots of their
/// terms' squares, in proportion to which the sums are exact.
inline std::string terms_of(const std::string& result) { return "terms of " + result; }

/// A result that is the gradient of a loss.
struct Derivative {
    std::string gradient;                                 // the result's name
    Values (*point)(const Operands& o);                   // where the gradient is taken
    double (*loss)(const Operands& o, const Values& at);  // in float64
};

struct Operation {
    std::string name, computes;
    std::vector<Letter> letters;
    bool fp32_only = false;
    std::vector<Implementation> (*implementations)(const Operands& o,
                                                   const Device& device) = only_one;

    void (*declare)(Operands& o) = nullptr;
    size_t (*scratch_bytes)(const Stream& stream, const Operands& o) =
        [](const Stream&, const Operands&) { return size_t{0}; };
    /// Computes what other operations compute before this one in training.
    void (*prepare)(Stream& stream, const Call& c) = [](Stream&, const Call&) {};
    /// One call of the contract, which adds its cost (cost_of in its header) and its time to the
    /// stream's profiler.
    void (*run)(Stream& stream, const Call& c) = nullptr;
    /// The results in float64.
    Results (*reference)(const Operands& o) = nullptr;
    std::vector<Derivative> derivatives = {};
};
const std::vector<Operation>& operations();

// In test/kernels/X_operations.cpp:
std::vector<Operation> linear_operations();
std::vector<Operation> fp8_operations();
std::vector<Operation> gelu_operations();
std::vector<Operation> swiglu_operations();
std::vector<Operation> relu_squared_operations();
std::vector<Operation> residual_operations();
std::vector<Operation> norm_operations();
std::vector<Operation> rope_operations();
std::vector<Operation> attention_operations();
std::vector<Operation> experts_operations();
std::vector<Operation> embedding_operations();
std::vector<Operation> head_loss_operations();
std::vector<Operation> adamw_operations();

// Shared by several of them.

constexpr Letter batch{'B', 2, 4, 64}, sequence{'T', 256, 256, 1024};
constexpr Letter tokens{'M', 256, 4 * 256, 64 * 1024};
constexpr Letter letter(char name, int64_t small, int64_t gpt2) {
    return {name, small, gpt2, gpt2};
}

/// w [rows, cols], with which the terms of x·wᵀ keep the size of x's elements.
void declare_weight(Operands& o, int64_t rows, int64_t cols);

/// Of sums of fp8 products, which tensor cores sum with about 14 bits: in roundings of 2⁻⁹ or 2⁻²⁴.
Accuracy accuracy_of_fp8_sums(const Operands& o, int64_t terms);

/// The libraries for matrix products: the CPU has two.
std::vector<Implementation> products(const Operands& o, const Device& device);
/// The same for a product that a GPU's library can compute together with what follows it, or not.
std::vector<Implementation> products_with_epilogue(const Operands& o, const Device& device);

/// Σ a ⊙ b
double dot(const Values& a, const Values& b);

}  // namespace train_gpt::compare
