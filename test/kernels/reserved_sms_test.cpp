// Matrix products that leave some of a GPU's multiprocessors to other streams.
#ifdef TRAIN_GPT_CUDA
#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/cublas_lt.h"
#include "kernels/choices.h"
#include "test/catch.h"
#include "test/kernels/linear_problem.h"
#include "test/text.h"

using namespace train_gpt;
using namespace train_gpt::linear_problem;

namespace {

std::vector<int32_t> sm_targets;  // that products were described with

/// While it lives, each CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET is noted.
class NotedTargets {
  public:
    NotedTargets() {
        next_ = cuda::cublas_lt().set_desc;
        cuda::cublas_lt().set_desc = [](cublasLtMatmulDesc_t description,
                                        cublasLtMatmulDescAttributes_t attribute, const void* value,
                                        size_t bytes) {
            if (attribute == CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET)
                sm_targets.push_back(*static_cast<const int32_t*>(value));
            return next_(description, attribute, value, bytes);
        };
    }
    ~NotedTargets() { cuda::cublas_lt().set_desc = next_; }
    NotedTargets(const NotedTargets&) = delete;
    NotedTargets& operator=(const NotedTargets&) = delete;

  private:
    static inline decltype(cuda::CublasLt::set_desc) next_ = nullptr;
};

}  // namespace

TEST_CASE("a product leaves as many multiprocessors as asked, and has algorithms of its own then",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const NotedTargets noted;
    const Layer p(DType::bf16, 32, 48, 64);
    const auto run = [&](Stream& stream) {
        const Buffer out(DType::bf16, {p.M, p.N});
        linear_forward(stream, {out, p.x, p.w, p.bias, {}, {}});
        return out.bytes();
    };
    const auto lines = [](const std::string& text) {
        return std::count(text.begin(), text.end(), '\n');
    };
    TestStream owner(p.scratch_bytes(), {.autotune = random_int(0, 1) == 1});
    Stream& stream = owner;
    sm_targets.clear();
    run(stream);
    CHECK(sm_targets.empty());
    CHECK(lines(kernel_choices(stream)) == 1);

    // All but one of the multiprocessors can be left, and one is the least that remains.
    const std::string whole = kernel_choices(stream);
    stream.settings.reserved_sms = 1;
    const std::string result = run(stream);
    REQUIRE(sm_targets.size() == 1);
    const int32_t sms = sm_targets[0] + 1;
    const auto left = static_cast<int>(random_int(2, sms - 1));
    stream.settings.reserved_sms = left;
    run(stream);
    REQUIRE(sm_targets.size() == 2);
    CHECK(sm_targets[1] == sms - left);
    CHECK(lines(kernel_choices(stream)) == 3);
    CHECK(contains(kernel_choices(stream), whole));
    stream.settings.reserved_sms = sms;
    CHECK(contains(error_of([&] { run(stream); }), concat("parallel.reserved_sms is ", sms)));

    // The choices are read back as they were written.
    TestStream again(p.scratch_bytes(), {.reserved_sms = left});
    set_kernel_choices(again, kernel_choices(stream));
    CHECK(kernel_choices(again) == kernel_choices(stream));
    CHECK(run(again).size() == result.size());
    CHECK(kernel_choices(again) == kernel_choices(stream));
    CHECK_THROWS_AS(set_kernel_choices(again, whole.substr(0, whole.size() - 1) + " 3 3\n"), Error);
}
#endif  // TRAIN_GPT_CUDA
