// The seeds of every fuzz target, as they are and with random damage.
#include <filesystem>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/fuzz/targets.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

bool run(const FuzzTarget& target, const std::string& bytes) {
    return target.run(std::as_bytes(std::span(bytes)));
}

/// A few random edits: bytes changed, removed, inserted or doubled, numbers made large.
std::string damaged(std::string bytes) {
    for (int64_t edits = random_int(1, 4); edits > 0 && !bytes.empty(); --edits) {
        const auto at = static_cast<size_t>(random_int(0, std::ssize(bytes) - 1));
        const auto n = static_cast<size_t>(random_int(1, 20));
        switch (random_int(0, 5)) {
            case 0:
                bytes[at] = static_cast<char>(random_int(0, 255));
                break;
            case 1:
                bytes[at] ^= static_cast<char>(1 << random_int(0, 7));
                break;
            case 2:
                bytes.erase(at, n);
                break;
            case 3:
                bytes.insert(at, bytes.substr(at / 2, n));
                break;
            case 4:
                bytes.resize(at);
                break;
            default:
                bytes.insert(at, std::to_string(test_rng()()));
        }
    }
    return bytes;
}

}  // namespace

TEST_CASE("readers take their seeds that are valid, and damaged ones do no harm", "[fuzz]") {
    for (const FuzzTarget& target : fuzz_targets()) {
        int valid = 0, taken = 0;
        for (const auto& entry :
             fs::directory_iterator(fs::path("test/fuzz/seeds") / target.name)) {
            CAPTURE(entry.path().string());
            const std::string name = entry.path().filename().string();
            const std::string bytes = read(entry.path());
            const bool is_valid = name.starts_with("valid");
            valid += is_valid;
            // What is packed is valid if this build has the library.
            CHECK((run(target, bytes) == is_valid || name.starts_with("packed")));
            for (int i = 0; i < 100; ++i) taken += run(target, damaged(bytes));
        }
        CAPTURE(target.name, taken);
        CHECK(valid > 0);
    }
}
