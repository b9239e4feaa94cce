#include "training/config/config.h"

#include <cstdio>

#include "training/commands/commands.h"
#include "training/config/config_help.h"
#include "training/config/config_schema.h"
#include "training/watch/progress.h"

namespace train_gpt::commands {

int config(const CommandLine& line) {
    const std::string text = line.schema     ? config_schema()
                             : line.markdown ? config_reference()
                                             : config_help(line.key, columns_of_stdout());
    std::fputs(text.c_str(), stdout);
    return 0;
}

}  // namespace train_gpt::commands
