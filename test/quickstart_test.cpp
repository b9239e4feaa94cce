// scripts/quickstart.sh, with stand-ins for training, for `bible` and for rsvg-convert.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "dataloader/manifest.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Passes every call except `train` on to the real program. It records a call of `train` and writes
/// what the script reads: the number of steps of the run, and steps of about $MS milliseconds, the
/// first of which takes much longer. With $TICKING it ends when the file $OUT says that what lasts
/// still lasts.
constexpr const char* program_script = R"sh(#!/bin/bash
[ "$1" = train ] || exec "$REAL" "$@"
steps=$(sed -n 's/^ *"steps": \([0-9]*\).*/\1/p' "$2")
for argument; do
    case $argument in
        run_dir=*) run_dir=${argument#*=} ;;
        schedule.steps=*) steps=${argument#*=} ;;
    esac
done
echo "$run_dir $2 $steps ${*:3}" >> "$CALLS"
[ -z "$BROKEN" ] || exit 1
[ -z "$TICKING" ] || for i in {1..1500}; do
    grep -q "^$TICKING: [0-9]* s$" "$OUT" && break
    /bin/sleep 0.02
done
mkdir -p "$run_dir"
printf '{\n    "schedule": {\n        "steps": %d,\n        "warmup_steps": 5\n    }\n}\n' \
    "$steps" > "$run_dir/config.json"
for i in 1 2 3 4 5 6 7 8; do
    echo "{\"step\":$i,\"loss\":2.5,\"ms\":$((MS * (i == 1 ? 90 : 1))).0$i,\"compute_ms\":1.5}"
done > "$run_dir/metrics.jsonl"
)sh";

/// Copies the picture, and fails where it is told to.
constexpr const char* rsvg_script = R"sh(#!/bin/sh
[ -z "$NO_PICTURE" ] && [ "$1" = -o ] && cp "$3" "$2"
)sh";

class Quickstart {
  public:
    Quickstart() {
        for (const char* name : {"bin", "tmp", "run", "data/quickstart"})
            fs::create_directories(folder_ / name);
        tool("program", program_script);
        tool("bible", "#!/bin/sh\n[ \"$1\" = -l ] && cat \"$KJV\"\n");
        tool("rsvg-convert", rsvg_script);
        set_cores(2);
    }

    void tool(const std::string& name, const std::string& script) const {
        write(folder_ / ("bin/" + name), script);
        fs::permissions(folder_ / ("bin/" + name), fs::perms::owner_all);
    }
    void set_cores(int n) const { tool("nproc", concat("#!/bin/sh\necho ", n, "\n")); }
    /// Makes prepared data, so that the script does not call `tokenize`.
    void set_prepared() const {
        set_prepared(prepared("king-james-bible.txt"), folder_ / "data/quickstart");
    }
    /// The same for a text of the user's; returns its path.
    std::string set_prepared_text() const {
        const std::string text = folder_ / "own.txt";
        write(text, "prepared");
        std::string sum =
            run_program({"sh", "-c", "cksum < " + text + " | cut -d ' ' -f 1"}).output;
        sum.pop_back();
        const std::string shards = folder_ / ("data/quickstart-own-" + sum);
        fs::create_directories(shards);
        set_prepared(text, shards);
        return text;
    }
    std::string prepared(const std::string& name) const {
        return folder_ / ("data/quickstart/" + name);
    }
    /// What `bible` prints.
    std::string kjv() const { return folder_ / "kjv"; }
    std::string run_dir() const { return folder_ / "run"; }
    /// How to train so many steps with the same arguments.
    std::string command_for(int steps, const std::string& arguments = "") const {
        return concat("make quickstart RUN_DIR=", run_dir(), " DATA_DIR=", folder_ / "data",
                      arguments.empty() ? "" : " QUICKSTART_ARGS='" + arguments + "'",
                      " STEPS=", steps, "\n");
    }
    std::string program() const { return folder_ / "bin/program"; }
    /// Where steps beyond 960 should read another text.
    std::string command_for_more_text() const {
        return concat("scripts/data.sh tinystories && ", program(), " train tinystories\n");
    }
    /// The line after a run of so many steps that says how to continue.
    std::string continuing_after(int steps) const {
        return concat(
            "\n  continue training      ",
            2 * steps > 960 ? "on more text: " + command_for_more_text() : command_for(2 * steps));
    }
    /// What the script has printed where start() redirects it into a file.
    std::string redirected() const { return read(folder_ / "out"); }
    bool leaves_nothing() const { return fs::is_empty(folder_ / "tmp"); }

