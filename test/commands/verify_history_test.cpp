// A run's history: what `verify` finds when something was edited, and what it prints otherwise.

// clang-format off: before program.h, which has a Json of its own
#include "training/files/history_chain.h"
// clang-format on

#include <csignal>

#include <sys/stat.h>

#include "base/file.h"
#include "base/sha256.h"
#include "test/commands/program.h"
#include "test/sorted_json.h"

using namespace train_gpt;

namespace {

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
        lines.push_back(text.substr(at, text.find('\n', at) - at));
    return lines;
}

void write_lines(const fs::path& file, const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    write(file, text);
}

/// A line with another "previous" in place of its own.
std::string with_previous(const std::string& line, const std::string& previous) {
    const std::string key = "\"previous\":\"";
    const size_t at = line.find(key) + key.size();
    return line.substr(0, at) + previous + line.substr(at + 64);
}

/// Flips a bit of a byte somewhere in a file.
void flip(const fs::path& file, size_t first = 0) {
    std::string bytes = read(file);
    bytes[static_cast<size_t>(random_int(static_cast<int64_t>(first), std::ssize(bytes) - 1))] ^= 4;
    write(file, bytes);
}

void replace(const fs::path& file, const std::string& from, const std::string& to) {
    std::string text = read(file);
    const size_t at = text.find(from);
    CAPTURE(file.string(), from);
    REQUIRE(at != std::string::npos);
    write(file, text.replace(at, from.size(), to));
}

/// A run that was stopped, resumed with another learning rate and finished, with data of its own.
/// Each test gets it as the run has left it.
class FinishedRun {
  public:
    FinishedRun() : run(directory_ / "run"), data(directory_ / "data") {
        const Workplace& w = Workplace::get();
        fs::copy(fs::path(w.data("data.json")).parent_path(), data);
        const auto train = [&](const Arguments& more) {
            check_succeeds(train_gpt_with(
                w.train(run, Arguments{"--set", "data.train=" + data + "/train_*.bin", "--set",
                                       "data.val=" + data + "/val_*.bin", "--set",
                                       "tokenizer.path=" + data + "/tokenizer.json", "--set",
                                       "checkpoint.every=4"} +
                                 more)));
        };
        train({"--stop-at", "6"});
        train({"--set", "optimizer.learning_rate=0.002"});
        fs::copy(run, directory_ / "run.before", fs::copy_options::recursive);
        fs::copy(data, directory_ / "data.before", fs::copy_options::recursive);
    }
    void restore() const {
        for (const std::string& folder : {run, data}) {
            fs::remove_all(folder);
            fs::copy(folder + ".before", folder, fs::copy_options::recursive);
        }
    }
    fs::path history() const { return fs::path(run) / "history.jsonl"; }
    fs::path checkpoint(int64_t step) const { return fs::path(run) / step_folder(step); }
    std::vector<std::string> lines() const { return lines_of(read(history())); }
    /// The index of the first line of an event from a line on.
    size_t line_of(const std::string& event, size_t from = 0) const {
        const auto all = lines();
        for (size_t i = from; i < all.size(); ++i)
            if (contains(all[i], "\"event\":\"" + event + "\"")) return i;
        FAIL("there is no " << event);
        return 0;
    }

  private:
    TemporaryDirectory directory_;

  public:
    const std::string run, data;
};

/// What verify says is wrong first; empty if everything holds.
std::string first_trouble(const Arguments& arguments) {
    const Outcome outcome = train_gpt_with(Arguments{"verify"} + arguments);
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.err.empty());
    const size_t at = outcome.out.rfind("first: ");
    CHECK(outcome.code == (at == std::string::npos ? 0 : 1));
    return at == std::string::npos ? "" : outcome.out.substr(at + 7);
}

struct Edit {
    std::string what;
    std::function<void()> make;
    Arguments found;  // words of the message
    Arguments options = {};
};

}  // namespace

