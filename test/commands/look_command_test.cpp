// train_gpt look.
#include "test/commands/program.h"

using namespace train_gpt;

namespace {

SortedJson data_of(const std::string& page) {
    const std::string begin = "<script type=\"application/json\" id=\"data\">";
    const size_t at = page.find(begin) + begin.size();
    return SortedJson::parse(page.substr(at, page.find("</script>", at) - at));
}

}  // namespace

TEST_CASE("look writes a page about a text, and says what it left out of it", "[cli][cuda]") {
    const TemporaryDirectory directory;
    const std::string page = directory / "look.html";
    const Arguments look{"look", finished_run(), "--out", page};
    const Outcome said =
        check_succeeds(train_gpt_with(look + Arguments{"--prompt", "hello there, you"}));
    CHECK(said.out == "wrote " + page + "\n");
    CHECK(said.err.empty());
    const SortedJson data = data_of(read(page));
    std::string text;
    for (const SortedJson& token : data["tokens"]) text += token["text"].get<std::string>();
    CHECK(text.ends_with("hello there, you"));
    const SortedJson settings = SortedJson::parse(read(finished_run() + "/config.json"));
    CHECK(data["layers"].size() == settings["model"]["n_layer"].get<size_t>());
    CHECK(data["layers"][0]["heads"] == settings["model"]["n_head"]);
    CHECK(contains(read(page), "A model of the family GPT-2"));

    write(directory / "prompt.txt", "hello there, you\n");
    check_succeeds(train_gpt_with(look + Arguments{"--prompt-file", directory / "prompt.txt"}));
    CHECK(data_of(read(page)) == data);

    std::string words;
    for (int i = 0; i < 400; ++i) words += "word ";
    const Outcome cut = check_succeeds(train_gpt_with(look + Arguments{"--prompt", words}));
    CHECK(cut.err.starts_with("train_gpt: note: the text has "));
    CHECK(contains(cut.err, "tokens; the page shows the first "));
    const size_t shown = data_of(read(page))["tokens"].size();
    CHECK(shown <= 128);
    CHECK(contains(read(page), "The text has "));
    CHECK(contains(read(page), concat("the page shows the first ", shown, ".")));
}

TEST_CASE("look says what a model that no family has is made of", "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run", page = directory / "look.html";
    check_succeeds(train_gpt_with(Workplace::get().train(
        run, {"--set", "schedule.steps=4", "--set", "model.positions=rope"})));
    check_succeeds(train_gpt_with({"look", run, "--out", page, "--prompt", "hello"}));
    CHECK(contains(read(page), "A decoder with LayerNorm, rotary positions and GELU: "));
}

TEST_CASE("look refuses what it cannot do before it writes anything", "[cli]") {
    const TemporaryDirectory directory;
    const std::string page = directory / "look.html", none = directory / "none";
    const auto look = [&](const std::string& model, const Arguments& more) {
        return train_gpt_with(Arguments{"look", model} + more);
    };
    check_refused(look(finished_run(), {"--out", page}), 2, {"no text to look at", "--prompt"});
    check_refused(look(finished_run(), {"--out", page, "--prompt", ""}), 2,
                  {"no text to look at", "--prompt"});
    check_refused(look(finished_run(), {"--out", page, "--prompt-file", "/dev/null"}), 1,
                  {"/dev/null has no text to look at", "--prompt-file"});
    check_refused(look(none, {"--out", page, "--prompt", "a"}), 1, {none});
    check_refused(look("test/fixtures/llama-tiny", {"--out", page, "--prompt", "a"}), 1,
                  {"has no tokenizer.json"});
    check_refused(look(finished_run(), {"--out", none + "/look.html", "--prompt", "a"}), 1,
                  {none + "/look.html", "No such file"});
    check_refused(train_gpt_with({"look"}), 2, {"checkpoint", "train_gpt look --help"});
    check_refused(look(finished_run(), {"--prompt", "a", "--prompt-file", none}), 2,
                  {"--prompt-file", "train_gpt look --help"});
    CHECK(std::filesystem::is_empty(directory.path()));
}
