#include <cstdio>

#include "dataloader/prepare.h"
#include "training/commands/commands.h"
#include "training/interrupt.h"
#include "training/known_data.h"

namespace train_gpt::commands {

int tokenize(const CommandLine& line) {
    require_made(line.prepare.tokenizer);
    catch_interrupts();
    const bool done = prepare(line.prepare, stdout, [] { return interrupted() != nullptr; });
    return done ? 0 : stopped_early_code(interrupt_signal() == SIGINT);
}

}  // namespace train_gpt::commands
