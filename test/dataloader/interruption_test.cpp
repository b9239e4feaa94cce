// prepare() that is interrupted and continued, and what it reports on the way.
#include <chrono>
#include <cmath>
#include <csignal>
#include <regex>
#include <thread>

#include <sys/wait.h>

#include "dataloader/manifest.h"
#include "test/dataloader/corpus.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Interrupts the command once a part of the text is saved.
void interrupt(const PrepareOptions& options) {
    const std::string progress = options.out + "/.tokenize.tmp/progress.json";
    REQUIRE_FALSE(prepare(options, nullptr, [&] {
        return fs::exists(progress) &&
               read_progress(progress, options.texts.size()).position.offset > 0;
    }));
}

/// Asks the command to end, again and again, until it is done. `folder` must not exist and is
/// removed.
void check_stops(PrepareOptions options, const std::string& folder,
                 const std::map<std::string, std::string>& expected) {
    options.out = folder;
    int stops = 0;
    for (int64_t patience = 1;; patience = random_int(1, 6), ++stops) {
        REQUIRE(stops < 1000);
        // Counting words for a vocabulary starts again each time.
        const std::string trained = folder + "/.tokenize.tmp/tokenizer.json";
        if (prepare(options, nullptr, [&] { return fs::exists(trained) && --patience < 0; })) break;
        CHECK_FALSE(fs::exists(folder + "/data.json"));
        CHECK(fs::exists(folder + "/.tokenize.tmp"));
    }
    CHECK(stops > 0);
    CHECK(difference(files_in(folder), expected) == "");
    CHECK_FALSE(fs::exists(folder + "/.tokenize.tmp"));
    fs::remove_all(folder);
}

