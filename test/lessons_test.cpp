// scripts/lessons/, with a stand-in for the program.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("lessons keep the shards of each text apart", "[scripts]") {
    const TemporaryDirectory folder;
    const std::string text = folder / "my text.txt";
    // `tokenize`: records its text, and writes what a lesson reads.
    write(folder / "program", R"sh(#!/bin/bash
echo "$2" >> "$CALLS"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
echo '{"complete": true}' > "$2/data.json"
printf 'val: 10 tokens (%s.00 bytes each)\n' $(wc -c < "$TEXT")
)sh");
    fs::permissions(folder / "program", fs::perms::owner_all);
    const auto lesson = [&](const std::string& path) {
        return run_program({"bash", "scripts/lessons/1-tokenizer.sh"},
                           {{"TRAIN_GPT", folder / "program"},
                            {"CALLS", folder / "calls"},
                            {"LESSONS_DIR", folder / "lessons"},
                            {"TEXT", path}});
    };
    const auto calls = [&] { return std::ranges::count(read(folder / "calls"), '\n'); };
    const auto folders = [&] {
        return std::distance(fs::directory_iterator(folder / "lessons"), fs::directory_iterator());
    };
    for (int texts = 1; texts <= 3; ++texts) {
        const std::string content(static_cast<size_t>(texts), 'a');
        write(text, content);
        for (int i = 0; i < 2; ++i) {  // the second time, what is there is used again
            const ProgramResult result = lesson(text);
            INFO(result.output);
            CHECK(result.exit_code == 0);
            CHECK(contains(
                result.output,
                concat("measured: bytes of a token with a vocabulary of 512 = ", texts, ".00\n")));
            CHECK(calls() == 4 * texts);
            CHECK(folders() == texts);
        }
    }

    // Shards that are not complete are made again, and so are those whose log is missing.
    const fs::path made = [&] {
        fs::path newest;
        for (const auto& entry : fs::directory_iterator(folder / "lessons"))
            if (newest.empty() || fs::last_write_time(entry) > fs::last_write_time(newest))
                newest = entry.path();
        return newest;
    }();
    write(made / "data-512/data.json", "{\"complete\": false}\n");
    CHECK(lesson(text).exit_code == 0);
    CHECK(calls() == 13);
    fs::remove(made / "tokenize-512.log");
    CHECK(lesson(text).exit_code == 0);
    CHECK(calls() == 14);

    // A path is relative to the folder from which the script is called.
    const ProgramResult relative =
        run_program({"bash", "-c",
                     "cd " + folder.path() + " && exec bash " +
                         fs::absolute("scripts/lessons/1-tokenizer.sh").string()},
                    {{"TRAIN_GPT", folder / "program"},
                     {"CALLS", folder / "calls"},
                     {"LESSONS_DIR", folder / "lessons"},
                     {"TEXT", "my text.txt"}});
    INFO(relative.output);
    CHECK(relative.exit_code == 0);
    CHECK(calls() == 14);

    const ProgramResult missing = lesson(folder / "none.txt");
    CHECK(missing.exit_code == 1);
    CHECK(contains(missing.output, "none.txt is not a readable file"));
    CHECK_FALSE(fs::exists(folder / "none.txt"));
}
