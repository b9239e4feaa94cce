// What tokenize prints.
#include <cstdlib>

#include "test/commands/program.h"
#include "test/parallel/ranks.h"

using namespace train_gpt;

TEST_CASE("tokenize ends with a command that trains, for a shell to read", "[cli]") {
    const TemporaryDirectory directory;
    write(directory / "a.txt", read(Workplace::get().text()));
    for (const std::string name : {"data", "it's my data", "sub/$HOME"}) {
        const std::string out = directory / name;
        const Outcome done = check_succeeds(
            train_gpt_with({"tokenize", "~/a.txt", "--train-vocab", "300", "--out", "~/" + name},
                           {.environment = {"HOME=" + directory.path()}}));
        REQUIRE(done.out.ends_with("\n"));
        const size_t last = done.out.rfind('\n', done.out.size() - 2) + 1;
        const std::string line = done.out.substr(last, done.out.size() - last - 1),
                          said = "to train on it: ";
        CAPTURE(line);
        REQUIRE(line.starts_with(said));
        // The words that a shell reads, one on a line.
        write(directory / "words.sh", "printf '%s\\n' " + line.substr(said.size()) + "\n");
        const std::string words = directory / "words";
        REQUIRE(std::system(("sh " + (directory / "words.sh") + " > " + words).c_str()) == 0);
        CHECK(read(words) == concat(binary(), "\ntrain\nquickstart\n--data\n", out,
                                    "\n--set\nrun_dir=runs/", fs::path(name).filename().string(),
                                    "\n"));
        CHECK(fs::exists(out + "/train_000000.bin"));
        write(directory / "next.sh", line.substr(said.size()) + " --print-config\n");
        const ProgramResult next = run_program({"sh", directory / "next.sh"});
        INFO(next.output);
        CHECK(next.exit_code == 0);
        CHECK(contains(next.output, concat("\"val\": ", SortedJson(out + "/val_*.bin").dump())));
    }
    // There is nothing to train on.
    const Outcome validation = check_succeeds(
        train_gpt_with({"tokenize", directory / "a.txt", "--tokenizer", directory / "data", "--out",
                        directory / "val", "--val-fraction", "1"}));
    CHECK_FALSE(contains(validation.out, "to train"));
}
