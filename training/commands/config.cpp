#include "training/config/config.h"

#include <cstdio>

#include "base/terminal_text.h"
#include "training/commands/commands.h"
#include "training/config/config_help.h"
#include "training/config/config_schema.h"
#include "training/config/from_depth.h"

namespace train_gpt::commands {

int config(const CommandLine& line) {
    if (line.depth > 0) {
        std::fputs(depth_config_text(line.depth).c_str(), stdout);
        std::fflush(stdout);
        std::fputs(text_for_terminal(depth_rules_text(line.depth), columns_of(stderr)).c_str(),
                   stderr);
        return 0;
    }
    const std::string text = line.schema     ? config_schema()
                             : line.markdown ? config_reference()
                                             : config_help(line.key, columns_of(stdout));
    std::fputs(text.c_str(), stdout);
    return 0;
}

}  // namespace train_gpt::commands
