// Keys of the configuration on a command line that are not given with --set.
#pragma once

namespace train_gpt {

/// Throws UsageError if a key of the configuration stands among the arguments as an option or
/// alone, as other programs take it. The message has the --set that the user means.
void refuse_keys(int argc, char** argv);

}  // namespace train_gpt
