#include "training/report/report.h"

#include <cstdio>

#include "base/printable.h"
#include "training/commands/commands.h"

namespace train_gpt::commands {

int report(const CommandLine& line) {
    std::printf("%s\n", printable(write_report(line.report)).c_str());
    return 0;
}

}  // namespace train_gpt::commands