TEST_CASE("verify finds each edit of a run's files, and names what and where", "[cli][history]") {
    const FinishedRun r;
    const fs::path history = r.history();
    const std::string file = history.string();
    const std::vector<std::string> lines = r.lines();
    REQUIRE(lines.size() > 8);
    const auto line = [](size_t index) { return "line " + std::to_string(index + 1) + " of "; };
    const size_t middle = static_cast<size_t>(random_int(2, std::ssize(lines) - 3));
    const size_t resumed = r.line_of("start", 1), saved = r.line_of("checkpoint", resumed);
    const size_t last_saved = r.line_of("checkpoint", saved + 1);
    const auto edited = [&](const std::function<void(std::vector<std::string>&)>& edit) {
        return [&, edit] {
            std::vector<std::string> changed = lines;
            edit(changed);
            write_lines(history, changed);
        };
    };
    const auto manifest_of = [&](int64_t step) {
        return (r.checkpoint(step) / "manifest.json").string();
    };
    const std::string other_program = r.run + "/other-program";
    using Lines = std::vector<std::string>;
    const auto at = [](Lines& all, size_t i) { return all.begin() + static_cast<long>(i); };
    const std::vector<Edit> edits = {
        {"a line changed",
         edited([&](Lines& all) { all[middle].insert(all[middle].rfind('}'), " "); }),
         {line(middle + 1) + file, "was changed"}},
        {"the time of the first line changed",
         edited([&](Lines& all) { all[0].insert(all[0].find("\"time\":") + 7, "1"); }),
         {line(1) + file, "line 1 was changed"}},
        {"the learning rate in a start changed",
         edited([&](Lines& all) {
             all[resumed].replace(all[resumed].rfind("\"learning_rate\":"), 19,
                                  "\"learning_rate\":0.5");
         }),
         {line(resumed + 1) + file}},
        {"a line's hash changed",
         edited(
             [&](Lines& all) { all[middle] = with_previous(all[middle], std::string(64, 'a')); }),
         {line(middle) + file}},
        {"the first line removed",
         edited([&](Lines& all) { all.erase(all.begin()); }),
         {line(0) + file, "removed"}},
        {"a line removed",
         edited([&](Lines& all) { all.erase(at(all, middle)); }),
         {line(middle) + file, "removed"}},
        {"two lines removed",
         edited([&](Lines& all) { all.erase(at(all, middle - 1), at(all, middle + 1)); }),
         {line(middle - 1) + file, "removed"}},
        {"a line twice",
         edited([&](Lines& all) { all.insert(at(all, middle), all[middle]); }),
         {line(middle + 1) + file, "follows line " + std::to_string(middle)}},
        {"a line added in the middle",
         edited([&](Lines& all) {
             all.insert(at(all, middle),
                        with_previous(all[middle], sha256_of(all[middle - 1] + " ")));
         }),
         {line(middle) + file}},
        {"a line without a hash added at the end",
         edited([&](Lines& all) { all.emplace_back(R"({"event":"sample","step":12})"); }),
         {line(lines.size()) + file, "no valid \"previous\"", "added"}},
        {"a line that is not JSON added",
         edited([&](Lines& all) { all.insert(at(all, 2), "x"); }),
         {line(2) + file, "added"}},
        {"two lines exchanged",
         edited([&](Lines& all) { std::swap(all[middle], all[middle + 1]); }),
         {line(middle) + file, "moved"}},
        {"the last line moved to the front",
         edited([&](Lines& all) { std::rotate(all.begin(), all.end() - 1, all.end()); }),
         {line(0) + file}},
        {"another line end",
         edited([&](Lines& all) {
             for (std::string& one : all) one += "\r";
         }),
         {line(1) + file}},
        {"all hashes removed",
         edited([&](Lines& all) {
             for (std::string& one : all) one.erase(one.rfind(",\"previous\""), 78);
         }),
         {manifest_of(12), "is not recorded"}},
        {"a chain made anew after a change",
         edited([&](Lines& all) {
             all[1].insert(all[1].find("\"step\":") + 7, "1");
             for (size_t i = 2; i < all.size(); ++i)
                 all[i] = with_previous(all[i], sha256_of(all[i - 1]));
         }),
         {file, "no line that the checkpoint of step 6 names"}},
        {"the history emptied", [&] { write(history, ""); }, {manifest_of(12), "is not recorded"}},
        {"the history removed", [&] { fs::remove(history); }, {manifest_of(12), "is not recorded"}},
        {"the end cut off before the last checkpoint",
         edited([&](Lines& all) { all.resize(last_saved); }),
         {manifest_of(12), "is not recorded"}},
        {"another run's history",
         [&] { write(history, read(fs::path(finished_run()) / "history.jsonl")); },
         {r.run + "/config.json is not the one that line 1 of " + file}},
        {"the weights changed",
         [&] { flip(r.checkpoint(8) / "model.safetensors"); },
         {(r.checkpoint(8) / "model.safetensors").string(), "differs from its hash"}},
        {"the optimizer's state changed",
         [&] { flip(r.checkpoint(12) / optimizer_file); },
         {(r.checkpoint(12) / optimizer_file).string(), "differs from its hash"}},
        {"a checkpoint's position changed",
         [&] { flip(r.checkpoint(12) / "position.json"); },
         {(r.checkpoint(12) / "position.json").string(), "differs from its hash"}},
        {"a file of a checkpoint removed",
         [&] { fs::remove(r.checkpoint(8) / "tokenizer.json"); },
         {(r.checkpoint(8) / "tokenizer.json").string(), "missing"}},
        {"a checkpoint's configuration changed, and its hash in the manifest",
         [&] {
             const std::string name = "train_gpt.json";
             std::string text = read(r.checkpoint(12) / name);
             text.insert(text.find('{') + 1, " ");
             replace_in_checkpoint(r.checkpoint(12), name, text);
         },
         {manifest_of(12), "is not the one that", line(last_saved) + file}},
        {"a manifest changed",
         [&] { replace(manifest_of(8), "\"deterministic\": true", "\"deterministic\": false"); },
         {manifest_of(8), line(saved) + file}},
        {"a checkpoint exchanged for an older one",
         [&] {
             fs::remove_all(r.checkpoint(12));
             fs::copy(r.checkpoint(8), r.checkpoint(12));
             replace(manifest_of(12), "\"step\": 8", "\"step\": 12");
         },
         {manifest_of(12), line(last_saved) + file}},
        {"a checkpoint of another run",
         [&] {
             fs::remove_all(r.checkpoint(8));
             fs::copy(fs::path(finished_run()) / step_folder(8), r.checkpoint(8));
         },
         {manifest_of(8), line(saved) + file}},
        {"a checkpoint added",
         [&] {
             fs::copy(r.checkpoint(12), r.checkpoint(16));
             replace(manifest_of(16), "\"step\": 12", "\"step\": 16");
         },
         {manifest_of(16), "is not recorded", "added"}},
        {"the run's configuration changed",
         [&] { replace(r.run + "/config.json", "\"seed\": ", "\"seed\": 1"); },
         {r.run + "/config.json", line(resumed) + file}},
        {"the run's choices changed",
         [&] { replace(r.run + "/choices.json", "{", "{ "); },
         {r.run + "/choices.json", line(resumed) + file}},
        {"the run's description of its data changed",
         [&] { replace(r.run + "/manifest.json", "\"xxh3\": \"", "\"xxh3\": \"0"); },
         {r.run + "/manifest.json", line(resumed) + file}},
        {"a training shard changed",
         [&] { flip(r.data + "/train_000000.bin", 1024); },
         {r.data + "/train_000000.bin", "differs from its hash in " + file}},
        {"a shard and its data.json changed",
         [&] {
             const std::string shard = r.data + "/train_000000.bin";
             const std::string before = hash_file(shard);
             flip(shard, 1024);
             replace(r.data + "/data.json", before, hash_file(shard));
         },
         {r.data + "/train_000000.bin", "differs from its hash in " + file}},
        {"a validation shard exchanged",
         [&] {
             fs::copy_file(r.data + "/train_000000.bin", r.data + "/val_000000.bin",
                           fs::copy_options::overwrite_existing);
         },
         {r.data + "/val_000000.bin", "instead of", file}},
        {"a shard removed",
         [&] { fs::remove(r.data + "/val_000000.bin"); },
         {"val_000000.bin", "missing"}},
        {"the tokenizer exchanged",
         [&] {
             check_succeeds(train_gpt_with({"tokenize", Workplace::get().text(), "--train-vocab",
                                            "290", "--out", r.data + "/other"}));
             fs::rename(r.data + "/other/tokenizer.json", r.data + "/tokenizer.json");
         },
         {r.data + "/tokenizer.json", "not the tokenizer that " + line(resumed) + file}},
        {"the program exchanged",
         [&] { write(other_program, read(binary()) + "x"); },
         {other_program, "not the program that " + line(resumed) + file},
         {"--binary", other_program}},
        {"another hash expected",
         [] {},
         {file, std::string(64, '7')},
         {"--head", std::string(64, '7')}},
    };
    CHECK(edits.size() >= 30);
    CHECK(first_trouble({r.run, "--binary", binary(), "--head", sha256_of(lines[middle])}) == "");
    for (const Edit& edit : edits) {
        r.restore();
        edit.make();
        const std::string trouble = first_trouble(Arguments{r.run} + edit.options);
        CAPTURE(edit.what, trouble, middle);
        CHECK_FALSE(trouble.empty());
        for (const std::string& part : edit.found) {
            CAPTURE(part);
            CHECK(contains(trouble, part));
        }
        const Outcome json = train_gpt_with(Arguments{"verify", r.run, "--json"} + edit.options);
        CHECK(json.code == 1);
        const SortedJson object = SortedJson::parse(json.out);
        CHECK(object.at("holds") == false);
        CHECK(object.at("broken").get<std::string>() + "\n" == trouble);
    }
}