    ProgramResult run(int64_t ms, const std::string& arguments = "", Environment more = {}) const {
        more.insert({{"MS", std::to_string(ms)}, {"QUICKSTART_ARGS", arguments}});
        return start({"bash", "scripts/quickstart.sh"}, more);
    }
    ProgramResult start(const std::vector<std::string>& command, Environment more = {}) const {
        const char* real = std::getenv("TRAIN_GPT");
        more.insert({{"PATH", (folder_ / "bin") + ":" + std::getenv("PATH")},
                     {"TRAIN_GPT", program()},
                     {"REAL", real ? real : "build/train_gpt"},
                     {"CALLS", folder_ / "calls"},
                     {"KJV", kjv()},
                     {"NO_PICTURE", ""},
                     {"TMPDIR", folder_ / "tmp"},
                     {"OUT", folder_ / "out"},
                     {"TICKING", ""},
                     {"DATA", ""},
                     {"FIELD", ""},
                     {"STEPS", ""},
                     {"DATA_DIR", folder_ / "data"},
                     {"RUN_DIR", run_dir()},
                     {"BROKEN", ""}});
        return run_program(command, more);
    }

    struct Call {
        std::string run_dir, config;
        int steps = 0;
        std::vector<std::string> settings;  // the words after --set
    };
    /// The calls of `train` since the last call of this function.
    std::vector<Call> trained() const {
        std::vector<Call> calls;
        std::istringstream lines(read(folder_ / "calls"));
        for (std::string line; std::getline(lines, line);) {
            Call call;
            std::istringstream words(line);
            words >> call.run_dir >> call.config >> call.steps;
            for (std::string word; words >> word;)
                if (word != "--set") call.settings.push_back(word);
            calls.push_back(call);
        }
        fs::remove(folder_ / "calls");
        return calls;
    }

  private:
    void set_prepared(const std::string& text, const std::string& shards) const {
        write(text, "prepared");
        fs::last_write_time(text, fs::file_time_type::clock::now() - std::chrono::seconds(10));
        for (const char* name : {"/train_000000.bin", "/val_000000.bin", "/tokenizer.json"})
            write(shards + name, "prepared");
    }

    TemporaryDirectory folder_;
};

constexpr const char* configuration = "configs/quickstart.json";

/// Checks that a run of `steps` steps differs from configs/quickstart.json in its schedule and in
/// how often it pauses, and in nothing else.
void check_length(const Quickstart::Call& call, int steps) {
    CHECK(call.config == configuration);
    CHECK(call.steps == steps);
    Config config = load_config(call.config, call.settings);
    const Config whole = load_config(configuration, {});
    CHECK(config.schedule.steps == steps);
    CHECK(config.sampling.every == steps / 4);
    for (const int64_t every : {config.checkpoint.every, config.evaluation.every}) {
        CHECK(steps % every == 0);
        CHECK(every < steps);
    }
    CHECK(config.schedule.warmup_steps <= whole.schedule.warmup_steps);
    CHECK(config.schedule.warmup_steps * 24 >= steps);
    config.schedule.steps = whole.schedule.steps;
    config.schedule.warmup_steps = whole.schedule.warmup_steps;
    config.checkpoint.every = whole.checkpoint.every;
    config.evaluation.every = whole.evaluation.every;
    config.sampling.every = whole.sampling.every;
    config.run_dir = whole.run_dir;
    config.tokenizer.path = whole.tokenizer.path;
    config.data.train = whole.data.train;
    config.data.val = whole.data.val;
    CHECK(to_json(config) == to_json(whole));
}

