// kernels.deterministic: what a run says and records about it. Which kernels it rules out is tested
// in test/kernels/attention_cudnn_test.cpp.
#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/layout.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"
#include "training/run_reports.h"

using namespace train_gpt;

namespace {

AttentionUse use_with(bool same_bits) {
    AttentionUse use;
    use.same_bits = same_bits;
    return use;
}

}  // namespace

TEST_CASE("kernels.deterministic is on unless it is turned off, and reaches the kernels") {
    Config config;
    CHECK(kernel_settings(config).deterministic);
    config.kernels.deterministic = false;
    CHECK_FALSE(kernel_settings(config).deterministic);
}

TEST_CASE("a run whose bits differ from run to run says so, and no other run does") {
    for (const bool deterministic : {true, false}) {
        for (const bool same_bits : {true, false}) {
            CAPTURE(deterministic, same_bits);
            const std::string note = note_on_bits(deterministic, use_with(same_bits));
            CHECK(note.empty() == deterministic);
            CHECK(contains(note, "bits differ from run to run") == (!deterministic && !same_bits));
            CHECK(contains(note, "changes nothing here") == (!deterministic && same_bits));
        }
    }
}

TEST_CASE("manifests of a run and of its checkpoints record whether its bits differ",
          "[checkpoint]") {
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 1, .n_head = 1, .n_embd = 8, .n_ctx = 4, .vocab_size = 50});
    TinyModel model(spec, 1, 2, DType::fp32);
    for (int i = 0; i < model.count(); ++i) {
        model.parameters->state.set(i,
                                    random_normal(static_cast<size_t>(model.parameter(i).numel())));
        for (const auto moment : {"m", "v"}) model.set_state(moment, i, 0);
    }
    for (const bool same_bits : {true, false}) {
        const TemporaryDirectory directory;
        Config config;
        config.data.train = {{"synthetic", 1, "all"}};
        RunFolder(directory.path()).describe(config, use_with(same_bits));
        const auto checkpoint = save_checkpoint(directory.path(), {.step = 1,
                                                                   .config = config,
                                                                   .spec = spec,
                                                                   .parameters = *model.parameters,
                                                                   .deterministic = same_bits});
        for (const std::string& folder : {directory.path(), checkpoint.string()}) {
            const auto manifest = nlohmann::json::parse(read(folder + "/manifest.json"));
            CHECK(manifest.at("deterministic") == same_bits);
        }
        CHECK_NOTHROW(verify_checkpoint(checkpoint, Verify::everything));
    }
}