/// Kills the command, again and again, until it is done. `folder` must not exist and is removed.
void check_kills(PrepareOptions options, const std::string& folder,
                 const std::map<std::string, std::string>& expected) {
    options.out = folder;
    int kills = 0;
    for (bool done = false; !done;) {
        REQUIRE(kills < 1000);
        const pid_t process = ::fork();
        REQUIRE(process >= 0);
        if (process == 0) {
            try {
                prepare(options, nullptr);
            } catch (...) {
                ::_exit(1);
            }
            ::_exit(0);
        }
        // Later processes get more time, so that some of them finish.
        std::this_thread::sleep_for(
            std::chrono::microseconds(random_int(1000, 20'000 * (kills + 1))));
        ::kill(process, SIGKILL);
        int status = 0;
        ::waitpid(process, &status, 0);
        kills += WIFSIGNALED(status);
        done = WIFEXITED(status);
        if (done) CHECK(WEXITSTATUS(status) == 0);
        if (done || !fs::exists(folder + "/data.json") || !read_data_manifest(folder).complete)
            continue;
        // It may have been killed just before it removed its lock.
        std::map<std::string, std::string> complete = files_in(folder);
        complete.erase(".tokenize.lock");
        CHECK(difference(complete, expected) == "");
    }
    CHECK(difference(files_in(folder), expected) == "");
    fs::remove_all(folder);
}

}  // namespace

TEST_CASE(
    "interrupted or killed at any moment, the same command gives the shards of an uninterrupted "
    "run") {
    const TemporaryDirectory folder;
    Strings inputs;
    for (int i = 0; i < 4; ++i) {
        const Strings documents = random_documents(25, i == 2 ? 200'000 : 40'000);
        const bool text = i % 2 == 0;
        std::string name = folder / ("part" + std::to_string(i) + (text ? ".txt" : ".jsonl"));
        std::string bytes = text ? as_text(documents) : as_jsonl(documents);
        if (const auto all = packers(); i > 1 && all.size() == 2) {
            const auto& [extension, pack] = i == 2 ? *all.begin() : *all.rbegin();
            name += extension;
            bytes = pack(bytes);
        }
        write(name, bytes);
        inputs.push_back(name);
    }
    write(folder / "long.txt", random_document(3'000'000));

    for (const bool one_document : {false, true}) {
        auto options =
            options_for(one_document ? Strings{folder / "long.txt"} : inputs, folder / "whole");
        options.val_split = one_document ? "tail" : "documents";
        options.save_seconds = 0;
        options.threads = 2;
        if (one_document) {
            options.tokenizer.clear();
            options.train_vocab = 300;
        }
        prepare(options, nullptr);
        const auto expected = files_in(folder / "whole");
        fs::remove_all(folder / "whole");

        check_stops(options, folder / "stopped", expected);
        check_kills(options, folder / "killed", expected);
    }
}

TEST_CASE("progress, speed and remaining time are reported") {
    const TemporaryDirectory folder;
    const std::string text = as_text(random_documents(400, 30'000));
    write(folder / "a.txt", text);
    write(folder / "b.txt", text);
    auto options = options_for({folder / "a.txt", folder / "b.txt"}, folder / "out");
    options.report_seconds = 0;
    std::FILE* const log = std::fopen((folder / "log").c_str(), "w");
    prepare(options, log);
    std::fclose(log);
    const std::string said = read(folder / "log");
    char total[16];
    std::snprintf(total, sizeof total, "%.2f", 2e-9 * static_cast<double>(text.size()));
    const std::regex line(
        concat("encoding: [0-9.]+ of ", total,
               R"re( GB \((\d+)%\) \| [0-9.]+ MB/s \| ([0-9.]+) million tokens(.*))re"));
    std::vector<int> percent;
    std::vector<double> tokens;
    bool has_eta = false;
    for (std::sregex_iterator at(said.begin(), said.end(), line), end; at != end; ++at) {
        percent.push_back(std::stoi((*at)[1]));
        tokens.push_back(std::stod((*at)[2]));
        has_eta |= std::regex_match((*at)[3].str(), std::regex(R"re( \| ETA \d+:\d\d:\d\d)re"));
    }
    CAPTURE(said);
    REQUIRE(percent.size() > 4);
    CHECK(std::ranges::is_sorted(percent));
    CHECK(percent.front() < 50);
    CHECK(percent.back() == 100);
    CHECK(std::ranges::is_sorted(tokens));
    CHECK(has_eta);
    int64_t written = 0;
    for (const PreparedShard& shard : read_data_manifest(folder / "out").shards)
        written += shard.tokens;
    CHECK(std::abs(tokens.back() - 1e-6 * static_cast<double>(written)) < 0.06);
}

TEST_CASE("an interrupted run continues where its output is in the folder that it reads") {
    const TemporaryDirectory folder;
    fs::create_directory(folder / "corpus");
    write(folder / "corpus/a.jsonl", as_jsonl(random_documents(300, 20000)));
    auto options = options_for({folder / "corpus"}, folder / "whole");
    options.save_seconds = 0;
    prepare(options, nullptr);
    options.out = folder / "corpus";
    interrupt(options);
    std::FILE* const log = std::fopen((folder / "log").c_str(), "w");
    prepare(options, log);
    std::fclose(log);
    CHECK(contains(read(folder / "log"), "continuing after"));
    fs::remove(folder / "corpus/a.jsonl");
    CHECK(difference(shards_in(folder / "corpus"), shards_in(folder / "whole")) == "");
}

TEST_CASE("a document that goes out in pieces ends once, wherever the run is interrupted") {
    const TemporaryDirectory folder;
    write(folder / "a.txt", random_document(2'500'000));
    write(folder / "b.txt", random_document(1'300'000));
    for (const double fraction : {0.0, 1.0, 0.1}) {
        auto options = options_for({folder / "a.txt", folder / "b.txt"}, folder / "whole");
        options.val_fraction = fraction;
        if (fraction == 0.1) options.val_split = "tail";
        options.save_seconds = 0;
        prepare(options, nullptr);
        const auto expected = files_in(folder / "whole");
        options.out = folder / "stopped";
        for (int stop = 1, ended = 0; !ended; ++stop) {
            REQUIRE(stop < 100);
            CAPTURE(fraction, stop);
            int left = stop;
            ended = prepare(options, nullptr, [&] { return --left == 0; });
            if (!ended) REQUIRE(prepare(options, nullptr));
            CHECK(difference(files_in(folder / "stopped"), expected) == "");
            fs::remove_all(folder / "stopped");
        }
        fs::remove_all(folder / "whole");
    }
}

namespace {

/// A run that is interrupted and started again, and the result of an uninterrupted one.
struct InterruptedRun {
    TemporaryDirectory folder;
    const std::string file = folder / "a.jsonl";
    const std::string staging = folder / "out/.tokenize.tmp", progress = staging + "/progress.json",
                      plan = staging + "/plan.txt";
    PrepareOptions options;
    std::map<std::string, std::string> expected;

    InterruptedRun() {
        write(file, as_jsonl(random_documents(300, 20000)));
        options = options_for({file}, folder / "whole");
        options.save_seconds = 0;
        prepare(options, nullptr);
        expected = files_in(folder / "whole");
        options.out = folder / "out";
    }
    /// Runs to the end; returns what was printed.
    std::string said() {
        std::FILE* log = std::fopen((folder / "log").c_str(), "w");
        prepare(options, log);
        std::fclose(log);
        return read(folder / "log");
    }
};

}  // namespace

TEST_CASE_METHOD(InterruptedRun,
                 "an interrupted run continues with the same options and inputs only") {
    SECTION("the number of threads may change") {
        interrupt(options);
        REQUIRE(fs::exists(progress));
        options.threads = 3;
        CHECK(contains(said(), "continuing after"));
        CHECK(difference(files_in(options.out), expected) == "");
    }
    SECTION("leftovers of a removal, which deletes the plan first, are not continued") {
        interrupt(options);
        REQUIRE(fs::exists(progress));
        fs::remove(plan);
        fs::remove(staging + "/train_000000.bin");
        CHECK_FALSE(contains(said(), "continuing after"));
        CHECK(difference(files_in(options.out), expected) == "");
    }
    SECTION("another fraction starts again") {
        interrupt(options);
        options.val_fraction = 0.25;
        const std::string text = said();
        CHECK(contains(text, "its val_fraction was different; starting again"));
        CHECK_FALSE(contains(text, "continuing"));
    }
    SECTION("another input starts again") {
        interrupt(options);
        write(file, as_jsonl(random_documents(100, 20000)));
        CHECK(contains(said(), "its inputs were different; starting again"));
        prepare(options, nullptr);
        options.out = folder / "whole";
        prepare(options, nullptr);
        CHECK(difference(files_in(folder / "out"), files_in(folder / "whole")) == "");
    }
    SECTION("without --skip-bad nothing is left out") {
        write(file, "{\n" + as_jsonl(random_documents(300, 20000)));
        options.skip_bad = true;
        interrupt(options);
        options.skip_bad = false;
        CHECK(contains(error_of([&] { said(); }), "line 1 of " + file));
        CHECK(contains(read(folder / "log"), "left out bad input"));
    }
    SECTION("other bytes in an input of the same size and time are noticed") {
        interrupt(options);
        const auto time = fs::last_write_time(file);
        std::string text = read(file);
        text[text.find("\"id\":7") + 5] = '8';
        write(file, text);
        fs::last_write_time(file, time);
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "is not what it was"));
    }
}

TEST_CASE_METHOD(InterruptedRun,
                 "a run that continues counts lines from the beginning of its input") {
    const Strings documents = random_documents(300, 20000);
    for (const bool is_text : {false, true}) {
        const std::string good = is_text ? as_text(documents) : as_jsonl(documents);
        const auto bad_line = 1 + std::ranges::count(good, '\n');
        options.texts = {folder / (is_text ? "b.txt" : "b.jsonl")};
        options.skip_bad = !is_text;
        write(options.texts[0], good + (is_text ? "caf\xE9\n" : "{\n"));
        interrupt(options);
        REQUIRE(contains(said(), "continuing after"));
        const DataManifest manifest = read_data_manifest(options.out);
        if (is_text) {
            CHECK(manifest.sources[0].first_not_utf8_line == bad_line);
        } else {
            REQUIRE(manifest.left_out.size() == 1);
            CHECK(manifest.left_out[0].line == bad_line);
        }
        fs::remove_all(options.out);
    }
}

TEST_CASE_METHOD(InterruptedRun,
                 "what an interrupted run left behind is checked before it is used") {
    SECTION("a damaged journal is refused") {
        interrupt(options);
        std::string text = read(progress);
        if (random_int(0, 1) == 1) {
            text.resize(text.size() / 2);
        } else {
            const size_t sources = text.find('[', text.find("\"sources\": ")) + 1;
            text.erase(sources, text.find(']', sources) - sources);
        }
        write(progress, text);
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "progress.json is damaged"));
    }
    SECTION("another standard input is noticed") {
        options.texts = {"-"};
        options.field = "text";
        with_input(file, [&] { interrupt(options); });
        with_input(vocabulary(), [&] {
            CHECK(contains(error_of([&] { prepare(options, nullptr); }),
                           "standard input is not what it was"));
        });
        with_input(file, [&] { prepare(options, nullptr); });
        CHECK(difference(shards_in(folder / "out"), shards_in(folder / "whole")) == "");
    }
    SECTION(
        "a run that was killed between its moves is finished, or started again where shards are "
        "gone") {
        interrupt(options);
        fs::remove(progress);
        const bool gone = random_int(0, 1) == 1;
        for (const auto& [name, bytes] : expected) write(staging + "/" + name, bytes);
        fs::rename(staging + "/train_000000.bin", folder / "out/train_000000.bin");
        std::string manifest = expected.at("data.json");
        manifest.replace(manifest.find("\"complete\": true"), 16, "\"complete\": false");
        write(folder / "out/data.json", manifest);
        if (gone) fs::remove(folder / "out/train_000000.bin");
        CHECK(contains(said(), gone ? "are missing" : "had made all shards"));
        CHECK(difference(files_in(options.out), expected) == "");
        CHECK_FALSE(fs::exists(plan));
    }
}
