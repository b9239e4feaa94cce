// train_gpt import and export.

#include "test/commands/program.h"

using namespace train_gpt;

TEST_CASE(
    "an exported model evaluates, samples, continues training and is imported back as the run left "
    "it",
    "[cli]") {
    const TemporaryDirectory directory;
    const std::string val = Workplace::get().data("val_*.bin");
    const auto loss_of = [&](const std::string& path) {
        const std::string out =
            check_succeeds(train_gpt_with({"eval", path, "--data", val, "--dtype", "fp32"})).out;
        return out.substr(0, out.find(','));
    };
    const std::string shards = directory / "shards", back = directory / "back",
                      file = directory / "model.bin", from_file = directory / "from-file";
    const std::string said = check_succeeds(train_gpt_with({"export", finished_run(), "--out",
                                                            shards, "--max-shard-size", "20KB"}))
                                 .out;
    CHECK(contains(said, "in fp32"));
    CHECK(contains(said, step_folder(12)));
    CHECK(names_in(shards).contains("model.safetensors.index.json"));
    check_succeeds(train_gpt_with({"import", shards, "--out", back}));
    check_succeeds(train_gpt_with({"export", back, "--out", file, "--format", "llm.c"}));
    check_succeeds(train_gpt_with({"import", file, "--out", from_file, "--tokenizer",
                                   Workplace::get().data("tokenizer.json")}));
    const fs::path weights = fs::path(finished_run()) / step_folder(12) / "model.safetensors";
    CHECK(file_difference(back + "/model.safetensors", weights) == "");
    CHECK(file_difference(from_file + "/model.safetensors", weights) == "");
    CHECK(read(back + "/config.json") == read(from_file + "/config.json"));
    const std::string loss = loss_of(shards);
    CHECK(loss_of(back) == loss);
    CHECK(loss_of(from_file) == loss);

    const auto sampled = [](const std::string& path) {
        return check_succeeds(train_gpt_with({"sample", path, "--temperature", "0"})).out;
    };
    CHECK(sampled(shards) == sampled(finished_run()));
    check_succeeds(train_gpt_with(
        Workplace::get().train(directory / "run", {"--set", "model.init_from=" + shards})));
    check_succeeds(
        train_gpt_with({"export", shards, "--out", directory / "half", "--dtype", "fp16"}));
    CHECK(number_after(loss_of(directory / "half"), "loss ") ==
          Approx(number_after(loss, "loss ")).epsilon(0.01));
}

TEST_CASE("import and export say what they cannot do", "[cli]") {
    const TemporaryDirectory directory;
    const std::string fixture = "test/fixtures/gpt2-tiny", out = directory / "out";
    check_refused(train_gpt_with({"import", fixture}), 2, {"--out"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--dtype", "fp8"}), 2,
                  {"--dtype", "fp8"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--format", "onnx"}), 2,
                  {"--format", "onnx"});
    const std::string dense = "test/fixtures/llama-tiny";
    check_refused(train_gpt_with({"import", dense, "--out", out, "--upcycle", "1"}), 2,
                  {"--upcycle"});
    check_refused(train_gpt_with({"import", dense, "--out", out, "--zero-router"}), 2,
                  {"--zero-router", "--upcycle"});
    check_refused(train_gpt_with({"import", dense, "--out", out, "--experts-per-token", "2"}), 2,
                  {"--experts-per-token", "--upcycle"});
    check_refused(train_gpt_with({"import", dense, "--out", out, "--upcycle", "2",
                                  "--experts-per-token", "3"}),
                  2, {"--experts-per-token 3, but --upcycle 2"});
    check_refused(train_gpt_with({"import", fixture, "--out", out, "--upcycle", "4"}), 1,
                  {fixture, "SwiGLU"});
    const TemporaryDirectory runs;
    check_refused(train_gpt_with(Workplace::get().train(
                      runs / "run", {"--set", "model.init_from=" + std::string(finished_run()),
                                     "--set", "model.mlp=swiglu", "--set", "model.n_expert=4",
                                     "--set", "model.n_expert_per_token=2"})),
                  1, {"has no experts", "import --upcycle 4"});
    for (const char* size : {"0", "-5", "5x", "", "GB"})
        check_refused(train_gpt_with({"export", fixture, "--out", out, "--max-shard-size", size}),
                      2, {"--max-shard-size"});
    check_refused(
        train_gpt_with({"export", fixture, "--out", out, "--format", "llm.c", "--dtype", "fp16"}),
        2, {"fp16"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--format", "llm.c",
                                  "--max-shard-size", "1GB"}),
                  2, {"--max-shard-size"});
    check_refused(train_gpt_with({"import", directory / "none", "--out", out}), 1, {"none"});
    check_refused(train_gpt_with({"import", directory.path(), "--out", out}), 1,
                  {directory.path()});
    check_refused(train_gpt_with({"import", fixture + "/model.safetensors", "--out", out}), 1,
                  {"folder"});
    check_refused(train_gpt_with({"import", "README.md", "--out", out}), 1, {"README.md", "llm.c"});
    check_refused(train_gpt_with({"import", fixture, "--out", out, "--tokenizer", "README.md"}), 1,
                  {"README.md"});
    write(directory / "pytorch_model.bin", "x");
    check_refused(train_gpt_with({"import", directory.path(), "--out", out}), 1,
                  {"pytorch_model.bin"});
    CHECK_FALSE(fs::exists(out));
    check_refused(train_gpt_with({"export", fixture, "--out", directory.path()}), 1, {"not empty"});
    check_refused(train_gpt_with({"export", fixture, "--out", out}, {.file_bytes = 5000}), 1,
                  {"model.safetensors"});
    CHECK(names_in(directory.path()) == std::set<std::string>{"pytorch_model.bin"});
}