std::string random_verse() {
    std::string verse;
    for (int64_t n = random_int(3, 20); n > 0; --n) {
        verse += verse.empty() ? "" : " ";
        for (int64_t letters = random_int(1, 5); letters > 0; --letters)
            verse += static_cast<char>(random_int('a', 'j'));
    }
    return verse + " 12 men.";
}

}  // namespace

TEST_CASE("scripts answer --help with their usage, and start nothing", "[scripts]") {
    const bool python = has_python();
    int scripts = 0;
    for (const auto& entry : fs::recursive_directory_iterator("scripts")) {
        const std::string script = entry.path().string();
        // Files that are parts of others have no #! line.
        const bool shell = script.ends_with(".sh");
        if (!(shell || (python && script.ends_with(".py"))) || !read(script).starts_with("#!"))
            continue;
        CAPTURE(script);
        ++scripts;
        const ProgramResult help = run_program({shell ? "bash" : "python3", script, "--help"}, {});
        CHECK(help.exit_code == 0);
        CHECK(contains(help.output, entry.path().filename().string()));
        CHECK_FALSE(contains(help.output, "set -"));
    }
    CHECK(scripts >= 10);
}

TEST_CASE("the quickstart refuses arguments that it does not know", "[scripts]") {
    const Quickstart q;
    const ProgramResult result = q.start({"bash", "scripts/quickstart.sh", "--hepl"});
    CHECK(result.exit_code == 2);
    CHECK(contains(result.output, "--hepl"));
    CHECK(q.trained().empty());
}

TEST_CASE("the quickstart's text has a document for each chapter, and no verse numbers",
          "[scripts]") {
    const Quickstart q;
    std::string printed, wanted;
    int chapters = 0;
    for (const std::string book : {"Genesis", "1 Samuel", "Song of Solomon"})
        for (int chapter = 1, end = static_cast<int>(random_int(150, 200)); chapter < end;
             ++chapter) {
            printed += concat("\n", book, " ", chapter, "\n\n");
            wanted += concat(chapters++ == 0 ? "" : "<|endoftext|>\n", book, " ", chapter, "\n\n");
            for (int64_t n = random_int(1, 5), i = 1; i <= n; ++i) {
                const std::string verse = random_verse();
                printed += concat("  ", i, " ", verse, "\n");
                wanted += verse + "\n";
            }
        }
    write(q.kjv(), printed);
    const ProgramResult result = q.run(10);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    CHECK(read(q.prepared("king-james-bible.txt")) == wanted);
    const DataManifest data = read_data_manifest(q.prepared(""));
    CHECK(data.val_split == "documents");
    CHECK(data.train_documents + data.val_documents == chapters);
    CHECK(data.val_documents > 0);

    const auto made = fs::last_write_time(q.prepared("data.json"));
    CHECK(q.run(10).exit_code == 0);
    CHECK(fs::last_write_time(q.prepared("data.json")) == made);
}

