// train_gpt with precision.fp8, and what plan says of it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "test/commands/program.h"

using namespace train_gpt;

namespace {

/// A model whose products are wide enough for fp8.
const Arguments in_fp8{"--set", "model.n_embd=64", "--set", "precision.fp8=delayed"};

/// Puts a NaN into one element of a weight's master.
void spoil(const fs::path& checkpoint, const std::string& weight) {
    std::string bytes = read(checkpoint / optimizer_file);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    const SortedJson entry = SortedJson::parse(bytes.substr(8, header)).at("master/" + weight);
    REQUIRE(entry.at("dtype") == "F32");
    const auto from = entry.at("data_offsets")[0].get<size_t>(),
               to = entry.at("data_offsets")[1].get<size_t>();
    const auto element =
        static_cast<size_t>(random_int(0, static_cast<int64_t>((to - from) / sizeof(float)) - 1));
    const float nan = std::nanf("");
    std::memcpy(bytes.data() + 8 + header + from + element * sizeof nan, &nan, sizeof nan);
    replace_in_checkpoint(checkpoint, optimizer_file, bytes);
}

}  // namespace

TEST_CASE("a run in fp8 that ends names the first operand that is not finite", "[cli][fp8]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const Arguments train =
        w.train(run, in_fp8 + Arguments{"--set", "device=cpu", "--set", "sampling.every=0"});
    check_succeeds(train_gpt_with(train + Arguments{"--stop-at", "2"}));
    const std::string layer = std::to_string(random_int(0, 1));
    spoil(run / step_folder(2), "h." + layer + ".mlp.c_fc.weight");
    check_refused(train_gpt_with(train), 1,
                  {"the gradient of step 3 is not finite (first in ",
                   "; the first operand of fp8 products that is not finite is the weight of " +
                       layer + ".up), so its update was not applied; "});
}
