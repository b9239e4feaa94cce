#include "device/stream.h"

#include "base/error.h"
#include "test/kernels/kernel_test.h"
#include "test/text.h"

namespace train_gpt {

TEST_CASE("a stream with too little scratch memory is an error that says how much is missing") {
    TestStream owner(100);
    Stream& stream = owner;
    CHECK(stream.scratch_for<float>(100) == stream.scratch);
    CHECK(error_of([&] { stream.scratch_for<float>(2048); }).find("2.00 KiB") != std::string::npos);
}

}  // namespace train_gpt