TEST_CASE("the quickstart picks the shortest run of at least two minutes, and keeps it",
          "[scripts]") {
    struct Speed {
        int64_t fastest, slowest;  // milliseconds of a step
        int steps;
    };
    const Speed speeds[] = {{1, 118, 960},   {125, 235, 960},  {240, 445, 480},
                            {460, 820, 240}, {835, 1400, 120}, {1420, 9000, 60}};
    for (const Speed& speed : speeds) {
        const Quickstart q;
        q.set_prepared();
        q.set_cores(static_cast<int>(random_int(1, 64)));
        const int64_t ms = random_int(speed.fastest, speed.slowest);
        CAPTURE(ms);
        const ProgramResult first = q.run(ms);
        INFO(first.output);
        REQUIRE(first.exit_code == 0);
        CHECK(contains(first.output, concat("a step takes ", ms, " ms")));
        CHECK(contains(first.output, concat("training for ", speed.steps, " steps")));
        CHECK(contains(first.output, concat("(", 2 * speed.steps, " steps would take ")) ==
              (speed.steps < 960));
        CHECK(contains(first.output, q.continuing_after(speed.steps)));
        // Steps of which even 960 end before two minutes
        const bool too_fast = speed.slowest == 118;
        CHECK(contains(first.output, "this machine reads the text four times in ") == too_fast);
        CHECK(contains(first.output, "; for a longer run: " + q.command_for_more_text()) ==
              too_fast);
        const auto calls = q.trained();
        REQUIRE(calls.size() == 2);
        CHECK(calls[0].run_dir != q.run_dir());
        CHECK(calls[0].steps < 20);
        CHECK(calls[1].run_dir == q.run_dir());
        check_length(calls[1], speed.steps);
        CHECK(q.leaves_nothing());

        // The length stays, however fast the machine is now.
        CHECK(q.run(random_int(1, 9000)).exit_code == 0);
        const auto again = q.trained();
        REQUIRE(again.size() == 1);
        CHECK(again[0].settings == calls[1].settings);
    }
}

TEST_CASE("README's table of the quickstart's lengths is what the script does", "[scripts]") {
    // | up to 1,411 ms | … | 120 | 1.50 |, and "more" in the last row
    const std::regex row(
        R"(\n\| (?:up to ([0-9,]+) ms|more) \| [^|]* \| ([0-9]+) \| ([0-9.]+|not measured) \|)");
    const std::string page = read("README.md");
    int rows = 0;
    int64_t above = 1;
    for (std::sregex_iterator at(page.begin(), page.end(), row), end; at != end; ++at) {
        std::string bound = (*at)[1];
        std::erase(bound, ',');
        CAPTURE(at->str());
        // The slowest of the row, and the fastest. The stand-in's steps take 0.05 ms more.
        const int64_t slowest = bound.empty() ? 9000 : std::stoll(bound);
        for (const int64_t ms : {above, slowest}) {
            const Quickstart q;
            q.set_prepared();
            const ProgramResult result = q.run(ms);
            INFO(result.output);
            CHECK(result.exit_code == 0);
            CHECK(contains(result.output, concat("training for ", (*at)[2].str(), " steps")));
            const bool measured = (*at)[3] != "not measured";
            CHECK(contains(result.output, "bits per byte") == measured);
            if (measured)
                CHECK(contains(result.output,
                               concat("expect about ", (*at)[3].str(), " bits per byte")));
        }
        above = slowest + 1;
        ++rows;
    }
    CHECK(rows == 5);
}

TEST_CASE("the quickstart says every 10 s that its measurement lasts", "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    q.tool("sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n");  // 10 s pass quickly
    const ProgramResult result = q.start(
        {"bash", "-c", "exec bash scripts/quickstart.sh > \"$OUT\" 2>&1"},
        {{"MS", "300"}, {"QUICKSTART_ARGS", ""}, {"TICKING", "measuring how long a step takes"}});
    const std::string output = q.redirected();
    INFO(output);
    CHECK(result.exit_code == 0);
    CHECK(contains(output, "\nmeasuring how long a step takes\nmeasuring how long a step takes: "));
    CHECK(contains(output, "\na step takes 300 ms here"));
}