TEST_CASE("verify says what the model in a checkpoint was made from", "[cli][history]") {
    const FinishedRun r;
    const SortedJson all =
        SortedJson::parse(check_succeeds(train_gpt_with({"verify", r.run, "--json"})).out);
    CHECK(all.at("holds") == true);
    CHECK(all.at("broken").is_null());
    const SortedJson& made = all.at("made_from");
    CHECK(made.at("step") == 12);
    CHECK(made.at("tokens") == 12 * 256);
    CHECK(made.at("sources").at(0).at("tokens") == 12 * 256);
    CHECK(made.at("configuration").at("optimizer").at("learning_rate") == 0.002);
    const SortedJson& starts = made.at("starts");
    REQUIRE(starts.size() == 2);
    CHECK(starts[0].at("first") == 1);
    CHECK(starts[0].at("last") == 6);
    CHECK(starts[1].at("first") == 7);
    CHECK(starts[1].at("last") == 12);
    CHECK(starts[0].at("binary").at("sha256") == sha256_of_file(binary()));
    CHECK(starts[1].at("changes") ==
          SortedJson::parse(R"([{"what": "configuration.optimizer.learning_rate",
                           "before": 0.003, "now": 0.002}])"));
    CHECK(made.at("data").at("train").at(0).at("xxh3") == hash_file(r.data + "/train_000000.bin"));
    CHECK(made.at("evaluations").back().at("step") == 12);

    // Of a checkpoint before the second start
    const std::string text =
        check_succeeds(train_gpt_with({"verify", r.checkpoint(4).string()})).out;
    CAPTURE(text);
    CHECK(contains(text, "steps 1 to 4: "));
    CHECK_FALSE(contains(text, "changed: "));
    CHECK(contains(check_succeeds(train_gpt_with({"verify", r.run})).out,
                   "changed: optimizer.learning_rate from 0.003 to 0.002"));
    CHECK(contains(check_succeeds(train_gpt_with({"verify", r.run, "--without-data"})).out,
                   "validation loss"));
    check_refused(train_gpt_with({"verify", r.data, "--head", "x"}), 2, {"--head"});
    check_refused(train_gpt_with({"verify", r.run, "--run", r.run}), 2, {"--run"});
}

