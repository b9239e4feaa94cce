#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/error.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "training/commands/commands.h"
#include "training/config/known_data.h"
#include "training/interrupt.h"

namespace train_gpt::commands {

namespace fs = std::filesystem;

namespace {

/// The command that trains a model on what `tokenize` wrote into a folder; empty if that is no text
/// for training.
std::string next_command(const fs::path& out) {
    int64_t tokens = 0;
    for (const PreparedShard& shard : read_data_manifest(out).shards)
        if (shard.split == name_of(Split::train)) tokens += shard.tokens;
    if (tokens == 0) return "";
    constexpr int64_t small_corpus = 5'000'000;
    const fs::path name = fs::absolute(out / ".").lexically_normal().parent_path().filename();
    return concat(shell_word(program_invocation_name), " train ",
                  tokens < small_corpus ? "quickstart" : "tinystories", " --data ",
                  shell_word(out.string()),
                  " --set run_dir=", shell_word((fs::path("runs") / name).string()));
}

}  // namespace

int tokenize(const CommandLine& line) {
    require_made(line.prepare.tokenizer);
    catch_interrupts();
    const bool done = prepare(line.prepare, stdout, [] { return interrupted() != nullptr; });
    if (!done) return stopped_early_code(interrupt_signal() == SIGINT);
    if (const std::string next = next_command(line.prepare.out); !next.empty())
        print_line(stdout, "to train on it: " + printable(next));
    return 0;
}

}  // namespace train_gpt::commands
