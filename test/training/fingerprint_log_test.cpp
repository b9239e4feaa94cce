// fingerprints.jsonl across the starts of a run.
#include "training/watch/fingerprint_log.h"

#include <string>
#include <vector>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

std::vector<int64_t> steps_in(const std::string& run) {
    std::vector<int64_t> steps;
    const RecordedFingerprints recorded(run);
    for (const auto& [step, line] : recorded.lines()) steps.push_back(step);
    return steps;
}

}  // namespace

TEST_CASE("a run that resumes drops the fingerprints of later steps, wanted or not",
          "[fingerprint]") {
    const TemporaryDirectory directory;
    const std::string run = directory.path(), file = directory / "fingerprints.jsonl";
    const std::string lines =
        "{\"step\":2,\"tensors\":{}}\n{\"step\":4,\"tensors\":{}}\n{\"step\":6,\"tensors\":{}}\n";
    const auto start = [&](std::optional<int64_t> resume_step, bool wanted, bool writes = true) {
        write(file, lines + "{\"step\":8,\"tens");
        const FingerprintLog log(run, resume_step, wanted, writes);
    };
    for (const bool wanted : {true, false}) {
        CAPTURE(wanted);
        start(4, wanted);
        CHECK(steps_in(run) == std::vector<int64_t>{2, 4});
        start(9, wanted);
        CHECK(read(file) == lines);
    }
    start(2, true, false);  // another rank
    CHECK(read(file) == lines + "{\"step\":8,\"tens");
    // A new run moves them.
    start({}, true);
    CHECK(read(file).empty());
    CHECK(read(directory / "fingerprints.old.jsonl").starts_with(lines));
}

TEST_CASE("a run without fingerprints has no file of them", "[fingerprint]") {
    const TemporaryDirectory directory;
    { const FingerprintLog log(directory.path(), 4, false, true); }
    CHECK_FALSE(std::filesystem::exists(directory / "fingerprints.jsonl"));
    CHECK(steps_in(directory.path()).empty());
}