TEST_CASE("another call lengthens the quickstart, and none shortens it", "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    int steps = 0;
    for (int i = 0; i < 4; ++i) {
        const int longer = steps + 4 * static_cast<int>(random_int(1, 300));
        CAPTURE(steps, longer);
        const ProgramResult run = q.run(9000, "", {{"STEPS", std::to_string(longer)}});
        INFO(run.output);
        REQUIRE(run.exit_code == 0);
        CHECK(contains(run.output, concat("lengthened from ", steps, " steps to ", longer)) ==
              (i > 0));
        CHECK(contains(run.output, q.continuing_after(longer)));
        const auto calls = q.trained();
        REQUIRE(calls.size() == 1);
        const Config config = load_config(calls[0].config, calls[0].settings);
        CHECK(config.schedule.steps == longer);
        CHECK(config.schedule.warmup_steps <= std::max(1, std::min(60, longer / 8 + 1)));
        CHECK(config.sampling.every * 4 >= longer);
        CHECK(config.sampling.every * 4 < longer + 4);
        steps = longer;

        // It is kept, and the same length again is no change.
        CHECK(q.run(9000).exit_code == 0);
        const auto kept = q.trained();
        REQUIRE(kept.size() == 1);
        CHECK(kept[0].steps == steps);
    }
    const ProgramResult shorter = q.run(9000, "", {{"STEPS", std::to_string(steps - 1)}});
    CHECK(shorter.exit_code == 1);
    CHECK(contains(shorter.output, concat("has ", steps, " steps")));
    for (const char* wrong : {"0", "-1", "1e3", "ten", "07"}) {
        const ProgramResult refused = q.run(9000, "", {{"STEPS", wrong}});
        CHECK(refused.exit_code == 2);
        CHECK(contains(refused.output, concat("STEPS=", wrong)));
    }
    CHECK(q.trained().empty());
}

TEST_CASE("the quickstart's last lines keep what it was given", "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    const std::string arguments = "--set log.every=7 --set device=cpu";
    const ProgramResult result = q.run(300, arguments);
    INFO(result.output);
    CHECK(result.exit_code == 0);
    CHECK(contains(result.output, q.command_for(960, arguments)));
    CHECK(contains(result.output,
                   "make quickstart DATA=my.txt QUICKSTART_ARGS='" + arguments + "'\n"));

    // STEPS would have no effect.
    const ProgramResult given = q.run(300, "--set schedule.steps=30");
    INFO(given.output);
    CHECK(given.exit_code == 0);
    CHECK_FALSE(contains(given.output, "STEPS="));
    CHECK(contains(given.output, "with another length in QUICKSTART_ARGS\n"));

    // Another text than the default one may be long, so that more steps are offered.
    const ProgramResult own = q.run(9000, "", {{"DATA", q.set_prepared_text()}, {"STEPS", "1200"}});
    INFO(own.output);
    CHECK(contains(own.output, " STEPS=2400\n"));
    CHECK_FALSE(contains(own.output, "more text"));
}

TEST_CASE("the quickstart measures nothing when its length is given, or when steps fail",
          "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    CHECK(q.run(9000, "--set schedule.steps=30").exit_code == 0);
    auto calls = q.trained();
    REQUIRE(calls.size() == 1);
    CHECK(calls[0].config == configuration);
    CHECK(calls[0].steps == 30);

    fs::remove(q.run_dir() + "/config.json");
    CHECK(q.run(9000, "", {{"BROKEN", "1"}}).exit_code == 1);
    calls = q.trained();
    REQUIRE(calls.size() == 2);
    CHECK(calls[1].config == configuration);
    CHECK(q.leaves_nothing());
}

TEST_CASE("the quickstart reads the field that FIELD names", "[scripts]") {
    const Quickstart q;
    const std::string text = q.run_dir() + "/own.jsonl";
    std::string lines;
    for (int i = 0; i < 400; ++i)
        lines += concat("{\"content\": \"", random_verse(), "\", \"title\": \"", random_verse(),
                        "\"}\n");
    write(text, lines);
    const ProgramResult without = q.run(9000, "", {{"DATA", text}});
    INFO(without.output);
    CHECK(without.exit_code == 1);
    CHECK(contains(without.output, "--field NAME is FIELD=NAME\n"));
    CHECK(q.trained().empty());

    const ProgramResult given = q.run(9000, "", {{"DATA", text}, {"FIELD", "content"}});
    INFO(given.output);
    REQUIRE(given.exit_code == 0);
    CHECK(contains(given.output, "DATA=" + text + " FIELD=content "));
    // Another field is another text.
    const std::string folder = q.trained().back().settings.at(1);
    const ProgramResult other = q.run(9000, "", {{"DATA", text}, {"FIELD", "title"}});
    INFO(other.output);
    REQUIRE(other.exit_code == 0);
    CHECK(q.trained().back().settings.at(1) != folder);
}