TEST_CASE("a run resumes after any end of its history, and the history holds", "[cli][history]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run", saved = directory / "saved";
    check_succeeds(
        train_gpt_with(w.train(saved, {"--set", "checkpoint.every=4", "--stop-at", "8"})));
    const std::string whole = read(fs::path(saved) / "history.jsonl");
    const auto resumed_with = [&](const std::string& history) {
        fs::remove_all(run);
        fs::copy(saved, run, fs::copy_options::recursive);
        write(fs::path(run) / "history.jsonl", history);
        return check_succeeds(train_gpt_with(w.train(run, {"--set", "checkpoint.every=4"})));
    };
    // The last line but for some bytes: a crash in the middle of a write
    const size_t last = whole.rfind('\n', whole.size() - 2) + 1;
    const size_t cut = static_cast<size_t>(
        random_int(static_cast<int64_t>(last) + 1, static_cast<int64_t>(whole.size()) - 2));
    CHECK(resumed_with(whole.substr(0, cut)).err.empty());
    CHECK(first_trouble({run}) == "");
    CHECK(contains(read(fs::path(run) / "history.jsonl"), "\"event\":\"torn\""));
    CHECK(contains(read(fs::path(run) / "history.jsonl"), "\"killed\":true"));

    // A history of an older version, which has no chain
    std::string old;
    for (std::string line : lines_of(whole))
        old += line.erase(line.rfind(",\"previous\""), 78) + "\n";
    const std::string manifest = saved + "/" + step_folder(8) + "/manifest.json";
    for (const int64_t step : {4, 8}) {
        const fs::path of = fs::path(saved) / step_folder(step) / "manifest.json";
        SortedJson json = SortedJson::parse(read(of));
        json.erase("history");
        write(of, json.dump(2));
    }
    CHECK(resumed_with(old).err.empty());
    CHECK(contains(read(fs::path(run) / "history.jsonl"), "\"event\":\"chain\""));
    CHECK(first_trouble({run}) == "");
    flip(fs::path(run) / step_folder(4) / "manifest.json");
    CHECK_FALSE(first_trouble({run}).empty());

    // A broken history does not end a run, which warns of it
    fs::remove_all(saved);
    check_succeeds(
        train_gpt_with(w.train(saved, {"--set", "checkpoint.every=4", "--stop-at", "8"})));
    std::vector<std::string> lines = lines_of(read(fs::path(saved) / "history.jsonl"));
    lines.erase(lines.begin() + 1);
    std::string broken;
    for (const std::string& line : lines) broken += line + "\n";
    const Outcome warned = resumed_with(broken);
    CHECK(contains(warned.err, "line 2 of " + run + "/history.jsonl"));
    CHECK(contains(first_trouble({run}), "line 2 of " + run + "/history.jsonl"));
}