TEST_CASE("the quickstart does not lengthen a run from 0 steps", "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    // As after QUICKSTART_ARGS="--set schedule.tokens=…"
    write(q.run_dir() + "/config.json", "{\n    \"schedule\": {\n        \"steps\": 0\n    }\n}\n");
    const ProgramResult without = q.run(9000);
    INFO(without.output);
    CHECK(without.exit_code == 1);
    CHECK(contains(without.output, "give the same QUICKSTART_ARGS again, or STEPS=960\n"));
    CHECK(q.trained().empty());

    const std::string tokens = "--set schedule.steps=0 --set schedule.tokens=1000000";
    CHECK(q.run(9000, tokens).exit_code == 0);
    CHECK(q.trained().size() == 1);

    const ProgramResult steps = q.run(9000, "", {{"STEPS", "600"}});
    INFO(steps.output);
    CHECK(steps.exit_code == 0);
    CHECK_FALSE(contains(steps.output, "lengthened"));
    const auto calls = q.trained();
    REQUIRE(calls.size() == 1);
    CHECK(calls[0].steps == 600);
}

TEST_CASE("the quickstart finds its text from another folder", "[scripts]") {
    const Quickstart q;
    const fs::path text = q.set_prepared_text();
    const std::string script = fs::absolute("scripts/quickstart.sh").string();
    for (const std::string path : {"../own.txt", "../bin/../own.txt", text.c_str()}) {
        CAPTURE(path);
        const ProgramResult result =
            q.start({"bash", "-c", "cd " + q.run_dir() + " && exec bash " + script},
                    {{"MS", "9000"}, {"QUICKSTART_ARGS", ""}, {"DATA", path}, {"STEPS", "30"}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
        CHECK(contains(result.output, "data/quickstart-own-"));
        CHECK(contains(result.output, "is already prepared"));
        CHECK(contains(result.output, "DATA=" + text.string() + " "));
    }
}

TEST_CASE("the quickstart does not leave an installation behind when the build fails",
          "[scripts]") {
    const TemporaryDirectory folder;
    fs::create_directory(folder / "scripts");
    for (const char* name : {"scripts/quickstart.sh", "scripts/visibly.sh"})
        fs::copy_file(name, folder / name);
    write(folder / "scripts/setup.sh", R"sh(#!/bin/bash
[ "$1" = quickstart ] || exit 0
exec > /dev/null 2>&1
sleep 2
echo > "$INSTALLED"
)sh");
    fs::permissions(folder / "scripts/setup.sh", fs::perms::owner_all);
    const ProgramResult result = run_program({"bash", folder / "scripts/quickstart.sh"},
                                             {{"CI", "true"},
                                              {"TRAIN_GPT", ""},
                                              {"MAKE", "false"},
                                              {"DATA", ""},
                                              {"STEPS", ""},
                                              {"INSTALLED", folder / "installed"}});
    INFO(result.output);
    CHECK(result.exit_code == 1);
    CHECK(fs::exists(folder / "installed"));
}

TEST_CASE("the quickstart ends with a page about the run and a picture of its loss", "[scripts]") {
    const Quickstart q;
    q.set_prepared();
    const ProgramResult result = q.run(10);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    CHECK(contains(result.output, q.run_dir() + "/report.html, in a browser"));
    CHECK(contains(result.output, "report.html, loss.png, and the model"));
    CHECK(contains(read(q.run_dir() + "/report.html"), "</html>"));
    CHECK(read(q.run_dir() + "/loss.png").starts_with("<svg "));
    CHECK(q.leaves_nothing());

    fs::remove(q.run_dir() + "/loss.png");
    const ProgramResult without = q.run(10, "", {{"NO_PICTURE", "1"}});
    CHECK(without.exit_code == 0);
    CHECK(contains(without.output, "loss.png is not drawn"));
    CHECK(contains(without.output, "report.html, and the model"));
}