TEST_CASE("a resumed run's history names the program, user and host, and what has changed",
          "[cli][history]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run", program = directory / "program";
    const Workplace& w = Workplace::get();
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "3"})));
    write(program, read(binary()) + "x");
    ::chmod(program.c_str(), 0755);
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "6"}), {.program = program}));
    const HistoryChain history = read_history(run);
    std::vector<SortedJson> starts;
    for (const HistoryLine& line : history.lines)
        if (line.event.at("event") == "start")
            starts.push_back(SortedJson::parse(line.event.dump()));
    REQUIRE(starts.size() == 2);
    CHECK_FALSE(starts[0].contains("changes"));
    REQUIRE(starts[1].at("changes").size() == 1);
    CHECK(starts[1].at("changes")[0] == SortedJson{{"what", "binary.sha256"},
                                                   {"before", sha256_of_file(binary())},
                                                   {"now", sha256_of_file(program)}});
    CHECK(starts[1].at("binary").at("path") == fs::canonical(program).string());
    CHECK(starts[1].at("binary").at("bytes") == fs::file_size(program));
    for (const SortedJson& start : starts) {
        CHECK(start.at("user").get<std::string>().size() > 0);
        CHECK(start.at("hosts").size() == 1);
        CHECK(start.at("mesh").at("data") == 1);
        CHECK(start.at("configuration").at("schedule").at("steps") == 12);
    }
    // The lists of files are in the first one only, since they are the same.
    CHECK(starts[0].at("data").contains("train"));
    CHECK_FALSE(starts[1].at("data").contains("train"));
    CHECK(starts[0].at("data").at("sha256") == starts[1].at("data").at("sha256"));
    CHECK(starts[1].at("checkpoint").at("manifest") ==
          sha256_of_file(run + "/" + step_folder(3) + "/manifest.json"));
}

TEST_CASE("nobody but the run writes to the history while it trains", "[cli][history]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    Process process(Workplace::get().train(run, endless));
    REQUIRE(process.wait_for_step(1));
    CHECK(contains(error_of([&] {
                       append_to_history(run, {{"event", "restart"}});
                   }),
                   "another run is writing into " + run));
    process.signal(SIGTERM);
    check_stopped(process.finish());
    append_to_history(run, {{"event", "restart"}});
    const HistoryChain history = read_history(run);
    CHECK_FALSE(history.broken);
    CHECK(history.lines.back().event.at("event") == "restart");
    CHECK(history.lines[history.lines.size() - 2].event.at("event") == "end");
    CHECK(contains(read(fs::path(run) / "history.jsonl"), "\"event\":\"signal\""));
}

TEST_CASE("an exported model has a card and names its place in the history", "[cli][history]") {
    const FinishedRun r;
    const std::string out = r.run + "/exported", file = r.run + "/model.bin";
    check_succeeds(train_gpt_with({"export", r.run, "--out", out, "--dtype", "bf16"}));
    const std::string card = read(fs::path(out) / "README.md");
    CAPTURE(card);
    for (const char* part : {"library_name: transformers", "Weights in bf16", "| 3,072 |",
                             "`optimizer.learning_rate` | 0.002 |", "`val_loss` |",
                             "steps 1 to 6: train_gpt ", "After step 12 "})
        CHECK(contains(card, part));
    CHECK(first_trouble({out, "--run", r.run}) == "");
    const std::string head =
        SortedJson::parse(read(r.checkpoint(12) / "manifest.json")).at("history");
    CHECK(SortedJson::parse(read(fs::path(out) / "provenance.json")).at("history") == head);

    check_succeeds(train_gpt_with({"export", r.run, "--out", file, "--format", "llm.c"}));
    const std::string bytes = read(file).substr(248 * 4, 32);
    std::string hex;
    for (const char c : bytes) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
        hex += digits;
    }
    CHECK(hex == head);

    CHECK(contains(first_trouble({out, "--run", finished_run()}), "provenance.json"));
    flip(fs::path(out) / "model.safetensors");
    CHECK(contains(first_trouble({out}), out + "/model.safetensors differs from its hash"));
}
